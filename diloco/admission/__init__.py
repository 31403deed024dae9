"""Admission to a closed run. Signatures alone decide: there is no server and no list of members.

Two machines can use the same token until a peer has seen both credentials; from then on it refuses
the second. All peers connect to each other, which makes this time short.
"""

from __future__ import annotations

from diloco.admission.gatekeeper import Admission, Memory
from diloco.admission.invitation import ROLES, Credential, Grant, Token, issue
from diloco.admission.keys import Revoked, RunKey

__all__ = [
    "ROLES",
    "Admission",
    "Credential",
    "Grant",
    "Memory",
    "Revoked",
    "RunKey",
    "Token",
    "issue",
]
