"""Audits: whoever has the contributions to a part of a version recomputes it, and so proves what its syncer did to it.

    pick      which parts of a fragment this member audits in one version, in secret until it asks for them
    log       the part's updates, which it has anyway, from version 0 on or as far back as the momentum remembers
    ask       the syncer for the part's payloads in the newest version, each with its path to the signed root
    audit     a pure function of all that: `Deviation` if no honest syncer can have published the newest update

Nothing is committed to but payloads and updates. The momentum is made of published updates (`state.adopt_`), so it
follows from the log; what is not known of it halves with each version. The residual master - anchor is what the
codec lost in the update before, so the log bounds it by half a step of that update's encoding (`Codec.cell`). From
version 0 on both are known to be zero.

So an audit does not compare bits. It follows *ranges* in which each value of an honest syncer lies, and the newest
update has to be the encoding of a value in them. A range takes in every rounding of fp32, whether or not the hardware
fuses a product with a sum, so honest peers with other processors do not accuse each other. What fits into a range is
not found: about a step of the encoding of the updates per element and version, which is less than one contributor
may change as well.

The bundle that proves a deviation to one member proves it to all: they call the same function with it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from diloco.config import OuterConfig
from diloco.errors import PayloadError
from diloco.outer.codecs import codec
from diloco.outer.fragments import CHUNK, Fragment
from diloco.outer.merkle import LEAF
from diloco.outer.optimizer import OPTIMIZERS, Linear, OuterOptimizer, OuterStep
from diloco.outer.payloads import magnitude_of
from diloco.outer.rda import CANCELLED, SMALLEST_NORM, directional_pieces
from diloco.outer.robust import trim_count

__all__ = ["Counted", "Deviation", "Part", "Seen", "audit", "memory", "obstacle", "parts", "pick", "versions_until"]

ROUNDING = 2.0**-23  # twice what one rounding to fp32 may change, as a part of the result
UNKNOWN = 1024.0
"""A momentum from before the log has at most this many times the largest pseudo-gradient that the log's updates show.
It acts on the updates of the log, so a larger one would show there."""
FORGOTTEN = 2.0**-34  # UNKNOWN times as much is as small as a rounding


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


@dataclass(frozen=True)
class Deviation:
    """Proof that an update is not what the contributions give: the version that it starts from, and why, in a line."""

    version: int
    why: str


# -- what is audited --------------------------------------------------------------------------------------------------


def obstacle(settings: OuterConfig) -> str | None:
    """Why versions cannot be audited with these settings, with the remedy; None if they can."""
    if settings.flatten:
        return (
            f"outer.flatten={settings.flatten} mixes all values of a matrix, so no part of a version can be "
            "recomputed alone; set outer.flatten=0"
        )
    if settings.barrier and not settings.judged_together:
        return (
            f"outer.robust={settings.robust} with outer.codec_up={settings.codec_up} adds up chunks as they arrive, "
            "also those of contributions that never become whole and are not signed; set outer.robust=clip"
        )
    return None


def parts(fragment: Fragment, settings: OuterConfig) -> list[Part]:
    """The parts in which a fragment is audited: with `rda` a part has to hold whole pieces of tensors."""
    size = CHUNK if settings.merge == "rda" else LEAF
    return [Part(fragment, at, min(at + size, fragment.numel)) for at in range(0, fragment.numel, size)]


def pick(count: int, share: float, members: int, rng: random.Random) -> list[int]:
    """Which of `count` parts one of `members` audits, so that together they audit that share of all parts on average.

    `rng` is the member's own: nobody else may be able to foresee it. Members may pick the same part.
    """
    wanted = min(count, share * count / members)
    whole = math.floor(wanted) + (rng.random() < wanted % 1)
    return sorted(rng.sample(range(count), whole))


def versions_until(found: float, count: int, altered: int, share: float) -> int:
    """After how many versions a syncer that alters `altered` of `count` parts in each is proved, with probability
    `found` at least.

    Its members audit share x count parts of a version on average. Each part that is picked is one of those that are
    not altered with probability 1 - altered / count, and members that pick twice at random miss more than one that
    picks two, so a version goes by unnoticed with probability exp(-share x altered) at most.
    """
    assert 0 < found < 1 and 0 < altered <= count and 0 < share
    return math.ceil(-math.log1p(-found) / (share * altered))


def memory(settings: OuterConfig, steps: Sequence[OuterStep]) -> float:
    """The part of a momentum from before these steps that is left of it after them; 0 for steps from version 0 on.

    A log may begin at the first of them once this is at most `FORGOTTEN`.
    """
    if steps and steps[0].version == 0:
        return 0.0
    errors = _Errors(1.0, 0.0)
    optimizer = OPTIMIZERS[settings.optimizer](settings)
    for step in steps:
        errors = errors.after(_linear(optimizer, step), step)
    return errors.momentum


def _linear(optimizer: OuterOptimizer, step: OuterStep) -> Linear:
    transition = optimizer.transition(step)
    assert isinstance(transition, Linear), f"outer.optimizer={optimizer.name} cannot be audited"
    return transition


# -- the audit --------------------------------------------------------------------------------------------------------


def audit(part: Part, settings: OuterConfig, anchor: Tensor, log: Sequence[Seen]) -> Deviation | None:
    """Whether each update of the log can be what an honest syncer publishes; the first one that cannot.

    Args:
        part: where.
        settings: of the run; `obstacle` has nothing against them.
        anchor: (part.numel,) fp32, the checker's own anchor, of any version about that time: only the size of its
            values matters, which bounds how sums with them are rounded.
        log: versions in a row. It says the more the farther it reaches back (`memory`), or if it begins at version 0.

    A payload or update that its codec refuses is a deviation too: an honest syncer merges and publishes none.
    """
    assert obstacle(settings) is None, "what cannot be audited is refused before"
    follower = _Follower(part, settings, anchor, log)
    counted = next((at for at, seen in enumerate(log) if seen.counted is not None), len(log))
    # Nothing of the residual before the last update that moves the anchor is left after it.
    begin = max((at for at in range(counted) if not follower.linear(log[at].step).still), default=0)
    for at, seen in enumerate(log):
        try:
            why = follower.take(seen, at >= begin)
        except PayloadError as error:
            why = str(error)
        if why is not None:
            return Deviation(seen.step.version, why)
    return None


class _Range(NamedTuple):
    """What a vector may be, element by element: (n,) fp64."""

    low: Tensor
    high: Tensor

    def plus(self, other: Tensor | _Range, times: float = 1.0) -> _Range:
        """The sum with `times` what another vector is, or may be."""
        if not times:
            return self
        low, high = (other, other) if isinstance(other, Tensor) else other if times > 0 else (other.high, other.low)
        return _Range(self.low + times * low, self.high + times * high)

    def wider(self, by: Tensor) -> _Range:
        """The same with a tolerance."""
        return _Range(self.low - by, self.high + by)

    def both(self, other: _Range) -> _Range:
        """What is in both; low is above high where nothing is."""
        return _Range(torch.maximum(self.low, other.low), torch.minimum(self.high, other.high))


class _Errors(NamedTuple):
    """How far momentum and window may be from what they are taken for."""

    momentum: float
    window: float

    def after(self, linear: Linear, step: OuterStep, noise: float = 0.0) -> _Errors:
        """The same after a step, if it is known only so well how far the anchor moved; see `Linear.follow_`."""
        momentum, window = self.momentum, self.window if step.pushes else 0.0
        if linear.still:
            return _Errors(momentum, window)
        mean, of_momentum, of_window = linear.moved
        into_momentum, into_window = linear.momentum[0] / mean, linear.window[0] / mean
        return _Errors(
            abs(linear.momentum[1] - into_momentum * of_momentum) * momentum
            + abs(linear.momentum[2] - into_momentum * of_window) * window
            + abs(into_momentum) * noise,
            abs(into_window * of_momentum) * momentum
            + abs(linear.window[2] - into_window * of_window) * window
            + abs(into_window) * noise,
        )


class _Follower:
    """What an honest syncer may have of a part after each version of a log. Vectors are (n,) fp64."""

    def __init__(self, part: Part, settings: OuterConfig, anchor: Tensor, log: Sequence[Seen]) -> None:
        self._part, self._settings = part, settings
        self._up, self._down = codec(settings.codec_up), codec(settings.codec_down)
        self._optimizer = OPTIMIZERS[settings.optimizer](settings)
        self._linear: dict[OuterStep, Linear] = {}
        zeros = torch.zeros(part.numel, dtype=torch.float64)
        top, mean = self._largest(log)
        delay = max((seen.step.delay for seen in log), default=1)
        self._unknown = _Errors(UNKNOWN * mean, UNKNOWN * mean * delay)
        self._noise = (anchor.double().abs() + top) * (4 * ROUNDING)  # of how far the anchor moves
        self._noises = _Errors(0.0, 0.0)  # of momentum and window, over `_noise`
        self._momentum = self._window = zeros
        self._anchor: Tensor | None = None  # known from the first update that carries values
        self._residual, self._errors = _Range(zeros - math.inf, zeros + math.inf), self._unknown
        if log and log[0].step.version == 0:
            self._residual, self._errors = _Range(zeros, zeros), _Errors(0.0, 0.0)
        self._peak = 0.0  # the largest value of momentum and window so far

    def _largest(self, log: Sequence[Seen]) -> tuple[float, float]:
        """How far the log moves an element at most, and the largest pseudo-gradient that it shows."""
        top = mean = 0.0
        before: Tensor | None = None
        for seen in log:
            linear = self.linear(seen.step)
            if linear.still:
                continue
            try:
                values = self._down.values(seen.update, self._part.numel)
            except PayloadError:
                break  # `take` says so
            if self._down.carries_values:
                after = values.clone()
                values, before = torch.zeros_like(after) if before is None else after - before, after
            moved = magnitude_of(values)
            top, mean = max(top, moved), max(mean, moved / abs(linear.moved[0]))
        return top, mean

    def linear(self, step: OuterStep) -> Linear:
        """What a step does."""
        if step not in self._linear:
            self._linear[step] = _linear(self._optimizer, step)
        return self._linear[step]

    def take(self, seen: Seen, residual: bool) -> str | None:
        """Follow one version, the residual too if that is asked for; why no honest syncer can have published it."""
        linear, numel = self.linear(seen.step), self._part.numel
        if seen.new_syncer:
            self._take_over()
        if not seen.step.pushes:
            self._window = torch.zeros_like(self._window)
            self._errors, self._noises = self._errors._replace(window=0.0), self._noises._replace(window=0.0)
        moved = self._down.values(seen.update, numel).double()
        cell = _Range(*self._down.cell(seen.update, numel)) if residual else _Range(moved, moved)
        if self._down.carries_values:
            base = self._window if linear.still else self._anchor
            if not linear.still:
                self._anchor = moved
            if base is None:  # how far the update moved the anchor is not known
                self._residual, self._errors = cell.plus(moved, -1.0), self._unknown
                return None
            moved, cell = moved - base, cell.plus(base, -1.0)
        mean = None if seen.counted is None else self._merged(seen.counted)
        judge, follow = (self._grow, self._window_grew) if linear.still else (self._move, self._anchor_moved)
        why = judge(linear, moved, cell, mean) if residual else None
        follow(linear, moved)
        self._errors = self._errors.after(linear, seen.step)
        self._noises = self._noises.after(linear, seen.step, 1.0)
        sizes = [magnitude_of(vector) for vector in (self._momentum, self._window)]
        self._peak = max(self._peak, *sizes)
        self._errors = _Errors(*(error + 4 * ROUNDING * size for error, size in zip(self._errors, sizes, strict=True)))
        return why

    def _take_over(self) -> None:
        """The master goes on, or starts at the anchor; the momentum goes on, or is an older one, or starts at zero."""
        low, high = self._residual
        self._residual = _Range(low.clamp(max=0.0), high.clamp(min=0.0))
        self._errors = _Errors(*(error + 2 * self._peak for error in self._errors))

    def _move(self, linear: Linear, moved: Tensor, cell: _Range, mean: _Range | None) -> str | None:
        """A version whose update moves the anchor."""
        of_mean, of_momentum, of_window = linear.moved
        before, why = self._residual, None
        master = cell.wider(self._noise)
        if mean is not None:
            unsure = (abs(of_momentum) * self._errors.momentum + abs(of_window) * self._errors.window) + self._noise * (
                1 + abs(of_momentum) * self._noises.momentum + abs(of_window) * self._noises.window
            )
            given = before.plus(mean, of_mean).plus(self._momentum, of_momentum).plus(self._window, of_window)
            given = given.wider(unsure)
            why = self._deviation(given, cell, moved)
            master = given.both(master)
        self._residual = master.plus(moved, -1.0).wider(self._noise)
        if linear.full and linear.window[0]:  # what the window that begins has lost moves the master too
            lost = master.plus(moved, -1.0).plus(before, -1.0)
            self._residual = self._residual.plus(lost, linear.full * linear.window[0] / of_mean)
        return why

    def _anchor_moved(self, linear: Linear, moved: Tensor) -> None:
        momentum, window = self._momentum, self._window
        mean = (moved - linear.moved[1] * momentum - linear.moved[2] * window) / linear.moved[0]
        self._momentum = linear.momentum[0] * mean + linear.momentum[1] * momentum + linear.momentum[2] * window
        self._window = linear.window[0] * mean + linear.window[2] * window

    def _grow(self, linear: Linear, grown: Tensor, cell: _Range, mean: _Range | None) -> str | None:
        """A version by which only the window grows; `grown` is how much."""
        why, of_mean = None, linear.window[0]
        noise = self._window.abs() * (4 * ROUNDING)
        if self._down.carries_values:
            noise += self._errors.window
        growth = cell.wider(noise)
        if mean is not None:
            zeros = torch.zeros_like(grown)
            given = _Range(zeros, zeros).plus(mean, of_mean).plus(self._window, linear.window[2] - 1.0).wider(noise)
            why = self._deviation(given, cell, grown)
            growth = given.both(growth)
        self._residual = self._residual.plus(growth.plus(grown, -1.0), linear.full).wider(self._noise)
        return why

    def _window_grew(self, linear: Linear, grown: Tensor) -> None:
        self._window = self._window + grown

    def _deviation(self, given: _Range, cell: _Range, published: Tensor) -> str | None:
        beyond = torch.maximum(given.low - cell.high, cell.low - given.high)
        worst = int(beyond.argmax())
        if float(beyond[worst]) <= 0:
            return None
        element, low, high = self._part.start + worst, float(given.low[worst]), float(given.high[worst])
        return (
            f"element {element} of fragment {self._part.fragment.index} moved by {float(published[worst]):.6g}, and "
            f"its contributions give {low:.6g} to {high:.6g}"
        )

    def _merged(self, counted: Sequence[Counted]) -> _Range:
        """What an honest syncer makes of the contributions, in any order and rounded to fp32 after each operation."""
        numel = self._part.numel
        found = [(one, self._up.values(one.payload, numel).double()) for one in counted]
        if self._settings.judging == "trimmed_mean":
            mean, size = _trimmed([values for _, values in found], self._settings.trim)
        elif self._settings.merge == "rda":
            mean, size = self._directions(found)
        else:
            total = sum(one.weight for one in counted)
            terms = [values * (one.weight * one.discount * one.scale / total) for one, values in found]
            mean, size = sum(terms[1:], terms[0]), sum((term.abs() for term in terms[1:]), terms[0].abs())
        off = size * (ROUNDING * (len(counted) + 4)) + 2.0**-140
        return _Range(mean - off, mean + off)

    def _directions(self, found: Sequence[tuple[Counted, Tensor]]) -> tuple[Tensor, Tensor]:
        """Radial-directional average (see `rda`), and the size of its terms."""
        total = sum(one.weight for one, _ in found)
        terms = [values * (one.weight * one.discount * one.scale / total) for one, values in found]
        mean, size = sum(terms[1:], terms[0]), sum((term.abs() for term in terms[1:]), terms[0].abs())
        for start, stop in directional_pieces(self._part.fragment, self._part.start, self._part.stop):
            direction, width = torch.zeros_like(mean[start:stop]), torch.zeros_like(mean[start:stop])
            length = among = 0.0
            for one, values in found:
                piece = values[start:stop] * one.scale
                norm = float(torch.linalg.vector_norm(piece))
                if norm >= SMALLEST_NORM:
                    unit = piece * (one.weight * one.discount / total / norm)
                    direction, width = direction + unit, width + unit.abs()
                    length += one.weight * one.discount / total * norm
                    among += one.weight * one.discount / total
            norm = float(torch.linalg.vector_norm(direction))
            if norm < 2 * CANCELLED:  # whether it is zero depends on how sums were rounded
                mean[start:stop], size[start:stop] = 0.0, math.inf
            else:
                mean[start:stop] = direction * (length / norm)
                size[start:stop] = (width + direction.abs() * (among / norm)) * (length / norm)
        return mean, size


def _trimmed(values: Sequence[Tensor], trim: float) -> tuple[Tensor, Tensor]:
    """Trimmed mean (see `robust`), and the size of its terms."""
    out = trim_count(len(values), trim)
    kept = torch.stack(list(values)).sort(dim=0).values[out : len(values) - out]
    return kept.mean(0), kept.abs().amax(0)
