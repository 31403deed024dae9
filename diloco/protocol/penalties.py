"""What a peer may claim, and what happens to one that misbehaves. Sans-IO; `limits` says how much a peer may ask.

    offence -> refused for 10 s -> next offence -> 20 s -> 40 s -> ... one hour at most, `Penalties`

An *offence* is a message that no honest peer of this version sends, whatever its link:

- a message that does not fit its schema or its stream, or is about a fragment that the run does not have;
- a payload that does not decode or has an absurd norm, or a claim of tokens that cannot be true (`implausible`).

A thin link, a crash or a lost lease makes nobody an offender: streams may break or stall, contributions may come twice
or late, and claims may be overtaken. An honest peer may also repeat what a liar told it, such as a term far above the
one that is known here, and a newer peer may send kinds of messages that are not known here.

After a day without an offence the count begins anew. A peer that returns under another identity is not recognised;
admission is the defence against that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from diloco.errors import PayloadError
from diloco.protocol.limits import MAX_PEERS
from diloco.protocol.messages import OtherVersion, UnknownKind
from diloco.protocol.messages.bulk import Contribution

__all__ = ["FIRST_S", "FORGET_S", "LONGEST_S", "Offence", "Penalties", "implausible", "offences"]

FIRST_S = 10.0
LONGEST_S = 3600.0
FORGET_S = 86400.0
SLACK = 8.0  # times the work that a peer can have done, as far as is known here


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


def implausible(
    header: Contribution, tokens_per_step: int | None, sync_every: int, steps_per_s: float, since_base_s: float | None
) -> str | None:
    """What is wrong with the claims of a contribution, in one line; None when they can be true.

    Tokens weigh in the mean and move the swarm clock, so claims about them are checked:

        tokens <= steps x tokens of an inner step          exact: the manifest says how large a batch is
        steps  <= 8 x what the peer can have done          by its own pace and the time since its base version, or H

    The peer said its pace in its heartbeats, long before this contribution. Others plan by that pace, so a peer that
    lies about it harms itself: the others wait for it too long, or not at all. The slack covers inexact clocks, late
    heartbeats, and peers that trained on while they could not send. A peer can thus claim a few times its true work,
    and no more.

    Args:
        tokens_per_step: of the manifest; None where a training loop counts in its own way.
        sync_every: H, which a peer may always have done.
        steps_per_s: the pace in the peer's last status; 0 while it had no measurement.
        since_base_s: seconds since its base version was published here; None when that is not known.
    """
    if tokens_per_step is not None and header.tokens > header.steps * tokens_per_step:
        return f"{header.tokens} tokens in {header.steps} steps are claimed, and a step has {tokens_per_step}"
    if since_base_s is None:
        return None
    possible = SLACK * max(sync_every, steps_per_s * since_base_s)
    if header.steps > possible:
        return (
            f"{header.steps} steps are claimed, {since_base_s:.0f} s after version {header.base_version} at "
            f"{steps_per_s:.3g} steps/s"
        )
    return None
