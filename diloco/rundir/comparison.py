"""`diloco.compare`: what `diloco compare` prints, as a value for notebooks and scripts.

Runs that differ in their seed only are one arm: its name, the mean and the spread of its results, and its curve. A gap
says how far an arm ends from data parallel at the same tokens, in percent of the held-out loss, seed by seed.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.rundir.compare import (
    NOT_A_DIFFERENCE,
    Point,
    Run,
    differing,
    find_runs,
    labels,
    read_runs,
    time_to_loss,
    worst_loss,
)
from diloco.rundir.files import prepare_run_directory, write_atomic
from diloco.rundir.plot import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["AXES", "Arm", "Comparison", "Gap", "arms_of", "compare", "find_gaps", "gap_of"]

RESULTS = ("loss", "perplexity", "tokens", "virtual_s", "wall_s", "bytes_sent", "utilization", "exit")
TOKENS_WITHIN = 0.02  # of each other; a budget ends with the outer step that reaches it

AXES = {  # of the pictures: field of `Point`, and label
    "tokens": ("tokens", "tokens applied by the swarm"),
    "time": ("time_s", "seconds"),
    "bytes": ("bytes_sent", "bytes sent by all peers"),
}


@dataclass(frozen=True)
class Comparison:
    """Runs side by side, as `compare` returns it.

    runs: each run with its `settings` by dotted key, its results (`loss` is the held-out loss in nats per token) and
        the `curve` of its evaluations; what is not known is None.
    arms: runs that differ in run.seed only, by their mean loss, the lowest first; `arm.mean("loss")`,
        `arm.spread("loss")` is the standard deviation over the seeds, and `arm.runs` are the runs.
    gaps: how far each arm ends from data parallel at the same tokens, in percent; empty without such a run.
    """

    runs: tuple[Run, ...]
    arms: tuple[Arm, ...]
    gaps: tuple[Gap, ...]

    def rows(self, loss: float | None = None) -> list[dict[str, Any]]:
        """A dict per run, for example for `pandas.DataFrame`: arm, directory, the settings that differ by dotted key,
        the results, and `time_to_loss_s`, the seconds to a held-out loss (None: the worst final loss of all).
        """
        reached = worst_loss(self.runs) if loss is None else loss
        keys = differing([run.settings for run in self.runs])
        return [
            {"arm": arm.name, "name": run.name, "directory": str(run.directory)}
            | {key: run.settings.get(key) for key in keys}
            | {name: getattr(run, name) for name in RESULTS}
            | {"time_to_loss_s": None if reached is None else time_to_loss(run, reached)}
            for arm in self.arms
            for run in arm.runs
        ]

    def to_csv(self, file: str | Path, loss: float | None = None) -> None:
        """Writes `rows` as a table with a line of names first. Raises ConfigError if `file` cannot be written."""
        rows, text = self.rows(loss), io.StringIO()
        writer = csv.DictWriter(text, rows[0])
        writer.writeheader()
        writer.writerows(rows)
        write_atomic(Path(file), text.getvalue())

    def plot(self, directory: str | Path, by: Sequence[str] = tuple(AXES)) -> list[Path]:
        """Draws held-out loss by "tokens", "time" and "bytes", the seeds of an arm as their mean with a band of one
        standard deviation; returns the pictures. Raises ConfigError if one cannot be written.
        """
        from matplotlib import colormaps

        prepare_run_directory(Path(directory))
        written = []
        colours = [colormaps["tab10"](index) for index in range(10)]
        if many := len(self.arms) > len(colours):
            colours = [colormaps["viridis"](index / (len(self.arms) - 1)) for index in range(len(self.arms))]
        for axis in by:
            of, label = AXES[axis]
            written.append(Path(directory) / f"loss-by-{axis}.png")
            virtual = axis == "time" and all(run.virtual_s for run in self.runs)
            with picture(written[-1], f"{label} (virtual)" if virtual else label) as axes:
                axes.set_ylabel("held-out loss (nats per token)")
                for arm, colour in zip(self.arms, colours, strict=False):
                    _draw(axes, arm, of, colour)
                if axes.lines:
                    axes.legend(frameon=False, fontsize=8, ncols=2 if many else 1)
        return written


def compare(*places: str | Path) -> Comparison:
    """Reads runs, which may have broken or be still going on, to compare them.

        from diloco import compare
        found = compare("runs/sweep", "runs/baseline")
        found.arms[0].name, found.arms[0].mean("loss"), found.arms[0].spread("loss")
        pandas.DataFrame(found.rows())

    `places` are run directories or directories of sweeps. Raises ConfigError if one of them is neither.
    """
    runs = read_runs(find_runs([Path(place) for place in places]))
    arms = arms_of(runs)
    return Comparison(tuple(runs), tuple(arms), tuple(find_gaps(arms)))


@dataclass(frozen=True)
class Arm:
    """Runs of one setting, each with a seed of its own; one run is an arm, too."""

    name: str
    runs: tuple[Run, ...]

    @property
    def counted(self) -> tuple[Run, ...]:
        """The runs that have ended well, or all if none has: those of which `mean` and `spread` are."""
        return tuple(run for run in self.runs if run.exit == 0) or self.runs

    def values(self, of: str) -> list[float]:
        """What is known of a field of `Run`, such as "loss", of each run that counts."""
        found = (getattr(run, of) for run in self.counted)
        return [value for value in found if value is not None]

    def mean(self, of: str = "loss") -> float | None:
        """None if it is known of no run."""
        values = self.values(of)
        return statistics.mean(values) if values else None

    def spread(self, of: str = "loss") -> float | None:
        """Standard deviation over the seeds; None with one run."""
        values = self.values(of)
        return statistics.stdev(values) if len(values) > 1 else None

    @property
    def seeds(self) -> list[int | None]:
        """run.seed of each run; None where nobody knows it."""
        return [run.settings.get("run.seed") for run in self.runs]

    def curve(self) -> Iterator[tuple[Point, float]]:
        """The mean over the runs at each version that all of them have, and the standard deviation of its loss."""
        curves = [{point.version: point for point in run.curve} for run in self.counted if run.curve]
        versions = sorted(set.intersection(*map(set, curves))) if curves else []
        for version in versions:
            points = [curve[version] for curve in curves]
            losses = [point.loss for point in points]
            x = {of: _mean([getattr(point, of) for point in points]) for of in ("tokens", "time_s", "bytes_sent")}
            yield Point(version, statistics.mean(losses), **x), statistics.stdev(losses) if len(losses) > 1 else 0.0


def arms_of(runs: Sequence[Run]) -> list[Arm]:
    """The arms by their mean loss, the lowest first and those without one last. Each has a name of its own."""
    groups: dict[str, list[Run]] = {}
    seen: Counter[str] = Counter()
    for run in runs:
        setting = repr(sorted(one for one in _without_seed(run).items() if not one[0].startswith(NOT_A_DIFFERENCE)))
        same = setting if run.settings else str(run.directory)
        again = f"{same} {run.settings.get('run.seed')}"
        seen[again] += 1  # who ran a seed twice has two arms
        groups.setdefault(f"{seen[again]} {same}", []).append(run)
    firsts = [group[0] for group in groups.values()]
    settings = [run.settings if len(firsts) == len(runs) else _without_seed(run) for run in firsts]
    names = labels(settings, [run.directory for run in firsts])
    arms = [Arm(name, tuple(group)) for name, group in zip(names, groups.values(), strict=True)]
    return sorted(arms, key=lambda arm: math.inf if (loss := arm.mean()) is None else loss)


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


def find_gaps(arms: Sequence[Arm]) -> list[Gap]:
    """The gap of each arm to the best data parallel arm with its model, data and tokens, if there is one."""
    baselines = [arm for arm in arms if _is_baseline(arm)]
    found = []
    for arm in arms:
        rivals = [] if _is_baseline(arm) else [one for one in baselines if _is_comparable(arm, one)]
        if rivals:
            best = min(rivals, key=lambda one: statistics.mean(_losses(one).values()))
            mine, theirs = _losses(arm), _losses(best)
            seeds = tuple(sorted(mine.keys() & theirs.keys()))
            name = "data parallel" if len(baselines) == 1 else f"data parallel {best.name}"
            found.append(Gap(arm.name, name, seeds, tuple(gap_of(mine[seed], theirs[seed]) for seed in seeds)))
    return found


def gap_of(loss: float, baseline: float) -> float:
    """A loss over a baseline's, in percent."""
    return 100 * (loss / baseline - 1)


