"""Limits on requests of other peers, and penalties for peers that misbehave. Sans-IO; seconds of a
monotonic clock.

    a request            -> bucket, limiter, or list of the newest -> granted, refused, or later
    an offence           -> refused for 10 s -> the next one: 20 s -> 40 s -> ... one hour at most

The limits are far above the needs of an honest peer. A request over a limit is refused or waits,
but is no offence: an honest peer treats a refusal as a broken stream and tries again. An offence is
a message that no honest peer of this version sends, however bad its link: it does not fit its
schema, its stream or the run, or it is a payload other than its contributor signed. Against peers
that return under another identity there is `diloco/admission`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from diloco.core.members import MAX_PEERS, Buckets
from diloco.errors import PayloadError
from diloco.messages.base import MAX_FRAME_BYTES
from diloco.messages.codec import OtherVersion, UnknownKind
from diloco.messages.fields import forget_oldest

T = TypeVar("T")

BURST_S = 10.0

# Most bytes of a frame, checked before decoding, as `MAX_GREETING_BYTES` and `MAX_FRAME_BYTES`.
REQUEST_BYTES = 2**16
CONTROL_BYTES, CONTROL_BYTES_PER_FRAGMENT = 2**17, 32
HELLO_BYTES, HELLO_BYTES_PER_FRAGMENT = 2**19, 256
REVOCATIONS_BYTES = 2**19
# Open streams, and newly begun ones per second.
STREAMS, STREAMS_PER_FRAGMENT = 16, 2
REQUESTS_PER_S = 20.0  # beyond one per fragment
CONTROL_STREAMS = (8, 1.0, 30.0)  # one is used; earlier ones may still be ending
MESSAGES_PER_S, MESSAGES_PER_FRAGMENT = 100.0, 4.0
STRANGERS, STRANGERS_OF_ONE, STRANGERS_OF_ONE_HOST = 128, 4, 32
# Work that other peers may cause.
DIALS_PER_S, DIALS_AT_ONCE, MAX_WAITING_DIALS = 32.0, 256.0, 1024
FILE_BYTES, FILE_BYTES_IN_ALL, FILE_BYTES_S = 2**27, 2**29, 3600.0  # per peer and in all, an hour
CALLS_PER_MINUTE, CALL_EVERY_S = 20, 10.0
# Lines of the event log: the burst, and the rate per second.
LINES, LINES_PER_S = 40.0, 0.1
LINES_IN_ALL, LINES_IN_ALL_PER_S = 400.0, 1.0
# Seconds for which a peer is refused, and after which its offences are forgotten.
FIRST_S, LONGEST_S, FORGET_S = 10.0, 3600.0, 86400.0

_CAUSED_BY = {
    "author": "contribution_broke indirect missed not_shunned refused_head stuck",
    "donor": "fetch_failed inner_state_failed",
    "peer": "join leave lost other_data penalty plan_ignored planned refused refused_us",
    "": "clipped digest_mismatch left_out missing same_data stands_back takeover",
}
CAUSED_BY_OTHERS = {kind: field for field, kinds in _CAUSED_BY.items() for kind in kinds.split()}
"""Kinds of events that a peer can cause as often as it likes, and the field that names it."""


def frame_bytes(fragments: int, closed: bool) -> tuple[int, int]:
    """Most bytes of a hello of this run, and of a later message on a control stream."""
    hello = HELLO_BYTES + HELLO_BYTES_PER_FRAGMENT * fragments
    control = max(CONTROL_BYTES, REVOCATIONS_BYTES if closed else 0)
    control += CONTROL_BYTES_PER_FRAGMENT * fragments
    return min(MAX_FRAME_BYTES, hello), min(MAX_FRAME_BYTES, control)


class Allowance:
    """Amounts that strangers may take in `seconds`: each of them, and all together, because
    identities cost nothing."""

    def __init__(self, each: float, together: float, seconds: float) -> None:
        self._each: Buckets[str] = Buckets(each / seconds, each)
        self._together: Buckets[None] = Buckets(together / seconds, together)

    def take(self, peer: str, amount: int, now: float) -> bool:
        """Take an amount for a peer and return True; False over a limit, and nothing is taken."""
        left = self._together.left(None, now) >= amount
        both = left and self._each.take(peer, now, amount)
        return both and self._together.take(None, now, amount)


class Limiter:
    """Counts the streams that each peer has open, and those that it begins."""

    def __init__(self, most: int, per_s: float, burst: float) -> None:
        self.most, self.per_s = most, per_s
        self._begun: Buckets[str] = Buckets(per_s, burst)
        self._open: dict[str, int] = {}

    def opened(self, peer: str, now: float) -> str | None:
        """Count a new stream, and return None; return the reason if it is over a limit."""
        streams = self._open.get(peer, 0)
        if streams >= self.most:
            return f"{streams} streams of this peer are open; at most {self.most} may be"
        if not self._begun.take(peer, now):
            return f"over {self.per_s:g} streams a second are begun by this peer"
        self._open[peer] = streams + 1
        return None

    def closed(self, peer: str) -> None:
        """Count the end of an allowed stream."""
        self._open[peer] -= 1
        if not self._open[peer]:
            del self._open[peer]


def bulk_streams(fragments: int) -> Limiter:
    """Make the limiter of the streams that carry requests and tensors."""
    per_s = REQUESTS_PER_S + fragments
    return Limiter(STREAMS_PER_FRAGMENT * fragments + STREAMS, per_s, per_s * BURST_S)


def control_messages(fragments: int) -> Buckets[str]:
    """Make the limit on messages read from the control stream of each peer."""
    per_s = MESSAGES_PER_S + MESSAGES_PER_FRAGMENT * fragments
    return Buckets(per_s, per_s * BURST_S)


class Newest(Generic[T]):
    """The newest streams of strangers. The oldest are ended for them: honest ones are short."""

    def __init__(self, of_one: int = STRANGERS_OF_ONE) -> None:
        self._of_one = of_one
        self._peers: dict[T, str] = {}  # by stream, the oldest first

    def add(self, peer: str, stream: T) -> list[T]:
        """Add a stream of a stranger (peer or host); return those to end. `remove` must follow."""
        its = [candidate for candidate, other in self._peers.items() if other == peer]
        over = its[: -(self._of_one - 1)]
        self._peers[stream] = peer
        rest = [candidate for candidate in self._peers if candidate not in over]
        over += rest[: max(0, len(rest) - STRANGERS)]
        for candidate in over:
            del self._peers[candidate]
        return over

    def remove(self, stream: T) -> None:
        """Remove a stream that is over, or whose peer is no stranger any more."""
        self._peers.pop(stream, None)


class Dials:
    """Queue of peers that others have named and this one is to call, at a limited rate."""

    def __init__(self) -> None:
        self._bucket: Buckets[None] = Buckets(DIALS_PER_S, DIALS_AT_ONCE)
        self._waiting: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def hear(self, peers: Iterable[str]) -> None:
        """Queue peers that another peer names; over the limit they have to call themselves."""
        for peer in peers:
            if len(self._waiting) >= MAX_WAITING_DIALS:
                return
            self._waiting[peer] = None

    def due(self, now: float) -> list[str]:
        """Remove and return the peers to call now."""
        peers = []
        while self._waiting and self._bucket.take(None, now):
            peers.append(next(iter(self._waiting)))
            del self._waiting[peers[-1]]
        return peers


class EventLines:
    """Limit on log lines of events that others cause, by peer and kind.

    The next line of the kind that is written has the number of lines left out (`suppressed`).
    """

    def __init__(self) -> None:
        self._of_peer: Buckets[tuple[str, str]] = Buckets(LINES_PER_S, LINES)
        self._of_kind: Buckets[str] = Buckets(LINES_IN_ALL_PER_S, LINES_IN_ALL)
        self._suppressed: dict[str, int] = {}  # by kind

    def suppressed(self, kind: str, peer: str, now: float) -> int | None:
        """Return how many lines of this kind were left out; None if this one has to be, too."""
        if not self._of_peer.take((kind, peer), now) or not self._of_kind.take(kind, now):
            self._suppressed[kind] = self._suppressed.get(kind, 0) + 1
            return None
        return self._suppressed.pop(kind, 0)


class Offence(PayloadError):
    """A message that no honest peer of this version sends, whatever its link."""


@contextmanager
def offences() -> Iterator[None]:
    """A `PayloadError` raised inside becomes an offence, unless its sender may be newer."""
    try:
        yield
    except (OtherVersion, UnknownKind):
        raise
    except PayloadError as error:
        raise Offence(str(error)) from None


class Penalties:
    """Offences and refusals by peer. After a day without an offence a count restarts."""

    def __init__(self) -> None:
        # by peer: number of offences, end of the refusal, reason; the newest is last
        self._records: dict[str, tuple[int, float, str]] = {}

    def offence(self, peer: str, reason: str, now: float) -> float:
        """Count an offence, once while the peer is refused; return the seconds of its refusal."""
        before, until, _ = self._records.pop(peer, (0, 0.0, ""))
        if now >= until:
            before = 1 if now >= until + FORGET_S else before + 1
            until = now + min(LONGEST_S, FIRST_S * 2.0 ** min(before - 1, 32))
        self._records[peer] = (before, until, reason)
        forget_oldest(self._records, MAX_PEERS)
        return until - now

    def refusal(self, peer: str, now: float) -> str | None:
        """Say for how long a peer is refused now, and why; None if it is not."""
        _, until, reason = self._records.get(peer, (0, now, ""))
        return f"refused for {until - now:.0f} s more: {reason}"[:400] if now < until else None
