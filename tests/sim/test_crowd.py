"""Swarms of production peers in virtual time: whatever fails, and in whatever order things arrive,
they end as one.

Every story is also watched: `tests.harness.fuzz.invariants` has what must hold with every event
and at the end. Freezes, splits, restarts and mixtures of faults are those of the fuzz
(`test_fuzz.py`) and of `tests/unit/core`.
"""

import itertools
from collections import Counter

import pytest
from msgspec.structs import replace as with_fields

from diloco.messages.base import Message
from diloco.messages.codec import encode
from diloco.messages.control import Status
from diloco.swarm.wire import streams
from tests.harness.fuzz.lives import PeerSpec
from tests.support.stories import TOKENS_PER_ROUND, Story, story
from tests.unit.messages.test_codec import extended

seeds = pytest.mark.parametrize("seed", range(2))


def contributors(swarm: Story) -> set[str]:
    """Of the first three versions; a peer may make one round more before all rest."""
    heads = (head for head in swarm.made() if head.number <= 3)
    return {"".join(line.peer for line, _ in head.lines) for head in heads}


# -- nobody fails ----------------------------------------------------------------------------------


@seeds
def test_four_peers_share_the_fragments_and_merge_everybody(seed: int) -> None:
    with story(seed) as swarm:
        swarm.starts("abcd", min_peers=4)
        begun = lambda: "a" in swarm.nodes() and swarm.version("a") == 1  # noqa: E731
        swarm.run_until(begun, "the first outer step")
        assert Counter(swarm.authors("a")) == dict.fromkeys("abcd", 1)
        nodes = swarm.run_to_the_end()
        assert contributors(swarm) == {"abcd"}
        assert set(swarm.lost.values()) == {0}
        facts = [node.core.facts for node in nodes.values()]
        assert all(one.takeovers == one.heals == 0 for one in facts)
        assert min(swarm.work(name) for name in nodes) > 2 * 4 * TOKENS_PER_ROUND
        kinds = [line.split()[2] for line in swarm.story]
        assert {*itertools.takewhile(lambda kind: kind != "done", kinds)} == {"join"}


def test_versions_have_the_same_bits_whatever_arrives_first() -> None:
    digests, orders = set(), set()
    for seed in range(4):
        with story(seed, fragments=3, outer={"codec_up": "fp32", "codec_down": "int8"}) as swarm:
            swarm.seed = 0  # of models and gradients
            for name in "abc":
                latency_s = swarm.random.choice([0.02, 0.1, 0.3])
                life = swarm.start(PeerSpec(name, step_s=5.0, latency_s=latency_s), 3)
                swarm.run_until(lambda life=life: life.ready, "it listens")
            nodes = swarm.run_to_the_end()
            first = [made for made in swarm.watch.versions.made.values() if made.head.number == 1]
            digests.add(tuple(sorted((made.head.fragment, made.parts) for made in first)))
            assert len(nodes) == 3
            orders.add(tuple(line.split()[1] for line in swarm.story))
    assert len(digests) == 1 and len(orders) > 1


