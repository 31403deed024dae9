"""How far one version may move a fragment: a bound that every peer checks alone, before it moves its anchor.

    movement  <=  a mean + b momentum + c window + lost before + lost after        L2 norms; a, b, c: `optimizer.Linear`

No merge rule makes the mean longer than the longest contribution, and the contributors have signed how long theirs are.
Momentum and window are made of means (`Linear.follow_`), so their bounds follow from those. What an encoding has lost
is at most half a step of it, element by element, or all of it, and stays in master - anchor (`Codec.most_lost`).

A syncer may sign any length for what it contributed itself. Therefore a contribution counts as no longer than `DOUBT`
times the *limit*, `FACTOR` medians of the newest lengths of the peers, with those of this version. Honest syncers scale
what is longer down to the limit (`Bound.scales`), and nobody is refused for it, because where training has just begun
all lengths may leap. With `outer.robust=none` there is no limit, and where fewer than `KNOWN` peers contribute, none.

A movement within the bound may still be wrong. An outer optimizer that is not `linear` has no bound; its contributions
have the limit all the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from diloco.config import OuterConfig
from diloco.outer.codecs import codec
from diloco.outer.fragments import chunks
from diloco.outer.optimizer import OPTIMIZERS, Linear, OuterStep
from diloco.outer.payloads import Codec, buffer
from diloco.outer.robust import norm_of

__all__ = ["DOUBT", "FACTOR", "KNOWN", "Bound", "Moved", "distance", "measure", "measured"]

FACTOR = 16.0
"""No honest pseudo-gradient has this many times the median length of the others': while the learning rate warms up,
lengths rise up to threefold from one round to the next."""
DOUBT = 2.0  # Peers that joined at different versions remember different lengths, and momenta.
KNOWN = 3  # peers with a majority
MEMORY = 16  # contributions that are remembered; few, because lengths follow the learning rate
SLACK = 1.01  # for sums that were rounded on the way, and norms that are signed within `NORM_TOLERANCE`


class Moved(NamedTuple):
    """L2 norms of what an update carries, and of the most that its encoding can have lost."""

    norm: float
    lost: float

    def __add__(self, other: object) -> Moved:
        """Of two chunks together."""
        assert isinstance(other, Moved)
        return Moved(math.hypot(self.norm, other.norm), math.hypot(self.lost, other.lost))


def measured(down: Codec, payload: Tensor, before: Tensor | None, numel: int) -> Moved:
    """The norms of a chunk of an update (uint8), from the values `before` it (numel,) fp32, or from zeros.

    Raises `PayloadError` for an invalid one.
    """
    values = down.values(payload, numel)
    norm = norm_of(values)
    lost = down.most_lost(payload, numel, norm)
    if down.carries_values and before is not None:
        norm = norm_of(torch.sub(values, before, out=buffer("moved", torch.float32, numel)))
    return Moved(norm, lost)


def measure(settings: OuterConfig, update: Tensor, anchor: Tensor) -> Moved:
    """The norms of a whole update (uint8) of an anchor (numel,) fp32.

    Raises `PayloadError` for an invalid one.
    """
    down, moved = codec(settings.codec_down), Moved(0.0, 0.0)
    offsets = down.offsets(len(anchor))
    for chunk, (start, stop) in enumerate(chunks(len(anchor))):
        payload = update[offsets[chunk] : offsets[chunk + 1]]
        moved += measured(down, payload, anchor[start:stop], stop - start)
    return moved


def distance(settings: OuterConfig, before: Tensor, after: Tensor) -> Moved:
    """The same for the anchor after a version, whose update is not known; both (numel,) fp32."""
    moved, part = 0.0, 2.0**-11 if codec(settings.codec_down).carries_values else math.inf
    for start, stop in chunks(len(before)):
        apart = torch.sub(after[start:stop], before[start:stop], out=buffer("moved", torch.float32, stop - start))
        moved = math.hypot(moved, norm_of(apart))
    return Moved(moved, part * norm_of(after) if moved else 0.0)


class Bound:
    """How far the next version of a fragment may move it; follows the versions one after another.

    A peer that begins at a version above 0 does not know what momentum and window are made of. It believes the first
    version that it sees, and how far that moves the anchor tells how long the momentum is.
    """

    def __init__(self, settings: OuterConfig) -> None:
        self._settings = settings
        self._values = codec(settings.codec_down).carries_values
        self._optimizer = OPTIMIZERS[settings.optimizer](settings)
        self._folds = settings.barrier and not settings.judged_together
        self.restart(0)

    def restart(self, version: int, lengths: Mapping[str, float] | None = None, term: int | None = None) -> None:
        """Begin anew at that version, which was made under that term of contributions of these lengths."""
        self._recent = [*(lengths or {}).items()]
        self._term = term
        unknown = math.inf if version else 0.0
        self._momentum = self._window = self._lost = unknown
        self._longest = 0.0  # that any momentum was

    def wrong(self, step: OuterStep, lengths: Mapping[str, float], moved: Moved, term: int | None = None) -> str | None:
        """Why a version cannot be made of contributions of these lengths; None if it can.

        Args:
            step: the version's place in its window. lengths: L2 norms of the contributions by peer, as they were
                signed. moved: of its update (`measure`). term: under which it was made; a new syncer may have gone on
                with an older momentum, or with none.
        """
        if not self._optimizer.linear:
            return None
        most = self._given(self._linear(step), lengths, moved, self._known(step, term))
        most += moved.lost if self._values else min(moved.lost, most)  # a value is rounded up to twice its size at most
        if moved.norm <= most * SLACK:
            return None
        return f"it moves by {moved.norm:.3g}, and what was contributed allows {most:.3g}"

    def follow(self, step: OuterStep, lengths: Mapping[str, float], moved: Moved, term: int | None = None) -> None:
        """This version is adopted."""
        if self._optimizer.linear:
            self._follow(self._linear(step), step, lengths, moved, term)
        self._term = term
        self._recent = [*self._recent, *lengths.items()][-max(MEMORY, len(lengths)) :]

    def _follow(
        self, linear: Linear, step: OuterStep, lengths: Mapping[str, float], moved: Moved, term: int | None
    ) -> None:
        mean = self._mean(lengths)
        momentum, window = self._known(step, term)
        if math.isinf(momentum):
            momentum = self._seen(linear, mean, moved, window)
        before = self._lost_before(moved)
        lost = moved.lost if self._values else min(moved.lost, self._given(linear, lengths, moved, (momentum, window)))
        published = mean + (before + lost) / abs(linear.moved[0])
        self._momentum = _total(linear.momentum, published, momentum, window)
        self._window = _total(linear.window, published, momentum, window)
        self._lost = lost
        if not math.isinf(self._momentum):
            self._longest = max(self._longest, self._momentum)

    def scales(self, lengths: Mapping[str, float]) -> dict[str, float]:
        """What a syncer multiplies contributions of these lengths with: 1, or less for one above the limit."""
        limit = self.limit(lengths)
        return {peer: limit / length if length > limit else 1.0 for peer, length in lengths.items()}

    def limit(self, lengths: Mapping[str, float] | None = None) -> float:
        """How long a contribution beside those of these lengths may be.

        Lengths of zero say nothing: the learning rate may begin there.
        """
        newest = {**dict(self._recent), **(lengths or {})}
        known = [length for length in newest.values() if length > 0.0]
        if len(known) < KNOWN or self._settings.judging == "none":
            return math.inf
        return FACTOR * statistics.median_high(known)

    def _linear(self, step: OuterStep) -> Linear:
        transition = self._optimizer.transition(step)
        assert isinstance(transition, Linear)
        return transition

    def _given(self, linear: Linear, lengths: Mapping[str, float], moved: Moved, known: tuple[float, float]) -> float:
        """The longest movement before it is encoded, or the longest growth of the window where nothing moves."""
        mean, (momentum, window) = self._mean(lengths), known
        return _total(linear.moved, mean, momentum, window) + self._lost_before(moved)

    def _mean(self, lengths: Mapping[str, float]) -> float:
        """The longest that the mean of contributions of these lengths can be."""
        longest, limit = max(lengths.values(), default=0.0), self.limit(lengths)
        if self._folds:  # a contribution that broke off midway counts where it arrived
            longest = max(longest, FACTOR * longest if math.isinf(limit) else limit)
        return min(longest, DOUBT * limit)

    def _known(self, step: OuterStep, term: int | None) -> tuple[float, float]:
        """Bounds of momentum and window before a step; a new syncer may go on with those that it had long ago."""
        new = self._term is not None and term != self._term
        return max(self._momentum, DOUBT * self._longest if new else 0.0), self._window if step.pushes else 0.0

    def _seen(self, linear: Linear, mean: float, moved: Moved, window: float) -> float:
        """How long an unknown momentum can be, by the movement that it has made."""
        of_mean, of_momentum, of_window = map(abs, linear.moved)
        if not of_momentum:
            return math.inf
        rest = FACTOR * min(moved.lost, moved.norm) + moved.lost
        return (moved.norm + _total((of_mean, 0.0, of_window), mean, 0.0, window) + rest) / of_momentum

    def _lost_before(self, moved: Moved) -> float:
        return FACTOR * min(moved.lost, moved.norm) if math.isinf(self._lost) else self._lost


def _total(parts: tuple[float, ...], *lengths: float) -> float:
    """The longest sum of vectors of these lengths, so many times each; no part of an unknown one is nothing."""
    return sum(abs(part) * length for part, length in zip(parts, lengths, strict=True) if part)
