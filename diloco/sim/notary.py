"""Stands for signatures in a simulated network: whoever asks the notary is known to it, and signs as itself only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

__all__ = ["Notary"]


class Notary:
    """Has a secret that no peer knows, so no peer can make the signature of another one."""

    def __init__(self, seed: int) -> None:
        self._secret = str(seed).encode()

    def signer(self, peer: str) -> Callable[[bytes], bytes]:
        """What signs as this peer; only its own transport gets that."""
        return lambda content: hashlib.sha256(b"\0".join((self._secret, peer.encode(), content))).digest()

    def verify(self, peer: str, content: bytes, signature: bytes) -> bool:
        """Whether that peer has signed the content."""
        return signature == self.signer(peer)(content)
