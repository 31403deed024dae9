"""What a peer may ask of this one, and what happens to one that misbehaves. Sans-IO.

    opened -> received, received, ... -> closed           one stream, `Limiter`
    bucket of requests, filled at a rate                  all streams of a peer
    offence -> refused for 10 s -> next offence -> 20 s -> 40 s -> ... one hour at most, `Penalties`

An *offence* is a message that no honest peer of this version sends, whatever its link:

- a message that does not fit its schema or its stream, or is about a fragment that the run does not have;
- a payload that does not decode or has an absurd norm, or a claim that cannot be true (`work.impossible`).

A thin link, a crash or a lost lease makes nobody an offender: streams may break or stall, contributions may come twice
or late, and claims may be overtaken. An honest peer may also repeat what a liar told it, such as a term far above the
one that is known here, and a newer peer may send kinds of messages that are not known here.

After a day without an offence the count begins anew. A peer that returns under another identity is not recognised;
admission is the defence against that.

The limits are far above the needs of an honest peer: it has a stream for each fragment that it contributes to, one for
each backup and a few to catch up, and opens a stream again a second after one broke. A stream over a limit is refused.
An honest peer treats that as a broken stream and tries again. It is no offence, because streams of a peer that
restarted may linger here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from diloco.errors import PayloadError
from diloco.protocol.messages import OtherVersion, UnknownKind

__all__ = ["FIRST_S", "FORGET_S", "LONGEST_S", "Limiter", "Offence", "Penalties", "offences"]

FIRST_S = 10.0
LONGEST_S = 3600.0
FORGET_S = 86400.0
MAX_PEERS = 4096  # remembered; identities cost nothing, so the oldest offenders are forgotten
EXTRA_STREAMS = 16  # beyond two per fragment
REQUESTS_PER_S = 20.0  # beyond one per fragment
BURST_S = 10.0


class Offence(PayloadError):
    """A message that no honest peer of this version sends, whatever its link."""


@contextmanager
def offences() -> Iterator[None]:
    """A `PayloadError` that is raised inside becomes an offence, unless the sender may be honest and newer."""
    try:
        yield
    except (OtherVersion, UnknownKind):
        raise
    except PayloadError as error:
        raise Offence(str(error)) from None


@dataclass
class _Record:
    offences: int = 0
    until: float = 0.0
    reason: str = ""


class Penalties:
    """Which peers are refused until when. Never raises; times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def offence(self, peer: str, reason: str, now: float) -> float:
        """Count an offence; returns for how many seconds the peer is refused from now on.

        Further offences while it is refused, from streams that were already open, count as one.
        """
        record = self._records.pop(peer, _Record())
        self._records[peer] = record  # moved to the end: the order is that of the last offence
        if now >= record.until + FORGET_S:
            record.offences = 0
        if now >= record.until:
            record.offences += 1
            record.until = now + min(LONGEST_S, FIRST_S * 2.0 ** min(record.offences - 1, 32))
        record.reason = reason
        while len(self._records) > MAX_PEERS:
            del self._records[next(iter(self._records))]
        return record.until - now

    def refusal(self, peer: str, now: float) -> str | None:
        """One line for a peer that is refused now, with the reason and the seconds left; None for all others."""
        record = self._records.get(peer)
        if record is None or now >= record.until:
            return None
        return f"refused for {record.until - now:.0f} s more: {record.reason}"[:400]


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
            if len(self._usage) >= MAX_PEERS:  # those that have no stream and whose bucket is full again are forgotten
                full_since = now - BURST_S
                self._usage = {p: u for p, u in self._usage.items() if u.streams or u.filled_at > full_since}
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
