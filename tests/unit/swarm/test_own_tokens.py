"""What became of a peer's own contributions: remembered for a bounded number, recounted when history changes."""

from __future__ import annotations

import random

from diloco.swarm.node.own_tokens import COUNTED, OwnTokens


def test_memory_is_bounded_whatever_the_base_versions_are() -> None:
    """Without a barrier a version is made by each contribution, so a peer's base versions have gaps of any length."""
    tokens, rng, base_version = OwnTokens(), random.Random(0), 0
    for _ in range(20 * COUNTED):
        tokens.was_applied(base_version, 1)
        tokens.was_left_out(base_version + 1, 1)
        base_version += rng.randint(4, 12)
    assert len(tokens.applied) == len(tokens._left_out) == COUNTED
    assert max(tokens.applied) > base_version - 13, "the newest are kept"


def test_what_another_history_lacks_is_lost_and_the_rest_found() -> None:
    tokens = OwnTokens({0: 10, 1: 20, 2: 30})
    tokens.was_left_out(3, 40)
    recount = tokens.recount(1, 30)
    assert (recount.lost, recount.found) == ({2: 30}, {}) and tokens.take_lost() == 30 and tokens.take_lost() == 0
    recount = tokens.recount(3, 70)
    assert (recount.lost, recount.found) == ({}, {3: 40}) and tokens.take_lost() == -40
    assert tokens.applied == {0: 10, 1: 20, 3: 40}
    assert tokens.recount(-1, 0).lost == {0: 10, 1: 20, 3: 40} and tokens.applied == {}
