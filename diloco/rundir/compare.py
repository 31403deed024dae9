"""Compares runs: the settings that differ, the results, and curves of the held-out loss.

Reads `config.yaml`, `summary.json` and `metrics.jsonl` of each run directory. A run that broke or is still going on has
only some of these files; then unknown values are None.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco.config import compose, flatten
from diloco.config.files import read_saved
from diloco.errors import ConfigError
from diloco.rundir.files import number, read_json_lines

__all__ = [
    "NOT_A_DIFFERENCE", "Point", "Run", "differing", "find_runs", "labels", "read_json", "read_runs",
    "time_to_loss", "worst_loss",
]  # fmt: skip

LONGEST_NAME = 80
NOT_A_DIFFERENCE = (
    "run.dir", "run.id", "run.name", "run.lead", "run.report", "train.threads", "wandb.", "data.shard", "eval.prompt",
)  # fmt: skip


@dataclass(frozen=True)
class Point:
    """Held-out loss in nats per token at a version; `time_s` is seconds since the start, virtual if simulated."""

    version: int
    loss: float
    tokens: float | None
    time_s: float | None
    bytes_sent: float | None


@dataclass
class Run:
    """One run, as far as it is known. `bytes_sent` is the sum over the peers, `utilization` the mean."""

    directory: Path
    settings: dict[str, Any]
    curve: list[Point] = field(default_factory=list)
    name: str = ""
    loss: float | None = None
    tokens: int | None = None
    virtual_s: float | None = None
    wall_s: float | None = None
    bytes_sent: int | None = None
    utilization: float | None = None
    exit: int | None = None

    @property
    def perplexity(self) -> float | None:
        return math.exp(self.loss) if self.loss is not None and self.loss < 700 else None


def find_runs(places: Sequence[Path]) -> list[Path]:
    """The run directories that `places` are or, for a sweep, contain; each once, in the given order. Raises
    `ConfigError` if a place is neither a run nor a sweep.
    """
    found: dict[Path, None] = {}
    for place in places:
        if not place.is_dir():
            raise ConfigError(f"{place} is no directory; give the run.dir of a run, or the directory of a sweep")
        runs = [place] if _is_run(place) else sorted(one for one in place.iterdir() if _is_run(one))
        if not runs:
            raise ConfigError(f"{place} holds no run (no metrics.jsonl, summary.json or config.yaml); give a run.dir")
        found.update(dict.fromkeys(runs))
    return list(found)


def read_runs(directories: Sequence[Path]) -> list[Run]:
    """Reads the runs, and gives them names that tell them apart."""
    runs = [_read(directory) for directory in directories]
    for run, name in zip(runs, labels([run.settings for run in runs], directories), strict=True):
        run.name = name
    return runs


def worst_loss(runs: Sequence[Run]) -> float | None:
    """The largest final loss of the finished runs (of all runs, if none finished): every one of them has reached it."""
    finished = [run for run in runs if run.exit == 0] or runs
    return max((run.loss for run in finished if run.loss is not None), default=None)


def time_to_loss(run: Run, loss: float) -> float | None:
    """Seconds (virtual if simulated) until the held-out loss was at most `loss`, interpolated linearly between points.

    None if it never was, or if the times are unknown.
    """
    before: Point | None = None
    for point in run.curve:
        if point.loss <= loss:
            if point.time_s is None or before is None or before.time_s is None or before.loss <= point.loss:
                return point.time_s
            part = (before.loss - loss) / (before.loss - point.loss)
            return before.time_s + part * (point.time_s - before.time_s)
        before = point
    return None


def _is_run(place: Path) -> bool:
    """Whether a directory holds a run or a member of a sweep."""
    return any((place / name).is_file() for name in ("metrics.jsonl", "summary.json", "config.yaml", "member.json"))


def _read(directory: Path) -> Run:
    member = read_json(directory / "member.json")
    run = Run(directory, _settings(directory / "config.yaml", member.get("overrides")))
    summary = read_json(directory / "summary.json")
    run.loss = number(_get(summary, "eval", "loss"))
    run.virtual_s, run.wall_s = number(summary.get("virtual_s")), number(summary.get("wall_s"))
    run.tokens, run.exit = _whole(_get(summary, "tokens", "applied")), _whole(summary.get("exit"))
    if run.exit is None:  # it wrote no summary, but the sweep knows its exit code
        run.exit = _whole(member.get("exit"))
    peers = summary.get("peers")
    peers = peers if isinstance(peers, list) else []
    sent = [value for peer in peers if (value := number(_get(peer, "bytes_sent"))) is not None]
    busy = [value for peer in peers if (value := number(_get(peer, "utilization"))) is not None]
    run.bytes_sent = int(sum(sent)) if sent else None
    run.utilization = sum(busy) / len(busy) if busy else None
    records = read_json_lines(directory / "metrics.jsonl")
    run.curve = _curve(records, run)
    if run.loss is None and run.curve:
        run.loss = run.curve[-1].loss
    if run.tokens is None:
        run.tokens = int(max((number(record.get("tokens")) or 0 for record in records), default=0)) or None
    return run


def _settings(saved: Path, overrides: Any) -> dict[str, Any]:
    """The settings by key. A run that broke before it wrote them has those of its sweep, or none."""
    with contextlib.suppress(ConfigError):
        if saved.is_file():
            return dict(flatten(json.loads(read_saved(saved).text)))
        if isinstance(overrides, list):
            return dict(flatten(compose([str(one) for one in overrides]).model_dump(mode="json")))
    return {}


def _curve(records: Sequence[Mapping[str, Any]], run: Run) -> list[Point]:
    """Held-out loss by version; a resumed run repeats some versions, and the later lines count."""
    began = next((at for record in records if (at := number(record.get("time"))) is not None), None)
    if run.virtual_s is not None:
        began = 0.0  # the virtual clock begins with the run
    sent: dict[str, float] = {}
    points: dict[int, Point] = {}
    for record in records:
        if (total := number(record.get("bytes_sent"))) is not None:
            sent[str(record.get("peer"))] = total
        loss, version = number(record.get("eval_loss")), number(record.get("version"))
        if loss is None or version is None:
            continue
        at, so_far = number(record.get("time")), sum(sent.values()) if sent else None
        time_s = None if at is None or began is None else at - began
        points[int(version)] = Point(int(version), loss, number(record.get("tokens")), time_s, so_far)
    return [points[version] for version in sorted(points)]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is none."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_bytes())
        if isinstance(content, dict):
            return content
    return {}


def _get(tree: Any, *keys: str) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree


def _whole(value: Any) -> int | None:
    found = number(value)
    return None if found is None else int(found)


def labels(settings: Sequence[Mapping[str, Any]], directories: Sequence[Path]) -> list[str]:
    """A name for each by the settings in which it differs from others, or else by its directory."""
    keys, places = differing(settings), [place.resolve().name for place in directories]
    names = [" ".join(f"{key}={_shown(one[key])}" for key in keys if key in one) for one in settings]
    names = [name if 0 < len(name) <= LONGEST_NAME else place for name, place in zip(names, places, strict=True)]
    count = Counter(names)
    names = [
        f"{name} ({place})" if count[name] > 1 and name != place else name
        for name, place in zip(names, places, strict=True)
    ]
    return names if len(set(names)) == len(names) else list(map(str, directories))


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys in which settings differ; of another model its name only."""
    known = [one for one in settings if one]
    keys = dict.fromkeys(key for one in known for key in one if not key.startswith(NOT_A_DIFFERENCE))
    absent = object()
    found = [key for key in keys if any(one.get(key, absent) != known[0].get(key, absent) for one in known)]
    if "model.name" in found:  # it implies the model's settings
        found = [key for key in found if key == "model.name" or not key.startswith("model.")]
    return found


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")
