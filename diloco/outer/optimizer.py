"""Pseudo-gradients, their merging, and the outer optimizer.

    delta      = anchor - local                  on each peer              pseudo_gradient_()
    mean       = sum w_m delta_m / sum w_m       on the syncer             Codec.accumulate_(), mean_()
    m          = beta m + mean                   on the syncer, fp32       nesterov_()
    master     = master - lr (mean + beta m)

(DiLoCo, arXiv 2311.08105, Algorithm 1.) All functions work element by element, so a fragment may be processed chunk by
chunk with the same result. The outer optimizers of the literature are these two functions:

    FedAvg              nesterov_ with lr=1, beta=0
    SGD (SparseLoCo)    nesterov_ with beta=0
    Nesterov (DiLoCo)   nesterov_ on the mean of all peers
    naive async         nesterov_ on each contribution; the momentum is then applied too often
    FedBuff             nesterov_ on the mean of each `delay` contributions
    Delayed Nesterov    delayed_nesterov_ on each contribution, or on the mean of those that came together
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from diloco.outer.fragments import chunks

__all__ = ["delayed_nesterov_", "followed_", "mean_", "nesterov_", "pseudo_gradient_"]


def pseudo_gradient_(out: Tensor, anchor: Tensor, local: Tensor) -> None:
    """out = anchor - local, all (n,) fp32; `out` may be `local`. It points uphill: optimizers subtract it."""
    torch.sub(anchor, local, out=out)


def mean_(weighted_sum: Tensor, total_weight: float) -> None:
    """Turns sum(w_m * delta_m) into the weighted mean, in place; (n,) fp32. Weights are tokens (or 1 for each)."""
    assert math.isfinite(total_weight) and total_weight > 0, f"total weight {total_weight} is not positive"
    weighted_sum.div_(total_weight)


@torch.no_grad()
def nesterov_(master: Tensor, momentum: Tensor, delta: Tensor, lr: float, beta: float) -> None:
    """One outer step, bit for bit that of `torch.optim.SGD(nesterov=True, momentum=beta, dampening=0)`.

    m = beta m + delta;  master -= lr (delta + beta m). From a momentum of zero the first step is
    lr (1 + beta) delta, and a constant delta approaches lr / (1 - beta) delta. Special cases: lr=1, beta=0 is plain
    averaging (FedAvg); beta=0 is SGD.

    Args:
        master: (n,) fp32, the outer parameters, changed in place.
        momentum: (n,) fp32, the optimizer's state, zeros before the first step, changed in place.
        delta: (n,) fp32, the merged pseudo-gradient, left as it is.
    """
    assert master.shape == momentum.shape == delta.shape, "master, momentum and delta must have one shape"
    for start, stop in chunks(master.numel()):  # so that the direction needs a temporary of one chunk only
        gradient, velocity = delta[start:stop], momentum[start:stop]
        velocity.mul_(beta).add_(gradient)
        master[start:stop].add_(torch.add(gradient, velocity, alpha=beta), alpha=-lr)


@torch.no_grad()
def followed_(momentum: Tensor, moved: Tensor, lr: float, beta: float) -> None:
    """The momentum after a step of `nesterov_`, from that before it and from how far the step moved the parameters.

    With m' = beta m + delta and moved = -lr (delta + beta m'), whoever sees the movement needs no pseudo-gradient:

        m' = (beta m - moved / lr) / (1 + beta)

    An error in m shrinks by beta / (1 + beta), at most a half, with every step, so one that is seen through a codec
    stays near, and even a momentum that was unknown is soon right.

    Args:
        momentum: (n,) fp32, changed in place.
        moved: (n,) fp32, new parameters - old ones; overwritten.
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
    `nesterov_` on the mean, for every c; we group contributions so, where the paper has them one at a time. With c=0 a
    window of contributions that do not depend on each other moves the master as far as `nesterov_` on their mean.

    Args:
        master: (n,) fp32, the outer parameters, changed in place.
        momentum: (n,) fp32, zeros before the first step, changed in place when `flush`.
        buffer: (n,) fp32, sum of the window, zeros before the first step, changed in place.
        delta: (n,) fp32, mean of the contributions, left as it is.
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
