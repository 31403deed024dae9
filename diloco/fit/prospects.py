"""What a volunteer's machine can give to a swarm, in words, before it takes part."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from diloco.config import Config, OuterConfig
from diloco.fit.speed import step_seconds
from diloco.protocol.patience import ROUNDS
from diloco.protocol.schedule import dylu_steps
from diloco.train.progress import DYLU_FLOOR

__all__ = ["prospects", "prospects_of"]

NOTICEABLE = 1.2  # times the others' round: a difference worth a line


def prospects(outer: OuterConfig, step_s: float, paces: Sequence[float]) -> list[str]:
    """Lines that say how this machine's rounds compare with the others', and which mode suits it.

    Args:
        step_s: seconds of an inner step here.
        paces: inner steps per second of the peers that train; without any there is nothing to compare with.
    """
    if not paces:
        return []
    theirs_s, steps = 1 / statistics.median(paces), outer.sync_every
    times = step_s / theirs_s
    lines = [
        f"a round of {steps} inner steps takes {_seconds(steps * step_s)} here, and {_seconds(steps * theirs_s)} "
        f"elsewhere (median of {len(paces)})"
    ]
    if times <= ROUNDS and outer.barrier:
        waited_for = "the others wait for this machine, so every round takes as long as here"
        return [*lines, waited_for] if times > NOTICEABLE else lines
    share = f"{100 / (1 + sum(paces) * step_s):.2g} % of the swarm's tokens"
    if outer.lockstep:
        lines.append(
            f"nobody waits for it: it contributes to one outer step in {math.ceil(times)}, {share}; what it learned is "
            "merged late, and counts less"
        )
    elif outer.barrier:
        lines.append("nobody waits for it, and this run discards what comes late: this machine would learn in vain")
    elif outer.dylu:
        mine = dylu_steps(1 / step_s, max(paces), steps, min(DYLU_FLOOR, steps))
        lines.append(f"it takes {mine} of {steps} inner steps a round, and gives {share}")
    elif times > 1 + outer.staleness_limit:
        lines.append(
            f"its contributions would be about {times:.0f} rounds late, and this run refuses what is over "
            f"{outer.staleness_limit} late: this machine would learn in vain"
        )
    else:
        lines.append(f"nobody waits for it, and it gives {share}")
    if times > ROUNDS and not outer.dylu:
        lines.append("a run of the mode outer=async suits such a machine: it takes fewer inner steps a round")
    return lines


def _seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def prospects_of(config: Config, micro_batch: int, paces: Sequence[float]) -> list[str]:
    """The same for this machine, on which two parts of a batch are tried first."""
    return prospects(config.outer, step_seconds(config, micro_batch, warmup=1, timed=1), paces) if paces else []
