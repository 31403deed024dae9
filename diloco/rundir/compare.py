"""`diloco.compare`: the comparison that `diloco compare` prints, as a value for notebooks.

It reads `config.yaml`, `summary.json` and `metrics.jsonl` of each run directory. A run that broke
or is still going on has only some of these files; then unknown values are None. Losses are on
held-out text, in nats per token.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco.config import flatten
from diloco.config.files import read_saved
from diloco.errors import ConfigError
from diloco.rundir.files import number, prepare_run_directory, read_json_lines, write_atomic
from diloco.rundir.plot import Point, held_out_curve, picture
from diloco.rundir.summary import Evaluation, read_summary

# Settings that make no difference to the result.
_NEUTRAL = re.compile(
    r"run\.(dir|id|name|lead|report)|train\.threads|wandb\.|data\.shard|eval\.prompt"
)
RESULTS = "loss perplexity tokens virtual_s wall_s bytes_sent utilization exit".split()
FILES = ("metrics.jsonl", "summary.json", "config.yaml", "member.json")
TOKENS_WITHIN = 0.02  # of each other; a budget ends with the outer step that reaches it
AXES = {  # of the pictures: field of `Point`, and label
    "tokens": ("tokens", "tokens applied by the swarm"),
    "time": ("time_s", "seconds"),
    "bytes": ("bytes_sent", "bytes sent by all peers"),
}


@dataclass
class Run:
    """One run; unknown fields are None. `bytes_sent`: over all peers, `utilization`: their mean."""

    directory: Path
    settings: dict[str, Any]
    seed: int | None = None
    curve: list[Point] = field(default_factory=list)
    loss: float | None = None
    tokens: int | None = None
    virtual_s: float | None = None
    wall_s: float | None = None
    bytes_sent: int | None = None
    utilization: float | None = None
    exit: int | None = None

    @property
    def perplexity(self) -> float | None:
        return Evaluation(self.loss).perplexity

    @property
    def compared(self) -> dict[str, Any]:
        """Return the settings that may make a difference."""
        return {key: value for key, value in self.settings.items() if not _NEUTRAL.match(key)}

    def time_to_loss(self, loss: float) -> float | None:
        """Interpolate seconds (virtual if simulated) until held-out loss was `loss` or less.

        None if it never was, or if the times are unknown.
        """
        before: Point | None = None
        for point in self.curve:
            if point.loss <= loss:
                if point.time_s is None or before is None or before.time_s is None:
                    return point.time_s
                part = (before.loss - loss) / (before.loss - point.loss)
                return before.time_s + part * (point.time_s - before.time_s)
            before = point
        return None


@dataclass(frozen=True)
class Arm:
    """Runs of one setting, each with a seed of its own; one run is an arm, too."""

    name: str
    runs: tuple[Run, ...]

    @property
    def counted(self) -> tuple[Run, ...]:
        """The runs that `mean` and `spread` use: those that ended well, or all if none has."""
        return tuple(run for run in self.runs if run.exit == 0) or self.runs

    def mean(self, of: str = "loss") -> float | None:
        """Return the mean over the seeds of a field of `Run`; None if it is unknown for all."""
        values = self._values(of)
        return statistics.mean(values) if values else None

    def spread(self, of: str = "loss") -> float | None:
        """Return the standard deviation over the seeds; None with one run."""
        return _deviation(self._values(of))

    def losses(self) -> dict[int, float]:
        """Return the held-out loss by seed."""
        return {run.seed: run.loss for run in self.runs if run.seed is not None and run.loss}

    def _values(self, of: str) -> list[float]:
        return [value for run in self.counted if (value := getattr(run, of)) is not None]


@dataclass(frozen=True)
class Gap:
    """The excess of an arm's final loss over a baseline's, in percent, for each of the `seeds`."""

    name: str
    baseline: str
    seeds: tuple[int, ...]
    percent: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.mean(self.percent)

    @property
    def spread(self) -> float | None:
        """The standard deviation over the seeds; None with one seed."""
        return _deviation(self.percent)

    def __str__(self) -> str:
        spread = f" ± {self.spread:.1f}" if self.spread is not None else ""
        seeds = f"seed{'s' * (len(self.seeds) > 1)} {', '.join(map(str, self.seeds))}"
        percent = f"{self.mean:+.1f}{spread} %"
        return f"{self.name}: held-out loss {percent} over {self.baseline} ({seeds})"


@dataclass(frozen=True)
class RunComparison:
    """Runs side by side, as `compare` returns it.

    arms: runs that differ in run.seed only, by their mean loss, the lowest first.
    gaps: how far each arm ends from data parallel at the same tokens; empty without such a run.
    """

    arms: tuple[Arm, ...]
    gaps: tuple[Gap, ...]

    @property
    def runs(self) -> list[Run]:
        return [run for arm in self.arms for run in arm.runs]

    def worst_loss(self) -> float | None:
        """Return the largest final loss of the finished runs (of all, if none finished)."""
        finished = [run for run in self.runs if run.exit == 0] or self.runs
        return max((run.loss for run in finished if run.loss is not None), default=None)

    def rows(self, loss: float | None = None) -> list[dict[str, Any]]:
        """List a dict per run, for example for `pandas.DataFrame`: arm, directory, the settings
        that differ by dotted key, the results, and `time_to_loss_s`, the seconds to a held-out loss
        (None: the worst final loss of all)."""
        reached = self.worst_loss() if loss is None else loss
        names, keys = _names(self.runs), _differing([run.compared for run in self.runs])
        return [
            {"arm": arm.name, "name": names.pop(0), "directory": str(run.directory)}
            | {key: run.settings.get(key) for key in keys}
            | {name: getattr(run, name) for name in RESULTS}
            | {"time_to_loss_s": None if reached is None else run.time_to_loss(reached)}
            for arm in self.arms
            for run in arm.runs
        ]

    def to_csv(self, file: str | Path, loss: float | None = None) -> None:
        """Write `rows` as a table with a header. Raises ConfigError if it cannot be written."""
        rows, text = self.rows(loss), io.StringIO()
        writer = csv.DictWriter(text, rows[0])
        writer.writeheader()
        writer.writerows(rows)
        write_atomic(Path(file), text.getvalue())

    def plot(self, directory: str | Path) -> list[Path]:
        """Draw the loss by tokens, time and bytes; ConfigError if a picture cannot be written."""
        from matplotlib import colormaps

        prepare_run_directory(Path(directory))
        many = len(self.arms) > 10
        palette = colormaps["viridis" if many else "tab10"]
        written = []
        for name, (of, label) in AXES.items():
            written.append(Path(directory) / f"loss-by-{name}.png")
            virtual = name == "time" and all(run.virtual_s for run in self.runs)
            with picture(written[-1], f"{label} (virtual)" if virtual else label) as axes:
                axes.set_ylabel("held-out loss (nats per token)")
                for index, arm in enumerate(self.arms):
                    colour = palette(index / (len(self.arms) - 1) if many else index)
                    legend: str | None = arm.name.replace("$", r"\$")
                    style: Any = {"color": colour, "markersize": 3}
                    for run in arm.counted:
                        line = [(getattr(p, of), p.loss) for p in run.curve]
                        if line := [(x, y) for x, y in line if x is not None]:
                            axes.plot(*zip(*line, strict=True), "o-", label=legend, **style)
                            legend = None
                if axes.lines:
                    axes.legend(frameon=False, fontsize=8, ncols=2 if many else 1)
        return written


def compare(*places: str | Path) -> RunComparison:
    """Read runs, which may have broken or be still going on, to compare them.

        from diloco import compare
        found = compare("runs/sweep", "runs/baseline")
        found.arms[0].name, found.arms[0].mean("loss"), found.arms[0].spread("loss")
        pandas.DataFrame(found.rows())

    `places` are run directories or directories of sweeps; ConfigError if one of them is neither.
    """
    arms = _arms([read_run(directory) for directory in _run_directories(map(Path, places))])
    return RunComparison(tuple(arms), tuple(_gaps(arms)))


def gap_of(loss: float, baseline: float) -> float:
    """Return the excess of a loss over a baseline's, in percent."""
    return 100 * (loss / baseline - 1)


