"""Outer optimizers, how large their steps are, and what they keep between two versions of a
fragment.

    delta      = anchor - local                  on each peer              Replica.capture
    mean       = sum w_m delta_m / sum w_m       on the author             merging.Mean
    m          = beta m + mean                   on author and heir        Linear.follow_
    master     = master - lr (mean + beta m)     on the author, fp32       Linear.move_

(DiLoCo, arXiv 2311.08105, Algorithm 1.) All vectors are fp32 of one shape (n,), and all functions
work element by element, so a fragment may be processed chunk by chunk with the same result. Vectors
that hold state between steps are zeros before the first one. FedAvg is Nesterov with lr=1 and
beta=0, and SGD (SparseLoCo) Nesterov with beta=0.

An optimizer says what one push does, in numbers. A step merges several contributions, which may
complete a window of `delay` and begin the next. It is linear in the mean, the momentum and the
window, so its coefficients (`Linear`) follow from the pushes, one after another, of the numbers 0
and 1. An heir computes the same ones as the author, from what every peer knows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from diloco.config import OuterConfig, registry
from diloco.outer.payloads import Codec, buffer, over_chunks

Value = TypeVar("Value", float, Tensor)
YOUTH = 16  # versions after which the momentum of a run without a plan has risen by half
LOST = 0.5
"""Part of a step that its encoding may lose, by the norm: small values beside a large one in their
block; e3m0 also loses a third of each value at most."""
Reach = tuple[float, float, float]
"""The most that momentum, window, and what encodings lost may be, by L2 norms of the fragment."""


@dataclass(frozen=True)
class OuterStep:
    """One outer step: the version that it starts from, and how many contributions it merges.

    With a windowed optimizer a momentum step belongs to `delay` contributions, and `pushes` of the
    window that is open are in earlier versions. The contributions of one version count as their
    mean, each of them, so their order does not matter. They may complete a window and begin the
    next.
    """

    version: int
    contributions: int
    pushes: int = 0
    delay: int = 1


class Transition(ABC):
    """Effect of one outer step on a chunk of the vectors: the momentum and the further ones of the
    optimizer. The master moves first, and the rest once the update is known."""

    @abstractmethod
    def move_(self, master: Tensor, mean: Tensor, vectors: Sequence[Tensor]) -> None:
        """Move the master by the mean of the contributions, which is left as it is."""

    @abstractmethod
    def follow_(self, vectors: Sequence[Tensor], moved: Tensor) -> None:
        """Bring the vectors to after the step, which moved the anchor by `moved`; that may be
        overwritten."""


@dataclass(frozen=True)
class Linear(Transition):
    """A step that is linear: each row has the parts of (mean, momentum, window) of which the result
    is the sum.

    The momentum is not made of the mean itself but of what the update publishes of it, as `follow_`
    finds it out from how far the anchor moved (PowerSGD, arXiv 1905.13727, Algorithm 2: error
    feedback, and momentum after compression). What the encoding lost stays in master - anchor, and
    enters the momentum with the update that publishes it. So an heir that applies the updates has
    the momentum and the window of the author, whatever the codec.
    """

    moved: tuple[float, ...]
    momentum: tuple[float, ...]
    window: tuple[float, ...]

    @torch.no_grad()
    def move_(self, master: Tensor, mean: Tensor, vectors: Sequence[Tensor]) -> None:
        # without a window its part is 0
        for part, vector in zip(self.moved, (mean, *vectors), strict=False):
            if part:
                master.add_(vector, alpha=part)

    @torch.no_grad()
    def follow_(self, vectors: Sequence[Tensor], moved: Tensor) -> None:
        """Recover the mean from how far the anchor moved, then update momentum and window.

        With Nesterov the new momentum is (beta m - moved / lr) / (1 + beta). So each step
        multiplies an error in m by beta / (1 + beta), at most a half: a momentum that starts out
        wrong is soon right.
        """
        for part, vector in zip(self.moved[1:], vectors, strict=False):
            moved.add_(vector, alpha=-part)
        mean = moved.div_(self.moved[0])
        momentum, *windows = vectors
        momentum.mul_(self.momentum[1]).add_(mean, alpha=self.momentum[0])
        for window in windows:
            momentum.add_(window, alpha=self.momentum[2])
            window.mul_(self.window[2]).add_(mean, alpha=self.window[0])


@dataclass
class OuterState:
    """Momentum and window of a fragment, which follow from the published updates alone.

    Attributes:
        version: the version that they belong to.
        vectors: the momentum and the optimizer's further vectors, each (numel,) fp32.
        pushes: contributions in the window. delay: contributions that make it full.
    """

    version: int
    vectors: tuple[Tensor, ...]
    pushes: int = 0
    delay: int = 1

    @property
    def momentum(self) -> Tensor:
        return self.vectors[0]

    def part(self, start: int, stop: int) -> list[Tensor]:
        """Views of a chunk of the vectors."""
        return [vector[start:stop] for vector in self.vectors]

    def step(self, version: int, contributions: int, delay: int) -> OuterStep:
        """The step from a version that merges so many contributions; a window that they begin is
        full with `delay`."""
        pushes = self.pushes if self.version == version else 0
        return OuterStep(version, contributions, pushes, self.delay if pushes else delay)

    def join_(self, step: OuterStep) -> None:
        """Belong to the anchor that the step starts from. Of another one only the momentum is worth
        keeping."""
        here = (self.version, self.pushes, self.delay if self.pushes else step.delay)
        if here != (step.version, step.pushes, step.delay):
            for further in self.vectors[1:]:
                further.zero_()
        self.version, self.pushes, self.delay = step.version, step.pushes, step.delay

    def apply_(
        self,
        step: OuterStep,
        transition: Transition,
        codec: Codec,
        anchor: Tensor,
        parts: Sequence[tuple[Tensor, tuple[int, int]]],
    ) -> None:
        """Move an anchor by the chunks of its update, each with its range, and the vectors by what
        it moved."""
        self.join_(step)

        def apply_(part: tuple[Tensor, tuple[int, int]]) -> None:
            update, (start, stop) = part
            chunk = anchor[start:stop]
            moved = buffer("moved", torch.float32, stop - start).copy_(chunk)
            codec.apply_update_(chunk, update)
            transition.follow_(self.part(start, stop), torch.sub(chunk, moved, out=moved))

        over_chunks(apply_, parts)
        self.version, self.pushes = (
            step.version + 1,
            (step.pushes + step.contributions) % step.delay,
        )


def momentum_at(
    version: float, momentum: float, warmup: int | None = 0, rounds: int | None = None
) -> float:
    """Outer momentum of the step from `version` to the next, which rises to `momentum` in `warmup`
    versions (0: it begins there). With None it rises over the planned `rounds`, or as long as the
    run gets older if nobody has planned any.

    1 / (1 - m), which times lr is the effective learning rate, rises linearly from 1 at version 0
    to that of `momentum`, as an inner learning rate warms up. This is m = t / (t + const), the
    schedule of Nesterov's method for convex functions. Its memory 1 / (1 - m) is about a fixed part
    of the rounds so far, which soon forgets the deltas of the steep start. If m itself were linear,
    the effective rate would rise almost only in the last rounds.

    scripts/README.md has the experiment from which the defaults follow (`scripts/momentum`).
    """
    ends = rounds if warmup is None else warmup
    if ends is not None and version >= ends:
        return momentum
    part = version / (version + YOUTH) if ends is None else version / ends
    return 1 - 1 / (1 + (1 / (1 - momentum) - 1) * part)


def lr_at(peers: int, lr: float, lr_by_peers: Mapping[int, float]) -> float:
    """Outer learning rate of a step merged from `peers` contributors; a decay of it gained nothing
    (DiLoCo).

    `lr_by_peers` gives it for some numbers of peers (scaling laws of DiLoCo, arXiv 2503.09799:
    {1: .4, 2: .6, 4: .6, 8: .8}). In between it is linear in log2(peers), and beyond the ends
    constant. Empty means `lr`.
    """
    if not lr_by_peers:
        return lr
    known = sorted(lr_by_peers.items())
    for (low, at_low), (high, at_high) in pairwise(known):
        if low <= peers < high:
            return at_low + (at_high - at_low) * math.log2(peers / low) / math.log2(high / low)
    return known[0][1] if peers < known[0][0] else known[-1][1]


class OuterOptimizer(ABC):
    """An outer optimizer: what a merged pseudo-gradient does to the master parameters of a
    fragment.

    It keeps no vectors: those are in an `OuterState`, the momentum and `num_buffers` further ones.
    A linear optimizer defines `push`, and everything else follows from that. Another one defines
    `transition`; then `can_follow` is False unless it says otherwise.
    """

    name: ClassVar[str]
    num_buffers: ClassVar[int] = 1
    windowed: ClassVar[bool] = False
    """True if a momentum step belongs to `outer.delay` contributions, rather than to a version."""
    can_follow: ClassVar[bool] = True
    """True if an heir can compute the vectors from the updates that it applies."""

    def __init_subclass__(cls) -> None:
        if "transition" in vars(cls):
            cls.can_follow = vars(cls).get("can_follow", False)

    def __init__(self, settings: OuterConfig) -> None:
        self.settings = settings
        self._lr_by_peers = {int(peers): lr for peers, lr in settings.lr_by_peers.items()}

    def zeros(self, numel: int) -> OuterState:
        """The state of a fragment before the first step."""
        vectors = (torch.zeros(numel, dtype=torch.float32) for _ in range(1 + self.num_buffers))
        return OuterState(0, tuple(vectors))

    def rates(self, step: OuterStep) -> tuple[float, float]:
        """Learning rate and momentum of a step."""
        settings = self.settings
        peers = step.delay if settings.windowed else step.contributions
        # Where nobody has planned versions, a run is as old as it has had momentum steps.
        planned = settings.momentum_warmup is not None or settings.rounds is not None
        age = step.version / (1 if planned or not settings.windowed else step.delay)
        momentum = momentum_at(age, settings.momentum, settings.momentum_warmup, settings.rounds)
        return lr_at(peers, settings.lr, self._lr_by_peers), momentum

    def transition(self, step: OuterStep) -> Transition:
        """Effect of a step, whose contributions are pushed one after another."""
        lr, beta = self.rates(step)
        pushes, delay = range(1), 1
        if self.settings.windowed:
            pushes, delay = range(step.pushes, step.pushes + step.contributions), step.delay
        columns = []
        for delta, momentum, window in ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)):
            values = (0.0, momentum, window)
            for push in pushes:
                values = self.push(*values, delta, lr, beta, delay, (push + 1) % delay == 0)
            columns.append(values)
        return Linear(*zip(*columns, strict=True))

    def reach(
        self, step: OuterStep, longest: float, before: Reach = (0.0, 0.0, 0.0)
    ) -> tuple[float, Reach]:
        """Bound the length of the update of a step whose contributions are no longer than
        `longest`, and the reach after it. It also publishes what earlier encodings lost. Infinite
        unless the step is `Linear`.
        """
        made, (momentum, window, lost) = self.transition(step), before
        if not isinstance(made, Linear):
            return math.inf, (math.inf, math.inf, math.inf)

        # no `sum`, which rounds otherwise from Python 3.12 on
        def length(row: tuple[float, ...]) -> float:
            return abs(row[0]) * longest + abs(row[1]) * momentum + abs(row[2]) * window

        due = length(made.moved) + lost
        return (1 + LOST) * due, (length(made.momentum), length(made.window), LOST * due)

    def push(
        self,
        theta: Value,
        momentum: Value,
        window: Value,
        delta: Value,
        lr: float,
        beta: float,
        delay: int,
        last: bool,
    ) -> tuple[Value, Value, Value]:
        """The new theta, momentum and window after one contribution, the `last` of a window of
        `delay` or not. All are linear in the four values; the window is not made of the momentum.
        """
        raise NotImplementedError(
            f"outer.optimizer={self.name} defines neither push nor transition"
        )


class Nesterov(OuterOptimizer):
    """Nesterov momentum once per version (DiLoCo, arXiv 2311.08105): that of
    `torch.optim.SGD(nesterov=True)`.

    From a momentum of zero the first step is lr (1 + beta) delta; a constant delta approaches lr /
    (1 - beta) delta.
    """

    name = "nesterov"
    num_buffers = 0

    def push(
        self,
        theta: Value,
        momentum: Value,
        window: Value,
        delta: Value,
        lr: float,
        beta: float,
        delay: int,
        last: bool,
    ) -> tuple[Value, Value, Value]:
        momentum = beta * momentum + delta
        return theta - lr * (delta + beta * momentum), momentum, window


class DelayedNesterov(OuterOptimizer):
    """Delayed Nesterov (Asynchronous Local-SGD, arXiv 2401.09135, Algorithm 3).

    Every contribution moves the parameters at once by lr / delay of itself; the momentum changes
    with the `last` of `delay` (N in the paper), and acts then, or with c > 0 (`outer.delay_c`) in
    part with each of them:

        window += delta
        if last: momentum = beta momentum + window / delay;  window = 0
        theta -= lr (delta / delay + share beta momentum)
                                    share = c,  or 1 - c delay + c for the last

    With delay=1 it is Nesterov momentum, for every c. With c=0, contributions that do not depend on
    each other move the parameters as far as Nesterov on their mean.
    """

    name = "delayed_nesterov"
    num_buffers = 1
    windowed = True

    def push(
        self,
        theta: Value,
        momentum: Value,
        window: Value,
        delta: Value,
        lr: float,
        beta: float,
        delay: int,
        last: bool,
    ) -> tuple[Value, Value, Value]:
        # more peers may be active than 1 / c
        window, share = window + delta, min(self.settings.delay_c, 1 / delay)
        if last:
            momentum, window = beta * momentum + window / delay, 0 * window
            share = 1 - share * delay + share
        return theta - lr * (delta / delay + share * beta * momentum), momentum, window


OUTER_OPTIMIZERS: registry.Registry[type[OuterOptimizer]] = registry.OUTER_OPTIMIZERS
for _optimizer in (Nesterov, DelayedNesterov):
    OUTER_OPTIMIZERS.add(_optimizer.name, _optimizer, _optimizer.windowed)