@seeds
def test_newer_and_older_peers_train_together(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that `b` says has a field more, and the statuses of `c` lack the newest ones."""

    said = set[str]()

    def encoded(message: Message) -> bytes:
        me = swarm.loop.owner or ""
        said.add(me[:1])
        if me.startswith("c") and isinstance(message, Status):
            message = with_fields(message, moved=0, arriving={}, planned=(0, 0, 0))
        frame = encode(message)
        return extended(frame) if me.startswith("b") else frame

    monkeypatch.setattr(streams, "encode", encoded)
    with story(seed) as swarm:
        swarm.starts("abc", min_peers=3)
        swarm.run_to_the_end()
        assert contributors(swarm) == {"abc"} and {*"abc"} <= said
        assert not {"refused", "penalty"} & {line.split()[2] for line in swarm.story}


@seeds
def test_streams_that_break_cost_no_contribution(seed: int) -> None:
    with story(seed, loss=0.3) as swarm:
        swarm.starts("abc", min_peers=3)
        swarm.run_to_the_end()
        assert contributors(swarm) == {"abc"}
        assert sum(swarm.kinds(name)["contribution_broke"] for name in "abc") > 0


@seeds
def test_hosts_make_versions_for_a_trainer_and_follow_it(seed: int) -> None:
    with story(seed, loss=0.1) as swarm:
        swarm.starts("hi", min_peers=3, trains=False)
        swarm.starts("a", min_peers=3)
        two = lambda: len(swarm.nodes()) == 3 and swarm.version("a") == 2  # noqa: E731
        swarm.run_until(two, "two outer steps")
        assert sorted(Counter(swarm.authors("a")).values()) == [1, 1, 2]
        swarm.run_to_the_end(1)
        assert contributors(swarm) == {"a"}


# -- peers come and go -----------------------------------------------------------------------------


@seeds
def test_fragments_of_the_dead_are_made_evenly_by_the_living(seed: int) -> None:
    """Also when one after the other dies, until a single one is left."""
    with story(seed, fragments=8, outer_steps=None) as swarm:
        swarm.begin("abcd")
        dead, *others = swarm.random.sample("abcd", 4)
        swarm.run_until(lambda: swarm.version(others[0]) >= 1, "the first outer step")
        swarm.run_for(1.1 * seed)
        swarm.crash(dead)
        version = swarm.version(others[0])
        swarm.run_until(lambda: swarm.version(others[0]) > version + 2, "they go on")
        assert sorted(Counter(swarm.authors(others[0])).values()) == [2, 3, 3]
        for name in others[1:]:
            swarm.run_for(2.0 + swarm.random.random())
            swarm.crash(name)
        swarm.run_to_the_end(2)
        assert swarm.authors(others[0]) == 8 * [others[0]]


@pytest.mark.parametrize("seed", range(3))
def test_a_leaver_loses_nothing_and_its_heirs_have_its_momentum(seed: int) -> None:
    with story(seed, outer_steps=6) as swarm:
        swarm.begin("abcd")
        swarm.run_until(lambda: swarm.version("a") == 1, "the first outer step")
        swarm.run_for(1.1 * seed)
        leaver = "abcd"[seed]
        given = swarm.authors(leaver).count(leaver)
        swarm.leave(leaver)
        swarm.run_until(lambda: swarm.lives[leaver].ended == "left", "it has left")
        learned = swarm.node(leaver).core.facts.loop.processed
        assert given and len(swarm.run_to_the_end()) == 3
        assert swarm.merged("abcd"[seed - 1], leaver)[1] == learned
        assert all(swarm.kinds(name)["leave"] == 1 for name in swarm.nodes())


# -- out of phase ----------------------------------------------------------------------------------


def test_peers_out_of_phase_are_all_merged_without_a_barrier() -> None:
    """Peers that begin one after another, evenly over a round."""
    outer = {"sync_every": 12, "quorum": 1, "optimizer": "delayed_nesterov"}
    with story(fragments=2, outer_steps=None, outer=outer, heartbeat_s=2.0) as swarm:
        names = [f"p{number:02}" for number in range(12)]
        for name in names:
            swarm.start(PeerSpec(name, step_s=0.5, latency_s=0.02))
            swarm.run_for(1.0)
        swarm.run_for(12.0)
        before = {name: swarm.merged("p00", name)[0] for name in names}
        swarm.run_for(20.0)
        gained = {name: swarm.merged("p00", name)[0] - before[name] for name in names}
        assert min(gained.values()) >= 2, gained
        assert sum(swarm.discarded(name) for name in names) <= 0.05 * swarm.work("p00")


def test_one_that_is_slow_and_contributes_nothing_stops_nobody() -> None:
    with story(fragments=1, outer_steps=None) as swarm:
        swarm.starts("abc", min_peers=4)
        swarm.start(PeerSpec("l", step_s=1e6), min_peers=4)
        swarm.run_until(lambda: len(swarm.nodes()) == 4, "all are in the swarm")
        swarm.run_for(80.0)
        assert swarm.version("a") > 10


# -- a public run ----------------------------------------------------------------------------------


def test_who_was_not_invited_is_merged_and_makes_no_version_even_when_the_invited_go() -> None:
    with story(0, fragments=2, outer_steps=None, uninvited="xyz") as swarm:
        swarm.begin("abxyz")
        swarm.run_for(20.0)
        assert min(swarm.merged("a", name)[0] for name in "xyz") >= 4
        swarm.leave("b")
        swarm.run_for(30.0)
        assert all(swarm.authors(name) == ["a", "a"] for name in "axyz")
        version = swarm.version("y")
        swarm.crash("a")
        swarm.run_for(30.0)
        assert swarm.version("y") <= version + 1, "nobody is left who may make one"
        assert {head.author for head in swarm.made()} == {"a", "b"}
