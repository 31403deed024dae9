"""Pseudo-gradients, their merging, and the outer optimizer.

    delta      = anchor - local                  on each peer              pseudo_gradient_()
    mean       = sum w_m delta_m / sum w_m       on the syncer             Codec.accumulate_(), mean_()
    m          = beta m + mean                   on the syncer, fp32       nesterov_()
    master     = master - lr (mean + beta m)

(DiLoCo, arXiv 2311.08105, Algorithm 1.) All functions work element by element, so a fragment may be processed chunk by
chunk with the same result. Other merge rules and optimizers are further functions of the same kind.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from diloco.outer.fragments import chunks

__all__ = ["mean_", "nesterov_", "pseudo_gradient_"]


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
