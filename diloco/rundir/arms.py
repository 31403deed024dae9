"""Runs that differ in their seed only are one arm: its name, the mean and the spread of its results, and its curve."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diloco.rundir.compare import NOT_A_DIFFERENCE, Point, Run, labels
from diloco.rundir.plot import picture

__all__ = ["AXES", "Arm", "arms_of", "name_arms", "plot_arms"]

AXES = {  # of the pictures: field of `Point`, and label
    "tokens": ("tokens", "tokens applied by the swarm"),
    "time": ("time_s", "seconds"),
    "bytes": ("bytes_sent", "bytes sent by all peers"),
}


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
    arms = name_arms([Arm("", tuple(group)) for group in groups.values()])
    return sorted(arms, key=lambda arm: math.inf if (loss := arm.mean()) is None else loss)


def name_arms(arms: Sequence[Arm]) -> list[Arm]:
    """The arms with names by the settings in which they differ, or else by the directories of their first runs."""
    one_each = all(len(arm.runs) == 1 for arm in arms)
    firsts = [arm.runs[0] for arm in arms]
    settings = [first.settings if one_each else _without_seed(first) for first in firsts]
    names = labels(settings, [first.directory for first in firsts])
    return [replace(arm, name=name) for arm, name in zip(arms, names, strict=True)]


def plot_arms(arms: Sequence[Arm], directory: Path, by: Sequence[str] = tuple(AXES)) -> list[Path]:
    """Draws held-out loss `by` tokens, time and bytes into `directory`; returns the paths of the pictures.

    An arm of several seeds is their mean, with a band of one standard deviation. Raises `ConfigError` if a picture
    cannot be written.
    """
    from matplotlib import colormaps

    written = []
    few = len(arms) <= 10
    for axis in by:
        of, label = AXES[axis]
        written.append(directory / f"loss-by-{axis}.png")
        virtual = " (virtual)" if axis == "time" and all(run.virtual_s for arm in arms for run in arm.runs) else ""
        with picture(written[-1], label + virtual) as axes:
            axes.set_ylabel("held-out loss (nats per token)")
            for index, arm in enumerate(arms):
                colour = colormaps["tab10"](index) if few else colormaps["viridis"](index / (len(arms) - 1))
                known = [(x, one.loss, spread) for one, spread in arm.curve() if (x := getattr(one, of)) is not None]
                if known:
                    x, mean, spread = map(list, zip(*known, strict=True))
                    name = arm.name.replace("$", r"\$") + (
                        f", {len(arm.counted)} seeds" if len(arm.counted) > 1 else ""
                    )
                    axes.plot(x, mean, "o-", color=colour, linewidth=1.5, markersize=3, label=name)
                    if any(spread):
                        low, high = ([y + sign * one for y, one in zip(mean, spread, strict=True)] for sign in (-1, 1))
                        axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
            if axes.lines:
                axes.legend(frameon=False, fontsize=8, ncols=1 if few else 2)
    return written


def _without_seed(run: Run) -> dict[str, Any]:
    return {key: value for key, value in run.settings.items() if key != "run.seed"}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if len(known) == len(values) else None
