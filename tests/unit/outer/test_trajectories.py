"""Golden trajectories: every merge rule and outer optimizer with constant gradients, worked out by
hand.

Unless it says otherwise, pseudo-gradients are 0.2, 0.4, 0.6 and 1.2 in every round, the outer
learning rate and the momentum are 0.5, and all parameters start at 10. The mean is then 0.6.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.core.rules.author import weights
from diloco.messages.heads import Line
from diloco.outer.codecs import CODECS
from diloco.outer.merging import Mean, Part
from diloco.outer.optimizer import (
    OUTER_OPTIMIZERS,
    YOUTH,
    DelayedNesterov,
    Nesterov,
    OuterStep,
    lr_at,
    momentum_at,
)
from diloco.swarm.node.position import dylu_steps
from tests.support.outer import EXACT, author, gaussian, make, named, outer

DELTAS = [0.2, 0.4, 0.6, 1.2]
NUMEL = 5


def full(value: float) -> Tensor:
    return torch.full((NUMEL,), value)


def assert_all(vector: Tensor, value: float) -> None:
    torch.testing.assert_close(vector, torch.full_like(vector, value), rtol=1e-6, atol=0)


def nesterov_(master: Tensor, momentum: Tensor, delta: Tensor, lr: float, beta: float) -> None:
    optimizer = Nesterov(outer(lr=lr, momentum=beta, momentum_warmup=0))
    transition = optimizer.transition(OuterStep(0, 1))
    before = master.clone()
    transition.move_(master, delta, [momentum])
    transition.follow_([momentum], master - before)


def merged(deltas: Sequence[float], weights: Sequence[float]) -> Tensor:
    out = full(0.0)
    those = zip(deltas, weights, strict=True)
    parts = [Part(CODECS["fp32"], full(delta).view(torch.uint8), one) for delta, one in those]
    Mean().merge(out, parts, [])
    return out


# FedAvg, lr 1:     10 - 0.6 = 9.4;  8.8;  8.2
# SGD, lr 0.5:      10 - 0.3 = 9.7;  9.4;  9.1
#
# Warm-up of 2 versions: 1 / (1 - mu) is 1, 1.5, 2, 2, so mu is 0, 1/3, 1/2, 1/2.
#   m = 0.6                    step 0.5 * (0.6 + 0)         = 0.3           9.7
#   m = 0.6 / 3 + 0.6 = 0.8    step 0.5 * (0.6 + 0.8 / 3)   = 0.43333333    9.26666667
#   m = 0.8 / 2 + 0.6 = 1.0    step 0.5 * (0.6 + 0.5)       = 0.55          8.71666667
#   m = 1.0 / 2 + 0.6 = 1.1    step 0.5 * (0.6 + 0.55)      = 0.575         8.14166667
#
# 1, 2, 4, 8 peers with {1: 0.4, 4: 0.8}: lr 0.4, 0.6 (half-way in doublings), 0.8, 0.8; steps 0.24,
# 0.36, 0.48, 0.48.
RATES: dict[str, tuple[Callable[[int], tuple[float, float]], list[float]]] = {
    "fedavg": (lambda version: (1.0, 0.0), [9.4, 8.8, 8.2]),
    "sgd": (lambda version: (0.5, 0.0), [9.7, 9.4, 9.1]),
    "warm-up": (
        lambda version: (0.5, momentum_at(version, 0.5, 2)),
        [9.7, 9.26666667, 8.71666667, 8.14166667],
    ),
    "by peers": (
        lambda version: (lr_at(2**version, 0.5, {1: 0.4, 4: 0.8}), 0.0),
        [9.76, 9.4, 8.92, 8.44],
    ),
}


@pytest.mark.parametrize(("rates", "golden"), RATES.values(), ids=RATES)
def test_nesterov_by_rates(rates: Callable[[int], Any], golden: list[float]) -> None:
    master, momentum = full(10.0), full(0.0)
    for version, expected in enumerate(golden):
        nesterov_(master, momentum, merged(DELTAS, [1.0] * 4), *rates(version))
        assert_all(master, expected)


# Equal tokens of 1000, in 2, 2, 1 and 1 steps. tokens, uniform: the mean is 0.6.
#   m 0.6, 0.9, 1.05           steps 0.5 * (0.6 + m / 2) = 0.45, 0.525, 0.5625    9.55, 9.025,
#                              8.4625
# tokens2_per_step: weights 500000, 500000, 1000000, 1000000; mean (0.1 + 0.2 + 0.6 + 1.2) / 3 =
#     0.7.
#   m 0.7, 1.05, 1.225         steps 0.5 * (0.7 + m / 2) = 0.525, 0.6125, 0.65625    9.475, 8.8625,
#                              8.20625
@pytest.mark.parametrize(
    ("kind", "golden"),
    [
        ("tokens", [9.55, 9.025, 8.4625]),
        ("uniform", [9.55, 9.025, 8.4625]),
        ("tokens2_per_step", [9.475, 8.8625, 8.20625]),
    ],
)
def test_nesterov_by_weights(kind: str, golden: list[float]) -> None:
    steps = {"a": 2, "b": 2, "c": 1, "d": 1}
    lines = [Line(0, peer, 1, "", taken, 1000, (), 1.0, "") for peer, taken in steps.items()]
    counted = weights(kind, lines, [False] * 4)
    master, momentum = full(10.0), full(0.0)
    for expected in golden:
        nesterov_(master, momentum, merged(DELTAS, counted), 0.5, 0.5)
        assert_all(master, expected)


def test_newcomers_weigh_a_quarter() -> None:
    lines = [Line(0, peer, 1, "", 10, 1000, (), 1.0, "") for peer in "abc"]
    assert weights("tokens", lines, [False, True, False]) == [1.0, 0.25, 1.0]
    assert weights("tokens", lines, [True, False, True]) == [1.0, 4.0, 1.0]
    assert weights("tokens", lines, [True, True, True]) == [1.0, 1.0, 1.0]


# SparseLoCo: one of three elements a round (ceil(3 / 64)), residual times 0.5, SGD with lr 1,
# delta (4, 3, -3.5).
#   e = (4, 3, -3.5)                                 sends  4     at 0   (6, 10, 10)
#   e = (0, 1.5, -1.75)   + delta = (4, 4.5, -5.25)  sends -5.25  at 2   (6, 10, 15.25)
#   e = (2, 2.25, 0)      + delta = (6, 5.25, -3.5)  sends  6     at 0   (0, 10, 15.25)
#   e = (0, 2.625, -1.75) + delta = (4, 5.625,-5.25) sends  5.625 at 1   (0, 4.375, 15.25)
def test_sparse_with_error_feedback() -> None:
    settings = outer(codec_up="topk", error_feedback=0.5, momentum=0, lr=1, codec_down="fp32")
    peer = author({"w": torch.full((3,), 10.0)}, settings)
    golden = ([6, 10, 10], [6, 10, 15.25], [0, 10, 15.25], [0, 4.375, 15.25])
    for version, expected in enumerate(golden):
        peer.local.tensors["w"].sub_(torch.tensor([4.0, 3.0, -3.5]))
        make(peer, named([peer.capture(0)]), step=OuterStep(version, 1))
        peer.load_local_()
        assert peer.anchors[0].tolist() == expected


# Naive async: a whole Nesterov step with each contribution.
#   m = 0.2                    step 0.5 * (0.2 + 0.1)    = 0.15       9.85
#   m = 0.1   + 0.4 = 0.5      step 0.5 * (0.4 + 0.25)   = 0.325      9.525
#   m = 0.25  + 0.6 = 0.85     step 0.5 * (0.6 + 0.425)  = 0.5125     9.0125
#   m = 0.425 + 1.2 = 1.625    step 0.5 * (1.2 + 0.8125) = 1.00625    8.00625, where synchronous
#                              Nesterov is at 9.55
#
# Delayed Nesterov, windows of four; three contributions of 0.2, 0.4 and 0.6 move the master by
# 0.025, 0.05 and 0.075.
#   c = 0     fourth: m = 2.4 / 4 = 0.6          step 0.5 * (0.3  + 0.3)       = 0.3       9.55
#             fourth: m = 0.3 + 0.6 = 0.9        step 0.5 * (0.45 + 0.3)       = 0.375     9.025, as
#                                                synchronous
#   c = 0.1   fourth: share 1 - 0.4 + 0.1 = 0.7  step 0.5 * (0.7 * 0.3 + 0.3)  = 0.255     9.595
#             each of the next three adds 0.5 * 0.1 * 0.5 * 0.6 = 0.015: 0.04, 0.065, 0.09
#             fourth: m = 0.9                    step 0.5 * (0.7 * 0.45 + 0.3) = 0.3075    9.0925
#
# Windows of two, c = 0. The first contribution, 0.8, is 3 versions late and counts (1 + 3) ** -0.5
# = 0.5.
#   step 0.5 * 0.5/2 * 0.8 = 0.1                                      9.9
#   m = (0.4 + 0.6) / 2 = 0.5    step 0.5 * (0.25 + 0.3) = 0.275      9.625
#
PUSHES: dict[str, tuple[float, int, list[float], list[float]]] = {
    "naive async": (0.0, 1, DELTAS, [9.85, 9.525, 9.0125, 8.00625]),
    "delayed": (0.0, 4, DELTAS * 2, [9.975, 9.925, 9.85, 9.55, 9.525, 9.475, 9.4, 9.025]),
    "delayed c": (0.1, 4, DELTAS * 2, [9.975, 9.925, 9.85, 9.595, 9.555, 9.49, 9.4, 9.0925]),
    "late": (0.0, 2, [0.8 * (1 + 3) ** -0.5, 0.6], [9.9, 9.625]),
}


@pytest.mark.parametrize(("c", "delay", "deltas", "golden"), PUSHES.values(), ids=PUSHES)
def test_one_push_at_a_time(c: float, delay: int, deltas: list[float], golden: list[float]) -> None:
    state = (full(10.0), full(0.0), full(0.0))
    push = DelayedNesterov(outer(optimizer="delayed_nesterov", quorum=1, delay_c=c)).push
    for index, (delta, expected) in enumerate(zip(deltas, golden, strict=True)):
        last = index % delay == delay - 1
        state = push(*state, full(delta), lr=0.5, beta=0.5, delay=delay, last=last)
        assert_all(state[0], expected)


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
    plan = outer(**{"optimizer": "delayed_nesterov", **fixed, **settings})
    replica = author({"w": gaussian(200)}, plan)
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


def momentum_of(step: OuterStep, optimizer: str = "nesterov", **rates: object) -> float:
    settings = outer(sync_every=10, optimizer=optimizer, **rates)
    return OUTER_OPTIMIZERS[optimizer](settings).rates(step)[1]


def test_by_default_the_momentum_rises_over_the_run() -> None:
    # 1 / (1 - 0.7) = 10/3, so 1, 13/6, 10/3 at the beginning, in the middle and at the end; 1 -
    # 6/13 = 7/13.
    planned = [momentum_of(OuterStep(version, 4), rounds=16) for version in (0, 8, 16, 40)]
    assert planned == pytest.approx([0.0, 7 / 13, 0.7, 0.7])
    aged = [momentum_of(OuterStep(version, 4)) for version in (0, YOUTH, 10**9)]
    assert aged == pytest.approx([0.0, 7 / 13, 0.7])
    windowed = momentum_of(OuterStep(4 * YOUTH, 1, 0, delay=4), "delayed_nesterov")
    assert windowed == momentum_of(OuterStep(YOUTH, 4))
    assert momentum_of(OuterStep(4, 4), rounds=100, momentum_warmup=4) == 0.7


def test_steps_by_speed_are_those_of_the_papers_toy_experiment() -> None:
    # PAPERS.md section 8: seconds per step .58, .75, 1.51, 3.33 and H=20 give 20, 15, 7 and 3,
    # which the floor lifts.
    speeds = [1 / seconds for seconds in (0.58, 0.75, 1.51, 3.33)]
    assert [dylu_steps(speed, max(speeds), 20) for speed in speeds] == [20, 15, 7, 5]
    assert dylu_steps(speeds[3], speeds[0], 20, floor=1) == 3
