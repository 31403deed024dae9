"""Claims of work: an honest one is never refused and never waits; one that is free counts for little."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.config import OuterConfig
from diloco.protocol.work import MULTIPLE, Credit, Weights, capped, fill_rate, impossible
from tests.support.core import contribution_of


def test_claims_that_no_honest_peer_makes_are_named() -> None:
    assert impossible(contribution_of(steps=10), 8, 10) is None
    assert impossible(contribution_of(steps=10, tokens=10**9), None, 10) is None
    wrong = "81 tokens in 10 steps are claimed, and a step has 8"
    assert impossible(contribution_of(steps=10, tokens=81), 8, 10) == wrong
    wrong = f"{2**37} steps are claimed in one contribution, and a cycle has 10"
    assert impossible(contribution_of(steps=2**37), None, 10) == wrong, "whatever pace the peer says that it has"


@given(rounds=st.floats(0.1, 3), sync_every=st.integers(1, 1000))
def test_no_honest_claim_is_impossible(rounds: float, sync_every: int) -> None:
    steps = max(1, int(rounds * sync_every))
    assert impossible(contribution_of(steps=steps, tokens=64 * steps), 64, sync_every) is None


@settings(max_examples=50)
@given(
    sync_every=st.integers(1, 500),
    pace=st.floats(0.01, 10),
    times=st.floats(0.05, MULTIPLE),
    pauses=st.lists(st.floats(0, 1e5), min_size=1, max_size=8),
    parts=st.floats(0.02, 1),
)
def test_an_honest_peer_never_waits(
    sync_every: int, pace: float, times: float, pauses: list[float], parts: float
) -> None:
    """It trains up to `MULTIPLE` times as fast as the others, sleeps now and then, and sends whole cycles or parts."""
    credit, now, steps = Credit(sync_every), 0.0, max(1, int(parts * sync_every))
    for version, pause_s in enumerate(pauses):
        now += pause_s + steps / (times * pace)
        for _ in range(2):  # its stream broke
            assert credit.counts_at("a", version, steps, fill_rate([pace]), now) <= now + 1e-6
            now += 0.5


def test_versions_are_not_free() -> None:
    """Without a barrier, a peer that claims a cycle for each version in no time would make all of them."""
    credit, rate = Credit(10), fill_rate([1.0, 1.0, 1.0])
    assert [credit.counts_at("liar", version, 10, rate, 0.0) for version in range(4)] == [0.0, 2.5, 5.0, 7.5]
    assert credit.counts_at("honest", 3, 10, rate, 0.0) == 0.0
    assert credit.counts_at("liar", 4, 10, rate, 1e6) == 1e6, "what it did not claim is not saved up for ever"
    assert credit.counts_at("liar", 5, 10, rate, 1e6) == 1e6
    assert credit.counts_at("liar", 6, 10, rate, 1e6) == 1e6 + 2.5


def test_a_claim_that_grows_is_paid_for_once_more() -> None:
    credit = Credit(10)
    assert [credit.counts_at("a", 0, steps, 1.0, 0.0) for steps in (5, 10, 30)] == [0.0, 0.0, 20.0]


def test_nobody_waits_while_no_pace_is_known() -> None:
    credit = Credit(10)
    assert fill_rate([]) == fill_rate([0.0]) == math.inf
    assert all(credit.counts_at("a", version, 80, math.inf, 1.0) == 1.0 for version in range(9))


def test_a_quarter_may_lie_and_a_half_may_be_slow() -> None:
    assert fill_rate([1.0, 1.0, 1.0, 1e30]) == MULTIPLE
    assert fill_rate([1.0, 0.025, 0.025]) == MULTIPLE


def test_memory_is_bounded_whoever_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("limits", "work"):
        monkeypatch.setattr(f"diloco.protocol.{module}.MAX_PEERS", 64)
    credit = Credit(10)
    for number in range(200):
        credit.counts_at(str(number), 0, 10, 1.0, 0.0)
    assert len(credit._buckets) == len(credit._paid) == 64


def test_a_weight_is_at_most_twice_the_median() -> None:
    assert capped({"a": 1.0, "b": 1.0, "l": 1e6}) == {"a": 1.0, "b": 1.0, "l": 2.0}
    assert capped({"a": 1.0, "b": 25.0}) == {"a": 1.0, "b": 25.0}, "of two nobody knows which one lies"


@pytest.mark.parametrize(("kind", "expected"), [("tokens", 2.0), ("tokens2_per_step", 2.0), ("uniform", 1.0)])
def test_weights_of_a_version_are_capped(kind: str, expected: float) -> None:
    weights = Weights(OuterConfig(method="diloco", sync_every=1, weights=kind))  # type: ignore[arg-type]
    counts = {"a": (8, 4), "b": (8, 4), "c": (8, 4), "l": (2**40, 4)}
    assert weights.together(counts) == {"a": 1.0, "b": 1.0, "c": 1.0, "l": expected}


def test_the_cap_of_what_is_folded_in_comes_from_those_before() -> None:
    weights = Weights(OuterConfig(method="diloco", sync_every=1))
    weights.offered(8, 4)
    assert weights.on_arrival(800, 4) == 100.0, "nothing is known yet"
    weights.published([(8, 4), (8, 4), (8, 4), (8000, 4)])
    weights.restart()
    assert weights.on_arrival(8, 4) == 1.0
    assert weights.on_arrival(800, 4) == 2.0
