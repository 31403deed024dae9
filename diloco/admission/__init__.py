"""Who may take part in a closed run. Signatures alone decide: there is no server and no list to maintain.

`invitation` says what a grant, a token and a credential are. The run key signs grants, and the hash of the manifest:
the seal, without which nobody invited takes settings. A token is a secret, because it holds the invitation key. A
credential is none: it is bound to one libp2p identity, which the transport authenticates.

Signatures cannot prevent that two machines use the same token. Both can, until a peer has seen both credentials; from
then on it refuses the second. All peers connect to each other, which makes this time short. README.md in this folder
says what an attacker can and cannot do.
"""

from __future__ import annotations

from diloco.admission.gatekeeper import Admission, Memory
from diloco.admission.invitation import ROLES, Credential, Grant, Role, Token, issue
from diloco.admission.keys import Revoked, RunKey

__all__ = ["ROLES", "Admission", "Credential", "Grant", "Memory", "Revoked", "Role", "RunKey", "Token", "issue"]
