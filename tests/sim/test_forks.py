"""A swarm that was split meets again: the history with more work goes on, on every peer, and nothing of it is lost."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.slow import slow
from tests.support.stories import TOKENS_PER_ROUND, Story, agreed, story

MODES: dict[str, dict[str, Any]] = {
    "barrier": {},
    "quorum": {"quorum": 1, "staleness_limit": 4},
    "staggered": {"staggered": True, "overlap": 1},
}


def split_and_meet(swarm: Story, one: str, other: str) -> tuple[dict[str, int], dict[str, int]]:
    """Tokens in the anchor of each peer, when the sides meet and a while later."""
    swarm.begin(one + other)
    swarm.run_for(6.0)
    versions = {name: swarm.version(name) for name in one + other}
    swarm.split(one, other)
    swarm.run_for(40.0)
    assert all(swarm.version(name) > version + 3 for name, version in versions.items()), "both sides go on"
    assert len({tuple(swarm.node(side[0]).protocol.digests) for side in (one, other)}) == 2
    before = {name: node.protocol.applied_tokens for name, node in swarm.nodes().items()}
    swarm.mend(one, other)
    swarm.run_for(30.0)
    return before, {name: node.protocol.applied_tokens for name, node in swarm.nodes().items()}


@pytest.mark.parametrize("mode", [mode if mode == "barrier" else slow(mode) for mode in MODES])
def test_a_peer_that_waited_for_nobody_overwrites_nothing(mode: str) -> None:
    """Nor does the budget of the others shrink by the numbers of versions, of which it makes many alone."""
    with story(1, fragments=2, outer_steps=None, outer=MODES[mode]) as swarm:
        before, after = split_and_meet(swarm, "a", "bcd")
        assert before["a"] < before["b"]
        assert min(after.values()) >= before["b"], "the clock of those who did more goes on"
        discarded = swarm.crowd.lives["a"].sync
        assert discarded is not None and discarded.discarded_tokens > 0
        assert all(node.protocol.versions[0] >= node.protocol.steps for node in swarm.nodes().values())
        if mode == "barrier":
            peer = swarm.node("b").protocol
            assert peer.steps < peer.versions[0] and peer.applied_tokens <= peer.steps * 4 * TOKENS_PER_ROUND
            for name in "ab":
                assert swarm.crowd.lives[name].sync.version <= peer.steps, name  # type: ignore[union-attr]
        swarm.run_to_the_end(2)


@pytest.mark.parametrize("sides", [("ab", "cde"), ("abc", "de"), ("ab", "cd")])
def test_both_sides_go_on_and_then_that_which_did_more(sides: tuple[str, str]) -> None:
    with story(0, fragments=2, outer_steps=None) as swarm:
        before, after = split_and_meet(swarm, *sides)
        assert min(after.values()) >= max(before.values())
        swarm.settle()
        agreed(swarm, swarm.run_to_the_end(2))
