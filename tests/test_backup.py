"""A backup knows the outer momentum of a fragment from its updates alone; when the syncer dies, it goes on with it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from swarm_helpers import json_lines
from torch import Tensor

from diloco.config import OuterConfig, compose
from diloco.outer.fragments import partition
from diloco.outer.optimizer import OuterStep, followed_, nesterov_
from diloco.outer.replica import Replica
from diloco.sim.run import simulate

NUMEL = 4096


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize(("lr", "beta"), [(0.7, 0.9), (0.4, 0.5), (1.0, 0.0)])
def test_the_momentum_follows_from_how_far_a_step_moved_the_parameters(lr: float, beta: float) -> None:
    generator = torch.Generator().manual_seed(1)
    master, momentum = torch.randn(NUMEL, generator=generator).double(), torch.zeros(NUMEL).double()
    followed = momentum.clone()
    for _ in range(10):
        before = master.clone()
        nesterov_(master, momentum, torch.randn(NUMEL, generator=generator).double(), lr, beta)
        followed_(followed, master - before, lr, beta)
    assert distance(followed, momentum) < 1e-12


def test_an_unknown_momentum_is_soon_right() -> None:
    generator = torch.Generator().manual_seed(2)
    master, momentum, followed = torch.zeros(NUMEL), torch.randn(NUMEL, generator=generator), torch.zeros(NUMEL)
    distances = []
    for _ in range(12):
        before = master.clone()
        nesterov_(master, momentum, torch.randn(NUMEL, generator=generator), 0.7, 0.9)
        followed_(followed, master - before, 0.7, 0.9)
        distances.append(float((followed - momentum).norm()))
    assert distances[-1] < 1e-3 * distances[0]


def rounds(codec: str, number: int, **settings: object) -> tuple[Replica, Replica]:
    """A syncer and the backup of its fragment after some rounds of steps that point the same way for a while."""
    outer = OuterConfig.parse(
        {"method": "diloco", "sync_every": 4, "codec_up": "fp32", "codec_down": codec, **settings}
    )
    syncer, backup = (Replica({"w": torch.ones(NUMEL)}, partition({"w": NUMEL}, 1), outer) for _ in range(2))
    syncer.hold(0)
    backup.stand_by(0)
    generator = torch.Generator().manual_seed(3)
    drift = torch.randn(NUMEL, generator=generator)
    for version in range(number):
        drift = 0.8 * drift + 0.6 * torch.randn(NUMEL, generator=generator)
        syncer.parameters["w"].copy_(syncer.anchors[0] - 0.01 * drift)
        syncer.held[0].fold(0, syncer.encode(0, 0), 1.0)
        update, step = torch.empty(syncer.update_nbytes(0), dtype=torch.uint8), OuterStep(version, 2)
        syncer.held[0].merge_(step, update)
        assert backup.apply_update_(0, update, step) == syncer.digest(0)
    return syncer, backup


@pytest.mark.parametrize(("codec", "bound"), [("fp32", 1e-4), ("int8", 0.0125), ("e3m0", 0.2)])
def test_a_backup_knows_the_syncers_momentum_within_the_loss_of_the_codec(codec: str, bound: float) -> None:
    syncer, backup = rounds(codec, 20, momentum_warmup=5, lr_by_peers={1: 0.4, 4: 0.8})
    assert distance(backup.standby[0].momentum, syncer.held[0].momentum) < bound
    backup.hold(0)
    assert distance(backup.held[0].momentum, syncer.held[0].momentum) < bound and not backup.standby
    assert torch.equal(backup.held[0].master, syncer.anchors[0])


def test_a_successor_follows_a_last_version_of_its_predecessor() -> None:
    syncer, backup = rounds("int8", 6)
    backup.hold(0)
    update = torch.empty(syncer.update_nbytes(0), dtype=torch.uint8)
    syncer.parameters["w"].copy_(syncer.anchors[0] - 0.01)
    syncer.held[0].fold(0, syncer.encode(0, 0), 1.0)
    syncer.held[0].merge_(OuterStep(6, 2), update)
    backup.apply_update_(0, update, OuterStep(6, 2))
    assert distance(backup.held[0].momentum, syncer.held[0].momentum) < 0.0125


def test_a_backup_that_missed_an_update_stays_at_its_version() -> None:
    syncer, backup = rounds("int8", 3)
    known, version = backup.standby[0].momentum.clone(), backup.standby[0].version
    assert version == 3
    update = torch.empty(syncer.update_nbytes(0), dtype=torch.uint8)
    syncer.held[0].fold(0, syncer.encode(0, 0), 1.0)
    syncer.held[0].merge_(OuterStep(4, 1), update)
    backup.apply_update_(0, update, OuterStep(4, 1))
    assert torch.equal(backup.standby[0].momentum, known) and backup.standby[0].version == version


@pytest.mark.parametrize("event", ["crash:1@17.5", "crash:1@9.5,join:4@11,crash:2@21.5"])
def test_a_syncers_death_costs_none_of_the_momentum(
    event: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: dict[int, list[tuple[Replica, Tensor]]] = {}
    hold = Replica.hold

    def spy(self: Replica, fragment: int, master: Tensor | None = None, momentum: Tensor | None = None) -> None:
        hold(self, fragment, master, momentum)
        held.setdefault(fragment, []).append((self, self.held[fragment].momentum.clone()))

    monkeypatch.setattr(Replica, "hold", spy)
    small = ["experiment=smoke", "local.peers=4", "budget.outer_steps=8", "outer.sync_every=4", "outer.fragments=4"]
    simulate(compose([*small, f"run.dir={tmp_path}", f"sim.events=[{event}]"]), lambda message: None)
    takeovers = [event for event in json_lines(tmp_path / "events.jsonl") if event["kind"] == "takeover"]
    assert takeovers and {event["momentum"] for event in takeovers} == {"kept"}
    for heirs in held.values():
        for (dead, _), (_, inherited) in pairwise(heirs):
            fragment = next(index for index, state in dead.held.items() if held[index] is heirs)
            assert distance(inherited, dead.held[fragment].momentum) < 0.0125
