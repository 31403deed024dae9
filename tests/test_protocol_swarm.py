"""Whole swarms of `Peer`s in virtual time: whatever fails, and in whatever order things arrive, they end as one."""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diloco.sim.bare import BareNode, Swarm

seeds = st.integers(0, 10**9)


def agreed(nodes: list[BareNode], version: int | None = None) -> None:
    """All anchors are the same, fragment by fragment, and every fragment has one living syncer whom all believe in."""
    one = nodes[0].peer
    for node in nodes:
        assert (node.peer.versions, node.peer.digests) == (one.versions, one.digests), node.name
        for fragment in range(len(one.versions)):
            lease, its = node.peer.leases.get(fragment), one.leases.get(fragment)
            assert lease is not None and its is not None
            assert (lease.holder, lease.term) == (its.holder, its.term) and lease.holder in {n.name for n in nodes}
        assert sorted(node.peer.syncers) == sorted(node.momentum) == [x.fragment for x in held(node)]
    if version is not None:
        assert set(one.versions) == {version}


def held(node: BareNode) -> list:
    return node.peer.leases.held_by(node.name)


def trace(swarm: Swarm) -> list[object]:
    """Everything that was published and noted, with the number of events and the time."""
    notes = [(name, [asdict(note) for note in node.notes]) for name, node in swarm.bare.items()]
    return [swarm.events, swarm.now, swarm.records, notes]


# -- nobody fails -----------------------------------------------------------------------------------------------------


@given(seeds)
@settings(max_examples=12)
def test_four_peers_share_the_fragments_and_merge_everybody_in_every_round(seed: int) -> None:
    swarm = Swarm(seed, min_peers=4)
    swarm.start("abcd")
    nodes = swarm.run_to_the_end()
    agreed(nodes, version=3)
    assert [len(held(node)) for node in nodes] == [1, 1, 1, 1]
    assert len(swarm.records) == 4 * 3
    assert all(list(record.contributors) == ["a", "b", "c", "d"] and record.term == 1 for record in swarm.records)
    assert not any(exchange.discarded for node in nodes for exchange in node.exchanges)
    assert {node.peer.applied_tokens for node in nodes} == {4 * 3 * 8 * 4}
    assert all(node.peer.takeovers == node.peer.heals == 0 for node in nodes)
    assert {kind for node in nodes for kind in node.kinds()} == {"join", "claim"}


@pytest.mark.parametrize(("peers", "fragments"), [(1, 3), (2, 5), (3, 4), (4, 2), (5, 5)])
def test_shares_differ_by_one_fragment_at_most(peers: int, fragments: int) -> None:
    for seed in range(5):
        swarm = Swarm(seed, fragments=fragments, min_peers=peers, outer_steps=1)
        swarm.start("abcde"[:peers])
        nodes = swarm.run_to_the_end()
        agreed(nodes, version=1)
        shares = [len(held(node)) for node in nodes]
        assert max(shares) - min(shares) <= 1


def test_nobody_grabs_everything_because_it_started_early() -> None:
    swarm = Swarm(min_peers=4)
    for name in "abcd":
        swarm.start(name)
        swarm.run_for(20.0)
    nodes = swarm.run_to_the_end()
    agreed(nodes, version=3)
    assert [len(held(node)) for node in nodes] == [1, 1, 1, 1]


def test_the_same_seed_is_the_same_run_and_another_one_is_not() -> None:
    traces = []
    for seed in (1, 1, 2):
        swarm = Swarm(seed, min_peers=3, break_rate=0.1)
        swarm.start("abc")
        swarm.run_for(3.0)
        swarm.kill("b")
        swarm.run_to_the_end()
        traces.append(trace(swarm))
    assert traces[0] == traces[1] != traces[2]


@given(seeds)
@settings(max_examples=12)
def test_streams_that_break_cost_no_contribution(seed: int) -> None:
    swarm = Swarm(seed, min_peers=3, break_rate=0.2)
    swarm.start("abc")
    nodes = swarm.run_to_the_end()
    agreed(nodes, version=3)
    assert all(list(record.contributors) == ["a", "b", "c"] for record in swarm.records) and len(swarm.records) == 4 * 3


@given(seeds)
@settings(max_examples=12)
def test_hosts_hold_fragments_for_a_trainer_and_follow_it(seed: int) -> None:
    swarm = Swarm(seed, min_peers=3, break_rate=0.1)
    swarm.start("hi", trains=False)
    swarm.start("a")
    nodes = swarm.run_to_the_end()
    agreed(nodes, version=3)
    assert sorted(len(held(node)) for node in nodes) == [1, 1, 2]
    assert all(list(record.contributors) == ["a"] for record in swarm.records)


