"""The outer optimizer: against torch, in its special cases, and along trajectories worked out by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.outer.codecs import codec
from diloco.outer.fragments import CHUNK, chunks, gather_, partition, scatter_
from diloco.outer.optimizer import mean_, nesterov_, pseudo_gradient_


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
