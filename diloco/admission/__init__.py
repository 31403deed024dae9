"""Who may take part in a closed run. Signatures alone decide: there is no server and no list to maintain.

    run key         signs    a grant, one for each invitation; the grant names an invitation key
    token           holds    the grant and the private half of the invitation key: this is the invitation
    invitation key  signs    a peer id and a role; grant and signature are the credential that a peer shows to others
    run key         signs    the hash of the manifest: the seal, without which nobody invited takes settings

A token is a secret, because it holds the invitation key: its user shows it to nobody. A credential is no secret. It is
bound to one libp2p identity, which the transport authenticates, and an eavesdropper cannot use it.

Signatures cannot prevent that two machines use the same token. Both can, until a peer has seen both credentials; from
then on it refuses the second. All peers connect to each other and publish their credentials in the DHT, which makes
this time short. README.md in this folder says what an attacker can and cannot do.
"""

from __future__ import annotations

from diloco.admission.gatekeeper import Admission
from diloco.admission.invitation import ROLES, Credential, Grant, Role, Token, issue
from diloco.admission.keys import Revoked, RunKey
from diloco.admission.memory import Memory

__all__ = ["ROLES", "Admission", "Credential", "Grant", "Memory", "Revoked", "Role", "RunKey", "Token", "issue"]
