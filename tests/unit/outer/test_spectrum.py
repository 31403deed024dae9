"""`outer.flatten`: singular values of merged matrices are evened out, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diloco.outer.fragments import CHUNK, Fragment, Slice, partition
from diloco.outer.spectrum import Matrix, flatten_, matrices
from tests.support.outer import EXACT, author, gaussian, make, named, outer, payload_of


def reference(matrix: Tensor, part: float) -> Tensor:
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    flat = (u * s ** (1 - part)) @ v
    return (flat * matrix.double().norm() / flat.norm()).float()


@pytest.mark.parametrize(
    ("part", "shape", "scale"), [(0.0, (8, 20), 1.0), (0.5, (20, 8), 1e-9), (0.5, (8, 20), 1e15), (1.0, (6, 6), 1.0)]
)
def test_singular_values_take_the_power_and_the_norm_stays(part: float, shape: tuple[int, int], scale: float) -> None:
    matrix = gaussian(shape[0] * shape[1], 1, scale).view(shape)
    flat = matrix.flatten().clone()
    flatten_(flat, [Matrix(0, *shape)], part)
    torch.testing.assert_close(flat.view(shape), reference(matrix, part), rtol=1e-4, atol=1e-5 * scale)


def test_zeros_and_a_single_direction_stay_as_they_are() -> None:
    zeros = torch.zeros(12)
    flatten_(zeros, [Matrix(0, 3, 4)], 1.0)
    assert not zeros.any()
    one = torch.outer(gaussian(6, 1), gaussian(5, 1))
    flat = one.flatten().clone()
    flatten_(flat, [Matrix(0, 6, 5)], 0.5)
    torch.testing.assert_close(flat.view(6, 5), one, rtol=1e-3, atol=1e-3)


def test_only_whole_rows_of_hidden_matrices_are_flattened() -> None:
    shapes = {
        "model.embed_tokens.weight": (9, 4), "layer.0.up.weight": (6, 4), "layer.0.norm.weight": (5,),
        "conv": (2, 2, 2), "lm_head.weight": (9, 4),
    }  # fmt: skip
    sizes = {name: int(torch.Size(shape).numel()) for name, shape in shapes.items()}
    [whole] = partition(sizes, 1)
    assert matrices(whole, shapes) == [Matrix(36, 6, 4)]
    cut = Fragment(0, (Slice("layer.0.up.weight", 6, 21), Slice("layer.0.norm.weight", 0, 5)), 20)
    assert matrices(cut, shapes) == [Matrix(2, 3, 4)], "rows 2 to 4; 1 and 5 are cut"
    alone = Fragment(0, (Slice("layer.0.up.weight", 0, 7),), 7)
    assert matrices(alone, shapes) == []


@pytest.mark.parametrize("robust", ["none", "clip"])
def test_a_version_is_made_of_flattened_matrices(robust: str) -> None:
    """One matrix lies across the border of two chunks; the vector behind it gets the plain mean."""
    shapes = {"a": (CHUNK - 2048,), "b": (64, 64), "c": (10,)}
    [fragment] = partition({name: int(torch.Size(shape).numel()) for name, shape in shapes.items()}, 1)
    settings = outer(lr=1.0, momentum=0.0, flatten=0.5, robust=robust, **EXACT)
    peer = author({name: torch.zeros(shape) for name, shape in shapes.items()}, settings)
    contributions = [gaussian(fragment.numel, seed) + 1 for seed in range(4)]
    make(peer, named(payload_of(peer.up, delta) for delta in contributions))
    mean = torch.stack(contributions).mean(0)
    begin, end = CHUNK - 2048, CHUNK + 2048
    assert peer.chunks[0][0][1] == CHUNK < end, "the matrix is in two chunks"
    mean[begin:end] = reference(mean[begin:end].view(64, 64), 0.5).flatten()
    torch.testing.assert_close(peer.anchors[0], -mean, rtol=1e-4, atol=1e-5)
