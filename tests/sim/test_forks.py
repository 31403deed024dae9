"""A swarm that was split meets again: the history with more work goes on, on every peer, and nothing of it is lost."""

from __future__ import annotations

from typing import Any

import pytest

from diloco.protocol import peer as peer_module
from tests.support.stories import TOKENS_PER_ROUND, Story, story

MODES: dict[str, dict[str, Any]] = {
    "barrier": {},
    "quorum": {"quorum": 1, "staleness_limit": 4},
    "staggered": {"staggered": True, "overlap": 1},
}
modes = pytest.mark.parametrize("mode", MODES)
seeds = pytest.mark.parametrize("seed", range(2))


def split_and_meet(swarm: Story, one: str, other: str, apart_s: float = 40.0) -> tuple[dict[str, int], dict[str, int]]:
    """Tokens in the anchor of each peer, when the sides meet and a while later."""
    swarm.start(one + other, min_peers=len(one + other))
    swarm.run_until_training()
    swarm.run_for(6.0)
    swarm.split(one, other)
    swarm.run_for(apart_s)
    before = {name: node.protocol.applied_tokens for name, node in swarm.nodes().items()}
    swarm.mend(one, other)
    swarm.run_for(30.0)
    return before, {name: node.protocol.applied_tokens for name, node in swarm.nodes().items()}


@seeds
@modes
def test_a_peer_that_was_cut_off_and_waited_for_nobody_overwrites_nothing(mode: str, seed: int) -> None:
    with story(seed, fragments=2, outer_steps=None, outer=MODES[mode]) as swarm:
        before, after = split_and_meet(swarm, "a", "bcde")
        peers = [node.protocol for node in swarm.nodes().values()]
        assert before["a"] < before["b"]
        assert min(after.values()) >= before["b"], "the clock of those who did more goes on"
        discarded = swarm.crowd.lives["a"].sync
        assert discarded is not None and discarded.discarded_tokens > 0
        assert all(peer.versions[0] >= peer.steps for peer in peers)
        swarm.run_to_the_end(2)


@seeds
@pytest.mark.parametrize("sides", [("ab", "cde"), ("abc", "def")])
def test_the_side_that_did_more_goes_on(sides: tuple[str, str], seed: int) -> None:
    with story(seed, fragments=2, outer_steps=None) as swarm:
        before, after = split_and_meet(swarm, *sides)
        assert min(after.values()) >= max(before.values())
        swarm.run_to_the_end(2)


def test_numbers_that_were_skipped_are_no_outer_steps() -> None:
    """A lone peer makes versions fast; when it comes back, the budget of the others does not shrink by these."""
    with story(1, fragments=2, outer_steps=None) as swarm:
        split_and_meet(swarm, "a", "bcde")
        node = swarm.node("b")
        assert node.protocol.steps < node.protocol.versions[0]
        assert node.protocol.applied_tokens <= node.protocol.steps * 5 * TOKENS_PER_ROUND
        for name in "ab":
            assert swarm.crowd.lives[name].sync.version <= node.protocol.steps, name  # type: ignore[union-attr]
        swarm.run_to_the_end(2)


def test_a_syncer_that_holds_on_to_less_work_loses_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    catch_ups = peer_module.catch_ups
    monkeypatch.setattr(peer_module, "catch_ups", lambda view: [] if view.me == "a" else catch_ups(view))
    with story(0, fragments=2, outer_steps=None) as swarm:
        before, _ = split_and_meet(swarm, "a", "bcde")
        others = [node.protocol for name, node in swarm.nodes().items() if name != "a"]
        assert all(peer.applied_tokens > before["b"] for peer in others), "they go on"
        assert all(
            lease.holder != "a" for peer in others for lease in (peer.leases.get(0), peer.leases.get(1)) if lease
        )
