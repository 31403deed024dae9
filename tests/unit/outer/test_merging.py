"""Merge rules: the contract that each of them keeps, radial-directional averaging, and
`outer.flatten`."""

import itertools
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diloco.config import OuterConfig
from diloco.errors import PayloadError
from diloco.outer.codecs import CODECS, LIMIT
from diloco.outer.fragments import CHUNK, Fragment, Slice, partition
from diloco.outer.merging import (
    MERGE_RULES,
    Matrix,
    Part,
    RadialDirectional,
    directional_pieces,
    flatten_,
    matrices,
)
from diloco.outer.replica import Replica
from tests.support.extensions import WEIGHTED_MEDIAN, registering
from tests.support.outer import EXACT, author, gaussian, make, named, outer, payload_of, weighted

# two chunks, and elements in no piece
NUMELS = {"embed.weight": 1000, "layer.weight": CHUNK, "layer.bias": 77}
NUMEL = sum(NUMELS.values())


def settings_of(rule: str, **settings: object) -> OuterConfig:
    """Settings that use the rule, a plain outer step, and codecs that are exact."""
    fixed = {"lr": 1, "momentum": 0, "merge": "mean", "robust": "none", **EXACT}
    key = "merge" if rule in MERGE_RULES else "robust"
    return outer(**{**fixed, **settings}).model_copy(update={key: rule})


def zeros(settings: OuterConfig) -> Replica:
    return author({name: torch.zeros(numel) for name, numel in NUMELS.items()}, settings)


def version(
    replica: Replica, found: Mapping[str, Tensor], weights: Mapping[str, float] | None = None
) -> Tensor:
    """How far a version moves the anchor back, of these contributions in this order of arrival."""
    before, weights = replica.anchors[0].clone(), weights or dict.fromkeys(found, 1.0)
    payloads = {peer: payload_of(replica.up, values) for peer, values in found.items()}
    those = [weighted(peer, payload, weights[peer]) for peer, payload in payloads.items()]
    _, digest = make(replica, those)
    assert digest == replica.digest(0)
    return before - replica.anchors[0]


def merged(
    settings: OuterConfig, found: Mapping[str, Tensor], weights: Mapping[str, float] | None = None
) -> Tensor:
    return version(zeros(settings), found, weights)


