"""A backup knows the outer state of a fragment from its updates alone; when the syncer dies, it goes on with it."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.outer.fragments import partition
from diloco.outer.optimizer import OPTIMIZERS, OuterStep
from diloco.outer.replica import Replica
from diloco.outer.state import OuterState
from tests.support.outer import merge, outer, relative_error
from tests.support.peers import json_lines
from tests.support.simulated import simulated
from tests.support.slow import slow

NUMEL = 4096
CODECS = ["fp32", "fp16", "int8", "e3m0"]
DELAY = 4
QUORUM = {"quorum": 1, "staleness_limit": 9}


class Rounds:
    """A syncer and a backup, and contributions that point the same way for a while, to matrices and norms."""

    def __init__(self, codec: str, **settings: object) -> None:
        plan = outer(**{"sync_every": 4, "codec_up": "fp32", "codec_down": codec, **QUORUM, **settings})
        self.generator = torch.Generator().manual_seed(3)
        start = 0.02 * self.noise()
        start[:400] += 1.0
        self.syncer, self.backup = (Replica({"w": start}, partition({"w": NUMEL}, 1), plan) for _ in range(2))
        self.syncer.hold(0)
        self.backup.stand_by(0)
        self.drift = self.noise()

    def noise(self) -> Tensor:
        return torch.randn(NUMEL, generator=self.generator)

    def deltas(self, contributions: int) -> list[Tensor]:
        """The next contributions to one version."""
        self.drift = 0.8 * self.drift + 0.6 * self.noise()
        return [0.01 * (self.drift + self.noise()) for _ in range(contributions)]

    def publish(self, contributions: int = 3) -> tuple[Tensor, OuterStep]:
        """The update of the next version, and its step."""
        return merged(self.syncer, self.deltas(contributions))

    def versions(self, number: int) -> None:
        """The syncer makes so many versions, which the backup follows."""
        for _ in range(number):
            update, step = self.publish()
            assert self.backup.apply_update_(0, update, step) == self.syncer.digest(0)


def merged(syncer: Replica, deltas: list[Tensor]) -> tuple[Tensor, OuterStep]:
    held = syncer.held[0]
    for delta in deltas:
        held.fold(0, delta.view(torch.uint8), 1.0)
    step = held.state.step(len(deltas), DELAY)
    return merge(held, step)[0], step


def assert_same(one: OuterState, other: OuterState, bound: float = 1e-6) -> None:
    """The same version, place in the window, momentum and window."""
    assert (one.version, one.pushes) == (other.version, other.pushes)
    for ours, theirs in zip(one.vectors, other.vectors, strict=True):
        assert relative_error(theirs, ours) <= bound if theirs.any() else not ours.any()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_backup_knows_the_state_whatever_the_codec_loses(optimizer: str, codec: str) -> None:
    rounds = Rounds(codec, optimizer=optimizer, momentum_warmup=5, lr_by_peers={1: 0.4, 4: 0.8})
    for _ in range(15):
        rounds.versions(1)
        assert_same(rounds.backup.standby[0], rounds.syncer.held[0].state)
    rounds.backup.hold(0, 15)
    assert_same(rounds.backup.held[0].state, rounds.syncer.held[0].state)
    assert not rounds.backup.standby
    assert torch.equal(rounds.backup.held[0].master, rounds.syncer.anchors[0])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_the_codec_loses_of_a_movement_is_not_missing(optimizer: str) -> None:
    """What the encoding loses is published later: in the long run none of it is missing."""
    exact, lossy = (Rounds(codec, optimizer=optimizer, momentum=0.5) for codec in ("fp32", "int8"))
    start = exact.syncer.anchors[0].clone()
    for rounds in (exact, lossy):
        rounds.versions(20)
        for _ in range(40):
            merged(rounds.syncer, [torch.zeros(NUMEL)] * DELAY)
    moved = [rounds.syncer.anchors[0] - start for rounds in (exact, lossy)]
    assert relative_error(moved[0], moved[1]) < 2e-3


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("how", ["handed over", "taken over"])
def test_a_successor_goes_on_in_the_middle_of_a_window(optimizer: str, how: str) -> None:
    """Eight contributions move the master as far, whoever was syncer of which."""
    undisturbed, rounds = (Rounds("fp32", optimizer=optimizer) for _ in range(2))
    start = rounds.syncer.anchors[0].clone()
    for version in range(8):
        merged(undisturbed.syncer, undisturbed.deltas(1))
        if version == 3:
            before = rounds.syncer.held[0]
            given = [before.master.clone(), before.state.clone()] if how == "handed over" else []
            rounds.backup.hold(0, version, *given)
            rounds.syncer = rounds.backup
        update, step = merged(rounds.syncer, rounds.deltas(1))
        if version < 3:
            rounds.backup.apply_update_(0, update, step)
    ours, theirs = (one.syncer.held[0] for one in (rounds, undisturbed))
    assert relative_error(theirs.master - start, ours.master - start) < 1e-4
    assert_same(ours.state, theirs.state, 1e-4)


def test_a_successor_follows_a_last_version_of_its_predecessor() -> None:
    rounds = Rounds("e3m0", optimizer="delayed_nesterov")
    rounds.versions(6)
    rounds.backup.hold(0, 6)
    update, step = rounds.publish()
    rounds.backup.apply_update_(0, update, step)
    rounds.backup.held[0].restart(7)
    assert_same(rounds.backup.held[0].state, rounds.syncer.held[0].state)


def test_a_backup_that_missed_an_update_keeps_only_its_momentum() -> None:
    rounds = Rounds("int8", optimizer="delayed_nesterov")
    rounds.versions(3)
    known = rounds.backup.standby[0].clone()
    assert known.version == 3 and known.pushes == 1
    rounds.publish()
    rounds.backup.apply_update_(0, *rounds.publish())
    assert_same(rounds.backup.standby[0], known, 0.0)
    rounds.backup.hold(0, 5)
    state = rounds.backup.held[0].state
    assert torch.equal(state.momentum, known.momentum) and not state.vectors[1].any()
    assert (state.version, state.pushes) == (5, 0)


@pytest.mark.parametrize(
    ("event", "mode"),
    [
        slow("crash:1@9.5,join:4@11,crash:2@21.5", ["budget.outer_steps=8"]),
        ("crash:1@9.5", ["outer=async"]),
        slow("crash:1@9.5", ["outer=decoupled", "outer.codec_down=fp16"]),
    ],
    ids=["all wait, two deaths", "async", "decoupled, fp16"],
)
def test_a_syncers_death_costs_none_of_the_momentum(
    event: str, mode: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: dict[int, list[tuple[Replica, OuterState]]] = {}
    hold = Replica.hold

    def spy(self: Replica, fragment: int, version: int = 0, *state: Any) -> None:
        hold(self, fragment, version, *state)
        held.setdefault(fragment, []).append((self, self.held[fragment].state.clone()))

    monkeypatch.setattr(Replica, "hold", spy)
    small = ["outer.fragments=4", "outer.lr=0.1", "outer.momentum=0.5", "budget.outer_steps=6", "eval.every=0"]
    tiny = ["model.config.num_hidden_layers=1", "data.sequence_length=8", "inner.batch_size=1", "eval.sequences=1"]
    simulated(tmp_path, *small, *tiny, *mode, f"sim.events=[{event}]")
    takeovers = [event for event in json_lines(tmp_path / "events.jsonl") if event["kind"] == "takeover"]
    assert takeovers and {event["momentum"] for event in takeovers} == {"kept"}
    for heirs in held.values():
        for (dead, _), (_, inherited) in pairwise(heirs):
            fragment = next(index for index, state in dead.held.items() if held[index] is heirs)
            assert_same(inherited, dead.held[fragment].state)
