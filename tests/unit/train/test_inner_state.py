"""A joiner's inner optimizer state: a donor's, checked before it is taken; or none, and then its first round is left
out.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco.config import compose
from diloco.errors import PayloadError
from diloco.outer.fragments import CHUNK
from diloco.protocol.messages.bulk import InnerHeader
from diloco.protocol.messages.control import Status
from diloco.protocol.states import State
from diloco.sim.run import Simulated, simulate
from diloco.swarm.conversations import inner_state
from diloco.swarm.conversations.inner_state import InnerDonor, InnerState, fetch_inner, send_inner
from diloco.swarm.wire.streams import Stream
from diloco.train import attachment as attachment_module
from diloco.train import inner
from diloco.train.api import Attachment
from diloco.train.inner import (
    InnerStart,
    bound_moments_,
    inner_optimizer,
    layout_of,
    load_moments_,
    snapshot,
)
from diloco.train.island import Island
from tests.support.inner_states import anchors, said
from tests.support.peers import json_lines

SMALL = ("experiment=smoke", "outer.sync_every=4", "sim.latency_s=0.01")
LATE = ("local.peers=3", "budget.outer_steps=4", "sim.events=[join:3@6.5]")


def simulated(run_dir: Path, *overrides: str) -> Simulated:
    return simulate(compose([*SMALL, f"run.dir={run_dir}", *overrides]), lambda message: None)


# -- the optimizer's side ---------------------------------------------------------------------------------------------


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
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=0.05, amsgrad=True),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.05, fused=True),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_state_that_was_taken_over_steps_as_the_donor_s_to_the_bit(name: str) -> None:
    donor, joiner = net(), net()
    there, here = MAKERS[name](donor), MAKERS[name](joiner)
    assert snapshot(there) is None, "before the first step"
    for _ in range(3):
        step(donor, there)
    state = snapshot(there)
    assert state is not None and state.layout == layout_of(here)
    load_moments_(here, state)
    joiner.load_state_dict(donor.state_dict())
    state.values.fill_(math.nan)  # it is the optimizer's own now
    for _ in range(2):
        step(donor, there)
        step(joiner, here)
    for one, other in zip(donor.parameters(), joiner.parameters(), strict=True):
        assert torch.equal(one, other)
    assert there.state_dict().keys() == here.state_dict().keys()


def test_what_keeps_no_state_has_none_and_what_is_unknown_has_no_layout() -> None:
    plain = layout_of(torch.optim.SGD(net().parameters(), lr=0.1))
    assert plain is not None and plain.names == () and plain.num_steps == 0
    assert layout_of(torch.optim.Adagrad(net().parameters(), lr=0.1)) is None


def test_frozen_parameters_are_left_out() -> None:
    model = net()
    model[0].requires_grad_(False)  # type: ignore[index]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    state = snapshot(optimizer)
    assert state is not None and state.layout.numels == (12, 12, 2, 2) and state.steps == (1, 1)


def test_every_rank_of_an_island_has_what_its_first_was_given() -> None:
    """Rank 0's figures and tensors come by broadcast."""
    donor = net()
    there = MAKERS["adamw"](donor)
    step(donor, there)
    state = snapshot(there)
    assert state is not None

    class Ranks:
        def agree(self, values: Sequence[float]) -> list[float]:
            assert state is not None and len(values) == len(state.steps)
            return list(map(float, state.steps))

        def share_(self, tensors: Iterable[Tensor]) -> None:
            assert state is not None
            [values] = tensors
            values.copy_(state.values)

    optimizer = MAKERS["adamw"](net())
    InnerStart(optimizer, Ranks(), lambda kind, fields: None).take_over_(None)  # type: ignore[arg-type]
    taken = snapshot(optimizer)
    assert taken is not None and taken.steps == state.steps and torch.equal(taken.values, state.values)


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.5, 0.5), (0.0, 0.9)])
def test_first_moments_that_no_adam_has_are_clamped_and_honest_ones_stay(betas: tuple[float, float]) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=betas)
    generator = torch.Generator().manual_seed(0)
    for number in range(50):
        for parameter in model.parameters():
            scale = 1e3 if number % 17 == 0 else 1.0  # a spike moves the first moment most
            parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        honest = snapshot(optimizer)
        assert honest is not None
        kept = honest.values.clone()
        bound_moments_(optimizer, honest)
        assert torch.equal(honest.values, kept)
    joiner = net()
    fresh = torch.optim.AdamW(joiner.parameters(), lr=1e-3, betas=betas)
    before = [parameter.detach().clone() for parameter in joiner.parameters()]
    tensors = torch.split(honest.values, list(honest.layout.numels))
    for name, values in zip(honest.layout.names, tensors, strict=True):
        values.fill_(0.0 if name.endswith("_sq") else 1e6)
    bound_moments_(fresh, honest)
    load_moments_(fresh, honest)
    for parameter in joiner.parameters():
        parameter.grad = torch.ones_like(parameter)
    fresh.step()
    moved = max(float((now - then).detach().abs().max()) for now, then in zip(joiner.parameters(), before, strict=True))
    assert moved < 0.02, "one step, at a learning rate of 0.001"


