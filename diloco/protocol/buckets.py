"""Token buckets: what each peer may have, filled as time passes, whatever the peer says. Sans-IO."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["MAX_PEERS", "Buckets"]

MAX_PEERS = (
    4096  # whose buckets are kept; identities cost nothing, so those that took nothing for longest are forgotten
)


@dataclass
class _Bucket:
    level: float
    filled_at: float


class Buckets:
    """A bucket per peer: it begins with `first`, and holds at most `most`.

    Taking never fails: a bucket below zero is in debt. All times are seconds of one monotonic clock.
    """

    def __init__(self, first: float, most: float) -> None:
        self._first, self._most = first, most
        self._buckets: dict[str, _Bucket] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def left(self, peer: str, rate: float, now: float) -> float:
        """What a peer may still have, if its bucket fills with `rate` per second; negative while in debt."""
        bucket = self._buckets.get(peer)
        if bucket is None:
            return self._first
        if rate == math.inf:
            return self._most
        return min(self._most, bucket.level + (now - bucket.filled_at) * rate)

    def take(self, peer: str, amount: float, rate: float, now: float) -> float:
        """Take so much; returns what is left."""
        level = self.left(peer, rate, now) - amount
        self._buckets.pop(peer, None)
        self._buckets[peer] = _Bucket(level, now)  # at the end: the order is that of the last taking
        while len(self._buckets) > MAX_PEERS:
            del self._buckets[next(iter(self._buckets))]
        return level
