"""Updates that arrive a round late, and eager ones: against a direct simulation of the papers' rules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diloco.config import OuterConfig
from diloco.outer.fragments import partition
from diloco.outer.optimizer import OuterStep
from diloco.outer.replica import Replica

LR, BETA, PEERS, ROUNDS = 0.5, 0.5, 3, 6
SETTINGS = {"method": "diloco", "sync_every": 4, "overlap": 4, "lr": LR, "momentum": BETA, "momentum_warmup": 0}


def inner(local: Tensor, peer: int, round_: int) -> Tensor:
    """What a peer's inner steps make of its parameters: they depend on where it starts."""
    return 0.8 * local + 0.1 * (peer + 1) + 0.01 * round_


def simulated(eager: bool) -> list[Tensor]:
    """Every peer's parameters at the start of each round, by the rules of arXiv 2502.12996: replicas in full."""
    locals_ = [torch.ones(3, dtype=torch.float64) for _ in range(PEERS)]
    momenta = [torch.zeros(3, dtype=torch.float64) for _ in range(PEERS)]
    before: list[Tensor] | None = None
    for round_ in range(ROUNDS):
        deltas = [local - inner(local, peer, round_) for peer, local in enumerate(locals_)]
        for peer in range(PEERS):
            late = torch.zeros(3, dtype=torch.float64) if before is None else sum(before) / PEERS
            own = (deltas[peer] - (before[peer] if before is not None else 0)) / PEERS if eager else 0
            estimate = late + own
            momenta[peer] = BETA * momenta[peer] + estimate
            locals_[peer] = locals_[peer] - LR * (estimate + BETA * momenta[peer])
        before = deltas
    return locals_


@pytest.mark.parametrize("eager", [False, True])
def test_peers_start_their_rounds_where_the_paper_says(eager: bool) -> None:
    settings = OuterConfig.parse({**SETTINGS, "eager": eager, "codec_up": "fp32", "codec_down": "fp32"})
    peers = []
    for _ in range(PEERS):
        parameters = {"w": torch.ones(3)}
        peers.append(Replica(parameters, partition({"w": 3}, 1), settings))
    peers[0].hold(0)
    under_way: list[Tensor] | None = None
    for round_ in range(ROUNDS):
        for index, peer in enumerate(peers):
            peer.parameters["w"].copy_(inner(peer.parameters["w"], index, round_))
        if under_way is not None:  # what was sent a round ago arrives
            update = torch.empty(peers[0].update_nbytes(0), dtype=torch.uint8)
            for payload in under_way:
                peers[0].held[0].fold(0, payload, 1.0)
            peers[0].held[0].merge_(OuterStep(round_ - 1, PEERS), update)
            for peer in peers[1:]:
                peer.apply_update_(0, update)
        for peer in peers:
            peer.capture(0)
            peer.load_late_(0, OuterStep(round_, PEERS))
        under_way = [peer.encode(0, 0).clone() for peer in peers]
        for peer in peers:
            peer.release_capture(0)
    for peer, expected in zip(peers, simulated(eager), strict=True):
        torch.testing.assert_close(peer.parameters["w"].double(), expected, rtol=0, atol=1e-5)
    assert len({peer.digest(0) for peer in peers}) == 1, "anchors stay the same; only the start of a round is personal"