# -- what is left of a run -------------------------------------------------------------------------


def _run_directories(places: Iterable[Path]) -> list[Path]:
    """List the run directories in `places`, and for a sweep those inside it; each once."""
    directories: dict[Path, None] = {}
    for path in places:
        if not path.is_dir():
            remedy = "give the run.dir of a run, or the directory of a sweep"
            raise ConfigError(f"{path} is no directory; {remedy}")
        runs = [path] if _is_run(path) else sorted(filter(_is_run, path.iterdir()))
        if not runs:
            files = "metrics.jsonl, summary.json or config.yaml"
            raise ConfigError(f"{path} holds no run (no {files}); give a run.dir")
        directories.update(dict.fromkeys(runs))
    return list(directories)


def _is_run(directory: Path) -> bool:
    return any((directory / name).is_file() for name in FILES)


def read_run(directory: Path) -> Run:
    """Read the run in a directory, as far as its files go."""
    summary = read_summary(directory / "summary.json")
    records = read_json_lines(directory / "metrics.jsonl")
    settings = _settings(directory / "config.yaml")
    virtual_s = None if summary is None else summary.virtual_s
    run = Run(directory, settings, settings.get("run.seed"), virtual_s=virtual_s)
    run.curve = held_out_curve(records, virtual_s is not None)
    run.loss = run.curve[-1].loss if run.curve else None
    if summary is None:
        tokens = max((number(record.get("tokens")) or 0 for record in records), default=0)
        run.tokens, run.exit = int(tokens) or None, read_json(directory / "member.json").get("exit")
        return run
    run.loss = run.loss if summary.eval.loss is None else summary.eval.loss
    run.tokens, run.wall_s, run.exit = summary.tokens.applied, summary.wall_s, summary.exit
    if summary.peers:
        run.bytes_sent = sum(peer.bytes_sent for peer in summary.peers)
        run.utilization = statistics.mean(peer.utilization for peer in summary.peers)
    return run