# -- whom a joiner asks -----------------------------------------------------------------------------------------------


def member(peer: str, state: State, pace: float, trains: bool = True) -> Any:
    return SimpleNamespace(peer=peer, trains=trains, status=Status(state=state, versions=[0], steps_per_s=pace))


@pytest.mark.parametrize("seed", range(8))
def test_three_that_train_are_asked_whatever_pace_they_claim_and_then_nobody(seed: int) -> None:
    notes: list[tuple[str, dict[str, object]]] = []
    asked: list[str] = []
    members = [
        member("slow", "training", 0.5), member("host", "ready", 0.0, trains=False), member("new", "ready", 0.0),
        member("gone", "leaving", 9.0), member("fast", "exchanging", 3.0), member("begun", "starting", 9.0),
        member("other", "training", 1.0), member("liar", "training", 1e6),
    ]  # fmt: skip

    @asynccontextmanager
    async def open_(donor: str) -> AsyncIterator[Stream]:
        asked.append(donor)
        raise ConnectionResetError(donor)
        yield

    context = SimpleNamespace(
        open=open_,
        protocol=SimpleNamespace(members=SimpleNamespace(all=lambda: members), manifest_hash="0" * 64),
        now=lambda: 0.0,
        note=lambda kind, **fields: notes.append((kind, fields)),
        replica=SimpleNamespace(rng=Random(seed)),
    )
    layout = layout_of(MAKERS["adamw"](net()))
    assert layout is not None
    assert asyncio.run(fetch_inner(context, layout)) is None  # type: ignore[arg-type]
    assert len(asked) == 3 and set(asked) <= {"slow", "fast", "other", "liar"}
    first = [Random(each).sample(["fast", "liar", "other", "slow"], 4)[0] for each in range(8)]
    assert len(set(first)) > 2, "the draw decides"
    assert notes == [("inner_state_failed", {"donor": donor, "why": donor}) for donor in asked]


def test_those_who_read_at_the_same_time_share_a_snapshot() -> None:
    made: list[int] = []

    def make() -> InnerState | None:
        model = net()
        optimizer = MAKERS["adamw"](model)
        step(model, optimizer)
        made.append(1)
        return snapshot(optimizer)

    async def scene() -> None:
        shared = InnerDonor(make)
        one, two = await asyncio.gather(shared.get(), shared.get())
        assert one is two and len(made) == 1
        del one, two
        for _ in range(1000):  # a worker thread lets go of what it was given a moment later
            if shared._kept is None or shared._kept() is None:
                break
            await asyncio.sleep(0.001)
        await shared.get()
        assert len(made) == 2
        with pytest.raises(PayloadError, match="no inner optimizer state is here"):
            await InnerDonor(lambda: None).get()

    asyncio.run(scene())


# -- a run with a joiner ----------------------------------------------------------------------------------------------


