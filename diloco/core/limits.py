"""How much one peer may ask of another: the numbers of all limits, and what counts along with them. Sans-IO.

    what a peer asks -> bucket, limiter, or list of the newest -> granted, refused, or later

`diloco/admission/README.md` has the table. Frames grow with the number of fragments, and a closed run takes more on
control streams, because the owner's list of revocations travels there.

The limits are far above the needs of an honest peer: it has a stream for each fragment that it contributes to and a few
for what it fetches, and opens a stream again seconds after one broke. What is over a limit is refused or waits. That is
no offence, because streams of a peer that restarted may linger here; an honest peer treats a refusal as
a broken stream and tries again. `penalties` says what happens to a peer that misbehaves.

All times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from diloco.messages.base import MAX_FRAME_BYTES
from diloco.messages.fields import forget_oldest

__all__ = [
    "CALLS_PER_MINUTE", "CALL_EVERY_S", "CAUSED_BY_OTHERS", "CONTROL_STREAMS", "FILE_BYTES", "FILE_BYTES_IN_ALL",
    "FILE_BYTES_S", "MAX_PEERS", "MIN_BYTES_PER_S", "PATIENCE_S", "PROBE_BYTES", "PROBE_BYTES_IN_ALL", "REQUEST_BYTES",
    "Allowance", "Bucket", "Buckets", "Dials", "EventLines", "Limiter", "Newest", "bulk_streams", "control_messages",
    "frame_bytes",
]  # fmt: skip

T = TypeVar("T")

MAX_PEERS = 4096  # remembered; identities cost nothing, so the others are forgotten
BURST_S = 10.0

# Bytes of a frame, looked at before it is decoded; `MAX_GREETING_BYTES` and `MAX_FRAME_BYTES` are the other two.
REQUEST_BYTES = 2**16
CONTROL_BYTES, CONTROL_BYTES_PER_FRAGMENT = 2**17, 32
HELLO_BYTES, HELLO_BYTES_PER_FRAGMENT = 2**19, 256
REVOCATIONS_BYTES = 2**19
# Streams at a time, and how many are begun.
STREAMS, STREAMS_PER_FRAGMENT = 16, 2
REQUESTS_PER_S = 20.0  # beyond one per fragment
CONTROL_STREAMS = (8, 1.0, 30.0)  # one is needed, a few more while the ends of those before are on their way
MESSAGES_PER_S, MESSAGES_PER_FRAGMENT = 100.0, 4.0
STRANGERS, STRANGERS_OF_ONE = 128, 4
# How slowly bytes of a fragment may come.
MIN_BYTES_PER_S, PATIENCE_S = 2.0**14, 600.0
# What a peer does because others ask for it.
DIALS_PER_S, DIALS_AT_ONCE, MAX_WAITING_DIALS = 32.0, 256.0, 1024
PROBE_BYTES, PROBE_BYTES_IN_ALL = 2**25, 2**26  # in a minute
FILE_BYTES, FILE_BYTES_IN_ALL, FILE_BYTES_S = 2**27, 2**29, 3600.0  # at once, and as many again in an hour
CALLS_PER_MINUTE, CALL_EVERY_S = 20, 10.0
# Lines of the event log: at once, and per second after that.
LINES, LINES_PER_S = 40.0, 0.1
LINES_IN_ALL, LINES_IN_ALL_PER_S = 400.0, 1.0

CAUSED_BY_OTHERS: Mapping[str, str] = {
    "clipped": "", "contribution_broke": "author", "digest_mismatch": "", "fetch_failed": "donor",
    "inner_state_failed": "donor", "join": "peer", "leave": "peer", "left_out": "", "lost": "peer", "missing": "",
    "not_shunned": "author", "other_data": "peer", "penalty": "peer", "plan_ignored": "peer", "planned": "peer",
    "refused": "peer", "refused_head": "author", "refused_us": "peer", "same_data": "", "stuck": "author",
    "takeover": "",
}  # fmt: skip
"""Kinds of events that a peer can cause as often as it likes, and the field that names this peer."""


def frame_bytes(fragments: int, closed: bool) -> tuple[int, int]:
    """The longest hello, and the longest message after it on a control stream, in a run with that many fragments."""
    control = max(CONTROL_BYTES, REVOCATIONS_BYTES if closed else 0) + CONTROL_BYTES_PER_FRAGMENT * fragments
    return min(MAX_FRAME_BYTES, HELLO_BYTES + HELLO_BYTES_PER_FRAGMENT * fragments), min(MAX_FRAME_BYTES, control)


class Bucket:
    """Holds `burst`, fills by `per_s` a second, and begins full."""

    def __init__(self, per_s: float, burst: float) -> None:
        self.per_s, self.burst = per_s, burst
        self._left, self._filled_at = burst, float("-inf")

    def left(self, now: float) -> float:
        """What is in it now; below 0 after `delay_s` has lent some."""
        if now > self._filled_at:
            filled = self._left + (now - self._filled_at) * self.per_s if self._left < self.burst else self.burst
            self._left, self._filled_at = min(self.burst, filled), now
        return self._left

    def take(self, now: float, amount: float = 1.0) -> bool:
        """Take so much, if it is there; otherwise nothing changes."""
        if self.left(now) < amount:
            return False
        self._left -= amount
        return True

    def delay_s(self, now: float, amount: float = 1.0) -> float:
        """Take so much in any case, and return for how many seconds the taker has to wait until it is there."""
        left = self.left(now) - amount
        self._left = left
        return max(0.0, -left / self.per_s)


class Buckets(Generic[T]):
    """Equal buckets by key. Memory is bounded: full buckets are forgotten, and when none is full, the oldest ones."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._by_key: dict[T, Bucket] = {}

    def of(self, key: T, now: float) -> Bucket:
        """The bucket of this key."""
        bucket = self._by_key.get(key)
        if bucket is None:
            if len(self._by_key) >= MAX_PEERS:
                self._by_key = {k: b for k, b in self._by_key.items() if b.left(now) < self._burst}
            forget_oldest(self._by_key, MAX_PEERS - 1)
            bucket = self._by_key[key] = Bucket(self._per_s, self._burst)
        return bucket

    def take(self, key: T, now: float, amount: float = 1.0) -> bool:
        """`Bucket.take` of that key's bucket."""
        return self.of(key, now).take(now, amount)


