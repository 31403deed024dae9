"""What an honest syncer can have made of a part of a fragment: the ranges that `audit` compares updates with.

Each vector of a syncer is followed as a value and a tolerance: the momentum and the window by the published updates,
as a backup follows them (`state.adopt_`), the residual master - anchor by what the encoding of an update can have lost
(`Codec.cell`), and the mean of the contributions by their payloads. Values are fp64. Tolerances take in each rounding
of the syncer's fp32, whether or not its hardware fuses a product with a sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from diloco.config import OuterConfig
from diloco.outer.codecs import codec
from diloco.outer.fragments import Fragment
from diloco.outer.optimizer import OPTIMIZERS, Linear, OuterOptimizer, OuterStep
from diloco.outer.payloads import magnitude_of
from diloco.outer.rda import CANCELLED, SMALLEST_NORM, directional_pieces

__all__ = ["Counted", "Follower", "Part", "Reach", "Seen", "linear_of"]

ROUNDING = 2.0**-23  # twice what one rounding to fp32 may change, as a part of the result
UNKNOWN = 1024.0
"""A momentum from before the log has at most this many times the largest pseudo-gradient that the log's updates show.
It acts on the updates of the log, so a larger one would show there."""


class Part(NamedTuple):
    """A range of elements of a fragment that is audited as a whole: a leaf of its Merkle trees, or a chunk."""

    fragment: Fragment
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Counted:
    """One contribution to a part, and what the version's head says that it counted (see `Held.fold`, `Judgement`).

    Attributes:
        payload: (bytes,) uint8 of the part, which its contributor signed.
        weight: what it counts in the average. discount: of what is late. scale: of what is too long.
    """

    payload: Tensor
    weight: float
    discount: float = 1.0
    scale: float = 1.0


@dataclass(frozen=True)
class Seen:
    """What is known of one version of a part.

    Attributes:
        step: as the version's head says.
        update: (bytes,) uint8 of the part, which its syncer signed.
        counted: all contributions to it; None where they were not asked for.
        new_syncer: whether the version is the first one of its term.
    """

    step: OuterStep
    update: Tensor
    counted: Sequence[Counted] | None = None
    new_syncer: bool = False


class _Range(NamedTuple):
    """What a vector may be, element by element: (n,) fp64."""

    low: Tensor
    high: Tensor

    def plus(self, other: Tensor | _Range, times: float = 1.0) -> _Range:
        """The sum with `times` what another vector is, or may be."""
        if not times:
            return self
        low, high = (other, other) if isinstance(other, Tensor) else other if times > 0 else (other.high, other.low)
        return _Range(torch.add(self.low, low, alpha=times), torch.add(self.high, high, alpha=times))

    def wider(self, by: Tensor) -> _Range:
        """The same with a tolerance."""
        return _Range(self.low - by, self.high + by)

    def both(self, other: _Range) -> _Range:
        """What is in both; low is above high where nothing is."""
        return _Range(torch.maximum(self.low, other.low), torch.minimum(self.high, other.high))


def linear_of(optimizer: OuterOptimizer, step: OuterStep) -> Linear:
    """What a step does."""
    transition = optimizer.transition(step)
    assert isinstance(transition, Linear), f"outer.optimizer={optimizer.name} cannot be audited"
    return transition


def _followed(linear: Linear) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Parts of (movement of the anchor, momentum, window) of which the new momentum is the sum, and the new window; see
    `Linear.follow_`.
    """
    mean, of_momentum, of_window = linear.moved
    momentum, window = linear.momentum[0] / mean, linear.window[0] / mean
    return (
        (momentum, linear.momentum[1] - momentum * of_momentum, linear.momentum[2] - momentum * of_window),
        (window, -window * of_momentum, linear.window[2] - window * of_window),
    )


class Reach(NamedTuple):
    """How large momentum and window may be at most, or an error in them."""

    momentum: float
    window: float

    def after(self, linear: Linear, step: OuterStep, moved: float = 0.0) -> Reach:
        """The same after a step that moves the anchor by so much, or an error of that size."""
        momentum, window = self.momentum, self.window if step.pushes else 0.0
        of_momentum, of_window = (tuple(map(abs, parts)) for parts in _followed(linear))
        return Reach(
            of_momentum[0] * moved + of_momentum[1] * momentum + of_momentum[2] * window,
            of_window[0] * moved + of_window[1] * momentum + of_window[2] * window,
        )

    def plus(self, other: Reach, times: float) -> Reach:
        """The sum with `times` another."""
        return Reach(self.momentum + times * other.momentum, self.window + times * other.window)


