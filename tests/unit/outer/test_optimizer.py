"""The outer optimizers: against torch, in special cases, and their rates. By hand:
test_trajectories.py."""

from __future__ import annotations

import pytest
import torch

from diloco.attach.node_link import dylu_steps
from diloco.outer.codecs import CODECS
from diloco.outer.optimizer import (
    OUTER_OPTIMIZERS,
    YOUTH,
    DelayedNesterov,
    Linear,
    OuterStep,
    lr_at,
)
from tests.support.outer import EXACT, author, gaussian, make, named, outer, relative_error


@pytest.mark.parametrize("delay", [1, 4, 16])
def test_a_window_of_pushes_is_nesterov_on_their_mean(delay: int) -> None:
    """Of independent ones (PAPERS.md section 8, claim 1); with c=0."""
    start = gaussian(1000, 0).double()
    state = (start, torch.zeros_like(start), torch.zeros_like(start))
    push = DelayedNesterov(outer(optimizer="delayed_nesterov", quorum=1)).push
    reference = torch.nn.Parameter(start.clone())
    sgd = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    for window in range(6):
        pushes = [gaussian(1000, 100 * window + push, 0.01).double() for push in range(delay)]
        for index, g in enumerate(pushes):
            state = push(*state, g, lr=0.7, beta=0.9, delay=delay, last=index == delay - 1)
        reference.grad = torch.stack(pushes).mean(0)
        sgd.step()
        assert relative_error(reference.detach(), state[0]) < 1e-14
        assert relative_error(sgd.state[reference]["momentum_buffer"], state[1]) < 1e-14
        assert not state[2].any()


GROUPS = {
    # 4 does not divide 3: the second version completes a window and begins the next
    "threes": [3, 3, 3, 3],
    "whole": [4, 4],
    "several": [9, 1, 2, 6],  # more than one window in a version
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("settings", [{}, {"delay_c": 0.1}], ids=["DN", "DN, c"])
def test_a_momentum_step_belongs_to_a_window_of_contributions(
    settings: dict[str, object], groups: list[int]
) -> None:
    """Versions that merge several contributions end where the same contributions end that are
    pushed one by one."""
    fixed = {"quorum": 1, "lr": 0.5, "momentum": 0.8, "momentum_warmup": 0, **EXACT}
    replica = author(
        {"w": gaussian(200)}, outer(**{"optimizer": "delayed_nesterov", **fixed, **settings})
    )
    state, delay, pushed = replica.states[0], 4, 0
    plain = (replica.anchors[0].double(), torch.zeros(200).double(), torch.zeros(200).double())
    for version, contributions in enumerate(groups * 3):
        deltas = [gaussian(200, 100 * version + peer + 1, 0.1) for peer in range(contributions)]
        make(replica, named(delta.view(torch.uint8) for delta in deltas), delay=delay)
        mean = torch.stack(deltas).double().mean(0)
        for _ in deltas:  # each of them counts as their mean, in whatever order they came
            pushed += 1
            rates = {"lr": 0.5, "beta": 0.8, "delay": delay, "last": pushed % delay == 0}
            plain = replica.optimizer.push(*plain, mean, **rates)  # type: ignore[arg-type]
        for ours, theirs in zip((replica.aggregates[0].master, *state.vectors), plain, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
        assert (state.version, state.pushes) == (version + 1, pushed % delay)


def test_a_windows_length_changes_with_the_next_window_only() -> None:
    state, steps = author({"w": torch.zeros(4)}, outer(optimizer="delayed_nesterov")).states[0], []
    for version, delay in enumerate((3, 2, 2, 2, 2)):
        steps.append(state.step(version, 1, delay))
        linear = Linear((1.0,) * 3, (0.0,) * 3, (0.0,) * 3)
        state.apply_(steps[-1], linear, CODECS["fp32"], torch.zeros(4), [])
    assert [(step.pushes, step.delay) for step in steps] == [(0, 3), (1, 3), (2, 3), (0, 2), (1, 2)]


PAPER = {1: 0.4, 2: 0.6, 4: 0.6, 8: 0.8}


def momentum_of(step: OuterStep, optimizer: str = "nesterov", **rates: object) -> float:
    settings = outer(sync_every=10, optimizer=optimizer, **rates)
    return OUTER_OPTIMIZERS[optimizer](settings).rates(step)[1]


def test_by_default_the_momentum_rises_over_the_run() -> None:
    """Over the rounds that are planned; without a plan with its age, of which a window of
    contributions is one step."""
    # 1 / (1 - 0.7) = 10/3, so 1, 13/6, 10/3 at the beginning, in the middle and at the end; 1 -
    # 6/13 = 7/13.
    planned = [momentum_of(OuterStep(version, 4), rounds=16) for version in (0, 8, 16, 40)]
    assert planned == pytest.approx([0.0, 7 / 13, 0.7, 0.7])
    aged = [momentum_of(OuterStep(version, 4)) for version in (0, YOUTH, 10**9)]
    assert aged == pytest.approx([0.0, 7 / 13, 0.7])
    windowed = momentum_of(OuterStep(4 * YOUTH, 1, 0, delay=4), "delayed_nesterov")
    assert windowed == momentum_of(OuterStep(YOUTH, 4))
    assert momentum_of(OuterStep(4, 4), rounds=100, momentum_warmup=4) == 0.7, (
        "a warm-up counts more than the plan"
    )


def test_the_learning_rate_by_peers_is_the_papers() -> None:
    """And linear in the logarithm between, constant beyond the ends and without a table."""
    assert [lr_at(peers, 0.7, PAPER) for peers in (1, 2, 4, 8)] == pytest.approx(
        [0.4, 0.6, 0.6, 0.8]
    )
    assert lr_at(3, 0.7, PAPER) == pytest.approx(0.6)
    # 4 is half-way from 2 to 8 in doublings
    assert lr_at(4, 0.7, {2: 0.5, 8: 0.9}) == pytest.approx(0.7)
    assert lr_at(1, 0.7, {2: 0.5, 8: 0.9}) == lr_at(7, 0.7, {4: 0.5}) == 0.5
    assert lr_at(1000, 0.7, {8: 0.9, 2: 0.5}) == 0.9 and lr_at(7, 0.7, {}) == 0.7


def test_steps_by_speed_are_those_of_the_papers_toy_experiment() -> None:
    # PAPERS.md section 8: seconds per step .58, .75, 1.51, 3.33 and H=20 give 20, 15, 7 and 3,
    # which the floor lifts.
    speeds = [1 / seconds for seconds in (0.58, 0.75, 1.51, 3.33)]
    assert [dylu_steps(speed, max(speeds), 20) for speed in speeds] == [20, 15, 7, 5]
    assert dylu_steps(speeds[3], speeds[0], 20, floor=1) == 3


def test_the_fastest_and_the_unmeasured_take_the_whole_interval() -> None:
    assert dylu_steps(0.0, 3.0, 50) == dylu_steps(3.0, 0.0, 50) == dylu_steps(3.0, 3.0, 50) == 50
    assert dylu_steps(4.0, 3.0, 50) == 50
