"""Peers that misbehave are refused for a while, and for twice as long each next time. Sans-IO.

    offence -> refused for 10 s -> next offence -> 20 s -> 40 s -> ... one hour at most

An *offence* is what no honest peer of this version sends, whatever its link: a message that does not fit its schema or
its stream, a payload that does not decode, an absurd norm, a token claim that cannot be, a word on a fragment that the
run does not have. What a thin link, a crash or a lost lease brings about is none: streams that break or stall,
contributions that are sent twice, come late, or are left out, claims that others have overtaken. Nor is what an honest
peer may repeat after a liar, such as a term far above the one that is known here.

After a day without an offence a peer begins anew. There is no defence against a peer that comes with another identity;
that is what admission is for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from diloco.errors import PayloadError
from diloco.protocol.messages import OtherVersion

__all__ = ["FIRST_S", "FORGET_S", "LONGEST_S", "Offence", "Penalties", "offences"]

FIRST_S = 10.0
LONGEST_S = 3600.0
FORGET_S = 86400.0
MAX_PEERS = 4096  # remembered; identities cost nothing, so those refused the longest ago are forgotten


class Offence(PayloadError):
    """What no honest peer of this version sends, whatever its link."""


@contextmanager
def offences() -> Iterator[None]:
    """What is invalid in here is an offence."""
    try:
        yield
    except OtherVersion:
        raise
    except PayloadError as error:
        raise Offence(str(error)) from None


@dataclass
class _Record:
    offences: int = 0
    until: float = 0.0
    reason: str = ""


class Penalties:
    """Who is refused until when. Never raises; times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def offence(self, peer: str, reason: str, now: float) -> float:
        """A peer did what no honest one does; returns for how many seconds it is refused from now on.

        Offences while it is refused already, from streams that were open, count as one.
        """
        record = self._records.pop(peer, _Record())
        self._records[peer] = record  # at the end: the order is that of the last offence
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