@cache
def contributions(count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(NUMEL, generator=generator)
    return {f"p{i}": common + 0.5 * torch.randn(NUMEL, generator=generator) for i in range(count)}


@pytest.fixture(autouse=True, scope="module")
def own_rule() -> Iterator[None]:
    """A merge rule of a user's keeps the contract, too."""
    with registering(WEIGHTED_MEDIAN):
        yield


every_rule = pytest.mark.parametrize("rule", [*MERGE_RULES, "weighted_median", "clip"])


@every_rule
@pytest.mark.parametrize("codec_up", ["fp32", "int8"])
def test_the_order_of_arrival_does_not_matter(rule: str, codec_up: str) -> None:
    found = {**contributions(5), "p3": -10 * contributions(5)["p3"]}
    settings = settings_of(rule, codec_up=codec_up)
    weights = {peer: 1.0 + i / 7 for i, peer in enumerate(found)}
    orders = itertools.islice(itertools.permutations(found), 0, 120, 41)
    results = [merged(settings, {peer: found[peer] for peer in order}, weights) for order in orders]
    for result in results[1:]:
        assert torch.equal(result, results[0])


@every_rule
@pytest.mark.parametrize("value", [0.0, 2.0**-126, LIMIT])
def test_extreme_contributions_merge_to_finite_values(rule: str, value: float) -> None:
    found = {f"p{i}": torch.full((NUMEL,), value if i % 2 else -value) for i in range(5)}
    assert merged(settings_of(rule), found, dict.fromkeys(found, 2.0**50)).isfinite().all()


@every_rule
@pytest.mark.parametrize("codec_up", ["fp32", "int8"])
def test_an_invalid_payload_changes_nothing(rule: str, codec_up: str) -> None:
    settings, found = settings_of(rule, codec_up=codec_up), contributions(4)
    replica = zeros(settings)
    good = named(payload_of(replica.up, values) for values in found.values())
    invalid = torch.full_like(good[0].payload, 0x7F)
    for at, broken in itertools.product(range(4), (invalid, invalid[:-1])):
        those = [*good[:at], good[at]._replace(payload=broken), *good[at + 1 :]]
        with pytest.raises(PayloadError):
            make(replica, those)
    assert torch.equal(version(replica, found), merged(settings, found))


def average(vectors: list[Tensor], weights: list[float], pieces: list[tuple[int, int]]) -> Tensor:
    out = torch.full_like(vectors[0], torch.nan)
    fp32 = CODECS["fp32"]
    those = zip(vectors, weights, strict=True)
    parts = [Part(fp32, vector.view(torch.uint8), weight) for vector, weight in those]
    RadialDirectional().merge(out, parts, pieces)
    return out


@settings(max_examples=60)
@given(
    st.integers(1, 6),
    st.sets(st.integers(1, 199), max_size=4),
    st.integers(0, 1000),
    st.sampled_from([1e-15, 1e-3, 1.0, 1e15]),
)
def test_the_average_agrees_with_the_formula_in_float64(
    workers: int, cuts: set[int], seed: int, scale: float
) -> None:
    pieces = list(pairwise([0, *sorted(cuts), 200]))
    vectors = [gaussian(200, seed + worker, scale) for worker in range(workers)]
    weights = [float(1000 * (worker + 1)) for worker in range(workers)]
    got = average(vectors, weights, pieces)
    for start, stop in pieces:
        parts = [vector[start:stop].double() for vector in vectors]
        pairs = list(zip(weights, parts, strict=True))
        direction = sum(weight * part / part.norm() for weight, part in pairs)
        if direction.norm() < 1e-2 * sum(weights):
            continue  # directions that nearly cancel; fp32 cannot agree to many places
        length = sum(weight * part.norm() for weight, part in pairs) / sum(weights)
        expected, atol = length * direction / direction.norm(), 1e-4 * float(length)
        torch.testing.assert_close(got[start:stop].double(), expected, rtol=1e-4, atol=atol)


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


def reference(matrix: Tensor, part: float) -> Tensor:
    u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    flat = (u * s ** (1 - part)) @ v
    return (flat * matrix.double().norm() / flat.norm()).float()


@pytest.mark.parametrize(
    ("part", "shape", "scale"),
    [(0.0, (8, 20), 1.0), (0.5, (20, 8), 1e-9), (0.5, (8, 20), 1e15), (1.0, (6, 6), 1.0)],
)
def test_singular_values_take_the_power_and_the_norm_stays(
    part: float, shape: tuple[int, int], scale: float
) -> None:
    matrix = gaussian(shape[0] * shape[1], 1, scale).view(shape)
    flat = matrix.flatten().clone()
    flatten_(flat, [Matrix(0, *shape)], part)
    expected = reference(matrix, part)
    torch.testing.assert_close(flat.view(shape), expected, rtol=1e-4, atol=1e-5 * scale)


def test_only_whole_rows_of_hidden_matrices_are_flattened() -> None:
    shapes = {
        "model.embed_tokens.weight": (9, 4),
        "layer.0.up.weight": (6, 4),
        "layer.0.norm.weight": (5,),
        "conv": (2, 2, 2),
        "lm_head.weight": (9, 4),
    }
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
    numel = sum(torch.Size(shape).numel() for shape in shapes.values())
    settings = outer(lr=1.0, momentum=0.0, flatten=0.5, robust=robust, **EXACT)
    peer = author({name: torch.zeros(shape) for name, shape in shapes.items()}, settings)
    contributions = [gaussian(numel, seed) + 1 for seed in range(4)]
    make(peer, named(payload_of(peer.up, delta) for delta in contributions))
    mean = torch.stack(contributions).mean(0)
    begin, end = CHUNK - 2048, CHUNK + 2048
    assert CHUNK < end, "the matrix is in two chunks"
    mean[begin:end] = reference(mean[begin:end].view(64, 64), 0.5).flatten()
    torch.testing.assert_close(peer.anchors[0], -mean, rtol=1e-4, atol=1e-5)


def test_zeros_and_a_single_direction_stay_as_they_are() -> None:
    zeros = torch.zeros(12)
    flatten_(zeros, [Matrix(0, 3, 4)], 1.0)
    assert not zeros.any()
    one = torch.outer(gaussian(6, 1), gaussian(5, 1))
    flat = one.flatten().clone()
    flatten_(flat, [Matrix(0, 6, 5)], 0.5)
    torch.testing.assert_close(flat.view(6, 5), one, rtol=1e-3, atol=1e-3)
