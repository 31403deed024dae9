"""The outer optimizers: against torch, in special cases, and their contract. By hand: see test_trajectories.py."""

from __future__ import annotations

import pytest
import torch

from diloco.config import registry
from diloco.outer.codecs import codec
from diloco.outer.optimizer import OPTIMIZERS, DelayedNesterov, Linear
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
    "threes": [3, 3, 3, 3],  # 4 does not divide 3: the second version completes a window and begins the next
    "whole": [4, 4],
    "several": [9, 1, 2, 6],  # more than one window in a version
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("settings", [{}, {"delay_c": 0.1}], ids=["DN", "DN, c"])
def test_a_momentum_step_belongs_to_a_window_of_contributions(settings: dict[str, object], groups: list[int]) -> None:
    """Versions that merge several contributions end where the same contributions end that are pushed one by one."""
    fixed = {"quorum": 1, "lr": 0.5, "momentum": 0.8, "momentum_warmup": 0, **EXACT}
    replica = author({"w": gaussian(200)}, outer(**{"optimizer": "delayed_nesterov", **fixed, **settings}))
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
        state.apply_(steps[-1], Linear((1.0,) * 3, (0.0,) * 3, (0.0,) * 3), codec("fp32"), torch.zeros(4), [])
    assert [(step.pushes, step.delay) for step in steps] == [(0, 3), (1, 3), (2, 3), (0, 2), (1, 2)]


def test_the_configuration_and_the_registry_have_the_same_names() -> None:
    assert registry.OPTIMIZERS == {name: one.windowed for name, one in OPTIMIZERS.items()}