# -- peers die --------------------------------------------------------------------------------------------------------


def test_a_peer_may_die_at_any_event() -> None:
    """Every event of a run of three in turn, each time another victim: the two that live reach the last version."""
    at, last_version = 0, 2
    while True:
        swarm = Swarm(at % 5, fragments=3, min_peers=2, outer_steps=last_version)
        swarm.start("abc")
        victim = swarm.bare["abc"[at % 3]]
        one, other = (node for node in swarm.bare.values() if node is not victim)
        terms: dict[int, int] = {}  # of what both believe the victim to hold when it dies
        final: list[bool] = []  # whether the last version is published by then, after which nothing is taken over

        def die(
            swarm: Swarm = swarm,
            victim: BareNode = victim,
            beliefs: tuple[BareNode, BareNode] = (one, other),
            terms: dict[int, int] = terms,
            final: list[bool] = final,
        ) -> None:
            held_by = [{lease.fragment: lease.term for lease in n.peer.leases.held_by(victim.name)} for n in beliefs]
            terms.update(held_by[0].items() & held_by[1].items())
            final.append(any(record.version == last_version for record in swarm.records))
            swarm.kill(victim.name)

        swarm.at_event[at] = die
        nodes = swarm.run_to_the_end()
        if at in swarm.at_event:
            break
        assert {node.name for node in nodes} == {one.name, other.name}
        if final == [True]:
            assert one.peer.versions == other.peer.versions == [last_version] * 3
            assert one.peer.digests == other.peer.digests
        else:
            agreed(nodes, last_version)
            for fragment, term in terms.items():
                lease = one.peer.leases.get(fragment)
                assert lease is not None and lease.term > term, (at, fragment)
        at += 1
    assert at > 200


@given(seeds)
@settings(max_examples=12)
def test_fragments_of_the_dead_are_held_evenly_under_a_higher_term(seed: int) -> None:
    swarm = Swarm(seed, fragments=8, min_peers=4, outer_steps=5)
    swarm.start("abcd")
    swarm.run_for(4.0 + seed % 50 / 10)
    dead = swarm.bare["abcd"[seed % 4]]
    fragments = [lease.fragment for lease in held(dead)]
    swarm.kill(dead.name)
    nodes = swarm.run_to_the_end()
    agreed(nodes, version=5)
    assert sorted(len(held(node)) for node in nodes) == [2, 3, 3]
    for fragment in range(8):
        lease = nodes[0].peer.leases.get(fragment)
        assert lease is not None and lease.term == (2 if fragment in fragments else 1)
    assert sum(node.peer.takeovers for node in nodes) == len(fragments) == 2


@given(seeds)
@settings(max_examples=12)
def test_one_peer_after_the_other_may_die_until_a_single_one_is_left(seed: int) -> None:
    swarm, r = Swarm(seed, min_peers=4, outer_steps=8), random.Random(seed)
    swarm.start("abcd")
    for name in r.sample("abcd", 3):
        swarm.run_for(2.0 + r.random())
        swarm.kill(name)
    (last,) = swarm.run_to_the_end()
    agreed([last], version=8)
    assert len(held(last)) == 4


# -- peers come and go ------------------------------------------------------------------------------------------------


@given(seeds)
@settings(max_examples=12)
def test_a_late_joiner_takes_nothing_away_and_is_soon_merged_in_every_round(seed: int) -> None:
    swarm = Swarm(seed, min_peers=3, outer_steps=6)
    swarm.start("abc")
    swarm.run_for(2.0 + seed % 60 / 10)
    before = [lease.holder for lease in map(swarm.bare["a"].peer.leases.get, range(4)) if lease is not None]
    began = swarm.bare["a"].peer.versions[0]
    swarm.start("d", newcomer=True, min_peers=1)
    nodes = swarm.run_to_the_end()
    agreed(nodes, version=6)
    assert [lease.holder for lease in map(nodes[0].peer.leases.get, range(4)) if lease is not None] == before
    joiner = swarm.bare["d"]
    assert not any(exchange.discarded for node in nodes for exchange in node.exchanges if node is not joiner)
    assert all(set("abc") <= set(record.contributors) for record in swarm.records)
    if began <= 2:  # time enough to fetch three versions, and perhaps to come late for one
        assert all("d" in record.contributors for record in swarm.records if record.version == 6)


