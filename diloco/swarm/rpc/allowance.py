"""How many bytes strangers may ask for."""

from __future__ import annotations

from diloco.protocol.limits import Bucket, Buckets

__all__ = ["Allowance"]


class Allowance:
    """So many bytes for each asker, and so many for all together, as identities cost a stranger nothing; and as many
    again every `seconds`.
    """

    def __init__(self, each: float, together: float, seconds: float) -> None:
        self._each: Buckets[str] = Buckets(each / seconds, each)
        self._together = Bucket(together / seconds, together)

    def take(self, peer: str, nbytes: int, now: float) -> bool:
        """Whether that peer may have so many; if not, nothing changes."""
        left = self._together.left(now) >= nbytes
        return left and self._each.take(peer, now, nbytes) and self._together.take(now, nbytes)