class Follower:
    """What an honest syncer may have of a part, version by version. Vectors are (n,) fp64.

    Args:
        part, settings: where, and of which run.
        sizes: (n,) fp64, what no magnitude of the anchor exceeds in any version that is judged.
        first: the step of the first version that `take` is given.
    """

    def __init__(self, part: Part, settings: OuterConfig, sizes: Tensor, first: OuterStep) -> None:
        self._part, self._settings = part, settings
        self._up, self._down = codec(settings.codec_up), codec(settings.codec_down)
        self._optimizer = OPTIMIZERS[settings.optimizer](settings)
        self._sizes = sizes
        zeros, begins = torch.zeros(part.numel, dtype=torch.float64), first.version == 0
        self._momentum, self._window = zeros, zeros
        self._anchor: Tensor | None = None  # known from the first update that carries values
        self._anything = _Range(zeros - math.inf, zeros + math.inf)
        self._residual = _Range(zeros, zeros) if begins else self._anything
        self._top = self._mean = 0.0  # largest movement of an element, and largest pseudo-gradient that it shows
        self._reach = Reach(0.0, 0.0)  # of what is known of momentum and window
        self._errors = Reach(0.0, 0.0)  # in them
        self._forgotten = Reach(0.0, 0.0) if begins else Reach(1.0, float(first.delay))  # over UNKNOWN * _mean
        self._noises = Reach(0.0, 0.0)  # over how far rounding may move the anchor

    def take(self, seen: Seen, judge: bool = True) -> str | None:
        """Follow one version; why no honest syncer can have published it, or None.

        Without `judge` the residual stays unknown. Raises `PayloadError` for a payload that no honest peer sends.
        """
        linear, step = linear_of(self._optimizer, seen.step), seen.step
        if seen.new_syncer:
            self._take_over()
        if not step.pushes:
            self._window = torch.zeros_like(self._window)
        moved = self._down.values(seen.update, self._part.numel).double()
        base = self._base(moved) if self._down.carries_values else None
        if self._down.carries_values and base is None:
            self._begin(seen, moved)
            return None
        why = None
        if base is not None:
            moved = moved - base
        size = magnitude_of(moved)
        self._top, self._mean = max(self._top, size), max(self._mean, size / abs(linear.moved[0]))
        if judge:
            cell = _Range(*self._down.cell(seen.update, self._part.numel))
            mean = None if seen.counted is None else self._merged(seen.counted)
            why = self._judge_movement(linear, moved, cell if base is None else cell.plus(base, -1.0), mean)
        else:
            self._residual = self._anything
        self._follow(linear, step, moved, size)
        return why

    def _base(self, values: Tensor) -> Tensor | None:
        """What an update that carries values starts from; None if that is not known."""
        base, self._anchor = self._anchor, values
        return base

    def _begin(self, seen: Seen, values: Tensor) -> None:
        """These values are known, and not how far they are from the ones before."""
        self._residual = _Range(*self._down.cell(seen.update, self._part.numel)).plus(values, -1.0)
        self._forgotten = Reach(1.0, float(seen.step.delay))

    def _take_over(self) -> None:
        """The master goes on, or starts at the anchor; the momentum goes on, or is an older one, or starts at zero."""
        low, high = self._residual
        self._residual = _Range(low.clamp(max=0.0), high.clamp(min=0.0))
        self._errors = self._errors.plus(self._reach, 2.0)
        self._forgotten = self._forgotten.plus(self._forgotten, 2.0)

    def _follow(self, linear: Linear, step: OuterStep, moved: Tensor, size: float) -> None:
        momentum, window = self._momentum, self._window
        of_momentum, of_window = _followed(linear)
        self._momentum, self._window = (
            _combined(parts, (moved, momentum, window)) for parts in (of_momentum, of_window)
        )
        self._reach = self._reach.after(linear, step, size)
        self._errors = self._errors.after(linear, step).plus(self._reach, 4 * ROUNDING)
        self._forgotten = self._forgotten.after(linear, step)
        self._noises = self._noises.after(linear, step, 1.0)

    def _unsure(self, linear: Linear, noise: Tensor) -> Tensor:
        """How far the part of momentum and window in a movement may be from the one that is computed."""
        known = self._errors.plus(self._forgotten, UNKNOWN * self._mean)
        of_momentum, of_window = abs(linear.moved[1]), abs(linear.moved[2])
        fixed = of_momentum * known.momentum + of_window * known.window
        return fixed + noise * (1 + of_momentum * self._noises.momentum + of_window * self._noises.window)

    def _judge_movement(self, linear: Linear, moved: Tensor, cell: _Range, mean: _Range | None) -> str | None:
        """A version whose update moves the anchor."""
        of_mean, of_momentum, of_window = linear.moved
        noise = (self._sizes + self._top) * (4 * ROUNDING)
        before, why = self._residual, None
        master = cell.wider(noise)
        if mean is not None:
            given = before.plus(mean, of_mean).plus(self._momentum, of_momentum).plus(self._window, of_window)
            given = given.wider(self._unsure(linear, noise))
            why = self._deviation(given, cell, moved)
            master = given.both(master)
        lost = master.plus(moved, -1.0).wider(noise)
        self._residual = lost
        return why

    def _deviation(self, given: _Range, cell: _Range, published: Tensor) -> str | None:
        beyond = torch.maximum(given.low - cell.high, cell.low - given.high)
        worst = int(beyond.argmax())
        if float(beyond[worst]) <= 0:
            return None
        low, high = float(given.low[worst]), float(given.high[worst])
        return (
            f"element {self._part.start + worst} of fragment {self._part.fragment.index} moved by "
            f"{float(published[worst]):.6g}, and its contributions give {low:.6g} to {high:.6g}"
        )

    # -- the mean of the contributions --------------------------------------------------------------------------------

    def _merged(self, counted: Sequence[Counted]) -> _Range:
        """What an honest syncer makes of the contributions, in any order and rounded after each operation."""
        found = [self._up.values(one.payload, self._part.numel).double() for one in counted]
        total = sum(one.weight for one in counted)
        factors = [one.weight * one.discount / total for one in counted]
        found = [values * one.scale if one.scale != 1.0 else values for one, values in zip(counted, found, strict=True)]
        mean, size = _weighted(found, factors)
        if self._settings.merge == "rda":
            for start, stop in directional_pieces(*self._part):
                pieces = [values[start:stop] for values in found]
                mean[start:stop], size[start:stop] = _directional(pieces, factors)
        off = size * (ROUNDING * (len(counted) + 4)) + 2.0**-140
        return _Range(mean - off, mean + off)