class Allowance:
    """How much strangers may ask for in `seconds`: each so much, and all together, because identities cost nothing."""

    def __init__(self, each: float, together: float, seconds: float) -> None:
        self._each: Buckets[str] = Buckets(each / seconds, each)
        self._together = Bucket(together / seconds, together)

    def take(self, peer: str, amount: int, now: float) -> bool:
        """Whether that peer may have so much; if not, nothing changes."""
        left = self._together.left(now) >= amount
        return left and self._each.take(peer, now, amount) and self._together.take(now, amount)


class Limiter:
    """Counts the streams that each peer has open, and those that it begins.

    Bytes need no counter of their own: a stream carries what its header asks for, and the length of that is known
    beforehand. At a time a peer can thus ask for (streams x largest fragment) bytes.
    """

    def __init__(self, most: int, per_s: float, burst: float) -> None:
        self.most, self.per_s = most, per_s
        self._begun: Buckets[str] = Buckets(per_s, burst)
        self._open: dict[str, int] = {}

    def opened(self, peer: str, now: float) -> str | None:
        """A peer opens a stream. Returns why it may not; None when it may, and `closed` follows."""
        streams = self._open.get(peer, 0)
        if streams >= self.most:
            return f"{streams} streams of this peer are open; at most {self.most} may be"
        if not self._begun.take(peer, now):
            return f"over {self.per_s:g} streams a second are begun by this peer"
        self._open[peer] = streams + 1
        return None

    def closed(self, peer: str) -> None:
        """An allowed stream is over."""
        self._open[peer] -= 1
        if not self._open[peer]:
            del self._open[peer]


def bulk_streams(fragments: int) -> Limiter:
    """For the streams that carry requests and tensors."""
    per_s = REQUESTS_PER_S + fragments
    return Limiter(STREAMS_PER_FRAGMENT * fragments + STREAMS, per_s, per_s * BURST_S)


def control_messages(fragments: int) -> Buckets[str]:
    """How fast the messages of each peer are read from its control stream."""
    per_s = MESSAGES_PER_S + MESSAGES_PER_FRAGMENT * fragments
    return Buckets(per_s, per_s * BURST_S)


class Newest(Generic[T]):
    """The newest streams of strangers. An older one makes room: those who mean well need theirs for a moment only."""

    def __init__(self) -> None:
        self._peers: dict[T, str] = {}  # by stream, the oldest first

    def add(self, peer: str, stream: T) -> list[T]:
        """A stranger opens a stream; returns the streams that end for it. `remove` follows."""
        over = [one for one, other in self._peers.items() if other == peer][: -(STRANGERS_OF_ONE - 1)]
        self._peers[stream] = peer
        over += [one for one in self._peers if one not in over][: max(0, len(self._peers) - len(over) - STRANGERS)]
        for one in over:
            del self._peers[one]
        return over

    def remove(self, stream: T) -> None:
        """The stream is over, or its peer is no stranger any more."""
        self._peers.pop(stream, None)


class Dials:
    """Peers that others have named, and that are to be called: so many at a time, the others later."""

    def __init__(self) -> None:
        self._bucket = Bucket(DIALS_PER_S, DIALS_AT_ONCE)
        self._waiting: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def hear(self, peers: Iterable[str]) -> None:
        """Somebody names these peers. Those for which there is no room are forgotten: they call by themselves."""
        for peer in peers:
            if len(self._waiting) >= MAX_WAITING_DIALS:
                return
            self._waiting[peer] = None

    def due(self, now: float) -> list[str]:
        """Peers to call now."""
        found = []
        while self._waiting and self._bucket.take(now):
            found.append(next(iter(self._waiting)))
            del self._waiting[found[-1]]
        return found


class EventLines:
    """Which events are written into the log: of those that others cause, so many of each peer and kind.

    The next line of the kind that is written says how many were not (`suppressed`).
    """

    def __init__(self) -> None:
        self._of_peer: Buckets[tuple[str, str]] = Buckets(LINES_PER_S, LINES)
        self._of_kind: Buckets[str] = Buckets(LINES_IN_ALL_PER_S, LINES_IN_ALL)
        self._suppressed: dict[str, int] = {}  # by kind

    def suppressed(self, kind: str, peer: str, now: float) -> int | None:
        """How many lines of this kind were left out since the last one; None when this one is left out, too."""
        if not self._of_peer.take((kind, peer), now) or not self._of_kind.take(kind, now):
            self._suppressed[kind] = self._suppressed.get(kind, 0) + 1
            return None
        return self._suppressed.pop(kind, 0)
