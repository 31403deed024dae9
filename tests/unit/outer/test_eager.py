"""Eager updates, against the paper's rules replica by replica."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.config import OuterConfig
from diloco.errors import ConfigError
from diloco.outer.fragments import partition
from diloco.outer.optimizer import OuterStep, eager_, nesterov_
from diloco.outer.replica import Replica

EAGER = {"method": "diloco", "sync_every": 4, "overlap": 4, "eager": True, "codec_up": "fp32", "codec_down": "fp32"}


def gaussian(numel: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(numel, generator=torch.Generator().manual_seed(seed))


class PaperReplica:
    """Eager updates (arXiv 2502.12996) as they stand there: parameters and momentum of its own, in float64.

    `own_part` is what the peer has in the mean of the round before: its pseudo-gradient over the peers of that round.
    """

    def __init__(self, theta: Tensor) -> None:
        self.theta = theta.double().clone()
        self.momentum = torch.zeros_like(self.theta)
        self.own_part = torch.zeros_like(self.theta)

    def step(self, delta: Tensor, previous_mean: Tensor, peers: int, lr: float, beta: float) -> None:
        estimate = previous_mean + delta / peers - self.own_part
        self.momentum = beta * self.momentum + estimate
        self.theta = self.theta - lr * (estimate + beta * self.momentum)
        self.own_part = delta / peers


@settings(deadline=None, max_examples=20)
@given(
    peers=st.lists(st.integers(1, 5), min_size=12, max_size=12) | st.integers(1, 5).map(lambda m: [m] * 12),
    lr=st.floats(0.1, 1.0),
    beta=st.floats(0.0, 0.95),
    seed=st.integers(0, 1000),
)
def test_peers_start_their_rounds_where_the_replicas_of_the_paper_are(
    peers: list[int], lr: float, beta: float, seed: int
) -> None:
    """Each peer's inner steps pull it a quarter of the way to a target of its own, from wherever it starts.

    So many of the five take part in each round. A peer that is away keeps its replica and learns nothing.
    """
    numel, everybody = 40, range(5)
    start, targets = gaussian(numel, seed), [gaussian(numel, seed + 1 + peer) for peer in everybody]
    replicas = [PaperReplica(start) for _ in everybody]
    paper_mean = torch.zeros(numel, dtype=torch.float64)
    anchor, momentum, mean = start.clone(), torch.zeros(numel), torch.zeros(numel)
    own, starts = [torch.zeros(numel) for _ in everybody], [start.clone() for _ in everybody]
    for present in peers:
        pulled = [float(peer < present) / 4 for peer in everybody]
        paper_deltas = [(one.theta - targets[peer].double()) * pulled[peer] for peer, one in enumerate(replicas)]
        for one, delta in zip(replicas, paper_deltas, strict=True):
            one.step(delta, paper_mean, present, lr, beta)
        paper_mean = torch.stack(paper_deltas).sum(0) / present

        deltas = [(starts[peer] - targets[peer]) * pulled[peer] for peer in everybody]
        nesterov_(anchor, momentum, mean, lr, beta)  # the mean of the round before has arrived meanwhile
        mean = torch.stack(deltas).sum(0) / present
        for peer in everybody:
            starts[peer].copy_(anchor)
            eager_(starts[peer], own[peer], deltas[peer], peers=present, lr=lr, beta=beta)
            scale = max(1.0, float(replicas[peer].theta.abs().max()))
            torch.testing.assert_close(starts[peer].double(), replicas[peer].theta, rtol=0, atol=1e-5 * scale)


def test_eager_with_one_peer_and_no_delay_to_hide_is_plain_nesterov() -> None:
    """M=1: the estimate is the fresh pseudo-gradient itself, as mean(t-1) and delta(t-1) cancel."""
    anchor, momentum = gaussian(30, 0), torch.zeros(30)
    reference, velocity = anchor.clone(), torch.zeros(30)
    own, mean = torch.zeros(30), torch.zeros(30)
    for seed in range(1, 9):
        delta = gaussian(30, seed)
        nesterov_(anchor, momentum, mean, 0.7, 0.9)
        nesterov_(reference, velocity, delta, 0.7, 0.9)
        start = anchor.clone()
        eager_(start, own, delta.clone(), peers=1, lr=0.7, beta=0.9)
        torch.testing.assert_close(start, reference, rtol=1e-5, atol=1e-5)
        mean = delta


def eager_replica(numel: int, **outer: object) -> Replica:
    return Replica({"w": torch.zeros(numel)}, partition({"w": numel}, 1), OuterConfig.parse({**EAGER, **outer}))


def test_no_offset_stays_when_most_peers_leave() -> None:
    """Six of eight leave after round 10. After round 20 this peer learns nothing more."""
    peer, learned = eager_replica(1000, lr=0.7, momentum=0.9), gaussian(1000, 0, 0.01)
    for round_ in range(60):
        if round_ < 20:
            peer.parameters["w"].sub_(learned)
        peer.load_late_(0, OuterStep(round_, 8 if round_ < 10 else 2))
    offset = peer.parameters["w"] - peer.anchors[0]
    assert float(offset.norm() / learned.norm()) < 0.05


def test_what_all_peers_do_ahead_is_the_next_outer_step_while_its_rates_change() -> None:
    """The momentum warms up, peers join one by one, and each number of peers has a learning rate of its own."""
    rates = {"lr_by_peers": {1: 0.9, 4: 0.3}, "momentum": 0.9, "momentum_warmup": 5}
    peers = [eager_replica(50, **rates)]
    peers[0].hold(0)
    under_way: list[Tensor] = []
    for version in range(10):
        if version in (3, 4, 7):
            newcomer = eager_replica(50, **rates)
            newcomer.anchors[0].copy_(peers[0].anchors[0])
            newcomer.load_local_()
            peers.append(newcomer)
        for index, peer in enumerate(peers):
            peer.parameters["w"].sub_(gaussian(50, 100 * version + index, 0.1))
            peer.capture(0)
        under_way = [peer.encode(0, 0).clone() for peer in peers]
        step = OuterStep(version, len(peers))
        for peer in peers:
            peer.release_capture(0)
            peer.load_late_(0, step)
        before = peers[0].anchors[0].clone()
        ahead = torch.stack([peer.parameters["w"] - before for peer in peers]).sum(0)
        update = torch.empty(peers[0].update_nbytes(0), dtype=torch.uint8)
        for payload in under_way:
            peers[0].held[0].fold(0, payload, 1.0)
        peers[0].held[0].merge_(step, update)
        for peer in peers[1:]:
            peer.apply_update_(0, update)
        torch.testing.assert_close(peers[0].anchors[0], before + ahead, rtol=0, atol=2e-6)


@pytest.mark.parametrize("forget", [lambda peer: peer.load_local_(), lambda peer: peer.forget_own(0)])
def test_a_peer_that_catches_up_or_comes_too_late_starts_anew(forget: object) -> None:
    peer, fresh = eager_replica(20), eager_replica(20)
    for version in range(5):
        peer.parameters["w"].sub_(gaussian(20, version))
        peer.load_late_(0, OuterStep(version, 2))
    forget(peer)  # type: ignore[operator]
    peer.load_local_()
    for one in (peer, fresh):
        one.parameters["w"].sub_(0.5)
        one.load_late_(0, OuterStep(5, 2))
    assert torch.equal(peer.parameters["w"], fresh.parameters["w"])


def test_vectors_of_different_lengths_are_our_bug() -> None:
    with pytest.raises(AssertionError, match="one shape"):
        eager_(torch.zeros(2), torch.zeros(3), torch.zeros(2), peers=1, lr=1.0, beta=0.0)
    with pytest.raises(AssertionError, match="impossible"):
        eager_(*(torch.zeros(2) for _ in range(3)), peers=0, lr=1.0, beta=0.0)


def test_eager_goes_with_nesterov_only() -> None:
    for optimizer in ("fedbuff", "delayed_nesterov"):
        with pytest.raises(ConfigError, match=f"outer.eager=true .*outer.optimizer={optimizer} .*set outer.optimizer"):
            OuterConfig.parse({**EAGER, "optimizer": optimizer})
