"""Swarms of production peers in virtual time: whatever fails, and in whatever order things arrive, they end as one.

Every story is also watched: `diloco.testing.fuzz.invariants` has what must hold after every turn and at the end.
Mixtures of faults are those of the fuzz (`test_fuzz.py`), splits are in `test_forks.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from diloco.protocol.syncer import Syncer
from tests.support.stories import TOKENS_PER_ROUND, agreed, story

seeds = pytest.mark.parametrize("seed", range(2))


# -- nobody fails -----------------------------------------------------------------------------------------------------


@seeds
def test_four_peers_share_the_fragments_and_merge_everybody(seed: int) -> None:
    with story(seed) as swarm:
        swarm.start("abcd", min_peers=4)
        nodes = swarm.run_to_the_end()
        agreed(swarm, nodes, version=3)
        assert [len(held) for held in swarm.last_held] == [1, 1, 1, 1]
        assert len(swarm.made()) == 4 * 3
        assert all(swarm.contributors(made) == "abcd" and made.term == 1 for made in swarm.made())
        assert swarm.discarded_tokens() == 0
        assert {node.protocol.applied_tokens for node in nodes} == {4 * 3 * TOKENS_PER_ROUND}
        assert all(node.protocol.takeovers == node.protocol.heals == 0 for node in nodes)
        assert {kind for name in "abcd" for kind in swarm.kinds(name)} == {"join", "claim", "done"}


@pytest.mark.parametrize(
    ("peers", "fragments", "apart_s"),
    [("a", 3, 0), ("abcd", 2, 0), ("abcd", 4, 20)],
)
def test_shares_differ_by_one_fragment_at_most(peers: str, fragments: int, apart_s: float) -> None:
    """Also where one peer is there long before the next: nobody grabs everything because it started early."""
    with story(0, fragments, outer_steps=1) as swarm:
        for names in peers if apart_s else [peers]:
            swarm.start(names, min_peers=len(peers))
            swarm.run_for(apart_s)
        agreed(swarm, swarm.run_to_the_end(), version=1)
        shares = [len(held) for held in swarm.last_held]
        assert max(shares) - min(shares) <= 1


def test_versions_have_the_same_bits_whatever_arrives_first(monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals: dict[tuple[int, int], list[str]] = {}
    arrived = Syncer.arrived

    def noted(self: Syncer, peer: str, *rest: Any) -> None:
        arrivals.setdefault((self.fragment, self.version), []).append(peer)
        arrived(self, peer, *rest)

    monkeypatch.setattr(Syncer, "arrived", noted)
    digests, orders = set(), set()
    for seed in range(4):
        arrivals.clear()
        with story(seed, fragments=3, outer={"codec_up": "fp32", "codec_down": "int8"}) as swarm:
            swarm.crowd.seed = 0  # of models and gradients
            for name in "abc":
                swarm.start(name, min_peers=3)
            nodes = swarm.run_to_the_end()
            digests |= {tuple(node.replica.digests()) for node in nodes}
        orders.add(tuple((key, *arrivals[key]) for key in sorted(arrivals)))
    assert len(digests) == 1 and len(orders) > 1


@seeds
def test_streams_that_break_cost_no_contribution(seed: int) -> None:
    with story(seed, loss=0.3) as swarm:
        swarm.start("abc", min_peers=3)
        agreed(swarm, swarm.run_to_the_end(), version=3)
        assert [swarm.contributors(made) for made in swarm.made()] == 4 * 3 * ["abc"]
        assert sum(swarm.kinds(name)["contribution_broke"] for name in "abc") > 0


@seeds
def test_hosts_hold_fragments_for_a_trainer_and_follow_it(seed: int) -> None:
    with story(seed, loss=0.1) as swarm:
        swarm.start("hi", min_peers=3, trains=False)
        swarm.start("a", min_peers=3)
        agreed(swarm, swarm.run_to_the_end(), version=3)
        assert sorted(len(held) for held in swarm.last_held) == [1, 1, 2]
        assert all(swarm.contributors(made) == "a" for made in swarm.made())


# -- peers die --------------------------------------------------------------------------------------------------------


@seeds
def test_fragments_of_the_dead_are_held_evenly_by_the_living(seed: int) -> None:
    """Under a higher term, and also when one after the other dies, until a single one is left."""
    with story(seed, fragments=8, outer_steps=8) as swarm:
        swarm.begin("abcd")
        swarm.run_for(1.7 + 1.1 * seed)
        dead, *others = swarm.random.sample("abcd", 4)
        fragments = swarm.held(dead)
        swarm.crowd.crash(dead)
        swarm.settle()
        assert sorted(len(swarm.held(name)) for name in others) == [2, 3, 3]
        terms = {fragment: belief.term for fragment, belief in swarm.beliefs(swarm.node(others[0])).items()}
        assert terms == {fragment: 2 if fragment in fragments else 1 for fragment in range(8)}
        assert sum(node.protocol.takeovers for node in swarm.nodes().values()) == len(fragments) == 2
        for name in others[1:]:
            swarm.run_for(2.0 + swarm.random.random())
            swarm.crowd.crash(name)
        agreed(swarm, swarm.run_to_the_end(), version=8)
        assert swarm.last_held == [[*range(8)]]


# -- peers come and go ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_the_heirs_of_a_leaver_have_its_momentum(seed: int) -> None:
    """They followed the updates. Its last version is theirs."""
    with story(seed, outer_steps=6) as swarm:
        swarm.begin("abcd")
        swarm.run_until(lambda: swarm.version("a") == 1, "the first outer step")
        swarm.run_for(1.1 * seed)
        leaver = "abcd"[seed]
        given = swarm.held(leaver)
        swarm.crowd.leave(leaver)
        swarm.run_until(lambda: swarm.crowd.lives[leaver].ended == "left", "it has left")
        nodes = swarm.run_to_the_end()
        agreed(swarm, nodes, version=6)
        assert len(nodes) == 3
        told = [swarm.kinds(node.protocol.name) for node in nodes]
        assert all(kinds["leave"] + kinds["lost"] == 1 for kinds in told)
        assert given and all(swarm.last_beliefs[0][fragment].term == 2 for fragment in given)
        taken = [line for line in swarm.crowd.story if " takeover " in line and "'term': 2" in line]
        assert len(taken) == len(given) and all("'momentum': 'kept'" in line for line in taken)


@seeds
def test_a_peer_that_restarts_at_once_does_not_split_the_swarm(seed: int) -> None:
    """The others may never notice that it was gone; its new process has no lease, no anchor and no momentum."""
    with story(seed, outer_steps=6) as swarm:
        swarm.begin("abc")
        swarm.run_for(1.3 * seed)
        swarm.crowd.crash("a")
        swarm.start("a")
        nodes = swarm.run_to_the_end()
        agreed(swarm, nodes, version=6)
        assert len(nodes) == 3


# -- peers freeze -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "seconds"), [(0, 1.0), (1, 8.0), (0, 40.0), (1, 40.0)])
def test_a_frozen_peer_comes_back_steps_down_and_catches_up(seed: int, seconds: float) -> None:
    with story(seed, outer_steps=None) as swarm:
        swarm.begin("abc")
        swarm.run_for(1.5 + 1.7 * seed)
        frozen = "abc"[seed]
        fragments = swarm.held(frozen)
        assert fragments
        swarm.freeze(frozen, seconds)
        swarm.run_for(seconds + 5.0)
        swarm.settle()
        nodes = swarm.run_to_the_end(outer_steps=3)
        agreed(swarm, nodes)
        assert len(nodes) == 3
        terms = {fragment: belief.term for fragment, belief in swarm.last_beliefs[0].items()}
        taken = fragments if seconds == 40.0 else []  # what the others hold is never taken from them
        assert terms == {fragment: 2 if fragment in taken else 1 for fragment in range(4)}
        if seconds == 40.0:
            assert swarm.held(frozen) == []
