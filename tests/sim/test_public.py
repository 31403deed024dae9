"""A public run: whoever reaches a peer contributes, and only invited peers make versions."""

from __future__ import annotations

from diloco.protocol.actions import Broadcast
from diloco.protocol.messages.control import Claim
from tests.support.stories import story


def test_contributors_are_merged_and_make_no_version_even_when_they_claim_or_the_invited_go() -> None:
    with story(0, fragments=2, outer_steps=None, uninvited="xyz") as swarm:
        swarm.begin("abxyz")
        swarm.run_for(20.0)
        shares = swarm.node("a").protocol.fragments[0].shares
        assert set(shares) == set("abxyz") and shares["x"].tokens == shares["a"].tokens > 0
        for name in "xyz":
            assert not swarm.node(name).protocol.holds
        liar = swarm.node("x")
        claims = [Claim(fragment=index, term=99, version=2**20, digest="0" * 64) for index in range(2)]

        async def lie() -> None:
            liar.context.do([Broadcast(claim) for claim in claims])

        swarm.loop.run_until_complete(lie())
        swarm.run_until(lambda: swarm.kinds("a")["penalty"] > 0 and swarm.kinds("y")["penalty"] > 0, "it is refused")
        swarm.crowd.leave("b")
        swarm.run_for(30.0)
        assert {one.holder for node in swarm.nodes().values() for one in swarm.beliefs(node).values()} == {"a"}
        version = swarm.version("y")
        swarm.crowd.crash("a")
        swarm.run_for(30.0)
        assert swarm.version("y") <= version + 1, "nobody is left who may make one"
