"""How many streams, bytes and requests one peer may ask of this one. Sans-IO.

    opened -> received, received, ... -> closed           one stream
    bucket of requests, filled at a rate                  all streams of a peer

The bounds are far above the needs of an honest peer: it has a stream for each fragment that it contributes to, one for
each backup and a few to catch up, and opens a stream again a second after one broke. A stream over a limit is refused.
An honest peer treats that as a broken stream and tries again. It is no offence (see `penalties`), because streams of a
peer that restarted may linger here.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limiter"]

EXTRA_STREAMS = 16  # beyond two per fragment
REQUESTS_PER_S = 20.0  # beyond one per fragment
BURST_S = 10.0
MAX_PEERS = 4096


@dataclass
class _Usage:
    streams: int = 0
    requests: float = 0.0  # that are left in the bucket
    filled_at: float = 0.0


class Limiter:
    """Counts streams and requests by peer.

    Args:
        fragments: of the model. Bytes need no counter of their own: a stream carries what its header asks for, and the
            length of that is known beforehand. At a time a peer can thus ask for (streams x largest fragment) bytes,
            and in a second for (requests x largest fragment).
    """

    def __init__(self, fragments: int) -> None:
        self.max_streams = 2 * fragments + EXTRA_STREAMS
        self.rate = REQUESTS_PER_S + fragments
        self._usage: dict[str, _Usage] = {}

    def opened(self, peer: str, now: float) -> str | None:
        """A peer opens a stream. Returns why it may not; None when it may, and `closed` follows."""
        usage = self._usage.get(peer)
        if usage is None:
            self._forget(now)
            usage = self._usage[peer] = _Usage(requests=self.rate * BURST_S, filled_at=now)
        left = usage.requests + (now - usage.filled_at) * self.rate
        usage.requests, usage.filled_at = min(left, self.rate * BURST_S), now
        if usage.streams >= self.max_streams:
            return f"{usage.streams} streams of this peer are open; at most {self.max_streams} may be"
        if usage.requests < 1:
            return f"over {self.rate:g} streams a second are begun by this peer"
        usage.requests -= 1
        usage.streams += 1
        return None

    def closed(self, peer: str) -> None:
        """An allowed stream is over."""
        self._usage[peer].streams -= 1

    def _forget(self, now: float) -> None:
        """When there are many peers, forget those that have no stream and whose bucket is full again."""
        if len(self._usage) >= MAX_PEERS:
            full_since = now - BURST_S
            kept = {peer: u for peer, u in self._usage.items() if u.streams or u.filled_at > full_since}
            self._usage = kept
