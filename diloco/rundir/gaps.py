"""How far runs end from data parallel at the same tokens, in percent of the held-out loss, with the spread over seeds.

1. Runs that differ in their seed only are one arm (`arms.py`).
2. The baselines of an arm are the data parallel arms with its model, data and tokens.
3. It is compared with the best of them and, if that is another one, with the best that has its inner optimizer. Runs of
   one seed are compared with each other.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diloco.rundir.arms import Arm, arms_of, name_arms
from diloco.rundir.compare import NOT_A_DIFFERENCE, Run

__all__ = ["Gap", "find_gaps", "gap_of"]

TOKENS_WITHIN = 0.02  # of each other; a budget ends with the outer step that reaches it


@dataclass(frozen=True)
class Gap:
    """`percent` has a value for each of the `seeds`; it is negative where `name` ends below `baseline`."""

    name: str
    baseline: str
    seeds: tuple[int, ...]
    percent: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.mean(self.percent)

    @property
    def spread(self) -> float | None:
        """Standard deviation over the seeds; None with one seed."""
        return statistics.stdev(self.percent) if len(self.percent) > 1 else None

    def __str__(self) -> str:
        spread = "" if self.spread is None else f" ± {self.spread:.1f}"
        seeds = f"seed{'s' * (len(self.seeds) > 1)} {', '.join(map(str, self.seeds))}"
        return f"{self.name}: held-out loss {self.mean:+.1f}{spread} % over {self.baseline} ({seeds})"


def find_gaps(runs: Sequence[Run]) -> list[Gap]:
    """The gaps of all arms that have a baseline, the lowest loss first; empty without a data parallel run."""
    arms = _arms(runs)
    found = []
    for arm in arms:
        rivals = [] if _is_baseline(arm.runs[0]) else [other for other in arms if _is_baseline_of(other, arm)]
        alike = [rival for rival in rivals if _optimizer(rival) == _optimizer(arm)]
        best = [min(some, key=_mean_loss) for some in (rivals, alike) if some]
        found += [_gap(arm, rival) for index, rival in enumerate(best) if rival not in best[:index]]
    return found


def _is_baseline(run: Run) -> bool:
    """Whether gradients were averaged in every step."""
    return run.settings.get("outer.method") == "data_parallel"


def gap_of(loss: float, baseline: float) -> float:
    """A loss over a baseline's, in percent."""
    return 100 * (loss / baseline - 1)


def _arms(runs: Sequence[Run]) -> list[Arm]:
    """The arms of all runs that were evaluated; a baseline is called one."""
    arms = arms_of([run for run in runs if run.settings and run.loss])
    baselines = name_arms([arm for arm in arms if _is_baseline(arm.runs[0])])
    called = [f"data parallel {arm.name}" if len(baselines) > 1 else "data parallel" for arm in baselines]
    others = name_arms([arm for arm in arms if not _is_baseline(arm.runs[0])])
    return [*others, *(replace(arm, name=name) for arm, name in zip(baselines, called, strict=True))]


def _losses(arm: Arm) -> dict[int, float]:
    """The held-out loss by seed."""
    return {int(run.settings["run.seed"]): run.loss for run in arm.runs if run.loss is not None}


def _optimizer(arm: Arm) -> Any:
    return arm.runs[0].settings.get("inner.optimizer")


def _mean_loss(arm: Arm) -> float:
    return statistics.mean(_losses(arm).values())


def _is_baseline_of(other: Arm, arm: Arm) -> bool:
    one, two = arm.runs[0], other.runs[0]
    if not _is_baseline(two) or _task(one) != _task(two) or one.tokens is None or two.tokens is None:
        return False
    equal = abs(one.tokens - two.tokens) <= TOKENS_WITHIN * max(one.tokens, two.tokens)
    return equal and bool(_losses(arm).keys() & _losses(other).keys())


def _gap(arm: Arm, rival: Arm) -> Gap:
    mine, theirs = _losses(arm), _losses(rival)
    seeds = tuple(sorted(mine.keys() & theirs.keys()))
    percent = tuple(gap_of(mine[seed], theirs[seed]) for seed in seeds)
    return Gap(arm.name, rival.name, seeds, percent)


def _task(run: Run) -> Mapping[str, Any]:
    """The settings that two runs must share to be compared."""
    groups = ("model.", "data.", "eval.sequences")
    mine = {key: value for key, value in run.settings.items() if key.startswith(groups)}
    return {key: value for key, value in mine.items() if not key.startswith(NOT_A_DIFFERENCE)}
