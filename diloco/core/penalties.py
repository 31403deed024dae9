"""What happens to a peer that misbehaves. Sans-IO; `limits` says how much a peer may ask, `work` what it may claim.

    offence -> refused for 10 s -> next offence -> 20 s -> 40 s -> ... one hour at most, `Penalties`

An *offence* is a message that no honest peer of this version sends, whatever its link:

- a message that does not fit its schema or its stream, or is about a fragment that the run does not have;
- a payload that does not decode, or is not what its contributor signed.

A thin link, a crash or a lost lease makes nobody an offender: streams may break or stall, and contributions may come
twice or late. An honest peer may also pass on what a liar told it, such as a head that nobody can have, and a newer one
may send kinds of messages that are not known here.

After a day without an offence the count begins anew. A peer that returns under another identity is not recognised;
admission is the defence against that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from diloco.core.limits import MAX_PEERS
from diloco.errors import PayloadError
from diloco.messages.codec import OtherVersion, UnknownKind
from diloco.messages.fields import forget_oldest

__all__ = ["FIRST_S", "FORGET_S", "LONGEST_S", "Offence", "Penalties", "offences"]

FIRST_S = 10.0
LONGEST_S = 3600.0
FORGET_S = 86400.0


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


class Penalties:
    """Which peers are refused until when. Never raises; times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._records: dict[str, tuple[int, float, str]] = {}  # offences, until when, why; the newest is last

    def offence(self, peer: str, reason: str, now: float) -> float:
        """Count an offence; returns for how many seconds the peer is refused from now on.

        Further offences while it is refused, from streams that were already open, count as one.
        """
        before, until, _ = self._records.pop(peer, (0, 0.0, ""))
        if now >= until + FORGET_S:
            before = 0
        if now >= until:
            before, until = before + 1, now + min(LONGEST_S, FIRST_S * 2.0 ** min(before, 32))
        self._records[peer] = (before, until, reason)
        forget_oldest(self._records, MAX_PEERS)
        return until - now

    def refusal(self, peer: str, now: float) -> str | None:
        """One line for a peer that is refused now, with the reason and the seconds left; None for all others."""
        _, until, reason = self._records.get(peer, (0, now, ""))
        return f"refused for {until - now:.0f} s more: {reason}"[:400] if now < until else None
