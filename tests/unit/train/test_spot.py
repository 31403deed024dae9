"""Contributions checked against data: what raises the loss is left out, and honest work never is."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco import data
from diloco import model as models
from diloco.config import OuterConfig, compose
from diloco.errors import ConfigError
from diloco.outer.fragments import partition
from diloco.outer.replica import Replica
from diloco.protocol.ledger import Units
from diloco.protocol.messages.bulk import Contribution
from diloco.protocol.offers import Close
from diloco.protocol.syncer import Syncer
from diloco.sim.run import Simulated
from diloco.swarm.conversations.units import LeasedData
from diloco.swarm.node.spot import BETA, SEQUENCES, Score, SpotChecks
from diloco.train.evaluate import loss_of
from tests.support.inner_states import said
from tests.support.simulated import digests, simulated
from tests.support.spots import checked

pytestmark = pytest.mark.slow

ME = "me"
NUMEL = 8192  # in two fragments
TARGET = torch.cat([torch.full((4096,), 1.0), torch.full((4096,), 2.0)])


class Version:
    """What a syncer has of the next version of a fragment of a quadratic bowl, and what it finds wrong with that."""

    def __init__(self, contributions: Mapping[str, float], fragment: int = 1, **outer: Any) -> None:
        """The contributions are this far from the anchor, which is at 0, to the bottom."""
        settings = OuterConfig(method="diloco", sync_every=1, fragments=2, **{"spot_check": 1.0, **outer})
        self.replica = Replica({"w": torch.zeros(NUMEL)}, partition({"w": NUMEL}, 2), settings)
        self.replica.hold(fragment)
        self.syncer = Syncer(fragment, 1, 0, settings)
        self.checks = SpotChecks(self.replica, "seed")
        self.checks.loss = self.loss
        self.notes: list[dict[str, Any]] = []
        self.tried: list[tuple[Tensor, Sequence[int]]] = []
        self.leased: Units | None = None
        self.protocol = SimpleNamespace(me=ME, accounts=SimpleNamespace(leased_to=lambda peer: self.leased))
        self.peers = sorted(contributions)
        for peer, part in contributions.items():
            header = Contribution(
                base_digest="0" * 64, manifest_hash="0" * 64, fragment=fragment, term=1, base_version=0, steps=1,
                tokens=1, units=[[0, 4], [10, 50]],
            )  # fmt: skip
            assert self.syncer.offer(peer, header).accepted
            payload = torch.empty(self.replica.payload_nbytes(fragment, 0), dtype=torch.uint8)
            self.replica.up.encode(-part * TARGET[fragment * 4096 :][:4096], payload)
            self.replica.held[fragment].take(0, peer, payload, 1.0)
            self.syncer.folded(peer)
            self.syncer.arrived(peer)

    def loss(self, parameters: Mapping[str, Tensor], numbers: Sequence[int]) -> list[float]:
        self.tried.append((parameters["w"].clone(), numbers))
        return [float((parameters["w"] - TARGET).square().mean())]

    def note(self, kind: str, **fields: Any) -> None:
        assert kind == "spot_check"
        self.notes.append(fields)

    @property
    def scores(self) -> dict[str, float]:
        return {note["peer"]: note["score"] for note in self.notes}

    def failing(self) -> list[str]:
        close = Close(self.syncer.fragment, 0, dict.fromkeys(self.peers, 1), ())
        held = self.replica.held[self.syncer.fragment]
        assert held.staged is not None
        judged = held.judge(*self.syncer.counted(self.peers))
        return asyncio.run(self.checks.failing(self, close, self.syncer, held.staged, judged))  # type: ignore[arg-type]


def test_the_score_is_what_a_part_of_the_contribution_gains() -> None:
    """With one fragment moved."""
    version = Version({"a": 1.0, "b": -1.0, ME: 1.0})
    assert version.failing() == ["b"]
    assert version.scores["a"] == pytest.approx(2.0 - 2.0 * (1 - BETA) ** 2, rel=1e-2)
    assert version.scores["b"] == pytest.approx(2.0 - 2.0 * (1 + BETA) ** 2, rel=1e-2)
    before, after = (parameters for parameters, _ in version.tried[:2])
    assert torch.equal(before, torch.zeros(NUMEL)) and torch.equal(after[:4096], torch.zeros(4096))
    assert all(torch.equal(parameters, before) for parameters, _ in version.tried[::2]), "each begins at the anchor"
    found = {"fragment": 1, "version": 1, "peer": "b", "data": "leased", "score": version.scores["b"], "error": 0.0}
    assert version.notes[1] == {**found, "left_out": True}


def test_a_contribution_fails_by_what_it_does_as_it_counts() -> None:
    version = Version({"a": 1.0, "b": 1.0, "c": 1.0, "d": 30.0, ME: 1.0})
    assert version.failing() == []
    clipped = pytest.approx(2.0 - 2.0 * (1 - 3 * BETA) ** 2, rel=1e-2)
    assert version.scores["d"] == clipped, "to three times the median"
    version = Version({"a": 1.0, "b": 1e18, ME: 1.0}, robust="trimmed_mean")
    version.checks.loss = lambda parameters, numbers: [float("nan" if float(parameters["w"].max()) > 3 else 1)]
    assert version.failing() == ["b"]
    version = Version({"a": -1.0, "b": 1.0, "c": -1.0, ME: 1.0})
    assert version.failing() == [] and not any(note["left_out"] for note in version.notes)
    assert [("half of the contributions fail" in note.get("why", "")) for note in version.notes] == [True, False, True]
    version = Version({"a": 1.0, ME: -1.0, "z": 1.0})
    assert version.failing() == [] and list(version.scores) == ["a", "z"]
    version = Version({"a": -1.0, ME: 1.0, "z": 1.0})
    version.checks.loss = None
    assert version.failing() == [] and not version.notes


def test_a_loss_that_rises_by_less_than_its_error_is_no_failure() -> None:
    before = [2.0, 2.0, 2.0, 2.0]
    unsure = Score.of(before, [2.3, 1.9, 2.1, 1.9])
    assert unsure.gain == pytest.approx(-0.05) and unsure.error == pytest.approx(0.0957, rel=1e-2)
    assert not unsure.fails and not Score.of(before, before).fails
    assert Score.of(before, [2.3, 2.1, 2.2, 2.0]).fails


def test_some_are_checked_and_all_once_one_of_them_fails() -> None:
    settings, everybody = {"spot_check": 0.25, "robust": "trimmed_mean"}, {f"p{i}": 1.0 for i in range(40)}
    honest = Version(everybody, **settings)
    assert honest.failing() == []
    chosen = list(honest.scores)
    assert 2 < len(chosen) < 20
    lying = Version(everybody | {chosen[0]: -1.0}, **settings)
    assert lying.failing() == [chosen[0]] and len(lying.notes) == 40
    other = Version(everybody, **settings)
    other.checks = SpotChecks(other.replica)
    other.checks.loss = other.loss
    found = []
    for _ in range(5):
        other.failing()
        found.append(list(other.scores))
        other.notes.clear()
    assert any(peers != chosen for peers in found), "the operating system's entropy"


def test_a_contribution_is_tried_on_units_that_it_names() -> None:
    version = Version({"a": 1.0, ME: 1.0})
    version.failing()
    (_, before), (_, after) = version.tried
    assert before == after == sorted(set(before)) and len(before) == SEQUENCES
    assert set(before) <= {*range(4), *range(10, 50)}


@pytest.mark.parametrize(("leased", "tried"), [([(2, 24)], [2, 3, *range(10, 24)]), ([(2, 23)], []), (None, [])])
def test_of_the_control_fragment_enough_must_be_leased(leased: Units | None, tried: list[int]) -> None:
    version = Version({"a": 1.0, ME: 1.0}, fragment=0)
    version.leased = leased
    version.failing()
    assert [numbers for _, numbers in version.tried] == [tried, tried]
    assert version.notes[0]["data"] == ("leased" if tried else "held-out")


def test_what_was_trained_on_is_neither_ahead_nor_settled() -> None:
    data = LeasedData()
    data.add([(0, 12)])
    data.take(4)
    sent = data.send()
    data.take(2)
    assert data.trained_on == [(0, 6)]
    data.drop(sent)
    assert data.trained_on == [(4, 6)]


def test_the_loss_is_that_of_the_given_parameters() -> None:
    config = compose(["experiment=smoke"])
    dataset = data.load(config.data, 0)
    holdout = dataset.holdout(8)
    model = models.build(config.model, 0, vocab_size=256, sequence_length=32)
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data.mul_(1.1)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    loss = loss_of(model, dataset, holdout)
    moved = {name: parameter.data for name, parameter in other.named_parameters()}
    found = dataset.sequences([5, 10**9])
    assert found is not None and torch.equal(found[0], next(iter(dataset.batches(6)))[5])
    with torch.no_grad():
        assert fmean(loss(moved, [])) == pytest.approx(float(models.loss(other.eval(), holdout)), rel=1e-5)
        assert loss(moved, [5, 10**9]) == pytest.approx([float(models.loss(other, row)) for row in found.split(1)])
        assert fmean(loss(before, [])) == pytest.approx(float(models.loss(copy.deepcopy(model), holdout)), rel=1e-5)
    assert loss_of(model, dataset, holdout, numbered=False)(moved, [5]) == loss(moved, [])
    assert model.training and all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_check_needs_contributions_that_are_judged_together() -> None:
    with pytest.raises(ConfigError, match=r"outer\.spot_check=0\.5 needs .* choose outer\.robust=clip"):
        compose(["outer.spot_check=0.5", "outer.robust=none"])
    with pytest.raises(ConfigError, match=r"outer\.spot_check=0\.5 needs .* choose outer\.quorum=null"):
        compose(["outer=async", "outer.spot_check=0.5"])
    ways = itertools.product(("auto", "none", "clip", "trimmed_mean", "centered_clip"), ("fp32", "int8"), (None, 2))
    for robust, codec_up, quorum in ways:
        settings = {"method": "diloco", "sync_every": 1, "robust": robust, "codec_up": codec_up, "quorum": quorum}
        if quorum and robust in ("trimmed_mean", "centered_clip"):
            continue
        possible = OuterConfig.parse(settings).judged_together
        with nullcontext() if possible else pytest.raises(ConfigError, match="spot_check"):
            OuterConfig.parse({**settings, "spot_check": 0.5})


def run(run_dir: Path, *overrides: str) -> Simulated:
    return simulated(run_dir, "local.peers=3", "outer.sync_every=6", "eval.every=0", *overrides)


@pytest.mark.parametrize("robust", ["clip", "trimmed_mean", "centered_clip"])
def test_an_honest_run_is_the_same_with_all_checked(tmp_path: Path, robust: str) -> None:
    rule = f"outer.robust={robust}"
    plain, all_checked = run(tmp_path / "a", rule), run(tmp_path / "b", rule, "outer.spot_check=1")
    assert digests(plain) == digests(all_checked) and len(digests(plain)) == 1
    found = checked(tmp_path / "b")
    assert len(found) == 2 * 2 * 2, "versions, fragments, others' contributions"
    assert not any(event["left_out"] for event in found)


def test_one_of_three_that_turns_around_is_left_out(tmp_path: Path) -> None:
    """Though three are not judged: by data, or because it opposes the syncer's own."""
    outcome = run(tmp_path, "outer.fragments=1", "outer.spot_check=1", "sim.attack=[flip:0x1]")
    found = [event["subject"] for event in checked(tmp_path) if event["left_out"]]
    found += [peer for event in said(tmp_path, "left_out") for peer in event["peers"]]
    assert found == ["p0"] * 2
    tokens = outcome.summary.tokens
    assert tokens.applied == 2 * 2 * 6 * 2 * 32 and tokens.discarded == tokens.applied / 2
