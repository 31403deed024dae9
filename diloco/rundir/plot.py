"""The losses of a run, from `metrics.jsonl` to `loss.png`."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from diloco.rundir.files import number, read_json_lines, write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEGEND_PEERS = 8  # with more peers, one line of the legend stands for all
SMOOTHED_SHARE = 40  # curves are smoothed by a running mean over 1/40 of their length
Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Point:
    """The held-out loss at a version; `time_s` is seconds since the start, virtual if simulated."""

    version: int
    loss: float
    tokens: float | None
    time_s: float | None
    bytes_sent: float | None  # by all peers


@dataclass
class Curve:
    """A peer's training loss, in nats per token, over tokens of the swarm clock."""

    x: list[float]
    loss: list[float]


def plot_losses(metrics_path: Path, out_png: Path, title: str) -> None:
    """Draw the training loss of each peer and the held-out loss of the anchor.

    Raises `ConfigError` if `out_png` cannot be written.
    """
    records = read_json_lines(metrics_path)
    with picture(out_png, "tokens applied by the swarm") as axes:
        axes.set_title(title, parse_math=False, loc="left", fontsize=11, fontweight="bold")
        axes.set_ylabel("loss (nats per token)")
        axes.margins(x=0.01)
        _draw(axes, training_curves(records), held_out_curve(records))


@contextlib.contextmanager
def picture(path: Path, x_label: str) -> Iterator[Axes]:
    """Yield axes to draw on, then replace the PNG `path`, which says so if nothing was drawn.

    Needs no display. Raises `ConfigError` if `path` cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(8, 5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    yield axes
    if not axes.lines:
        center: dict[str, Any] = {"transform": axes.transAxes, "ha": "center", "va": "center"}
        axes.text(0.5, 0.5, "no loss was logged", color="gray", **center)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    write_atomic(path, content.getvalue())


def training_curves(records: Records) -> dict[str, Curve]:
    """Return the training loss by peer; of steps that a resumed peer repeats, later lines count.

    Lines are sorted by the clock first: a peer that rejoins without a checkpoint counts its steps
    from zero again.
    """
    steps: dict[str, list[tuple[float, float, float]]] = {}  # clock, step, loss
    for record in records:
        loss, step = number(record.get("loss")), number(record.get("inner_step"))
        if loss is not None and step is not None:
            at = (number(record.get("tokens")) or 0.0, step)
            points = steps.setdefault(str(record.get("peer", "?")), [])
            while points and points[-1][:2] >= at:
                points.pop()
            points.append((*at, loss))
    return {
        peer: Curve(_spread([at for at, _, _ in points]), [loss for _, _, loss in points])
        for peer, points in sorted(steps.items())
    }


def held_out_curve(records: Records, virtual: bool = False) -> list[Point]:
    """Return the held-out loss by version; of versions repeated by a resume, later lines count.

    A virtual clock begins with the run; else the first line's time is the start.
    """
    times = [at for record in records if (at := number(record.get("time"))) is not None]
    began = 0.0 if virtual or not times else times[0]
    sent: dict[str, float] = {}  # by peer
    points: dict[int, Point] = {}
    for record in records:
        if (total := number(record.get("bytes_sent"))) is not None:
            sent[str(record.get("peer"))] = total
        names = ("version", "eval_loss", "tokens", "time")
        version, loss, tokens, at = (number(record.get(name)) for name in names)
        if version is not None and loss is not None:
            time_s, all_sent = None if at is None else at - began, sum(sent.values())
            point = Point(int(version), loss, tokens, time_s, all_sent if sent else None)
            points[point.version] = point
    return [points[version] for version in sorted(points)]


def _spread(x: list[float]) -> list[float]:
    """Spread equal clock values evenly over their steps: [0, 0, 10, 10] -> [0, 5, 10, 15]."""
    values, moves = np.unique(x, return_index=True)
    index = np.arange(len(x))
    spread = np.interp(index, moves, values) if len(x) else np.array([])
    if len(values) > 1:
        pace = (values[-1] - values[-2]) / (moves[-1] - moves[-2])
        spread += pace * np.maximum(index - moves[-1], 0)
    return [float(at) for at in spread]


def _smooth(values: Sequence[float]) -> np.ndarray:
    """Average over a window. Near the start, where losses fall fast, it shrinks on both sides."""
    index = np.arange(len(values))
    reach = np.minimum(len(values) // (2 * SMOOTHED_SHARE), index)
    start, stop = index - reach, np.minimum(index + reach + 1, len(values))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    smooth: np.ndarray = (sums[stop] - sums[start]) / (stop - start)
    return smooth


def _draw(axes: Axes, training: Mapping[str, Curve], held_out: Sequence[Point]) -> None:
    from matplotlib import colormaps

    few = len(training) <= LEGEND_PEERS
    palette = colormaps["tab10" if few else "viridis"]
    width, alpha = (1.0, 0.85) if few else (0.6, 0.5)
    for index, (peer, curve) in enumerate(training.items()):
        colour = palette(index if few else index / (len(training) - 1))
        who = peer if few else f"{len(training)} peers"
        label = f"training, {who}" if few or index == 0 else None
        if few and len(curve.x) > 2 * SMOOTHED_SHARE:
            axes.plot(curve.x, curve.loss, color=colour, linewidth=0.5, alpha=0.15)
        style: Any = {"color": colour, "linewidth": width, "alpha": alpha}
        axes.plot(curve.x, _smooth(curve.loss), label=label, **style)
    if held_out:
        x, losses = [point.tokens or 0.0 for point in held_out], [point.loss for point in held_out]
        label, every = f"held-out, anchor: {losses[-1]:.3f} at the end", max(1, len(x) // 25)
        size: Any = {"linewidth": 2.2, "markersize": 4.5, "markevery": every}
        axes.plot(x, losses, "o-", color="black", label=label, **size)
    if axes.lines:
        axes.legend(loc="upper right", frameon=False, fontsize=9)