def _draw(axes: Axes, arm: Arm, of: str, colour: Any) -> None:
    known = [(x, one.loss, spread) for one, spread in arm.curve() if (x := getattr(one, of)) is not None]
    if known:
        x, mean, spread = map(list, zip(*known, strict=True))
        seeds = f", {len(arm.counted)} seeds" if len(arm.counted) > 1 else ""
        name = arm.name.replace("$", r"\$") + seeds
        axes.plot(x, mean, "o-", color=colour, linewidth=1.5, markersize=3, label=name)
        low, high = ([y + sign * one for y, one in zip(mean, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)


def _is_baseline(arm: Arm) -> bool:
    """Whether gradients were averaged in every step."""
    return arm.runs[0].settings.get("outer.method") == "data_parallel"


def _is_comparable(arm: Arm, other: Arm) -> bool:
    one, two = arm.mean("tokens"), other.mean("tokens")
    if one is None or two is None or _task(arm) != _task(other):
        return False
    return abs(one - two) <= TOKENS_WITHIN * max(one, two) and bool(_losses(arm).keys() & _losses(other).keys())


def _losses(arm: Arm) -> dict[int, float]:
    """The held-out loss by seed."""
    return {seed: run.loss for seed, run in zip(arm.seeds, arm.runs, strict=True) if seed is not None and run.loss}


def _task(arm: Arm) -> Mapping[str, Any]:
    """The settings that two runs must share to be compared."""
    groups = ("model.", "data.", "eval.sequences")
    settings = arm.runs[0].settings.items()
    return {key: value for key, value in settings if key.startswith(groups) and not key.startswith(NOT_A_DIFFERENCE)}


def _without_seed(run: Run) -> dict[str, Any]:
    return {key: value for key, value in run.settings.items() if key != "run.seed"}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if len(known) == len(values) else None
