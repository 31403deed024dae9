"""Eager updates, against the paper's rules replica by replica."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.outer.optimizer import eager_, nesterov_


def gaussian(numel: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(numel, generator=torch.Generator().manual_seed(seed))


class PaperReplica:
    """Eager updates (arXiv 2502.12996) as they stand there: parameters and momentum of its own, in float64."""

    def __init__(self, theta: Tensor) -> None:
        self.theta = theta.double().clone()
        self.momentum = torch.zeros_like(self.theta)
        self.previous = torch.zeros_like(self.theta)

    def step(self, delta: Tensor, previous_mean: Tensor, peers: int, lr: float, beta: float) -> None:
        estimate = previous_mean + (delta - self.previous) / peers
        self.momentum = beta * self.momentum + estimate
        self.theta = self.theta - lr * (estimate + beta * self.momentum)
        self.previous = delta


@settings(deadline=None, max_examples=40)
@given(peers=st.integers(1, 5), lr=st.floats(0.1, 1.0), beta=st.floats(0.0, 0.95), seed=st.integers(0, 1000))
def test_anchor_and_shadow_are_together_the_replicas_of_the_paper(
    peers: int, lr: float, beta: float, seed: int
) -> None:
    """Each peer's inner steps pull it a quarter of the way to a target of its own, from wherever it starts."""
    numel = 40
    start, targets = gaussian(numel, seed), [gaussian(numel, seed + 1 + peer) for peer in range(peers)]
    replicas = [PaperReplica(start) for _ in range(peers)]
    paper_mean = torch.zeros(numel, dtype=torch.float64)
    anchor, momentum, mean = start.clone(), torch.zeros(numel), torch.zeros(numel)
    own = [tuple(torch.zeros(numel) for _ in range(3)) for _ in range(peers)]
    for _ in range(12):
        paper_deltas = [(one.theta - target.double()) / 4 for one, target in zip(replicas, targets, strict=True)]
        for one, delta in zip(replicas, paper_deltas, strict=True):
            one.step(delta, paper_mean, peers, lr, beta)
        paper_mean = torch.stack(paper_deltas).mean(0)

        deltas = [(anchor + state[0] - target) / 4 for state, target in zip(own, targets, strict=True)]
        for (shadow, velocity, previous), delta in zip(own, deltas, strict=True):
            eager_(shadow, velocity, previous, delta, peers=peers, lr=lr, beta=beta)
            assert torch.equal(previous, delta)
        nesterov_(anchor, momentum, mean, lr, beta)  # the mean of the round before has arrived meanwhile
        mean = torch.stack(deltas).mean(0)
        for one, (shadow, _, _) in zip(replicas, own, strict=True):
            scale = max(1.0, float(one.theta.abs().max()))
            torch.testing.assert_close((anchor + shadow).double(), one.theta, rtol=0, atol=1e-5 * scale)


def test_eager_with_one_peer_and_no_delay_to_hide_is_plain_nesterov() -> None:
    """M=1: the estimate is the fresh pseudo-gradient itself, as mean(t-1) and delta(t-1) cancel."""
    anchor, momentum = gaussian(30, 0), torch.zeros(30)
    reference, velocity = anchor.clone(), torch.zeros(30)
    shadow, own, previous, mean = (torch.zeros(30) for _ in range(4))
    for seed in range(1, 9):
        delta = gaussian(30, seed)
        eager_(shadow, own, previous, delta, peers=1, lr=0.7, beta=0.9)
        nesterov_(anchor, momentum, mean, 0.7, 0.9)
        nesterov_(reference, velocity, delta, 0.7, 0.9)
        torch.testing.assert_close(anchor + shadow, reference, rtol=1e-5, atol=1e-5)
        mean = delta


def test_vectors_of_different_lengths_are_our_bug() -> None:
    with pytest.raises(AssertionError, match="one shape"):
        eager_(torch.zeros(2), torch.zeros(2), torch.zeros(3), torch.zeros(2), peers=1, lr=1.0, beta=0.0)
    with pytest.raises(AssertionError, match="impossible"):
        eager_(*(torch.zeros(2) for _ in range(4)), peers=0, lr=1.0, beta=0.0)
