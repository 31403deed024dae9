"""How far one version may move a fragment: a bound that every peer checks alone, before it moves its anchor.

    movement  <=  a mean + b momentum + c window + lost before + lost after        L2 norms; a, b, c: `optimizer.Linear`

No merge rule makes the mean longer than the longest contribution, and the contributors have signed how long theirs are.
Momentum and window are made of means (`Linear.follow_`), so their bounds follow from those. What an encoding has lost
is at most half a step of it, element by element (`Codec.cell`), or all of it, and stays in master - anchor.

A syncer may sign any length for what it contributed itself, so a contribution longer than `FACTOR` times the median of
the recent ones is refused by honest syncers (`Bound.too_long`), and counts as no longer than that here. A movement
within the bound may still be wrong: `audit` finds that.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from diloco.config import OuterConfig
from diloco.outer.codecs import codec
from diloco.outer.fragments import chunks
from diloco.outer.optimizer import OPTIMIZERS, Linear, OuterStep
from diloco.outer.robust import MIN_JUDGED, norm_of

__all__ = ["FACTOR", "Bound", "Moved", "measure"]

FACTOR = 16.0
"""No honest pseudo-gradient has this many times the median length of the recent ones: while the learning rate warms up,
lengths rise up to threefold from one round to the next."""
DOUBT = 2.0  # Peers that joined at different versions remember different lengths.
MEMORY = 8  # lengths that are remembered; few, because they follow the learning rate
SLACK = 1.001  # for sums that were rounded on the way


class Moved(NamedTuple):
    """L2 norms of what an update carries, and of the most that its encoding can have lost."""

    norm: float
    lost: float


def measure(settings: OuterConfig, update: Tensor, anchor: Tensor) -> Moved:
    """The norms of a whole update (uint8) of an anchor (numel,) fp32; `PayloadError` for an invalid one."""
    down, moved, lost = codec(settings.codec_down), 0.0, 0.0
    offsets = down.offsets(len(anchor))
    for chunk, (start, stop) in enumerate(chunks(len(anchor))):
        payload = update[offsets[chunk] : offsets[chunk + 1]]
        values = down.values(payload, stop - start)
        norm = norm_of(values)
        lost += down.most_lost(payload, stop - start, norm) ** 2
        moved += (norm_of(values - anchor[start:stop]) if down.carries_values else norm) ** 2
    return Moved(math.sqrt(moved), math.sqrt(lost))


class Bound:
    """How far the next version of a fragment may move it; follows the versions one after another.

    A peer that begins at a version above 0 does not know what momentum and window are made of. They count as made of
    means of the longest length that `FACTOR` allows, until what was unknown has faded.
    """

    def __init__(self, settings: OuterConfig, version: int = 0) -> None:
        self._settings = settings
        self._optimizer = OPTIMIZERS[settings.optimizer](settings)
        self._lengths: deque[float] = deque(maxlen=MEMORY)
        self._lost = 0.0 if version == 0 else math.inf
        self._momentum, self._window = (0.0, 0.0) if version == 0 else (math.inf, math.inf)

    def wrong(self, step: OuterStep, lengths: Sequence[float], moved: Moved) -> str | None:
        """Why a version cannot be made of contributions of these lengths; None if it can.

        Args:
            step: the version's place in its window. lengths: L2 norms of the contributions, as they were signed.
            moved: of its update (`measure`).
        """
        most = self._given(self._linear(step), self._mean(lengths), step)
        most += min(moved.lost, most)  # a value is rounded up to no more than twice of what it was
        if moved.norm <= most * SLACK:
            return None
        return f"it moves by {moved.norm:.3g}, and what was contributed allows {most:.3g}"

    def _given(self, linear: Linear, mean: float, step: OuterStep) -> float:
        """The longest movement before it is encoded, or the longest growth of the window where nothing moves."""
        momentum, window = self._known(mean, step)
        if linear.still:
            return abs(linear.window[0]) * mean + abs(linear.window[2] - 1.0) * window
        of_mean, of_momentum, of_window = map(abs, linear.moved)
        return of_mean * mean + of_momentum * momentum + of_window * window + self._lost_before(mean)

    def follow(self, step: OuterStep, lengths: Sequence[float], moved: Moved, new_syncer: bool = False) -> None:
        """This version is adopted; a new syncer may have gone on with an older momentum, or with none."""
        linear, mean = self._linear(step), self._mean(lengths)
        momentum, window = self._known(mean, step)
        before, lost = self._lost_before(mean), min(moved.lost, self._given(linear, mean, step))
        if linear.still:
            self._window = abs(linear.window[2]) * window + abs(linear.window[0]) * mean + lost
            self._lost = before + abs(linear.full) * lost
        else:
            published = mean + (before + lost) / abs(linear.moved[0])
            rows = (linear.momentum, linear.window)
            self._momentum, self._window = (
                abs(row[0]) * published + abs(row[1]) * momentum + abs(row[2]) * window for row in rows
            )
            self._lost = lost * (1.0 + abs(linear.full))
        if new_syncer:
            self._momentum, self._window = max(self._momentum, momentum), max(self._window, window)
        limit = self._limit()
        self._lengths.extend(min(length, limit) for length in lengths)

    def _linear(self, step: OuterStep) -> Linear:
        transition = self._optimizer.transition(step)
        assert isinstance(transition, Linear)
        return transition

    def too_long(self, length: float) -> bool:
        """Whether a contribution of this length has to be refused."""
        return length > self._limit()

    def _limit(self) -> float:
        few = len(self._lengths) < MIN_JUDGED
        return math.inf if few else FACTOR * statistics.median_low(self._lengths)

    def _mean(self, lengths: Sequence[float]) -> float:
        """The longest that the mean of contributions of these lengths can be."""
        longest = min(max(lengths, default=0.0), DOUBT * self._limit())
        # The middle value of each element may come from another contribution.
        return longest * (math.sqrt(len(lengths)) if self._settings.judging == "trimmed_mean" else 1.0)

    def _known(self, mean: float, step: OuterStep) -> tuple[float, float]:
        """Bounds of momentum and window, also where their beginnings are not known."""
        beta = self._settings.momentum
        longest = FACTOR * mean
        momentum = longest / (1.0 - beta) if math.isinf(self._momentum) else self._momentum
        window = longest * step.delay if math.isinf(self._window) else self._window
        return momentum, window if step.pushes else 0.0

    def _lost_before(self, mean: float) -> float:
        return FACTOR * mean if math.isinf(self._lost) else self._lost
