"""Draws `loss.png`: the training loss of every peer and the held-out loss of the anchor over the
swarm clock."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from diloco.rundir.files import number, read_json_lines, write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEGEND_PEERS = 8  # with more peers, one line of the legend stands for all
SMOOTHED_SHARE = 40  # curves are smoothed by a running mean over 1/40 of their length


@dataclass
class Curve:
    """Losses in nats per token over tokens of the swarm clock."""

    x: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)


def plot_losses(metrics_path: Path, out_png: Path, title: str) -> None:
    """Draws the losses in `metrics_path` (any number of peers, torn lines, missing fields) and
    replaces `out_png`. Raises `ConfigError` if `out_png` cannot be written.
    """
    training, held_out = read_curves(metrics_path)
    with picture(out_png, "tokens applied by the swarm") as axes:
        axes.set_title(title, parse_math=False, loc="left", fontsize=11, fontweight="bold")
        axes.set_ylabel("loss (nats per token)")
        axes.margins(x=0.01)
        _draw(axes, training, held_out)


@contextlib.contextmanager
def picture(path: Path, x_label: str) -> Iterator[Axes]:
    """Gives axes to draw on, and then replaces the picture `path`. If nothing was drawn, the
    picture says so.

    Works without a display. Raises `ConfigError` if `path` cannot be written.
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
        axes.text(
            0.5,
            0.5,
            "no loss was logged",
            transform=axes.transAxes,
            ha="center",
            va="center",
            color="gray",
        )
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    write_atomic(path, content.getvalue())


def read_curves(metrics_path: Path) -> tuple[dict[str, Curve], Curve]:
    """Training loss per peer, and held-out loss.

    A resumed peer repeats the steps after its checkpoint: the later lines count. It is the clock
    that tells them apart, for a peer that rejoins without a checkpoint counts its steps from zero
    again.
    """
    training: dict[str, list[tuple[float, float, float]]] = {}  # clock, step, loss
    held_out: dict[int, tuple[float, float]] = {}
    for record in read_json_lines(metrics_path):
        step, tokens = number(record.get("inner_step")), number(record.get("tokens")) or 0.0
        loss, eval_loss = number(record.get("loss")), number(record.get("eval_loss"))
        if loss is not None and step is not None:
            points = training.setdefault(str(record.get("peer", "?")), [])
            while points and points[-1][:2] >= (tokens, step):
                points.pop()
            points.append((tokens, step, loss))
        if eval_loss is not None:
            version = number(record.get("version"))
            held_out[len(held_out) if version is None else int(version)] = tokens, eval_loss
    curves = {
        peer: Curve(_spread([at for at, _, _ in points]), [loss for _, _, loss in points])
        for peer, points in sorted(training.items())
    }
    evaluated = [held_out[version] for version in sorted(held_out)]
    return curves, Curve([at for at, _ in evaluated], [loss for _, loss in evaluated])


def _spread(x: list[float]) -> list[float]:
    """Spreads equal values up to the next value, the last as widely as those before them: the clock
    stands still between outer steps. [0, 0, 10, 10] -> [2.5, 7.5, 12.5, 17.5]
    """
    values, counts = np.unique(x, return_counts=True)
    widths = np.diff(values)
    widths = np.append(widths, widths[-1] if len(widths) else 0.0)
    within = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    spread: list[float] = (np.repeat(values, counts) + np.repeat(widths, counts) * within).tolist()
    return spread


def _smooth(values: Sequence[float]) -> list[float]:
    """Centred running mean. Near the start, where losses fall fast, its window shrinks on both
    sides; near the end it is cut off on one side.
    """
    index, reach = np.arange(len(values)), len(values) // (2 * SMOOTHED_SHARE)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    start, stop = (
        index - np.minimum(reach, index),
        np.minimum(index + np.minimum(reach, index) + 1, len(values)),
    )
    smooth: list[float] = ((sums[stop] - sums[start]) / (stop - start)).tolist()
    return smooth


def _draw(axes: Axes, training: dict[str, Curve], held_out: Curve) -> None:
    from matplotlib import colormaps

    few = len(training) <= LEGEND_PEERS
    palette = colormaps["tab10" if few else "viridis"]
    for index, (peer, curve) in enumerate(training.items()):
        colour = palette(index) if few else palette(index / (len(training) - 1))
        if few and len(curve.x) > 2 * SMOOTHED_SHARE:
            axes.plot(curve.x, curve.loss, color=colour, linewidth=0.5, alpha=0.15)
        label = (
            f"training, {peer}"
            if few
            else f"training, {len(training)} peers"
            if index == 0
            else None
        )
        width, alpha = (1.0, 0.85) if few else (0.6, 0.5)
        axes.plot(
            curve.x, _smooth(curve.loss), color=colour, linewidth=width, alpha=alpha, label=label
        )
    if held_out.x:
        label, every = (
            f"held-out, anchor: {held_out.loss[-1]:.3f} at the end",
            max(1, len(held_out.x) // 25),
        )
        axes.plot(
            held_out.x,
            held_out.loss,
            "o-",
            color="black",
            linewidth=2.2,
            markersize=4.5,
            markevery=every,
            label=label,
        )
    if axes.lines:
        axes.legend(loc="upper right", frameon=False, fontsize=9)
