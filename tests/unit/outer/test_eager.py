"""Updates that arrive a round late, and eager ones, against the papers' rules replica by replica."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.errors import ConfigError
from diloco.outer.fragments import partition
from diloco.outer.optimizer import OuterStep, eager_
from diloco.outer.replica import Replica
from tests.support.outer import EXACT, gaussian, merge, outer, syncer

EAGER = {"sync_every": 4, "overlap": 4, "eager": True, **EXACT}


def replica(numel: int, **settings: object) -> Replica:
    return Replica({"w": torch.zeros(numel)}, partition({"w": numel}, 1), outer(**{**EAGER, **settings}))


def captured(peer: Replica, step: OuterStep) -> Tensor:
    """What the peer sends of the round that ends; it starts the next one."""
    peer.capture(0)
    payload = peer.encode(0, 0).clone()
    peer.load_late_(0, step)
    peer.release_capture(0)
    return payload


def arrive(peers: list[Replica], payloads: list[Tensor], step: OuterStep) -> None:
    """The first peer merges these contributions, and all move their anchors."""
    for payload in payloads:
        peers[0].held[0].fold(0, payload, 1.0)
    update, digest, _ = merge(peers[0].held[0], step)
    assert all(peer.apply_update_(0, update) == digest for peer in peers[1:])


class PaperReplica:
    """Eager updates (arXiv 2502.12996) as they stand there: parameters and momentum of its own, in float64.

    `own_part` is what the peer has in the mean of the round before: its pseudo-gradient over the peers of that round.
    Without `eager` it steps by that mean alone.
    """

    def __init__(self, theta: Tensor, eager: bool) -> None:
        self.theta, self.eager = theta.double().clone(), eager
        self.momentum = torch.zeros_like(self.theta)
        self.own_part = torch.zeros_like(self.theta)

    def step(self, delta: Tensor, previous_mean: Tensor, peers: int, lr: float, beta: float) -> None:
        estimate = previous_mean + self.eager * (delta / peers - self.own_part)
        self.momentum = beta * self.momentum + estimate
        self.theta = self.theta - lr * (estimate + beta * self.momentum)
        self.own_part = delta / peers


@settings(max_examples=15)
@given(
    peers=st.lists(st.integers(1, 5), min_size=12, max_size=12) | st.integers(1, 5).map(lambda m: [m] * 12),
    lr=st.floats(0.1, 1.0),
    beta=st.floats(0.0, 0.95),
    seed=st.integers(0, 1000),
)
@pytest.mark.parametrize("eager", [False, True])
def test_rounds_start_where_the_replicas_of_the_paper_are(
    eager: bool, peers: list[int], lr: float, beta: float, seed: int
) -> None:
    """Each peer's inner steps pull it a quarter of the way to a target of its own, from wherever it starts.

    So many of the five take part in each round. A peer that is away keeps its replica and learns nothing.
    """
    numel, everybody = 40, range(5)
    start, targets = gaussian(numel, seed), [gaussian(numel, seed + 1 + peer) for peer in everybody]
    papers, mean = [PaperReplica(start, eager) for _ in everybody], torch.zeros(numel, dtype=torch.float64)
    plan = outer(**{**EAGER, "eager": eager}, lr=lr, momentum=beta, momentum_warmup=0, robust="none")
    ours = [syncer({"w": start.clone()}, plan) for _ in everybody]
    under_way: list[Tensor] = []
    for round_, present in enumerate(peers):
        pulled = [float(peer < present) / 4 for peer in everybody]
        deltas = [(one.theta - targets[peer].double()) * pulled[peer] for peer, one in enumerate(papers)]
        for one, delta in zip(papers, deltas, strict=True):
            one.step(delta, mean, present, lr, beta)
        mean = torch.stack(deltas).sum(0) / present

        for peer, one in enumerate(ours):
            one.parameters["w"].lerp_(targets[peer], pulled[peer])
        if under_way:  # what was sent a round ago arrives
            arrive(ours, under_way, OuterStep(round_ - 1, len(under_way)))
        under_way = [captured(one, OuterStep(round_, present)) for one in ours][:present]
        for one, paper in zip(ours, papers, strict=True):
            scale = max(1.0, float(paper.theta.abs().max()))
            torch.testing.assert_close(one.parameters["w"].double(), paper.theta, rtol=0, atol=1e-5 * scale)


def test_no_offset_stays_when_most_peers_leave() -> None:
    """Six of eight leave after round 10. After round 20 this peer learns nothing more."""
    peer, learned = replica(1000, lr=0.7, momentum=0.9), gaussian(1000, 0, 0.01)
    for round_ in range(60):
        if round_ < 20:
            peer.parameters["w"].sub_(learned)
        peer.load_late_(0, OuterStep(round_, 8 if round_ < 10 else 2))
    offset = peer.parameters["w"] - peer.anchors[0]
    assert float(offset.norm() / learned.norm()) < 0.05


def test_what_all_peers_do_ahead_is_the_next_outer_step() -> None:
    """The momentum warms up, peers join one by one, and each number of peers has a learning rate of its own."""
    rates = {"lr_by_peers": {1: 0.9, 4: 0.3}, "momentum": 0.9, "momentum_warmup": 5}
    peers = [replica(50, **rates)]
    peers[0].hold(0)
    for version in range(10):
        if version in (3, 4, 7):
            newcomer = replica(50, **rates)
            newcomer.anchors[0].copy_(peers[0].anchors[0])
            newcomer.load_local_()
            peers.append(newcomer)
        for index, peer in enumerate(peers):
            peer.parameters["w"].sub_(gaussian(50, 100 * version + index, 0.1))
        step, before = OuterStep(version, len(peers)), peers[0].anchors[0].clone()
        payloads = [captured(peer, step) for peer in peers]
        ahead = torch.stack([peer.parameters["w"] - before for peer in peers]).sum(0)
        arrive(peers, payloads, step)
        torch.testing.assert_close(peers[0].anchors[0], before + ahead, rtol=0, atol=2e-6)


@pytest.mark.parametrize("forget", [lambda peer: peer.load_local_(), lambda peer: peer.forget_own(0)])
def test_a_peer_that_catches_up_or_comes_too_late_starts_anew(forget: object) -> None:
    peer, fresh = replica(20), replica(20)
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


@pytest.mark.parametrize("optimizer", ["fedbuff", "delayed_nesterov"])
def test_eager_goes_with_nesterov_only(optimizer: str) -> None:
    with pytest.raises(ConfigError, match=f"outer.eager=true .*outer.optimizer={optimizer} .*set outer.optimizer"):
        outer(**EAGER, optimizer=optimizer)
