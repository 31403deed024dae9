"""Pseudo-gradients, their mean, and the outer optimizers.

    delta      = anchor - local                  on each peer              pseudo_gradient_()
    mean       = sum w_m delta_m / sum w_m       on the syncer             Codec.accumulate_(), mean_()
    m          = beta m + mean                   on the syncer, fp32       nesterov_()
    master     = master - lr (mean + beta m)

(DiLoCo, arXiv 2311.08105, Algorithm 1.) All vectors are fp32 of one shape (n,), and all functions work element by
element, so a fragment may be processed chunk by chunk with the same result. Vectors that hold state between steps are
zeros before the first one. The outer optimizers of the literature are these functions:

    FedAvg              nesterov_ with lr=1, beta=0
    SGD (SparseLoCo)    nesterov_ with beta=0
    Nesterov (DiLoCo)   nesterov_ on the mean of all peers
    naive async         nesterov_ on each contribution; the momentum is then applied too often
    FedBuff             nesterov_ on the mean of each `delay` contributions
    Delayed Nesterov    delayed_nesterov_ on each contribution, or on the mean of those that came together
    eager updates       eager_ on each peer's own pseudo-gradient at once, nesterov_ on the mean a round late

`OPTIMIZERS` gives the class for each value of `outer.optimizer`. A class chooses rates and calls these
functions; the vectors belong to the syncer's `Held`. Every syncer computes the same rates from what every peer knows,
and so does a successor that takes a fragment over.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from diloco.config import OuterConfig
from diloco.outer.fragments import chunks
from diloco.outer.payloads import buffer

__all__ = [
    "OPTIMIZERS", "OuterOptimizer", "OuterStep", "delayed_nesterov_", "eager_", "followed_", "lr_at", "mean_",
    "momentum_at", "nesterov_", "pseudo_gradient_",
]  # fmt: skip


@dataclass(frozen=True)
class OuterStep:
    """One outer step: the version that it starts from, and how many contributions it merges; see `Close`.

    With a windowed optimizer a momentum step belongs to `delay` contributions, and `flush` says that these complete it.
    """

    version: int
    contributions: int
    delay: int = 1
    flush: bool = True


@torch.no_grad()
def pseudo_gradient_(out: Tensor, anchor: Tensor, local: Tensor) -> None:
    """out = anchor - local, all (n,) fp32; `out` may be `local`. It points uphill: optimizers subtract it."""
    torch.sub(anchor, local, out=out)


def mean_(weighted_sum: Tensor, total_weight: float) -> None:
    """Turn sum(w_m * delta_m) into the weighted mean, in place; (n,) fp32."""
    assert math.isfinite(total_weight) and total_weight > 0, f"total weight {total_weight} is not positive"
    weighted_sum.div_(total_weight)


@torch.no_grad()
def nesterov_(master: Tensor, momentum: Tensor, delta: Tensor, lr: float, beta: float) -> None:
    """One outer step, bit for bit that of `torch.optim.SGD(nesterov=True, momentum=beta, dampening=0)`.

    m = beta m + delta;  master -= lr (delta + beta m). From a momentum of zero the first step is
    lr (1 + beta) delta, and a constant delta approaches lr / (1 - beta) delta. `delta` is left as it is.
    """
    assert master.shape == momentum.shape == delta.shape, "master, momentum and delta must have one shape"
    for start, stop in chunks(master.numel()):  # so that the direction needs a temporary of one chunk only
        gradient, velocity = delta[start:stop], momentum[start:stop]
        velocity.mul_(beta).add_(gradient)
        direction = buffer("displacement", master.dtype, stop - start)
        master[start:stop].add_(torch.add(gradient, velocity, alpha=beta, out=direction), alpha=-lr)


@torch.no_grad()
def followed_(momentum: Tensor, moved: Tensor, lr: float, beta: float) -> None:
    """The momentum after a step of `nesterov_`, from that before it and from how far the step moved the parameters.

    As m' = beta m + delta and moved = -lr (delta + beta m'), the movement alone tells the new momentum:

        m' = (beta m - moved / lr) / (1 + beta)

    Every step multiplies an error in m by beta / (1 + beta), at most a half. So the losses of a codec do not add
    up, and a momentum that starts out wrong is soon right.

    `moved`, new parameters - old ones, is overwritten.
    """
    assert momentum.shape == moved.shape, "momentum and moved must have one shape"
    momentum.mul_(beta / (1 + beta)).sub_(moved, alpha=1 / (lr * (1 + beta)))


@torch.no_grad()
def delayed_nesterov_(
    master: Tensor,
    momentum: Tensor,
    buffer: Tensor,
    delta: Tensor,
    *,
    lr: float,
    beta: float,
    pushes: float,
    delay: int,
    flush: bool,
    c: float = 0.0,
) -> None:
    """Delayed Nesterov (Asynchronous Local-SGD, arXiv 2401.09135, Algorithm 3) for contributions that came together.

    Every contribution moves the master at once by lr / delay of itself; the momentum changes and acts only when a
    window of `delay` (N in the paper) contributions is full, with `flush`:

        buffer += pushes delta
        if flush: m = beta m + buffer / delay;  buffer = 0
        master -= lr (pushes / delay delta + share beta m)      share = c pushes,  or 1 - c delay + c pushes with flush

    The shares of a window add up to 1. With pushes=1 this is Algorithm 3. With pushes=delay and flush it is
    `nesterov_` on the mean, for every c. The paper merges contributions one at a time; we group those that came
    together. With c=0 a window of contributions that do not depend on each other moves the master as far as `nesterov_`
    on their mean.

    Args:
        momentum: changed in place when `flush`.
        buffer: sum of the window, changed in place.
        delta: mean of the contributions, left as it is.
        pushes: how many they are; less when they are discounted for their staleness.
        delay: contributions in a window, at least 1; may change after a flush only.
        flush: these complete the window.
        c: part of the momentum that acts with each contribution, 0 to 1 / delay.
    """
    assert master.shape == momentum.shape == buffer.shape == delta.shape, "all four vectors must have one shape"
    assert pushes >= 0 and delay >= 1 and 0 <= c * delay <= 1, f"pushes={pushes}, delay={delay}, c={c} is impossible"
    buffer.add_(delta, alpha=pushes)
    share = c * pushes
    if flush:
        momentum.mul_(beta).add_(buffer, alpha=1 / delay)
        buffer.zero_()
        share += 1 - c * delay
    master.add_(delta, alpha=-lr * pushes / delay)
    if share:
        master.add_(momentum, alpha=-lr * share * beta)


@torch.no_grad()
def eager_(start: Tensor, momentum: Tensor, delta: Tensor, *, peers: int, lr: float, beta: float) -> None:
    """Eager updates (arXiv 2502.12996): a peer's fresh pseudo-gradient acts at once on where its round starts.

    In the paper, peer m of M steps in round t by its own estimate of the mean pseudo-gradient,

        mean(t-1) + (delta_m(t) - delta_m(t-1)) / M

    which is the mean of the round before with its own part replaced by the fresh one. The outer step is linear in the
    pseudo-gradient, so it is the sum of the steps by each term alone. The steps by mean(t-1) are those of the anchor.
    The differences of delta_m / M add up, in the momentum and in the parameters, to

        own    = beta own + delta_m(t) / M
        start  = anchor - lr (delta_m(t) / M + beta own)

    which is the peer's own part of the outer step that comes next: `nesterov_` with its own terms alone, from the
    anchor. Only `own` is kept. The anchor stays the same on all peers, and the start is personal and never sent.

    Therefore M, lr and beta may change: they are those of the step that will merge delta_m. What this peer has learned
    before fades out of `own` as it does out of the outer momentum, and no offset stays. A paper's replica, which keeps
    the sum of its steps, would keep an offset for good when lr changes.

    Args:
        start: a copy of the anchor, which becomes where this peer starts.
        momentum: `own`, changed in place; zeros while the outer momentum has nothing of this peer.
        delta: its pseudo-gradient of this round, overwritten with its own part of the mean.
        peers: M, at least 1. Contributions are taken to weigh the same.
    """
    assert start.shape == momentum.shape == delta.shape, "start, momentum and delta must have one shape"
    assert peers >= 1, f"{peers} peers are impossible"
    nesterov_(start, momentum, delta.div_(peers), lr, beta)


def momentum_at(version: int, momentum: float, warmup: int) -> float:
    """Outer momentum of the step from `version` to the next, for a warm-up of that many versions (0 for none).

    1 / (1 - m), which times lr is the effective learning rate, rises linearly from 1 at version 0 to that of
    `momentum` at version `warmup`, as an inner learning rate warms up. This is m = t / (t + const), the schedule of
    Nesterov's method for convex functions. Its memory 1 / (1 - m) is about a fixed part of the rounds so far, which
    soon forgets the deltas of the steep start. If m itself were linear, the effective rate would rise almost only in
    the last rounds.

    Pier (arXiv 2511.17849) lowers the momentum instead, from 0.99 to 0.9, after a data-parallel start, which we do not
    have.
    """
    assert 0 <= momentum < 1 and version >= 0, f"momentum={momentum}, version={version} is impossible"
    if version >= warmup:
        return momentum
    memory = 1 + (1 / (1 - momentum) - 1) * version / warmup
    return 1 - 1 / memory


def lr_at(version: int, peers: int, lr: float, lr_by_peers: Mapping[int, float]) -> float:
    """Outer learning rate of the step from `version`, merged from `peers` contributors.

    `lr_by_peers` gives it for some numbers of peers (scaling laws of DiLoCo, arXiv 2503.09799: 1: .4, 2: .6, 4: .6,
    8: .8). In between it is linear in log2(peers), and beyond the ends constant. Empty means `lr`. The version changes
    nothing, because a decay of the outer learning rate gained nothing (DiLoCo, arXiv 2311.08105).
    """
    assert version >= 0 and peers >= 1, f"version={version}, peers={peers} is impossible"
    if not lr_by_peers:
        return lr
    known = sorted(lr_by_peers.items())
    for (low, at_low), (high, at_high) in pairwise(known):
        if low <= peers < high:
            return at_low + (at_high - at_low) * math.log2(peers / low) / math.log2(high / low)
    return known[0][1] if peers < known[0][0] else known[-1][1]


class OuterOptimizer(ABC):
    """An outer optimizer: what a merged pseudo-gradient does to the master parameters of a fragment.

    It keeps no vectors: the syncer passes the master, the momentum and `num_buffers` further vectors, chunk by chunk.
    The momentum goes along when a fragment changes hands. Further vectors do not: they start at zeros on the successor.
    """

    name: ClassVar[str]
    num_buffers: ClassVar[int] = 0
    can_follow: ClassVar[bool] = False
    """Whether a backup can compute the momentum from the updates that it applies (`follow_`)."""

    def __init__(self, settings: OuterConfig) -> None:
        self.settings = settings
        self._lr_by_peers = {int(peers): lr for peers, lr in settings.lr_by_peers.items()}

    def rates(self, step: OuterStep) -> tuple[float, float]:
        """Learning rate and momentum of a step."""
        settings = self.settings
        lr = lr_at(step.version, max(step.contributions, step.delay), settings.lr, self._lr_by_peers)
        return lr, momentum_at(step.version, settings.momentum, settings.momentum_warmup)

    @abstractmethod
    def step_(self, master: Tensor, momentum: Tensor, buffers: list[Tensor], delta: Tensor, step: OuterStep) -> None:
        """Move the master by a merged pseudo-gradient `delta`, which is left as it is; the others change in place."""

    def follow_(self, momentum: Tensor, moved: Tensor, step: OuterStep) -> None:
        """Bring a backup's momentum to after a step, given new - old parameters `moved`, which may be overwritten."""
        raise NotImplementedError(f"outer.optimizer={self.name} cannot be followed")


