"""Merge rules: the contract that each of them keeps, and what a new one takes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import get_args

import pytest
import torch
from torch import Tensor

from diloco.config import OuterConfig
from diloco.config import groups as names
from diloco.errors import PayloadError
from diloco.outer.codecs import LIMIT
from diloco.outer.fragments import CHUNK, partition
from diloco.outer.merging import AVERAGES, JUDGES, Average, Judge, MergeRule, Staged, Sum
from diloco.outer.optimizer import OuterStep
from diloco.outer.replica import Replica
from diloco.outer.robust import Judgement

NUMELS = {"embed.weight": 1000, "layer.weight": CHUNK, "layer.bias": 77}  # two chunks, and elements in no piece
NUMEL = sum(NUMELS.values())


def settings_of(rule: str, **outer: object) -> OuterConfig:
    """Settings that use the rule, a plain outer step, and codecs that are exact."""
    fixed = {"method": "diloco", "sync_every": 1, "lr": 1, "momentum": 0, "codec_up": "fp32", "codec_down": "fp32"}
    settings = OuterConfig(**{**fixed, "merge": "mean", "robust": "none", **outer})
    key = "merge" if rule in AVERAGES else "robust"
    return settings.model_copy(update={key: rule})


def merged(settings: OuterConfig, contributions: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """What a version makes of these contributions, in this order of arrival."""
    replica = Replica({name: torch.zeros(n) for name, n in NUMELS.items()}, partition(NUMELS, 1), settings)
    replica.hold(0)
    held = replica.held[0]
    for peer, values in contributions.items():
        for chunk, (start, stop) in enumerate(held.chunks):
            payload = torch.empty(held.up.nbytes(stop - start), dtype=torch.uint8)
            held.up.encode(values[start:stop], payload)
            sent = payload.clone()
            held.take(chunk, peer, payload, weights[peer])
            assert torch.equal(payload, sent), "what was received is left as it is"
    judged = held.judge(weights) if held.staged is not None else None
    update = torch.empty(replica.update_nbytes(0), dtype=torch.uint8)
    digest = held.merge_(OuterStep(0, len(contributions)), update, judged)
    assert digest == replica.digest(0)
    return -replica.anchors[0]


def contributions(count: int, seed: int = 0, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(NUMEL, generator=generator)
    return {f"p{i}": scale * (common + 0.5 * torch.randn(NUMEL, generator=generator)) for i in range(count)}


def alike(found: Mapping[str, Tensor]) -> dict[str, float]:
    return dict.fromkeys(found, 1.0)


# -- the contract -----------------------------------------------------------------------------------------------------


every_rule = pytest.mark.parametrize("rule", [*AVERAGES, *JUDGES])


@every_rule
@pytest.mark.parametrize("count", [1, 3, 5])
def test_equal_contributions_merge_to_themselves(rule: str, count: int) -> None:
    [values] = contributions(1).values()
    found = {f"p{i}": values for i in range(count)}
    result = merged(settings_of(rule), found, {peer: 1.0 + i for i, peer in enumerate(found)})
    torch.testing.assert_close(result, values, rtol=1e-5, atol=1e-6)


@every_rule
def test_the_result_points_where_the_contributions_point_and_is_about_as_long(rule: str) -> None:
    found = contributions(6)
    values = torch.stack(list(found.values()))
    result = merged(settings_of(rule), found, alike(found))
    assert float(torch.nn.functional.cosine_similarity(result, values.mean(0), dim=0)) > 0.95
    assert 0.8 < float(result.norm() / values.norm(dim=1).mean()) < 1.1


@every_rule
def test_the_order_of_arrival_does_not_matter(rule: str) -> None:
    found = contributions(5)
    weights = {peer: 1.0 + i for i, peer in enumerate(found)}
    results = [
        merged(settings_of(rule), {peer: found[peer] for peer in order}, weights)
        for order in itertools.islice(itertools.permutations(found), 0, 120, 41)
    ]
    for result in results[1:]:
        if rule in AVERAGES:  # whose sums round in the order of arrival
            torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(result, results[0])


@every_rule
def test_a_power_of_two_in_front_of_all_contributions_is_in_front_of_the_result(rule: str) -> None:
    small, large = contributions(5), contributions(5, scale=2.0**20)
    results = [merged(settings_of(rule), found, alike(found)) for found in (small, large)]
    torch.testing.assert_close(2.0**20 * results[0], results[1], rtol=1e-5, atol=0.5)


@every_rule
@pytest.mark.parametrize("value", [0.0, 2.0**-126, LIMIT])
def test_extreme_contributions_merge_to_finite_values(rule: str, value: float) -> None:
    found = {f"p{i}": torch.full((NUMEL,), value if i % 2 else -value) for i in range(5)}
    assert merged(settings_of(rule), found, dict.fromkeys(found, 2.0**50)).isfinite().all()


@every_rule
@pytest.mark.parametrize("codec_up", ["fp32", "int8"])
def test_an_invalid_payload_changes_nothing(rule: str, codec_up: str) -> None:
    settings = settings_of(rule, codec_up=codec_up)
    found = contributions(4)
    replica = Replica({name: torch.zeros(n) for name, n in NUMELS.items()}, partition(NUMELS, 1), settings)
    replica.hold(0)
    held = replica.held[0]
    invalid = torch.full((held.up.nbytes(CHUNK),), 0x7F, dtype=torch.uint8)
    for peer, values in found.items():
        for broken in (invalid, invalid[:-1]):
            with pytest.raises(PayloadError):
                held.take(0, peer, broken, 1.0)
        for chunk, (start, stop) in enumerate(held.chunks):
            payload = torch.empty(held.up.nbytes(stop - start), dtype=torch.uint8)
            held.up.encode(values[start:stop], payload)
            held.take(chunk, peer, payload, 1.0)
    judged = held.judge(alike(found)) if held.staged is not None else None
    held.merge_(OuterStep(0, 4), torch.empty(replica.update_nbytes(0), dtype=torch.uint8), judged)
    assert torch.equal(-replica.anchors[0], merged(settings, found, alike(found)))


@every_rule
def test_a_second_version_starts_from_nothing(rule: str) -> None:
    settings, found = settings_of(rule), contributions(5)
    replica = Replica({name: torch.zeros(n) for name, n in NUMELS.items()}, partition(NUMELS, 1), settings)
    replica.hold(0)
    held, anchors = replica.held[0], []
    for version in range(2):
        for peer, values in found.items():
            for chunk, (start, stop) in enumerate(held.chunks):
                held.take(chunk, peer, values[start:stop].clone().view(torch.uint8), 1.0)
        judged = held.judge(alike(found)) if held.staged is not None else None
        held.merge_(OuterStep(version, 5), torch.empty(replica.update_nbytes(0), dtype=torch.uint8), judged)
        anchors.append(replica.anchors[0].clone())
    torch.testing.assert_close(anchors[1], 2 * anchors[0], rtol=1e-5, atol=1e-5)


# -- names ------------------------------------------------------------------------------------------------------------


def test_every_name_of_the_configuration_is_a_rule_and_the_other_way_round() -> None:
    assert set(AVERAGES) == set(get_args(names.Average))
    assert set(JUDGES) == set(get_args(names.Judge))
    assert all(rule.name == name for name, rule in {**AVERAGES, **JUDGES}.items())


@pytest.mark.parametrize("robust", ["auto", "none", *get_args(names.Judge)])
@pytest.mark.parametrize("codec_up", ["fp32", "int8"])
@pytest.mark.parametrize("quorum", [None, 2])
def test_contributions_are_staged_where_the_configuration_says_that_they_are_judged(
    robust: str, codec_up: str, quorum: int | None
) -> None:
    if quorum and robust in get_args(names.OwnJudge):
        return
    settings = OuterConfig(method="diloco", sync_every=1, robust=robust, codec_up=codec_up, quorum=quorum)
    judged = settings.judged_together
    replica = Replica({"w": torch.zeros(5)}, partition({"w": 5}, 1), settings)
    replica.hold(0)
    assert (replica.held[0].rule is not None) == (replica.held[0].staged is not None) == judged


# -- a new rule -------------------------------------------------------------------------------------------------------


class Median(Judge):
    name = "median"

    def merge_(
        self, into: Sum, staged: Staged, chunk: int, peers: Sequence[str], judged: Judgement, average: Average
    ) -> None:
        into.total.copy_(staged.decoded(peers, chunk).median(0).values)


class Signs(Average):
    """The majority's sign of each coordinate (signSGD with majority vote, arXiv 1810.05291)."""

    name = "signs"

    def add_(self, into: Sum, values: Tensor, weight: float, scale: float = 1.0) -> None:
        into.total.add_(values.sign(), alpha=weight)

    def average_(self, into: Sum) -> None:
        into.total.sign_()


@pytest.mark.parametrize("rule", [Median, Signs])
def test_a_class_in_the_registry_is_all_that_a_new_rule_takes(
    rule: type[MergeRule], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(AVERAGES if issubclass(rule, Average) else JUDGES, rule.name, rule)
    found = contributions(5)
    values = torch.stack(list(found.values()))
    expected = values.median(0).values if rule is Median else values.sign().sum(0).sign()
    for codec_up in ("fp32", "int8"):
        result = merged(settings_of(rule.name, codec_up=codec_up), found, alike(found))
        error = (result - expected).abs()
        step = 0.1 if codec_up == "int8" else 0.0
        assert float((error > step).float().mean()) < 0.02, "int8 may turn the sign of a value near zero"
