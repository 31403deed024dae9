"""Outer steps that a peer takes by itself, after which peers differ by design.

    eager updates   the peer's fresh pseudo-gradient acts now, those of the others a round late       eager_()
    gossip          each peer has parameters of its own and meets one other peer a round              gossip_()

Both differ from peer to peer, so they are compared by distance and not by digest. As in `optimizer.py`, all vectors
are fp32, pseudo-gradients are anchor - local, and everything works element by element.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diloco.outer.fragments import chunks
from diloco.outer.optimizer import nesterov_

__all__ = ["eager_", "gossip_"]


@torch.no_grad()
def eager_(
    shadow: Tensor, velocity: Tensor, previous: Tensor, delta: Tensor, *, peers: int, lr: float, beta: float
) -> None:
    """Eager updates (arXiv 2502.12996): moves the offset of this peer from the anchor by its fresh pseudo-gradient.

    In the paper, peer m of M steps in round t by its own estimate of the mean pseudo-gradient,

        mean(t-1) + (delta_m(t) - delta_m(t-1)) / M

    the mean of the round before, in which its own part is replaced by the fresh one. The outer step is linear in the
    pseudo-gradient, so its result is the sum of what the two terms cause alone:

        anchor    steps by mean(t-1), as everywhere           on the syncer, nesterov_()
        shadow    steps by d = (delta_m(t) - delta_m(t-1)) / M, from zero, with a momentum of its own
                  n = beta n + d;  s -= lr (d + beta n)

    and the peer begins round t+1 at anchor + shadow. The anchor stays the same on all peers and only the shadow is
    personal; it needs no bytes on the wire. A pseudo-gradient is that of the round alone: anchor + shadow as the
    round began, minus local. The sum is that of the paper as long as the anchor is merged from all M peers with equal
    weights and lr, beta and M stay as they are. After a change of them the differences no longer add up to a fresh
    term, and an offset would stay for good: set shadow, velocity and previous to zeros, which begins anew.

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


@torch.no_grad()
def gossip_(
    parameters: Tensor,
    momentum: Tensor,
    mean_delta: Tensor,
    mean_parameters: Tensor,
    *,
    alpha: float = 0.5,
    beta: float = 0.7,
    gamma: float = 0.7,
) -> None:
    """NoLoCo (arXiv 2506.10911): one outer step of a peer that has met a partner.

        m = alpha m - beta mean_delta + gamma (mean_parameters - parameters);  parameters += m

    This is the form of the authors' code, as the signs printed in the paper are not consistent; their
    pseudo-gradients point downhill and ours uphill, hence the minus. The third term pulls the partners together: the
    mean of the two moves as if it were not there. A peer without a partner passes its own values as the means.

    Args:
        parameters: (n,) fp32, the peer's own outer parameters (phi), changed in place.
        momentum: (n,) fp32, zeros before the first step, changed in place.
        mean_delta: (n,) fp32, mean of both pseudo-gradients, left as it is.
        mean_parameters: (n,) fp32, mean of both outer parameters as the round began, left as it is.
    """
    shapes = {parameters.shape, momentum.shape, mean_delta.shape, mean_parameters.shape}
    assert len(shapes) == 1, "all four vectors must have one shape"
    for start, stop in chunks(parameters.numel()):  # so that the pull needs a temporary of one chunk only
        own, velocity = parameters[start:stop], momentum[start:stop]
        velocity.mul_(alpha).sub_(mean_delta[start:stop], alpha=beta)
        velocity.add_(mean_parameters[start:stop] - own, alpha=gamma)
        own.add_(velocity)
