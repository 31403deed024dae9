"""How much strangers may ask for."""

from __future__ import annotations

from diloco.core.limits import Bucket, Buckets

__all__ = ["Allowance"]


class Allowance:
    """So much for each asker, and so much for all together, as identities cost nothing; again in `seconds`."""

    def __init__(self, each: float, together: float, seconds: float) -> None:
        self._each: Buckets[str] = Buckets(each / seconds, each)
        self._together = Bucket(together / seconds, together)

    def take(self, peer: str, amount: int, now: float) -> bool:
        """Whether that peer may have so much; if not, nothing changes."""
        left = self._together.left(now) >= amount
        return left and self._each.take(peer, now, amount) and self._together.take(now, amount)
