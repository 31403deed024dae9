"""Claims of work: an honest one is never refused, and one that is too large counts for little."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.protocol.work import capped, impossible, weigh
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


def test_a_weight_is_at_most_twice_the_median() -> None:
    assert capped({"a": 1.0, "b": 1.0, "l": 1e6}) == {"a": 1.0, "b": 1.0, "l": 2.0}
    assert capped({"a": 1.0, "b": 25.0}) == {"a": 1.0, "b": 25.0}, "of two nobody knows which one lies"


@pytest.mark.parametrize(("kind", "expected"), [("tokens", 2.0), ("tokens2_per_step", 2.0), ("uniform", 1.0)])
def test_weights_of_a_version_are_capped(kind: str, expected: float) -> None:
    counts = {"a": (8, 4), "b": (8, 4), "c": (8, 4), "l": (2**40, 4)}
    weights = weigh(kind, counts)
    assert {peer: weight / weights["a"] for peer, weight in weights.items()} == {"a": 1, "b": 1, "c": 1, "l": expected}