class Nesterov(OuterOptimizer):
    """Nesterov momentum once per version (DiLoCo, arXiv 2311.08105)."""

    name = "nesterov"
    can_follow = True

    def step_(self, master: Tensor, momentum: Tensor, buffers: list[Tensor], delta: Tensor, step: OuterStep) -> None:
        nesterov_(master, momentum, delta, *self.rates(step))

    def follow_(self, momentum: Tensor, moved: Tensor, step: OuterStep) -> None:
        followed_(momentum, moved, *self.rates(step))


class DelayedNesterov(OuterOptimizer):
    """Delayed Nesterov (Asynchronous Local-SGD, arXiv 2401.09135, Algorithm 3); one buffer."""

    name = "delayed_nesterov"
    num_buffers = 1

    def step_(self, master: Tensor, momentum: Tensor, buffers: list[Tensor], delta: Tensor, step: OuterStep) -> None:
        lr, beta = self.rates(step)
        delayed_nesterov_(
            master, momentum, buffers[0], delta,
            lr=lr, beta=beta, pushes=step.contributions, delay=step.delay, flush=step.flush, c=self.settings.delay_c,
        )  # fmt: skip


class FedBuff(OuterOptimizer):
    """One Nesterov step with the mean of `delay` contributions (arXiv 2106.06639); one buffer."""

    name = "fedbuff"
    num_buffers = 1

    def step_(self, master: Tensor, momentum: Tensor, buffers: list[Tensor], delta: Tensor, step: OuterStep) -> None:
        [window] = buffers
        window.add_(delta, alpha=step.contributions / step.delay)
        if step.flush:
            nesterov_(master, momentum, window, *self.rates(step))
            window.zero_()


OPTIMIZERS: dict[str, type[OuterOptimizer]] = {one.name: one for one in (Nesterov, DelayedNesterov, FedBuff)}
