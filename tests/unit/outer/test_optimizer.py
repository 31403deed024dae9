"""The outer optimizers: against torch, in special cases, along trajectories worked out by hand, and their contract."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.config import OuterConfig, names
from diloco.outer.codecs import codec
from diloco.outer.extensions import register
from diloco.outer.fragments import CHUNK, chunks, gather_, partition, scatter_
from diloco.outer.optimizer import (
    OPTIMIZERS,
    OuterOptimizer,
    OuterStep,
    Transition,
    delayed_nesterov,
    fedbuff,
    mean_,
    nesterov_,
    pseudo_gradient_,
)
from diloco.outer.replica import Replica


def gaussian(numel: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=60)
@given(
    numel=st.integers(1, 300),
    seed=st.integers(0, 1000),
    lr=st.floats(0.01, 2.0),
    beta=st.floats(0.01, 0.99),
    scale=st.sampled_from([1e-6, 1e-2, 1.0, 1e3]),
)
def test_nesterov_is_torchs_sgd_bit_for_bit(numel: int, seed: int, lr: float, beta: float, scale: float) -> None:
    master, momentum = gaussian(numel, seed), torch.zeros(numel)
    reference = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.SGD([reference], lr=lr, momentum=beta, nesterov=True)
    for step in range(30):
        delta = gaussian(numel, seed + step + 1, scale)
        reference.grad = delta.clone()
        optimizer.step()
        nesterov_(master, momentum, delta, lr, beta)
    assert torch.equal(master, reference.detach())
    assert torch.equal(momentum, optimizer.state[reference]["momentum_buffer"])


def test_learning_rate_one_without_momentum_is_plain_averaging() -> None:
    anchor = gaussian(1000, 0)
    locals_ = [anchor + gaussian(1000, seed, 0.01) for seed in (1, 2, 3)]
    total, delta = torch.zeros(1000), torch.empty(1000)
    for local in locals_:
        pseudo_gradient_(delta, anchor, local)
        total += delta
    mean_(total, 3.0)
    master, momentum = anchor.clone(), torch.zeros(1000)
    for _ in range(2):
        nesterov_(master, momentum, total, 1.0, 0.0)
        torch.testing.assert_close(master, torch.stack(locals_).mean(0), rtol=0, atol=5e-7)
        master.copy_(anchor)  # the step before left no trace that momentum 0 would use


def test_one_worker_with_learning_rate_one_keeps_its_own_parameters() -> None:
    """Done when 4: to fp32 rounding, as anchor - (anchor - local) rounds twice."""
    anchor, wire = gaussian(CHUNK, 0), codec("fp32")
    local = anchor + gaussian(CHUNK, 1, 0.01)
    delta, acc, payload = torch.empty(CHUNK), torch.zeros(CHUNK), torch.empty(wire.nbytes(CHUNK), dtype=torch.uint8)
    pseudo_gradient_(delta, anchor, local)
    wire.encode(delta, payload)
    wire.accumulate_(acc, payload, 8192.0)
    mean_(acc, 8192.0)
    nesterov_(anchor, torch.zeros(CHUNK), acc, 1.0, 0.0)
    torch.testing.assert_close(anchor, local, rtol=2e-7, atol=2e-7)


def test_chunk_by_chunk_is_the_same_as_at_once_and_leaves_the_gradient_alone() -> None:
    numel = 2 * CHUNK + 17
    delta = gaussian(numel, 1)
    copy = delta.clone()
    whole, parts = ((gaussian(numel, 0), gaussian(numel, 2)) for _ in range(2))
    nesterov_(*whole, delta, 0.7, 0.9)
    for start, stop in chunks(numel):
        nesterov_(parts[0][start:stop], parts[1][start:stop], delta[start:stop], 0.7, 0.9)
    assert torch.equal(whole[0], parts[0]) and torch.equal(whole[1], parts[1])
    assert torch.equal(delta, copy)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(1.0, 1e7), min_size=1, max_size=9), st.integers(0, 100))
def test_the_weighted_mean_agrees_with_float64(weights: list[float], seed: int) -> None:
    deltas = [gaussian(64, seed + worker, 0.01) for worker in range(len(weights))]
    acc, wire = torch.zeros(64), codec("fp32")
    for weight, delta in zip(weights, deltas, strict=True):
        wire.accumulate_(acc, delta.view(torch.uint8), weight)
    mean_(acc, sum(weights))
    expected = sum(weight * delta.double() for weight, delta in zip(weights, deltas, strict=True)) / sum(weights)
    torch.testing.assert_close(acc.double(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("total", [0.0, -1.0, float("nan"), float("inf")])
def test_a_mean_over_no_weight_is_our_bug(total: float) -> None:
    with pytest.raises(AssertionError, match="total weight"):
        mean_(torch.ones(3), total)


# -- Delayed Nesterov -------------------------------------------------------------------------------------------------


class PaperDelayedNesterov:
    """Algorithm 3 of Asynchronous Local-SGD (arXiv 2401.09135) as it stands there, in float64."""

    def __init__(self, theta: Tensor, lr: float, beta: float, delay: int, c: float) -> None:
        self.theta, self.m, self.buffer, self.t = theta.double(), torch.zeros(()), torch.zeros(()), 0
        self.lr, self.beta, self.delay, self.c = lr, beta, delay, c

    def push(self, g: Tensor) -> None:
        n, c, beta = self.delay, self.c, self.beta
        self.buffer = self.buffer + g.double()
        if (self.t + 1) % n == 0:
            self.m = beta * self.m + self.buffer / n
            self.theta = self.theta - self.lr * ((1 - c * n + c) * beta * self.m + g.double() / n)
            self.buffer = torch.zeros(())
        else:
            self.theta = self.theta - self.lr * (c * beta * self.m + g.double() / n)
        self.t += 1


@settings(deadline=None, max_examples=40)
@given(
    delay=st.integers(1, 9),
    part=st.sampled_from([0.0, 0.3, 1.0]),
    lr=st.floats(0.01, 1.0),
    beta=st.floats(0.0, 0.95),
    seed=st.integers(0, 1000),
)
def test_one_push_at_a_time_is_the_algorithm_of_the_paper(
    delay: int, part: float, lr: float, beta: float, seed: int
) -> None:
    state, c = (gaussian(50, seed), torch.zeros(50), torch.zeros(50)), part / delay
    paper = PaperDelayedNesterov(state[0], lr, beta, delay, c)
    for push in range(3 * delay + 1):
        g = gaussian(50, seed + push + 1, 0.1)
        state = delayed_nesterov(*state, g, lr=lr, beta=beta, delay=delay, last=(push + 1) % delay == 0, c=c)
        paper.push(g)
    torch.testing.assert_close(state[0].double(), paper.theta, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("delay", [1, 4, 8, 16])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_a_window_of_independent_pushes_is_nesterov_on_their_mean(
    delay: int, dtype: torch.dtype, tolerance: float
) -> None:
    """PAPERS.md section 8, claim 1; with c=0."""
    start = gaussian(CHUNK + 7, 0).to(dtype)
    state = (start, torch.zeros_like(start), torch.zeros_like(start))
    reference, velocity = start.clone(), torch.zeros_like(start)
    for window in range(6):
        pushes = [gaussian(CHUNK + 7, 100 * window + push, 0.01).to(dtype) for push in range(delay)]
        for index, g in enumerate(pushes):
            state = delayed_nesterov(*state, g, lr=0.7, beta=0.9, delay=delay, last=index == delay - 1)
        nesterov_(reference, velocity, torch.stack(pushes).mean(0), 0.7, 0.9)
        assert float((state[0] - reference).norm() / reference.norm()) < tolerance
        assert float((state[1] - velocity).norm() / velocity.norm()) < tolerance
        assert not state[2].any()


# -- windows ----------------------------------------------------------------------------------------------------------

GROUPS = {
    "threes": [3, 3, 3, 3],  # 4 does not divide 3: the second version completes a window and begins the next
    "whole": [4, 4],
    "several": [9, 1, 2, 6],  # more than one window in a version
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("settings", [{}, {"delay_c": 0.1}, {"optimizer": "fedbuff"}], ids=["DN", "DN, c", "FedBuff"])
def test_a_momentum_step_belongs_to_exactly_as_many_contributions_as_a_window_has(
    settings: dict[str, object], groups: list[int]
) -> None:
    """Versions that merge several contributions end where the same contributions end that are pushed one by one."""
    outer = OuterConfig.parse(
        {
            "method": "diloco", "sync_every": 1, "codec_up": "fp32", "codec_down": "fp32", "quorum": 1,
            "staleness_limit": 9, "optimizer": "delayed_nesterov", "lr": 0.5, "momentum": 0.8, "momentum_warmup": 0,
            **settings,
        }
    )  # fmt: skip
    replica = Replica({"w": gaussian(200, 0)}, partition({"w": 200}, 1), outer)
    replica.hold(0)
    held, delay, pushed = replica.held[0], 4, 0
    plain = (replica.anchors[0].double(), torch.zeros(200).double(), torch.zeros(200).double())
    for version, contributions in enumerate(groups * 3):
        deltas = [gaussian(200, 100 * version + peer + 1, 0.1) for peer in range(contributions)]
        for delta in deltas:
            held.fold(0, delta.view(torch.uint8), 1.0)
        held.merge_(held.state.step(contributions, delay), torch.empty(replica.update_nbytes(0), dtype=torch.uint8))
        mean = torch.stack(deltas).double().mean(0)
        for _ in deltas:  # each of them counts as their mean, in whatever order they came
            pushed += 1
            rates = {"lr": 0.5, "beta": 0.8, "delay": delay, "last": pushed % delay == 0}
            if outer.optimizer == "fedbuff":
                plain = fedbuff(*plain, mean, **rates)  # type: ignore[arg-type]
            else:
                plain = delayed_nesterov(*plain, mean, **rates, c=outer.delay_c)  # type: ignore[arg-type]
        for ours, theirs in zip((held.master, *held.state.vectors), plain, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
        assert (held.state.version, held.state.pushes) == (version + 1, pushed % delay)


def test_the_length_of_a_window_changes_with_the_next_window_only() -> None:
    replica = Replica({"w": torch.zeros(4)}, partition({"w": 4}, 1), outer_optimizer("fedbuff").settings)
    replica.hold(0)
    steps = []
    for delay in (3, 2, 2, 2, 2):
        steps.append(replica.held[0].state.step(1, delay))
        replica.held[0].state.took_(steps[-1])
    assert [(step.pushes, step.delay) for step in steps] == [(0, 3), (1, 3), (2, 3), (0, 2), (1, 2)]


# -- trajectories -----------------------------------------------------------------------------------------------------

# Four workers with constant gradients 1, 2, 3 and 6 take two inner SGD steps of lr 0.1 a round, so that their
# pseudo-gradients are always 0.2, 0.4, 0.6 and 1.2. Outer lr 0.5, momentum 0.5, start at 10.
#
# Equal weights: the mean is 2.4 / 4 = 0.6.
#   round 1: m = 0.6                   step = 0.5 * (0.6 + 0.5 * 0.6)    = 0.45      10      - 0.45    = 9.55
#   round 2: m = 0.5 * 0.6 + 0.6 = 0.9       step = 0.5 * (0.6 + 0.45)   = 0.525     9.55    - 0.525   = 9.025
#   round 3: m = 0.45 + 0.6  = 1.05          step = 0.5 * (0.6 + 0.525)  = 0.5625    9.025   - 0.5625  = 8.4625
#   round 4: m = 0.525 + 0.6 = 1.125         step = 0.5 * (0.6 + 0.5625) = 0.58125   8.4625  - 0.58125 = 7.88125
EQUAL = [9.55, 9.025, 8.4625, 7.88125]
#
# Tokens 1000, 1000, 1000 and 5000: the mean is (0.2 + 0.4 + 0.6 + 5 * 1.2) / 8 = 7.2 / 8 = 0.9, so 1.5 times the above.
#   steps 0.675, 0.7875, 0.84375, 0.871875
#   10 - 0.675 = 9.325; 9.325 - 0.7875 = 8.5375; 8.5375 - 0.84375 = 7.69375; 7.69375 - 0.871875 = 6.821875
WEIGHTED = [9.325, 8.5375, 7.69375, 6.821875]


@pytest.mark.parametrize(
    ("tokens", "golden"),
    [([4096.0] * 4, EQUAL), ([1000.0, 1000.0, 1000.0, 5000.0], WEIGHTED)],
    ids=["equal", "weighted"],
)
@pytest.mark.parametrize("fragments", [1, 3])
def test_four_workers_with_constant_gradients_follow_the_trajectory_worked_out_by_hand(
    tokens: list[float], golden: list[float], fragments: int
) -> None:
    wire, gradients = codec("fp32"), [1.0, 2.0, 3.0, 6.0]
    workers = [{"w": torch.full((2, 3), 10.0).t(), "b": torch.full((4,), 10.0)} for _ in gradients]
    parts = partition({name: p.numel() for name, p in workers[0].items()}, fragments)
    anchors = [torch.full((part.numel,), 10.0) for part in parts]
    masters = [anchor.clone() for anchor in anchors]
    momenta = [torch.zeros(part.numel) for part in parts]
    for expected in golden:
        for parameters, gradient in zip(workers, gradients, strict=True):
            for _ in range(2):
                for parameter in parameters.values():
                    parameter -= 0.1 * gradient
        for part, anchor, master, momentum in zip(parts, anchors, masters, momenta, strict=True):
            acc, delta = torch.zeros(part.numel), torch.empty(part.numel)
            payload = torch.empty(wire.nbytes(part.numel), dtype=torch.uint8)
            for parameters, weight in zip(workers, tokens, strict=True):
                gather_(delta, part, 0, part.numel, parameters)
                pseudo_gradient_(delta, anchor, delta)
                wire.encode(delta, payload)
                wire.accumulate_(acc, payload, weight)
            mean_(acc, sum(tokens))
            nesterov_(master, momentum, acc, 0.5, 0.5)
            wire.encode_update(master, anchor, payload)
            wire.apply_update_(anchor, payload)
            for parameters in workers:
                scatter_(parameters, part, 0, part.numel, anchor)
        for parameters in workers:
            for parameter in parameters.values():
                torch.testing.assert_close(parameter, torch.full_like(parameter, expected), rtol=1e-6, atol=0)


def test_a_constant_pseudo_gradient_approaches_its_asymptotic_gain() -> None:
    """PAPERS.md: at (0.7, 0.9) the gain on a constant delta is 1.9 at first, 6.86 in round 10, and 10 in the end."""
    master, momentum, delta = torch.zeros(1), torch.zeros(1), torch.ones(1)
    gains = []
    for _ in range(200):
        before = float(master)
        nesterov_(master, momentum, delta, 0.7, 0.9)
        gains.append((before - float(master)) / 0.7)
    assert gains[0] == pytest.approx(1.9, abs=1e-5)
    assert gains[9] == pytest.approx(6.86, abs=5e-3)
    assert gains[-1] == pytest.approx(10.0, abs=1e-3)


# -- the registry -----------------------------------------------------------------------------------------------------


every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def outer_optimizer(name: str, **outer: object) -> OuterOptimizer:
    rates = {"lr": 0.7, "momentum": 0.9, "momentum_warmup": 0, **outer}
    return OPTIMIZERS[name](OuterConfig(method="diloco", sync_every=1, optimizer=name, **rates))


def advance(one: OuterOptimizer, step: OuterStep, master: Tensor, vectors: Sequence[Tensor], mean: Tensor) -> None:
    """A step as the syncer takes it, with a codec that loses nothing."""
    transition, before = one.transition(step), master.clone()
    transition.move_(master, mean, vectors)
    if transition.still:
        vectors[1].copy_(transition.grown(mean, vectors[1]))  # type: ignore[attr-defined]
    else:
        transition.follow_(vectors, master - before)


def stepped(one: OuterOptimizer, steps: Sequence[OuterStep], cuts: Sequence[int]) -> list[Tensor]:
    """Master, momentum and further vectors after these steps, taken part by part."""
    numel = cuts[-1]
    vectors = [gaussian(numel, 0), *(torch.zeros(numel) for _ in range(1 + one.num_buffers))]
    for number, step in enumerate(steps):
        delta = gaussian(numel, number + 1, 0.01)
        before = delta.clone()
        for start, stop in pairwise(cuts):
            master, *parts = (vector[start:stop] for vector in vectors)
            advance(one, step, master, parts, delta[start:stop])
        assert torch.equal(delta, before), "the pseudo-gradient is left as it is"
    return vectors


STEPS = [OuterStep(version, 2, pushes=version % 2 * 2, delay=4) for version in range(6)]


@every_optimizer
def test_an_outer_optimizer_may_be_applied_part_by_part(name: str) -> None:
    one = outer_optimizer(name, lr=0.5, momentum=0.5)
    whole, parts = (stepped(one, STEPS, cuts) for cuts in ([0, 1000], [0, 1, 300, 1000]))
    assert all(map(torch.equal, whole, parts))


@every_optimizer
def test_a_full_window_of_equal_contributions_without_momentum_is_one_step_of_the_learning_rate(name: str) -> None:
    one = outer_optimizer(name, lr=0.5, momentum=0.0)
    master, delta = torch.zeros(10), torch.ones(10)
    vectors = [torch.zeros(10) for _ in range(1 + one.num_buffers)]
    for pushes in (0, 2) if one.settings.windowed else (0,):
        advance(one, OuterStep(0, 2, pushes, 4 if one.settings.windowed else 1), master, vectors, delta)
    torch.testing.assert_close(master, torch.full((10,), -0.5))


@every_optimizer
def test_a_momentum_that_starts_out_wrong_is_soon_right(name: str) -> None:
    one = outer_optimizer(name, lr=0.7, momentum=0.9)
    master, vectors = torch.zeros(50), [gaussian(50, 1), *(torch.zeros(50) for _ in range(one.num_buffers))]
    followed = [torch.zeros(50), *(torch.zeros(50) for _ in range(one.num_buffers))]
    distances = []
    for version in range(24):
        before, step = master.clone(), OuterStep(version, 1, version % 2 if one.settings.windowed else 0, 2)
        transition = one.transition(step)
        advance(one, step, master, vectors, mean := gaussian(50, version + 2))
        moved = master - before
        if transition.still:
            followed[1].copy_(transition.grown(mean, followed[1]))  # type: ignore[attr-defined]
        else:
            transition.follow_(followed, moved)
        distances.append(float((followed[0] - vectors[0]).norm()))
    assert distances[-1] < 2e-3 * distances[0]


def test_every_name_of_the_configuration_is_an_optimizer_and_the_other_way_round() -> None:
    assert set(OPTIMIZERS) == set(names.OPTIMIZERS)
    for name, one in OPTIMIZERS.items():
        assert names.OPTIMIZERS[name] == (one.windowed, one.linear)


def test_a_registered_class_is_all_that_a_new_optimizer_takes(registers: None) -> None:
    class AdamStep(Transition):
        def __init__(self, lr: float, beta: float, count: int) -> None:
            self.lr, self.beta, self.count = lr, beta, count

        def move_(self, master: Tensor, mean: Tensor, vectors: Sequence[Tensor]) -> None:
            momentum, square = vectors
            momentum.lerp_(mean, 1 - self.beta)
            square.lerp_(mean.square(), 0.01)
            scale = (square / (1 - 0.99**self.count)).sqrt() + 1e-8
            master.addcdiv_(momentum / (1 - self.beta**self.count), scale, value=-self.lr)

        def follow_(self, vectors: Sequence[Tensor], moved: Tensor) -> None:
            pass

    @register
    class Adam(OuterOptimizer):
        name = "adam"

        def transition(self, step: OuterStep) -> Transition:
            return AdamStep(*self.rates(step), step.version + 1)

    settings = OuterConfig(
        method="diloco",
        sync_every=1,
        lr=0.1,
        momentum=0.9,
        momentum_warmup=0,
        codec_up="fp32",
        codec_down="fp32",
        optimizer="adam",
    )
    parameters = {"w": gaussian(CHUNK + 5, 0)}
    replica = Replica(parameters, partition({"w": CHUNK + 5}, 1), settings)
    replica.hold(0)
    reference = torch.nn.Parameter(replica.anchors[0].clone())
    adam = torch.optim.Adam([reference], lr=0.1, betas=(0.9, 0.99))
    assert not replica.can_stand_by
    for version in range(3):
        parameters["w"].sub_(gaussian(CHUNK + 5, version + 1))
        reference.grad = replica.anchors[0] - parameters["w"]
        adam.step()
        for chunk in range(2):
            replica.held[0].take(chunk, "peer", replica.encode(0, chunk), 1.0)
        replica.held[0].merge_(OuterStep(version, 1), torch.empty(replica.update_nbytes(0), dtype=torch.uint8))
        replica.load_local_()
        torch.testing.assert_close(replica.anchors[0], reference.detach(), rtol=1e-4, atol=1e-4)
