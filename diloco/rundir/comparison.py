"""`diloco.compare`: what `diloco compare` prints, as a value for notebooks and scripts."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.rundir.arms import AXES, Arm, Gap, arms_of, find_gaps, plot_arms
from diloco.rundir.compare import Run, differing, find_runs, read_runs, time_to_loss, worst_loss
from diloco.rundir.files import prepare_run_directory, write_atomic

__all__ = ["Comparison", "compare"]

RESULTS = ("loss", "perplexity", "tokens", "virtual_s", "wall_s", "bytes_sent", "utilization", "exit")


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
        prepare_run_directory(Path(directory))
        return plot_arms(self.arms, Path(directory), by)


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