def _combined(parts: Sequence[float], vectors: Sequence[Tensor]) -> Tensor:
    total = parts[0] * vectors[0]
    for part, vector in zip(parts[1:], vectors[1:], strict=True):
        if part:
            total.add_(vector, alpha=part)
    return total


def _weighted(values: Sequence[Tensor], factors: Sequence[float]) -> tuple[Tensor, Tensor]:
    """The weighted mean, and the size of its terms."""
    mean, size = torch.zeros_like(values[0]), torch.zeros_like(values[0])
    for one, factor in zip(values, factors, strict=True):
        mean.add_(one, alpha=factor)
        size.add_(one.abs(), alpha=abs(factor))
    return mean, size


def _directional(values: Sequence[Tensor], factors: Sequence[float]) -> tuple[Tensor, Tensor]:
    """The radial-directional average of one piece (see `rda`), and the size of its terms."""
    norms = [float(torch.linalg.vector_norm(one)) for one in values]
    norms = [norm if norm >= SMALLEST_NORM else 0.0 for norm in norms]
    units = [one / norm if norm else torch.zeros_like(one) for one, norm in zip(values, norms, strict=True)]
    direction, size = _weighted(units, factors)
    length = sum(factor * norm for factor, norm in zip(factors, norms, strict=True))
    norm = float(torch.linalg.vector_norm(direction))
    if norm < 2 * CANCELLED:  # whether it counts as cancelled depends on how sums were rounded
        return torch.zeros_like(direction), torch.full_like(direction, math.inf)
    return direction * (length / norm), (size + direction.abs() * (sum(factors) / norm)) * (length / norm)
