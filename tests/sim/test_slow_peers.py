"""A volunteer far slower or faster than the others costs a swarm little, and what it learned is
merged."""

from __future__ import annotations

from pathlib import Path

from diloco.testing.fuzz.lives import PeerSpec
from tests.support.simulated import simulated
from tests.support.stories import STEP_S, TOKENS_PER_ROUND, Story, story

SECONDS = 200.0


def train(swarm: Story, names: str, seconds: float, *slow: PeerSpec) -> int:
    """Tokens that are merged after some time by these peers and slow ones."""
    swarm.start(names, min_peers=len(names) + len(slow))
    for member in slow:
        swarm.crowd.start(member, min_peers=len(names) + len(slow))
    swarm.run_until(lambda: len(swarm.nodes()) == len(names) + len(slow), "all are in the swarm")
    swarm.run_for(seconds)
    return swarm.work("a")


def test_a_peer_forty_times_slower_costs_little_and_is_merged() -> None:
    outer = {"codec_up": "int8"}
    with story(0, fragments=1, outer_steps=None, outer=outer) as swarm:
        alone = train(swarm, "abc", SECONDS / 4)
    with story(0, fragments=1, outer_steps=None, outer=outer) as swarm:
        together = train(swarm, "abc", SECONDS, PeerSpec("s", step_s=40.0 * STEP_S))
        contributions, tokens = swarm.merged("a", "s")
        assert contributions >= 2 and tokens >= TOKENS_PER_ROUND
        assert all(swarm.discarded(name) == 0 for name in "abcs")
        swarm.run_to_the_end(outer_steps=2)
    # The first version waited for it, which is once; after that nobody did.
    waited = 40.0 / SECONDS
    assert together > (1 - 0.1 - waited) * 4 * alone


def test_one_that_is_slow_and_contributes_nothing_stops_nobody() -> None:
    with story(0, fragments=1, outer_steps=None) as swarm:
        train(swarm, "abc", 80.0, PeerSpec("l", step_s=1e6))
        assert swarm.version("a") > 10


def test_a_peer_sixteen_times_faster_is_merged_at_its_pace_without_a_barrier(
    tmp_path: Path,
) -> None:
    """Nobody waits for anybody, although all come in one moment each 4 seconds."""
    outcome = simulated(
        tmp_path, "outer=async", "sim.step_s=[1,1,1,0.0625]", "budget.outer_steps=60"
    )
    fast = outcome.summary.peers[3]
    assert fast.steps >= 0.95 * 16 * outcome.virtual_s
    assert [peer.seconds.wait for peer in outcome.summary.peers] == [0.0] * 4
