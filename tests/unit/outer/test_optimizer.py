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
    Linear,
    OuterStep,
)
from tests.support.outer import EXACT, author, gaussian, make, named, outer

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


def test_steps_by_speed_are_those_of_the_papers_toy_experiment() -> None:
    # PAPERS.md section 8: seconds per step .58, .75, 1.51, 3.33 and H=20 give 20, 15, 7 and 3,
    # which the floor lifts.
    speeds = [1 / seconds for seconds in (0.58, 0.75, 1.51, 3.33)]
    assert [dylu_steps(speed, max(speeds), 20) for speed in speeds] == [20, 15, 7, 5]
    assert dylu_steps(speeds[3], speeds[0], 20, floor=1) == 3
