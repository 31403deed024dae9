"""Eager updates: a peer's fresh pseudo-gradient acts on its own parameters now, those of the others a round late.

So local parameters differ from peer to peer by design, and anchors stay equal. As in `optimizer.py`, all vectors are
fp32, pseudo-gradients are anchor - local, and everything works element by element.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.outer.optimizer import nesterov_

__all__ = ["eager_"]


@torch.no_grad()
def eager_(
    shadow: Tensor, velocity: Tensor, previous: Tensor, delta: Tensor, *, peers: int, lr: float, beta: float
) -> None:
    """Eager updates (arXiv 2502.12996): moves the offset of this peer from the anchor by its fresh pseudo-gradient.

    In the paper, peer m of M steps in round t by its own estimate of the mean pseudo-gradient,

        mean(t-1) + (delta_m(t) - delta_m(t-1)) / M

    which is the mean of the round before with its own part replaced by the fresh one. The outer step is linear in the
    pseudo-gradient, so it is the sum of the steps by each term alone:

        anchor    steps by mean(t-1), as everywhere           on the syncer, nesterov_()
        shadow    steps by d = (delta_m(t) - delta_m(t-1)) / M, from zero, with a momentum of its own
                  n = beta n + d;  s -= lr (d + beta n)

    and the peer begins round t+1 at anchor + shadow. The anchor stays the same on all peers; only the shadow is
    personal, and it is never sent. The pseudo-gradient covers one round alone: anchor + shadow as the round began,
    minus local. The sum equals the paper's as long as the anchor is merged from all M peers with equal weights, and lr,
    beta and M do not change. After a change the differences no longer add up to a fresh term, and an offset would stay
    for good; set shadow, velocity and previous to zeros to start anew.

    Args:
        shadow: (n,) fp32, s, zeros at first, changed in place.
        velocity: (n,) fp32, n, zeros at first, changed in place.
        previous: (n,) fp32, this peer's pseudo-gradient of the last round, zeros at first; becomes `delta`.
        delta: (n,) fp32, its pseudo-gradient of this round, left as it is.
        peers: M, at least 1.
    """
    assert shadow.shape == velocity.shape == previous.shape == delta.shape, "all four vectors must have one shape"
    assert peers >= 1, f"{peers} peers are impossible"
    previous.sub_(delta).div_(-peers)  # is now d, so that no temporary is needed
    nesterov_(shadow, velocity, previous, lr, beta)
    previous.copy_(delta)
