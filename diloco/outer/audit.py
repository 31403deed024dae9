"""Audits: whoever has the contributions to a part of a version recomputes it, and so proves what its syncer did to it.

    pick      which parts of a fragment this member audits in one version, in secret until it asks for them
    log       the part's updates, which it has anyway, from version 0 on or as far back as the momentum remembers
    ask       the syncer for the part's payloads in the newest version, each with its path to the signed root
    audit     a pure function of all that: `Deviation` if no honest syncer can have published the newest update

Nothing is committed to but payloads and updates. The momentum is made of published updates (`state.adopt_`), so it
follows from the log; what is not known of it halves with each version. The residual master - anchor is what the
codec lost in the update before, so the log bounds it by half a step of that update's encoding (`Codec.cell`). From
version 0 on both are known to be zero.

So an audit does not compare bits. It follows *ranges* in which each value of an honest syncer lies, and the newest
update has to be the encoding of a value in them. A range takes in every rounding of fp32, whether or not the hardware
fuses a product with a sum, so honest peers with other processors do not accuse each other. What fits into a range is
not found: about a step of the encoding of the updates per element and version, which is less than one contributor
may change as well.

The bundle that proves a deviation to one member proves it to all: they call the same function with it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from diloco.config import OuterConfig
from diloco.errors import PayloadError
from diloco.outer.codecs import codec
from diloco.outer.fragments import Fragment
from diloco.outer.optimizer import OPTIMIZERS, OuterStep
from diloco.outer.recompute import Follower, Part, Reach, Seen, linear_of
from diloco.outer.shown import part_at, part_count

__all__ = ["FORGOTTEN", "Deviation", "audit", "memories", "memory", "obstacle", "parts", "pick", "versions_until"]

FORGOTTEN = 2.0**-20
"""What is left of a momentum from before a log when the log is long enough for an audit: less than a step of int8."""


@dataclass(frozen=True)
class Deviation:
    """Proof that an update is not what the contributions give: the version that it starts from, and why, in a line."""

    version: int
    why: str


# -- what is audited --------------------------------------------------------------------------------------------------


def obstacle(settings: OuterConfig) -> str | None:
    """Why versions cannot be audited with these settings, with the remedy; None if they can."""
    if settings.flatten:
        return (
            f"outer.flatten={settings.flatten} mixes all values of a matrix, so no part of a version can be "
            "recomputed alone; set outer.flatten=0"
        )
    if settings.barrier and not settings.judged_together:
        return (
            f"outer.robust={settings.robust} with outer.codec_up={settings.codec_up} adds up chunks as they arrive, "
            "also those of contributions that never become whole and are not signed; set outer.robust=clip"
        )
    return None


def parts(fragment: Fragment, settings: OuterConfig) -> list[Part]:
    """All parts in which a fragment is audited."""
    found = (part_at(fragment, settings, number) for number in range(part_count(fragment, settings)))
    return [part for part in found if part is not None]


def pick(count: int, share: float, members: int, rng: random.Random) -> list[int]:
    """Which of `count` parts one of `members` audits, so that together they audit that share of all parts on average.

    `rng` is the member's own: nobody else may be able to foresee it. Members may pick the same part.
    """
    wanted = min(count, share * count / members)
    whole = math.floor(wanted) + (rng.random() < wanted % 1)
    return sorted(rng.sample(range(count), whole))


def versions_until(found: float, count: int, altered: int, share: float) -> int:
    """After how many versions a syncer that alters `altered` of `count` parts in each is proved, with probability
    `found` at least.

    The honest members together audit share x count parts of a version on average. One pick meets an altered part with
    probability altered / count, and no member picks a part twice, so a version goes by unnoticed with probability
    exp(-share x altered) at most.
    """
    assert 0 < found < 1 and 0 < altered <= count and 0 < share
    return math.ceil(-math.log1p(-found) / (share * altered))


def memory(settings: OuterConfig, steps: Sequence[OuterStep]) -> float:
    """The part of a momentum from before these steps that is left of it after them; 0 for steps from version 0 on.

    A log may begin at the first of them once this is at most `FORGOTTEN`.
    """
    *_, left = (1.0, *memories(settings, steps))
    return left


def memories(settings: OuterConfig, steps: Iterable[OuterStep]) -> Iterator[float]:
    """`memory` after each of these steps."""
    optimizer, left = OPTIMIZERS[settings.optimizer](settings), None
    for step in steps:
        left = Reach(float(step.version > 0), 0.0) if left is None else left
        left = left.after(linear_of(optimizer, step), step)
        yield left.momentum


# -- the audit --------------------------------------------------------------------------------------------------------


def audit(part: Part, settings: OuterConfig, anchor: Tensor, log: Sequence[Seen]) -> Deviation | None:
    """Whether each update of the log can be what an honest syncer publishes; the first one that cannot.

    Args:
        part: where.
        settings: of the run; `obstacle` has nothing against them.
        anchor: (part.numel,) fp32, the checker's own anchor, at any version from the first one whose contributions are
            in the log to its last. Only the sizes of its values count, which say how sums with them are rounded.
        log: versions in a row. It says the more the farther it reaches back (`memory`), or if it begins at version 0.

    A payload or update that its codec refuses is a deviation too: an honest syncer merges and publishes none.
    """
    assert obstacle(settings) is None, "what cannot be audited is refused before"
    counted = next((at for at, seen in enumerate(log) if seen.counted is not None), len(log))
    judged = counted - 1  # the last update before says all that is to be known of the residual
    sizes, down = anchor.double().abs(), codec(settings.codec_down)
    try:
        for seen in log[max(judged, 0) :]:
            sizes += down.values(seen.update, part.numel).abs()
        follower = Follower(part, settings, sizes, log[0].step)
    except PayloadError as error:
        return Deviation(seen.step.version, str(error))
    for at, seen in enumerate(log):
        try:
            why = follower.take(seen, at >= judged)
        except PayloadError as error:
            why = str(error)
        if why is not None:
            return Deviation(seen.step.version, why)
    return None
