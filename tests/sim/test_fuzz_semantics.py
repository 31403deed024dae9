"""A liar whose numbers are at their bounds, among production nodes: no exception, no stuck node.

`scripts/fuzz_semantics` plays all fields with all of their extreme values; a few of them are played here.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from diloco.protocol.messages import decode, encode
from diloco.protocol.messages.base import KINDS
from diloco.testing.fuzz.extremes import NUM_VALUES, Target, changed, targets
from diloco.testing.fuzz.liar import LIAR, Lie, lie_of, num_lies, play_lie
from tests.support.messages import EXAMPLES


@pytest.mark.parametrize("seed", range(0, num_lies(), num_lies() // 3 + 1))
def test_no_number_within_its_bounds_ends_or_stops_a_peer(seed: int) -> None:
    assert play_lie(lie_of(seed)).violation is None


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.kind)
def test_every_number_of_every_message_fits_at_its_bounds(example: Any) -> None:
    for kind, path in targets():
        if kind != example.kind or path[-1] in ("pushes", "wire_version"):
            continue
        lies = [changed(example, Target(kind, path, value), random.Random(0)) for value in range(NUM_VALUES)]
        assert sum(lie != example for lie in lies) >= 2, path
        assert all(decode(encode(lie)) == lie for lie in lies)


def test_every_field_gets_each_of_its_extreme_values_once() -> None:
    lies = {lie_of(seed).target for seed in range(num_lies())}
    assert len(lies) == num_lies() == len(targets()) * NUM_VALUES
    assert {lie.kind for lie in lies} == {kind for kind, _ in targets()} <= KINDS.keys()


def test_a_version_that_leaves_none_behind_it_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("protocol.fragment", "protocol.membership", "swarm.node.anchors"):
        monkeypatch.setattr(f"diloco.{module}.leaps_too_far", lambda here, there: False)
    lie = Lie(2, Target("state", ("record", "head", "version"), 0), first=True, more=False)
    assert "1 validation error for Head" in str(play_lie(lie).violation)


def test_a_sum_over_its_bound_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.swarm.conversations.recorder.at_most", lambda number, limit=0: number)
    lie = Lie(0, Target("status", ("tokens",), 0), first=True, more=False)
    assert "1 validation error for LedgerTotals" in str(play_lie(lie).violation)


@pytest.mark.slow
def test_a_publication_that_nobody_can_fetch_starts_no_storm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each failed fetch woke the others: two honest peers opened hundreds of streams a second to each other."""
    monkeypatch.setattr("diloco.protocol.limits.EventLines.suppressed", lambda self, kind, peer, now: 0)
    lie = Lie(0, Target("published", ("version",), 5), first=True, more=False)
    outcome = play_lie(lie)
    assert outcome.violation is None
    failed: Counter[tuple[str, int]] = Counter()
    for line in outcome.story:
        second, peer, kind = line.split()[:3]
        if kind == "fetch_failed" and peer != LIAR:
            failed[peer, int(float(second))] += 1
    assert failed and max(failed.values()) <= 3 * 3, "three fragments, and three peers to ask once a second"
