"""A volunteer far slower than the others costs a synchronous swarm little, and what it learned is merged."""

from __future__ import annotations

import pytest

from diloco.testing.fuzz.crowd import Member
from tests.support.stories import STEP_S, TOKENS_PER_ROUND, Story, story

SECONDS = 200.0  # two and a half rounds of the slow one


def train(swarm: Story, slow: float) -> int:
    """Four peers, and one that is so many times slower if that is not 0; tokens that are merged after some minutes."""
    swarm.start("abcd", min_peers=5 if slow else 4)
    if slow:
        swarm.crowd.start(Member("s", step_s=slow * STEP_S), min_peers=5)
    swarm.run_until_training()
    swarm.run_for(SECONDS)
    return swarm.node("a").protocol.applied_tokens


@pytest.mark.parametrize("robust", ["auto", "none"])  # kept until the version closes, or folded in on arrival
def test_a_peer_that_is_forty_times_slower_costs_a_barrier_little_and_is_merged(robust: str) -> None:
    outer = {"robust": robust, "codec_up": "int8"}
    with story(0, fragments=2, outer_steps=None, outer=outer) as swarm:
        alone = train(swarm, 0.0)
    with story(0, fragments=2, outer_steps=None, outer=outer) as swarm:
        together = train(swarm, 40.0)
        shares = swarm.node("a").protocol.accounts.shares(0)
        assert shares["s"].contributions == 2 and shares["s"].tokens == 2 * TOKENS_PER_ROUND
        assert swarm.discarded_tokens() == 0
        late = [made for made in swarm.made() if any(made.version - 1 > base for (_, base), _ in made.contributions)]
        assert late and all(len(made.contributions) == 5 for made in late), "it is merged beside the others"
        assert {node.protocol.penalties.refusal("s", swarm.loop.seconds) for node in swarm.nodes().values()} == {None}
        swarm.run_to_the_end(outer_steps=2)
    # The first version waited for it, which is once; after that nobody did.
    waited = 20.0 / SECONDS
    assert together > (1 - 0.05 - waited) * alone


def test_one_that_says_it_is_slow_and_contributes_nothing_stops_nobody() -> None:
    with story(0, fragments=1, outer_steps=None) as swarm:
        swarm.start("abc", min_peers=4)
        swarm.crowd.start(Member("l", step_s=1e6), min_peers=4)
        swarm.run_until_training()
        swarm.run_for(60.0)
        assert swarm.version("a") > 10
