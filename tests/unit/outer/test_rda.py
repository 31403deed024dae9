"""Radial-directional averaging: against float64, in its special cases, and with bad peers."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.outer.codecs import codec
from diloco.outer.fragments import partition
from diloco.outer.merging import Part, directional_pieces, radial_directional
from tests.support.outer import gaussian


def average(vectors: list[Tensor], weights: list[float], pieces: list[tuple[int, int]]) -> Tensor:
    out = torch.full_like(vectors[0], torch.nan)
    parts = [Part(vector.view(torch.uint8), weight) for vector, weight in zip(vectors, weights, strict=True)]
    radial_directional(out, codec("fp32"), parts, pieces)
    return out


@settings(max_examples=60)
@given(
    st.integers(1, 6), st.sets(st.integers(1, 199), max_size=4), st.integers(0, 1000),
    st.sampled_from([1e-15, 1e-3, 1.0, 1e15]),
)  # fmt: skip
def test_the_average_agrees_with_the_formula_in_float64(workers: int, cuts: set[int], seed: int, scale: float) -> None:
    pieces = list(pairwise([0, *sorted(cuts), 200]))
    vectors = [gaussian(200, seed + worker, scale) for worker in range(workers)]
    weights = [float(1000 * (worker + 1)) for worker in range(workers)]
    got = average(vectors, weights, pieces)
    for start, stop in pieces:
        parts = [vector[start:stop].double() for vector in vectors]
        direction = sum(weight * part / part.norm() for weight, part in zip(weights, parts, strict=True))
        if direction.norm() < 1e-2 * sum(weights):
            continue  # directions that nearly cancel; fp32 cannot agree to many places
        length = sum(weight * part.norm() for weight, part in zip(weights, parts, strict=True)) / sum(weights)
        expected = length * direction / direction.norm()
        torch.testing.assert_close(got[start:stop].double(), expected, rtol=1e-4, atol=1e-4 * float(length))


def test_a_piece_of_zeros_counts_in_the_mean_norm_only() -> None:
    x = torch.tensor([3.0, 4.0])
    assert average([x, torch.zeros(2)], [1.0, 1.0], [(0, 2)]).tolist() == pytest.approx([1.5, 2.0])
    assert average([torch.zeros(2)] * 2, [1.0, 1.0], [(0, 2)]).tolist() == [0, 0]


def test_opposite_directions_give_zeros_not_amplified_rounding() -> None:
    x = gaussian(1000, 0)
    nearly = -x * (1 + 1e-7)
    assert not average([x, nearly], [1.0, 1.0], [(0, 1000)]).any()


def test_pieces_are_parts_of_tensors_without_embeddings() -> None:
    numels = {"model.embed_tokens.weight": 10, "model.layers.0.w": 6, "model.layers.1.w": 4}
    (fragment,) = partition({**numels, "transformer.wte.weight": 3}, 1)
    assert directional_pieces(fragment, 0, 23) == [(10, 16), (16, 20)]
    assert directional_pieces(fragment, 8, 12) == [(2, 4)]
    assert directional_pieces(fragment, 12, 23) == [(0, 4), (4, 8)]
    assert directional_pieces(fragment, 0, 5) == []
