"""Slope of a loss: a line through its last quarter, by least squares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from diloco.messages.snapshot import Snapshot

LEAST_POINTS = 8  # with fewer the standard error itself is not known
ERRORS = 2.0  # a slope within so many standard errors of 0 is flat
UNITS = (("a day", 86_400.0), ("an hour", 3600.0), ("a minute", 60.0))


@dataclass(frozen=True)
class Slope:
    """Change of a loss per second, and its standard error; `span_s` is what the history covers."""

    per_s: float
    error_per_s: float
    span_s: float

    def __str__(self) -> str:
        units = [unit for unit in UNITS if unit[1] <= self.span_s]
        name, unit_s = units[0] if units else UNITS[-1]
        slope, error = self.per_s * unit_s, self.error_per_s * unit_s
        digits = 3 if error <= 0 else min(max(0, -math.floor(math.log10(error))), 6)
        size, spread = (f"{value:.{digits}f}" for value in (abs(slope), error))
        size, spread = (text.removeprefix("0") or "0" for text in (size, spread))
        if abs(slope) <= ERRORS * error:
            return f"is flat ({'-' * (slope < 0)}{size} ± {spread} {name})"
        return f"{'falls' if slope < 0 else 'rises'} {size} ± {spread} {name}"


def slope_of(at: Sequence[float], losses: Sequence[float]) -> Slope | None:
    """Fit a line to the last quarter of the seconds `at`, which ascend; None with too few points.

    Neighbours that err alike (peers report at different times, so a mean changes piece by piece)
    make the error larger, by their correlation r as in an AR(1) process: (1 + r) / (1 - r).
    """
    if not at:
        return None
    start = at[-1] - (at[-1] - at[0]) / 4
    points = [(x, y) for x, y in zip(at, losses, strict=True) if x >= start]
    count = len(points)
    if count < LEAST_POINTS:
        return None
    mean_x, mean_y = (sum(column) / count for column in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if not spread:
        return None
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rests = [y - mean_y - slope * (x - mean_x) for x, y in points]
    squares = sum(rest**2 for rest in rests)
    alike = sum(a * b for a, b in pairwise(rests)) / squares if squares else 0.0
    alike = min(max(0.0, alike), 0.99)
    variance = squares / (count - 2) / spread * (1 + alike) / (1 - alike)
    return Slope(slope, math.sqrt(variance), at[-1] - at[0])


def trend(snapshot: Snapshot) -> str:
    """Say whether the held-out loss falls; of too few measurements, the training loss."""
    for name, curve in (("held-out", snapshot.held_out), ("training", snapshot.loss)):
        slope = slope_of([point.at for point in curve], [point.loss for point in curve])
        if slope is not None:
            return f"{name} loss {slope}"
    return "whether it falls is not known yet"
