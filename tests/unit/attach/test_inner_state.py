"""A joiner's inner optimizer state: a donor's, checked before it is taken; or none, and then its
first round is left out.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diloco.attach import optimizer as inner
from diloco.attach.optimizer import layout_of, load_moments_, snapshot
from diloco.attach.swarm import Attachment
from diloco.config import compose
from diloco.sim.run import Simulated
from diloco.swarm.rpc import inner_state as donors
from diloco.swarm.rpc.inner_state import InnerState
from diloco.train.optimizer import inner_optimizer
from tests.support.extensions import LION
from tests.support.peers import events, json_lines
from tests.support.simulated import digests
from tests.support.simulated import simulated as simulated_with

LATE = ("local.peers=3", "budget.outer_steps=4", "sim.events=[join:3@6.5]")


def simulated(run_dir: Path, *overrides: str) -> Simulated:
    return simulated_with(run_dir, "sim.latency_s=0.01", *overrides)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(8.0).view(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


Make = Callable[[nn.Module], torch.optim.Optimizer]
MAKERS: dict[str, Make] = {
    "adamw": lambda m: inner_optimizer(m, compose(["inner.lr=0.05"]).inner),
    "muon": lambda m: inner_optimizer(m, compose(["inner.lr=0.05", "inner.optimizer=muon"]).inner),
    "lion": lambda m: inner_optimizer(m, compose(["inner.lr=0.05", "inner.optimizer=lion"]).inner),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=0.05, amsgrad=True),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, fused=True),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
}


def taken(optimizer: torch.optim.Optimizer) -> InnerState:
    state = snapshot(optimizer)
    assert state is not None
    return state


@pytest.mark.parametrize("name", MAKERS)
def test_a_state_that_was_taken_over_steps_as_the_donor_s(name: str, registers: None) -> None:
    exec(LION, {})
    donor, joiner = net(), net()
    there, here = MAKERS[name](donor), MAKERS[name](joiner)
    assert snapshot(there) is None, "before the first step"
    for _ in range(3):
        step(donor, there)
    state = taken(there)
    assert state.layout == layout_of(here)
    load_moments_(here, state)
    joiner.load_state_dict(donor.state_dict())
    state.values.fill_(math.nan)  # it is the optimizer's own now
    for _ in range(2):
        step(donor, there)
        step(joiner, here)
    assert all(map(torch.equal, donor.parameters(), joiner.parameters()))
    assert there.state_dict().keys() == here.state_dict().keys()


def test_what_keeps_no_state_or_is_frozen_is_left_out() -> None:
    plain = layout_of(torch.optim.SGD(net().parameters(), lr=0.1))
    assert plain is not None and plain.names == () and plain.num_steps == 0
    unknown = torch.optim.Adagrad(net().parameters(), lr=0.1)
    assert layout_of(unknown) is None
    model = net()
    model[0].requires_grad_(False)  # type: ignore[index]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    state = taken(optimizer)
    assert state.layout.numels == (12, 12, 2, 2) and state.steps == (1, 1)


@pytest.fixture
def p0_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Donors are asked in the order of their names."""
    members = lambda core, rng: sorted(m.peer for m in core.facts.members.all())  # noqa: E731
    monkeypatch.setattr(donors, "_donors", members)


@pytest.mark.usefixtures("p0_first")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_joiner_has_a_donor_s_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    history: dict[str, list[InnerState]] = {"p0": [], "p3": []}
    found: list[InnerState] = []
    after_step = Attachment._after_step

    def watched(attachment: Attachment) -> None:
        name = "" if attachment.node is None else attachment.node.node.core.facts.identity.name
        if name in history:
            history[name].append(taken(attachment._optimizer))
        after_step(attachment)

    def load(optimizer: torch.optim.Optimizer, state: InnerState, parameters: Any) -> None:
        load_moments_(optimizer, state, parameters)
        found.append(taken(optimizer))

    monkeypatch.setattr(Attachment, "_after_step", watched)
    monkeypatch.setattr(inner, "load_moments_", load)
    simulated(tmp_path, *LATE, f"inner.optimizer={optimizer}")
    [event], [state] = events(tmp_path, "inner_state"), found
    assert (event["peer"], event["from"], event["bytes"]) == ("p3", "p0", 4 * state.values.numel())
    assert 0 < event["seconds"] < 1
    same = [torch.equal(one.values, state.values) for one in history["p0"]]
    assert history["p0"][same.index(True)].steps == state.steps and sum(same) == 1
    assert set(state.steps) == {6}, "of the step that the donor had taken"
    assert set(history["p3"][0].steps) == {7}
    assert not events(tmp_path, "cold_start") and not events(tmp_path, "discarded")


def test_a_cold_joiner_s_first_round_weighs_nothing(tmp_path: Path) -> None:
    """Nobody waits for it: until it takes part, every anchor is the one of a run without it."""
    cold = ["swarm.inner_state=cold", "budget.outer_steps=6"]
    cold += ["sim.step_s=[1,1,1,1.7]", "sim.latency_s=0"]
    without = simulated(tmp_path / "without", *LATE, *cold, "sim.events=[join:3@6.5,crash:3@6.6]")
    outcome = simulated(tmp_path / "with", *LATE, *cold)
    [event] = events(tmp_path / "with", "cold_start")
    discarded, *_ = events(tmp_path / "with", "discarded")  # each fragment has its account
    assert (event["peer"], event["why"]) == ("p3", "swarm.inner_state=cold")
    assert discarded["tokens"] == outcome.summary.tokens.discarded == 4 * 64
    assert discarded["peer"] == "p3"
    assert 6.5 + 4 * 1.7 == pytest.approx(discarded["time"], abs=0.1)
    files = [json_lines(tmp_path / name / "metrics.jsonl") for name in ("without", "with")]
    lines = [[one for one in all_ if one["peer"] == "p0" and "anchors" in one] for all_ in files]
    alone, joined = ({one["version"]: one["anchors"] for one in own} for own in lines)
    same = [alone[version] == joined[version] for version in range(1, 7)]
    assert same == [True] * 3 + [False] * 3
    assert not events(tmp_path / "with", "missing") and not events(tmp_path / "with", "inner_state")
    assert len(digests(outcome)) == 1
    tokens = outcome.summary.tokens
    assert tokens.processed == tokens.applied + tokens.discarded
    assert outcome.virtual_s > without.virtual_s