@example(22986)  # what was given away is merged no more
@given(seeds)
@settings(max_examples=12)
def test_a_leaver_hands_its_fragments_over_with_their_outer_state(seed: int) -> None:
    swarm = Swarm(seed, min_peers=4, outer_steps=6)
    swarm.start("abcd")
    swarm.run_for(4.0 + seed % 60 / 10)
    leaver = swarm.bare["abcd"[seed % 4]]
    swarm.spawn(leaver, leaver.leave())
    nodes = swarm.run_to_the_end()
    agreed(nodes, version=6)
    assert not swarm.alive(leaver) and len(nodes) == 3
    for node in nodes:
        assert node.kinds()["leave"] + node.kinds()["lost"] == 1
        for fragment, momentum in node.momentum.items():
            assert momentum == tuple(range(1, 7)), fragment
    assert {fragment for node in nodes for fragment in node.momentum} == set(range(4))


@given(seeds)
@settings(max_examples=12)
def test_a_peer_that_restarts_at_once_under_its_old_name_does_not_split_the_swarm(seed: int) -> None:
    """The others may never notice that it was gone; its new process has no lease, no anchor and no momentum."""
    swarm = Swarm(seed, min_peers=3, outer_steps=5)
    swarm.start("abc")
    swarm.run_for(3.0 + seed % 60 / 10)
    swarm.kill("a")
    swarm.start("a", newcomer=True, min_peers=1)
    nodes = swarm.run_to_the_end()
    agreed(nodes, version=5)
    assert len(nodes) == 3


# -- peers freeze, networks split -------------------------------------------------------------------------------------


@given(seeds, st.sampled_from([1.0, 8.0, 40.0]))
@settings(max_examples=12)
def test_a_frozen_peer_comes_back_steps_down_and_catches_up(seed: int, seconds: float) -> None:
    swarm = Swarm(seed, min_peers=3, outer_steps=10)
    swarm.start("abc")
    swarm.run_for(3.0 + seed % 40 / 10)
    frozen = swarm.bare["abc"[seed % 3]]
    fragments = {lease.fragment for lease in held(frozen)}
    swarm.freeze(frozen.name, seconds)
    nodes = swarm.run_to_the_end()
    agreed(nodes, version=10)
    for fragment in range(4):  # what the others hold was never taken from them
        lease = nodes[0].peer.leases.get(fragment)
        assert lease is not None and lease.term == (2 if fragment in fragments and seconds == 40.0 else 1)
    if seconds == 40.0:
        assert held(frozen) == [] and frozen.momentum == {}


@pytest.mark.parametrize("sides", [("ab", "cd"), ("a", "bcd")])
@pytest.mark.parametrize("seconds", [6.0, 30.0])
def test_a_split_swarm_goes_on_on_both_sides_and_becomes_one_again(sides: tuple[str, str], seconds: float) -> None:
    for seed in range(4):
        swarm = Swarm(seed, min_peers=4, outer_steps=10**6)
        swarm.start("abcd")
        swarm.run_for(4.0 + seed)
        swarm.split(*sides)
        swarm.run_for(seconds)
        versions = [swarm.bare[side[0]].peer.versions[0] for side in sides]
        if seconds == 30.0:
            assert min(versions) > max(node.peer.versions[0] for node in swarm.bare.values()) // 3
            digests = [swarm.bare[side[0]].peer.digests for side in sides]
            assert digests[0] != digests[1]
        swarm.split()
        swarm.run_for(10.0)
        for node in swarm.bare.values():
            node.outer_steps = max(versions) + 15
        agreed(swarm.run_to_the_end())


# -- everything at once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(25))
def test_a_swarm_survives_any_mixture_of_deaths_restarts_freezes_joins_and_leaves(seed: int) -> None:
    r = random.Random(seed)
    swarm = Swarm(seed, fragments=r.randint(1, 5), break_rate=r.choice([0.0, 0.1]), outer_steps=10**6, steps=3)
    swarm.start("abcd", min_peers=4)
    swarm.start("h", trains=False, min_peers=4)
    for newcomer in "wxyz":
        swarm.run_for(1.0 + 5 * r.random())
        trainers = [node for node in swarm.living() if node.peer.trains and node.peer.state != "leaving"]
        name = r.choice(trainers).name
        what = r.choice(["kill", "freeze", "restart", "join", "leave"])
        if what in ("kill", "restart") and len(trainers) > 2:
            swarm.kill(name)
        if what == "restart" and len(trainers) > 2:
            swarm.start(name, newcomer=True)
        elif what == "join":
            swarm.start(newcomer, newcomer=True)
        elif what == "freeze":
            swarm.freeze(name, r.choice([1.0, 10.0, 30.0]))
        elif what == "leave" and len(trainers) > 2:
            swarm.spawn(swarm.bare[name], swarm.bare[name].leave())
    goal = 5 + max(node.peer.versions[0] for node in swarm.living())
    for node in swarm.bare.values():
        node.outer_steps = goal
    agreed(swarm.run_to_the_end())
