"""Who may take part in a closed run, decided by signatures alone: no server, no list that somebody has to keep.

    run key (its owner) --signs--> grant, one for each invitation --names--> invitation key, which the token carries
    invitation key --signs--> peer id and role = credential, the only thing that is ever shown to others

- `keys.py`         the run key as a file
- `invitation.py`   grants, tokens, credentials: bytes and back
- `revocations.py`  the owner's signed list of what counts no more
- `gatekeeper.py`   `Admission`: what one peer concludes from all that

A token is a secret, because it holds the invitation key; it stays with whom it was given to. A credential is none: it
is bound to one libp2p identity, which the transport authenticates, so whoever overhears it can do nothing with it.

What no signature can do: a token that two machines have is used by both until some peer has seen both, which then
refuses the second. Peers connect to all others and put their credentials into the DHT, so that is soon.
"""

from __future__ import annotations

from diloco.admission.gatekeeper import Admission
from diloco.admission.invitation import ROLES, Credential, Grant, Role, Token, issue
from diloco.admission.keys import RunKey
from diloco.admission.revocations import Revoked

__all__ = ["ROLES", "Admission", "Credential", "Grant", "Revoked", "Role", "RunKey", "Token", "issue"]