@pytest.fixture
def p0_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Donors are asked in the order of their names."""
    monkeypatch.setattr(inner_state, "_donors", lambda protocol, rng: sorted(m.peer for m in protocol.members.all()))


@pytest.mark.usefixtures("p0_first")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_joiner_begins_with_the_moments_of_a_donor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    history: list[InnerState] = []
    taken: list[InnerState] = []
    after_step = Attachment._after_step

    def watched(attachment: Attachment) -> None:
        if attachment.node is not None and attachment.node.protocol.name == "p0":
            history.append(snapshot(attachment._optimizer))  # type: ignore[arg-type]
        after_step(attachment)

    def load(optimizer: torch.optim.Optimizer, state: InnerState) -> None:
        load_moments_(optimizer, state)
        taken.append(snapshot(optimizer))  # type: ignore[arg-type]

    monkeypatch.setattr(Attachment, "_after_step", watched)
    monkeypatch.setattr(inner, "load_moments_", load)
    simulated(tmp_path, *LATE, f"inner.optimizer={optimizer}")
    [event] = said(tmp_path, "inner_state")
    [state] = taken
    assert (event["peer"], event["from"], event["bytes"]) == ("p3", "p0", 4 * state.values.numel())
    assert 0 < event["seconds"] < 1
    same = [one for one in history if torch.equal(one.values, state.values) and one.steps == state.steps]
    assert len(same) == 1 and set(state.steps) == {6}, "of the step that the donor had taken"
    assert not said(tmp_path, "cold_start") and not said(tmp_path, "discarded")


def test_a_joiner_s_first_round_is_better_than_with_empty_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over 3 seeds, 3 learning rates and joins at versions 4 and 12, 14 of 18 were; by 0.06 on average."""
    joins = ("local.peers=2", "outer.sync_every=10", "budget.outer_steps=14", "sim.events=[join:2@120.5]")
    rate = ("inner.lr=0.003", "inner.schedule=constant", "inner.warmup_steps=0")
    more = ("sim.latency_s=0", "train.log_every=1", "eval.every=0")

    def losses(run_dir: Path) -> list[float]:
        simulated(run_dir, *joins, *rate, *more)
        lines = [line for line in json_lines(run_dir / "metrics.jsonl") if line["peer"] == "p2" and "loss" in line]
        return [line["loss"] for line in lines if line["version"] == 12]  # before its first contribution is merged

    warm = losses(tmp_path / "warm")
    monkeypatch.setattr(inner, "load_moments_", lambda optimizer, state: None)
    empty = losses(tmp_path / "empty")
    assert len(warm) == len(empty) == 9 and warm[0] == empty[0], "the same batches and anchor"
    assert sum(warm[1:]) < sum(empty[1:])


def spoiled_numels(header: InnerHeader, values: Tensor) -> tuple[InnerHeader, Tensor]:
    return header.model_copy(update={"numels": [2**40] * len(header.numels)}), values


def spoiled_names(header: InnerHeader, values: Tensor) -> tuple[InnerHeader, Tensor]:
    return header.model_copy(update={"names": header.names[::-1]}), values


def spoiled_steps(header: InnerHeader, values: Tensor) -> tuple[InnerHeader, Tensor]:
    return header.model_copy(update={"steps": header.steps[1:]}), values


def not_a_number(header: InnerHeader, values: Tensor) -> tuple[InnerHeader, Tensor]:
    values[-1] = math.nan
    return header, values


def negative_square(header: InnerHeader, values: Tensor) -> tuple[InnerHeader, Tensor]:
    at = sum(header.numels[: header.names.index("0.3.exp_avg_sq")])
    values[at] = -1e-6
    return header, values


@pytest.mark.usefixtures("p0_first")
@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (spoiled_numels, "the inner state there has .* expected"),
        (spoiled_names, "in the order of the parameters here"),
        (spoiled_steps, "step counters; expected"),
        (not_a_number, "holds nan"),
        (negative_square, r"0\.3\.exp_avg_sq, a second moment, holds -1e-06"),
    ],
)
def test_a_lying_donor_is_refused_and_another_one_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[..., Any], why: str
) -> None:
    sent: list[InnerState] = []

    async def lying(stream: Stream, state: InnerState) -> None:
        sent.append(state)
        if len(sent) > 1:
            await send_inner(stream, state)
            return
        layout = state.layout
        header = InnerHeader(names=list(layout.names), numels=list(layout.numels), steps=list(state.steps))
        header, values = spoil(header, state.values.clone())
        await stream.send(header)
        for piece in values.split(CHUNK):
            await stream.send_payload(piece.view(torch.uint8))

    monkeypatch.setattr("diloco.swarm.conversations.answer.send_inner", lying)
    outcome = simulated(tmp_path, *LATE)
    [failed], [event] = said(tmp_path, "inner_state_failed"), said(tmp_path, "inner_state")
    assert failed["donor"] == "p0" and event["from"] == "p1"
    assert re.search(why, failed["why"]), failed["why"]
    assert len({peer.anchor_digest for peer in outcome.summary.peers}) == 1


@pytest.mark.usefixtures("p0_first")
def test_a_donor_whose_moments_diverged_says_so_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[InnerState] = []

    def diverged(optimizer: torch.optim.Optimizer) -> InnerState | None:
        state = snapshot(optimizer)
        assert state is not None
        given.append(state)
        if len(given) == 1:
            state.values[0] = math.inf
        return state

    monkeypatch.setattr(attachment_module, "snapshot", diverged)
    outcome = simulated(tmp_path, *LATE)
    [failed] = said(tmp_path, "inner_state_failed")
    assert failed["donor"] == "p0" and "refused: the inner state's 0.0.exp_avg holds" in failed["why"]
    assert said(tmp_path, "inner_state")[0]["from"] == "p1"
    assert len({peer.anchor_digest for peer in outcome.summary.peers}) == 1


