"""Merge rules: the contract that each of them keeps, and what a new one takes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cache
from typing import get_args

import pytest
import torch
from torch import Tensor

from diloco.config import OuterConfig, run_settings
from diloco.errors import PayloadError
from diloco.outer.codecs import LIMIT
from diloco.outer.fragments import CHUNK
from diloco.outer.merging import AVERAGES
from diloco.outer.replica import Replica
from tests.support.outer import EXACT, author, make, named, outer, payload_of, weighted

NUMELS = {"embed.weight": 1000, "layer.weight": CHUNK, "layer.bias": 77}  # two chunks, and elements in no piece
NUMEL = sum(NUMELS.values())


def settings_of(rule: str, **settings: object) -> OuterConfig:
    """Settings that use the rule, a plain outer step, and codecs that are exact."""
    fixed = {"lr": 1, "momentum": 0, "merge": "mean", "robust": "none", **EXACT}
    key = "merge" if rule in AVERAGES else "robust"
    return outer(**{**fixed, **settings}).model_copy(update={key: rule})


def zeros(settings: OuterConfig) -> Replica:
    return author({name: torch.zeros(numel) for name, numel in NUMELS.items()}, settings)


def version(replica: Replica, found: Mapping[str, Tensor], weights: Mapping[str, float] | None = None) -> Tensor:
    """How far a version moves the anchor back, of these contributions in this order of arrival."""
    before, weights = replica.anchors[0].clone(), weights or dict.fromkeys(found, 1.0)
    those = [weighted(peer, payload_of(replica.up, values), weights[peer]) for peer, values in found.items()]
    _, digest = make(replica, those)
    assert digest == replica.digest(0)
    return before - replica.anchors[0]


def merged(settings: OuterConfig, found: Mapping[str, Tensor], weights: Mapping[str, float] | None = None) -> Tensor:
    return version(zeros(settings), found, weights)


@cache
def contributions(count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(NUMEL, generator=generator)
    return {f"p{i}": common + 0.5 * torch.randn(NUMEL, generator=generator) for i in range(count)}


every_rule = pytest.mark.parametrize("rule", [*AVERAGES, "clip"])


@every_rule
@pytest.mark.parametrize("codec_up", ["fp32", "int8"])
def test_the_order_of_arrival_does_not_matter(rule: str, codec_up: str) -> None:
    """Also where one lies."""
    found = {**contributions(5), "p3": -10 * contributions(5)["p3"]}
    settings, weights = settings_of(rule, codec_up=codec_up), {peer: 1.0 + i / 7 for i, peer in enumerate(found)}
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


def test_the_configuration_and_the_registry_have_the_same_names() -> None:
    assert set(AVERAGES) == set(get_args(run_settings.Average))