def _settings(saved: Path) -> dict[str, Any]:
    """Return the settings by key; empty if they are unknown."""
    with contextlib.suppress(ConfigError):
        if saved.is_file():
            return dict(flatten(json.loads(read_saved(saved).text)))
    return {}


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; empty if there is none."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_bytes())
        if isinstance(content, dict):
            return content
    return {}


# -- arms and gaps ---------------------------------------------------------------------------------


def _arms(runs: Sequence[Run]) -> list[Arm]:
    """Group runs into arms with unique names, by their mean loss; those without one come last."""
    groups: dict[str, list[Run]] = {}
    seen: Counter[str] = Counter()
    for run in runs:
        same = repr(sorted(_without_seed(run).items())) if run.settings else str(run.directory)
        seen[f"{same} {run.seed}"] += 1  # a seed that was run twice makes two arms
        groups.setdefault(f"{seen[f'{same} {run.seed}']} {same}", []).append(run)
    firsts = [group[0] for group in groups.values()]
    names = _names(firsts, with_seed=len(firsts) == len(runs))
    arms = [Arm(name, tuple(group)) for name, group in zip(names, groups.values(), strict=True)]
    return sorted(arms, key=lambda arm: math.inf if (loss := arm.mean()) is None else loss)


def _without_seed(run: Run) -> dict[str, Any]:
    return {key: value for key, value in run.compared.items() if key != "run.seed"}


def _names(runs: Sequence[Run], with_seed: bool = True) -> list[str]:
    """Name each run by the settings in which it differs from others, or else by its directory."""
    settings = [run.compared if with_seed else _without_seed(run) for run in runs]
    keys = _differing(settings)
    names = [" ".join(f"{k}={_shown(run[k])}" for k in keys if k in run) for run in settings]
    often = Counter(names)
    for index, name in enumerate(names):
        if often[name] > 1 or not 0 < len(name) <= 80:
            names[index] = runs[index].directory.resolve().name
    return names if len(set(names)) == len(names) else [str(run.directory) for run in runs]


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the keys in which settings differ; of another model its name only."""
    known = [setting for setting in settings if setting]
    keys = dict.fromkeys(key for run in known for key in run)
    changed = [k for k in keys if any(k not in run or run[k] != known[0].get(k) for run in known)]
    if "model.name" in changed:  # it implies the model's settings
        changed = [key for key in changed if key == "model.name" or not key.startswith("model.")]
    return changed


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value.replace(" ", "")
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, separators=(",", ":"))


def _gaps(arms: Sequence[Arm]) -> list[Gap]:
    """Compare each arm with the best data parallel arm of its model, data and tokens, if any."""
    baselines = [arm for arm in arms if arm.runs[0].settings.get("outer.method") == "data_parallel"]
    gaps = []
    for arm in arms:
        rivals = [
            baseline
            for baseline in baselines
            if arm not in baselines and _is_comparable(arm, baseline)
        ]
        if rivals:
            best = min(rivals, key=lambda arm: statistics.mean(arm.losses().values()))
            mine, theirs = arm.losses(), best.losses()
            seeds = tuple(sorted(mine.keys() & theirs.keys()))
            name = "data parallel" if len(baselines) == 1 else f"data parallel {best.name}"
            percent = tuple(gap_of(mine[seed], theirs[seed]) for seed in seeds)
            gaps.append(Gap(arm.name, name, seeds, percent))
    return gaps


def _is_comparable(arm: Arm, other: Arm) -> bool:
    """Return True if model, data and tokens are equal, and both have a seed in common."""
    mine, its = arm.mean("tokens"), other.mean("tokens")
    if mine is None or its is None or abs(mine - its) > TOKENS_WITHIN * max(mine, its):
        return False
    return _task(arm) == _task(other) and bool(arm.losses().keys() & other.losses().keys())


def _task(arm: Arm) -> dict[str, Any]:
    """Return the settings of model, data and evaluation."""
    task, settings = ("model.", "data.", "eval.sequences"), arm.runs[0].compared
    return {key: value for key, value in settings.items() if key.startswith(task)}


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None
