"""Swarms of production peers in virtual time: whatever fails, and in whatever order things arrive, they end as one.

Every story is also watched: `diloco.testing.fuzz.invariants` has what must hold after every turn and at the end.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from diloco.protocol.syncer import Syncer
from tests.support.stories import TOKENS_PER_ROUND, Belief, agreed, story

seeds = pytest.mark.parametrize("seed", range(4))


# -- nobody fails -----------------------------------------------------------------------------------------------------


@seeds
def test_four_peers_share_the_fragments_and_merge_everybody_in_every_round(seed: int) -> None:
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


@pytest.mark.parametrize(("peers", "fragments"), [(1, 3), (2, 5), (3, 4), (4, 2), (5, 5)])
def test_shares_differ_by_one_fragment_at_most(peers: int, fragments: int) -> None:
    for seed in range(2):
        with story(seed, fragments, outer_steps=1) as swarm:
            swarm.start("abcde"[:peers], min_peers=peers)
            agreed(swarm, swarm.run_to_the_end(), version=1)
            shares = [len(held) for held in swarm.last_held]
            assert max(shares) - min(shares) <= 1


def test_nobody_grabs_everything_because_it_started_early() -> None:
    with story() as swarm:
        for name in "abcd":
            swarm.start(name, min_peers=4)
            swarm.run_for(20.0)
        agreed(swarm, swarm.run_to_the_end(), version=3)
        assert [len(held) for held in swarm.last_held] == [1, 1, 1, 1]


@pytest.mark.parametrize("robust", ["auto", "none"])  # kept until the version closes, or folded in on arrival
def test_int8_versions_have_the_same_bits_whatever_arrives_first(robust: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrivals: dict[tuple[int, int], list[str]] = {}
    arrived = Syncer.arrived

    def noted(self: Syncer, peer: str, *rest: Any) -> None:
        arrivals.setdefault((self.fragment, self.version), []).append(peer)
        arrived(self, peer, *rest)

    monkeypatch.setattr(Syncer, "arrived", noted)
    digests, orders = set(), set()
    for seed in range(8):
        arrivals.clear()
        with story(seed, fragments=3, outer={"codec_up": "int8", "codec_down": "int8", "robust": robust}) as swarm:
            swarm.crowd.seed = 0  # of models and gradients
            for name in "abc":
                swarm.start(name, min_peers=3)
            nodes = swarm.run_to_the_end()
            digests |= {tuple(node.replica.digests()) for node in nodes}
        orders.add(tuple((key, *arrivals[key]) for key in sorted(arrivals)))
    assert len(digests) == 1 and len(orders) > 1


def test_the_same_seed_is_the_same_run_and_another_one_is_not() -> None:
    traces = []
    for seed in (1, 1, 2):
        with story(seed, loss=0.1) as swarm:
            swarm.start("abc", min_peers=3)
            swarm.run_for(3.0)
            swarm.crowd.crash("b")
            swarm.run_to_the_end()
            traces.append([swarm.loop.turns, swarm.loop.seconds, swarm.made(), swarm.crowd.story])
    assert traces[0] == traces[1] != traces[2]


@seeds
def test_streams_that_break_cost_no_contribution(seed: int) -> None:
    with story(seed, loss=0.3) as swarm:
        swarm.start("abc", min_peers=3)
        agreed(swarm, swarm.run_to_the_end(), version=3)
        assert len(swarm.made()) == 4 * 3
        assert all(swarm.contributors(made) == "abc" for made in swarm.made())
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


DYING = 40  # of the turns of a round, at which somebody dies


def turns_of_a_round() -> tuple[int, int]:
    """After which turns of the loop a round begins, and is over for everybody, when nobody dies."""
    with story(0, fragments=3, outer_steps=2) as swarm:
        swarm.start("abc", min_peers=3)
        swarm.run_until_training()
        begins = swarm.loop.turns
        swarm.run_until(lambda: all(swarm.version(name) == 1 for name in "abc"), "its end")
        return begins, swarm.loop.turns


def test_a_peer_may_die_at_any_event() -> None:
    """At turns of a round in turn, each time another victim: the two that live reach the last version."""
    first, last = turns_of_a_round()
    assert last - first > 100
    for number in range(DYING):
        at, victim = first + number * (last - first) // DYING, "abc"[number % 3]
        one, other = (name for name in "abc" if name != victim)
        with story(0, fragments=3, outer_steps=2) as swarm:
            held: list[tuple[int, Belief]] = []  # what both believe that the victim holds when it dies

            def die(swarm=swarm, held=held, victim=victim, one=one, other=other) -> None:  # type: ignore[no-untyped-def]
                both = swarm.beliefs(swarm.node(one)).items() & swarm.beliefs(swarm.node(other)).items()
                held += [(fragment, belief) for fragment, belief in both if belief.holder == victim]
                swarm.crowd.crash(victim)

            swarm.at_turn(at, die)
            swarm.start("abc", min_peers=3)
            nodes = swarm.run_to_the_end()
            assert [node.protocol.name for node in nodes] == [one, other]
            agreed(swarm, nodes, version=2)
            assert held and all(swarm.last_beliefs[0][fragment].term > belief.term for fragment, belief in held)


@seeds
def test_fragments_of_the_dead_are_held_evenly_under_a_higher_term(seed: int) -> None:
    with story(seed, fragments=8, outer_steps=5) as swarm:
        swarm.start("abcd", min_peers=4)
        swarm.run_until_training()
        swarm.run_for(1.7 + 1.1 * (seed % 4))
        dead = "abcd"[seed % 4]
        fragments = swarm.held(dead)
        swarm.crowd.crash(dead)
        nodes = swarm.run_to_the_end()
        agreed(swarm, nodes, version=5)
        assert sorted(len(held) for held in swarm.last_held) == [2, 3, 3]
        terms = {fragment: belief.term for fragment, belief in swarm.last_beliefs[0].items()}
        assert terms == {fragment: 2 if fragment in fragments else 1 for fragment in range(8)}
        assert sum(node.protocol.takeovers for node in nodes) == len(fragments) == 2


@seeds
def test_one_peer_after_the_other_may_die_until_a_single_one_is_left(seed: int) -> None:
    with story(seed, outer_steps=8) as swarm:
        swarm.start("abcd", min_peers=4)
        swarm.run_until_training()
        for name in swarm.random.sample("abcd", 3):
            swarm.run_for(2.0 + swarm.random.random())
            swarm.crowd.crash(name)
        [last] = swarm.run_to_the_end()
        agreed(swarm, [last], version=8)
        assert swarm.last_held == [[0, 1, 2, 3]]


# -- peers come and go ------------------------------------------------------------------------------------------------


@seeds
def test_a_late_joiner_takes_nothing_away_and_is_soon_merged_in_every_round(seed: int) -> None:
    with story(seed, outer_steps=6) as swarm:
        swarm.start("abc", min_peers=3)
        swarm.run_until_training()
        swarm.run_for(1.3 * (seed % 4))
        before, began = swarm.beliefs(swarm.node("a")), swarm.version("a")
        swarm.start("d")
        nodes = swarm.run_to_the_end()
        agreed(swarm, nodes, version=6)
        assert swarm.last_beliefs[0] == before
        assert all(swarm.crowd.lives[name].sync.discarded_tokens == 0 for name in "abc")  # type: ignore[union-attr]
        assert all(set("abc") <= set(swarm.contributors(made)) for made in swarm.made())
        assert began <= 2, "there is time enough to fetch three versions, and perhaps to come late for one"
        assert all("d" in swarm.contributors(made) for made in swarm.made() if made.version == 6)


@pytest.mark.parametrize("seed", range(6))
def test_a_leaver_hands_its_fragments_over_with_their_outer_state(seed: int) -> None:
    with story(seed, outer_steps=6) as swarm:
        swarm.watch_outer_states()
        swarm.start("abcd", min_peers=4)
        swarm.run_until_training()
        swarm.run_until(lambda: swarm.version("a") == 1, "the first outer step")
        swarm.run_for(1.1 * (seed % 6))
        leaver = "abcd"[seed % 4]
        given = swarm.held(leaver)
        assert given
        swarm.crowd.leave(leaver)
        nodes = swarm.run_to_the_end()
        agreed(swarm, nodes, version=6)
        assert swarm.crowd.lives[leaver].ended == "left" and len(nodes) == 3
        assert all(
            swarm.kinds(node.protocol.name)["leave"] + swarm.kinds(node.protocol.name)["lost"] == 1 for node in nodes
        )
        assert all(swarm.last_beliefs[0][fragment].term == 2 for fragment in given)
        assert swarm.outer_states_differ == []


def test_without_its_outer_state_a_fragment_has_another_one() -> None:
    """The comparison in the story of the leaver finds a difference when syncers die with their backups."""
    with story(0, outer_steps=6) as swarm:
        swarm.watch_outer_states()
        swarm.start("abcd", min_peers=4)
        swarm.run_until_training()
        swarm.run_for(4.0)
        for name in "abc":
            swarm.crowd.crash(name)
        swarm.run_to_the_end()
        assert swarm.outer_states_differ


@seeds
def test_a_peer_that_restarts_at_once_under_its_old_name_does_not_split_the_swarm(seed: int) -> None:
    """The others may never notice that it was gone; its new process has no lease, no anchor and no momentum."""
    with story(seed, outer_steps=6) as swarm:
        swarm.start("abc", min_peers=3)
        swarm.run_until_training()
        swarm.run_for(1.3 * (seed % 4))
        swarm.crowd.crash("a")
        swarm.start("a")
        nodes = swarm.run_to_the_end()
        agreed(swarm, nodes, version=6)
        assert len(nodes) == 3


# -- peers freeze, networks split -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [1.0, 8.0, 40.0])
@pytest.mark.parametrize("seed", range(2))
def test_a_frozen_peer_comes_back_steps_down_and_catches_up(seed: int, seconds: float) -> None:
    with story(seed, outer_steps=None) as swarm:
        swarm.start("abc", min_peers=3)
        swarm.run_until_training()
        swarm.run_for(1.5 + 1.7 * (seed % 4))
        frozen = "abc"[seed % 3]
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


@pytest.mark.parametrize("sides", [("ab", "cd"), ("a", "bcd")])
@pytest.mark.parametrize("seconds", [6.0, 66.0])
def test_a_split_swarm_goes_on_on_both_sides_and_becomes_one_again(sides: tuple[str, str], seconds: float) -> None:
    for seed in range(2):
        with story(seed, outer_steps=None) as swarm:
            swarm.start("abcd", min_peers=4)
            swarm.run_until_training()
            swarm.run_for(1.5 + seed)
            before = swarm.version("a")
            swarm.split(*sides)
            swarm.run_for(seconds)
            if seconds == 66.0:
                assert all(swarm.version(name) > before + 3 for name in "abcd")
                digests = {tuple(swarm.node(side[0]).protocol.digests) for side in sides}
                assert len(digests) == 2
            swarm.mend(*sides)
            swarm.run_for(10.0)
            swarm.settle()
            nodes = swarm.run_to_the_end(outer_steps=3)
            agreed(swarm, nodes)
            assert len(nodes) == 4


# -- everything at once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_a_swarm_survives_any_mixture_of_deaths_restarts_freezes_joins_and_leaves(seed: int) -> None:
    r = random.Random(seed)
    with story(seed, fragments=r.randint(1, 4), outer_steps=None, loss=r.choice([0.0, 0.1])) as swarm:
        swarm.start("abcd", min_peers=5)
        swarm.start("h", min_peers=5, trains=False)
        swarm.run_until_training()
        for newcomer in "wxyz":
            swarm.run_for(1.0 + 5 * r.random())
            trainers = [life for life in swarm.crowd.members() if life.member.trains]
            name = r.choice(trainers).name
            match r.choice(["kill", "freeze", "restart", "join", "leave"]):
                case "kill" if len(trainers) > 2:
                    swarm.crowd.crash(name)
                case "restart" if len(trainers) > 2:
                    swarm.crowd.crash(name)
                    swarm.start(name)
                case "join":
                    swarm.start(newcomer)
                case "freeze":
                    swarm.freeze(name, r.choice([1.0, 10.0, 30.0]))
                case "leave" if len(trainers) > 2:
                    swarm.crowd.leave(name)
        swarm.run_for(40.0)
        swarm.settle()
        agreed(swarm, swarm.run_to_the_end(outer_steps=4))