def test_a_cold_joiner_s_first_round_weighs_nothing_and_nobody_waits_for_it(tmp_path: Path) -> None:
    """Until it takes part, every anchor is the one of a run without it."""
    cold = ("swarm.inner_state=cold", "budget.outer_steps=6", "sim.step_s=[1,1,1,1.7]", "sim.latency_s=0")
    without = simulated(tmp_path / "without", *LATE, *cold, "sim.events=[join:3@6.5,crash:3@6.6]")
    outcome = simulated(tmp_path / "with", *LATE, *cold)
    [event] = said(tmp_path / "with", "cold_start")
    [discarded] = said(tmp_path / "with", "discarded")
    assert (event["peer"], event["why"]) == ("p3", "swarm.inner_state=cold")
    assert discarded["peer"] == "p3" and discarded["tokens"] == outcome.summary.tokens.discarded == 4 * 64
    assert 6.5 + 4 * 1.7 == pytest.approx(discarded["time"], abs=0.1)
    alone, joined = anchors(tmp_path / "without", "p0"), anchors(tmp_path / "with", "p0")
    assert [alone[version] == joined[version] for version in range(1, 7)] == [True] * 3 + [False] * 3
    assert not said(tmp_path / "with", "missing") and not said(tmp_path / "with", "inner_state")
    assert len({peer.anchor_digest for peer in outcome.summary.peers}) == 1
    tokens = outcome.summary.tokens
    assert tokens.processed == tokens.applied + tokens.discarded
    assert outcome.virtual_s > without.virtual_s


@pytest.mark.parametrize("outer", ["streaming", "async"])
def test_a_cold_joiner_comes_to_take_part_without_a_barrier_too(tmp_path: Path, outer: str) -> None:
    small = ["outer.overlap=1", "outer.fragments=2"] if outer == "streaming" else []
    every = ("outer.sync_every=4", "budget.outer_steps=12", "swarm.inner_state=cold")
    outcome = simulated(tmp_path, *LATE, f"outer={outer}", *every, *small)
    assert [event["peer"] for event in said(tmp_path, "cold_start")] == ["p3"]
    [first, *_] = said(tmp_path, "discarded")
    assert first["peer"] == "p3" and first["tokens"] == 4 * 64
    joiner = next(peer for peer in outcome.summary.peers if peer.name == "p3")
    assert joiner.steps > 4 and len({peer.anchor_digest for peer in outcome.summary.peers}) == 1


def test_without_a_donor_that_answers_a_joiner_starts_cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachment_module, "snapshot", lambda optimizer: None)
    outcome = simulated(tmp_path, *LATE)
    assert [event["why"] for event in said(tmp_path, "inner_state_failed")] == [
        "refused: no inner optimizer state is here"
    ] * 3
    [event] = said(tmp_path, "cold_start")
    assert event["why"] == "no donor has any"
    assert outcome.summary.tokens.discarded == 4 * 64


def test_a_cold_joiner_may_leave_in_its_first_round(tmp_path: Path) -> None:
    leaves = "sim.events=[join:3@6.5,leave:3@8.5]"
    outcome = simulated(tmp_path, *LATE[:2], "swarm.inner_state=cold", leaves)
    peers = {peer.name: peer for peer in outcome.summary.peers}
    assert peers["p3"].steps in (2, 3) and outcome.summary.tokens.discarded == 0
    assert len({peers[name].anchor_digest for name in ("p0", "p1", "p2")}) == 1


def test_a_peer_with_saved_state_and_one_that_comes_at_the_start_ask_nobody() -> None:
    for source in ("own", "donor"):

        def never_late(asked: str, source: str = source) -> bool:
            assert source != "own", "a resumed peer asks nobody"
            assert asked == "joins_late"
            return False

        node: Any = SimpleNamespace(joins_late=lambda: "joins_late")
        runtime: Any = SimpleNamespace(call=never_late)
        start = InnerStart(MAKERS["adamw"](net()), Island(torch.device("cpu")), lambda kind, fields: None)
        start.source = source  # type: ignore[assignment]
        assert start.fetch(node, runtime, lambda: False) == (None, False)
