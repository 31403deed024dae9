"""The fast part of `scripts/fuzz_protocol`, and small cases of what it found."""

import random
from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as altered

from diloco.core.events import Captured, Exit, Leave, Merge, Stepped, Tick
from diloco.core.peer import Peer
from diloco.core.rules import contributions
from diloco.messages.codec import decode, encode
from diloco.messages.control import Hello, Status
from diloco.messages.fields import MAX_TOKENS
from diloco.messages.heads import Book, Entry
from diloco.swarm.mailbox.objects import Box
from tests.harness.fuzz.extremes import NUM_VALUES, Target, changed, targets
from tests.harness.fuzz.faults import scenario, split_scenario
from tests.harness.fuzz.liar import lie_of, play_lie
from tests.harness.fuzz.stage import play
from tests.support import core as support
from tests.support.core_fuzz import World, broken
from tests.support.slow import slow
from tests.support.stories import story
from tests.unit.messages.test_codec import EXAMPLES

# -- schedules -------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(0, 16, 4))
def test_no_fault_schedule_breaks_an_invariant(first: int) -> None:
    played = {seed: play(scenario(seed)).violation for seed in range(first, first + 4)}
    assert played == dict.fromkeys(played)


@pytest.mark.parametrize("seed", range(3))
def test_no_split_breaks_an_invariant(seed: int) -> None:
    assert play(split_scenario(seed)).violation is None


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_no_fault_schedule_breaks_a_promise_of_the_core(first: int) -> None:
    found = {seed: broken(World(seed)) for seed in range(first, first + 10)}
    assert found == dict.fromkeys(found, "")


@pytest.mark.parametrize("seed", range(3))
def test_no_number_within_its_bounds_ends_or_stops_a_peer(seed: int) -> None:
    assert play_lie(lie_of(seed)).violation is None


def with_plan(example: Any) -> Any:
    """A plan that is all zeros is not sent, nor is what arrives where nothing does."""
    if isinstance(example, Hello):
        return altered(example, status=with_plan(example.status))
    if isinstance(example, Box):
        return altered(example, hello=with_plan(example.hello))
    if not isinstance(example, Status):
        return example
    return altered(example, planned=(1, 2, 3), arriving={0: (7, "a" * 64)})


@pytest.mark.parametrize("example", [*map(with_plan, EXAMPLES)], ids=lambda example: example.kind)
def test_every_number_of_every_message_fits_at_its_bounds(example: Any) -> None:
    paths = [path for kind, path in targets() if kind == example.kind]
    for path in [path for path in paths if path[-1] != "wire_version"]:
        values = (Target(example.kind, path, value) for value in range(NUM_VALUES))
        lies = [changed(example, target, random.Random(0)) for target in values]
        assert sum(lie != example for lie in lies) >= 2, path
        assert all(decode(encode(lie)) == lie for lie in lies)


def test_the_same_seed_is_the_same_run_line_by_line() -> None:
    """With a trace, which changes nothing, and without."""
    traced: list[str] = []
    outcome = play(scenario(3), traced.append)
    assert outcome.violation is None and len(traced) > 30
    assert play(scenario(3)) == outcome and tuple(traced) == outcome.story
    assert play(scenario(4)).story != outcome.story


@pytest.mark.parametrize("lives", [30, slow(1000)])
def test_nothing_runs_out_when_a_peer_restarts_again_and_again(lives: int) -> None:
    with story(0, fragments=1, outer_steps=None) as swarm:
        swarm.starts("a")
        swarm.run_until(lambda: swarm.lives["a"].ready, "it is there")
        for life in range(1, lives + 1):
            swarm.run_until(lambda life=life: swarm.version("a") >= life, f"version {life}")
            last = swarm.lives["a"]
            steps = last.node.clock()[0]
            swarm.run_until(lambda: last.checkpoints[-1].saved.steps >= steps, "it is written")  # noqa: B023
            swarm.crash("a")
            swarm.start(last.member, checkpoint=last.checkpoints[-1])
            swarm.run_until(lambda: swarm.lives["a"].node is not None, "it is back")
        swarm.run_to_the_end(1)
        assert swarm.merged("a", "a")[0] == swarm.version("a") >= lives


# -- what was found --------------------------------------------------------------------------------


def core(*others: str, fragments: int = 1, **settings: Any) -> Peer:
    """A core that trains, and members that do."""
    peer = support.core(fragments=fragments, **{"settle_s": 0.0, **settings})
    for other in others:
        support.join(peer, other, tips={f.index: f.tip.key for f in peer.facts.fragments})
    peer.receive(Tick(), 1.0)
    return peer


def captures(peer: Peer, now: float) -> None:
    """The payloads that the core asked for are made."""
    for f in peer.facts.fragments:
        if f.learned.draft is not None:
            peer.receive(Captured(f.learned.draft, b"", 1.0, support.D), now)


def test_a_turn_is_over_when_another_history_took_what_was_learned() -> None:
    """Else it waits for inner steps, and the inner steps for it."""
    peer = core(fragments=2, staggered=True, sync_every=4)
    peer.facts.loop.turn_due = True
    peer.receive(Tick(), 2.0)
    assert not peer.facts.loop.turn_due and peer.runs


def test_who_leaves_in_the_middle_of_an_overlap_goes_at_once() -> None:
    """It waits for no head to load, as it loads none any more."""
    peer = core("b", authors=False, sync_every=2, overlap=1)
    f = peer.facts.fragments[0]
    for now in (2.0, 2.2):
        peer.receive(Stepped(8), now)
    captures(peer, 2.3)
    peer.receive(Stepped(8), 3.0)
    assert f.learned.tokens == 8 and f.learned.steps_left == 0
    f.pool.clear()  # it is in a version
    actions = [*peer.receive(Leave(), 3.5), *peer.receive(Tick(), 4.0)]
    assert any(isinstance(action, Exit) for action in actions) and f.learned.tokens == 0


def test_who_leaves_is_author_until_the_version_that_it_makes_is_made() -> None:
    """Else two make one, and what is in that which loses is lost."""
    peer = core("b", sync_every=1)
    f = peer.facts.fragments[0]
    f.round.merge = Merge(0, f.tip.head.id, 1, (), 0, 1)
    peer.receive(Leave(), 2.0)
    assert peer.facts.is_author()
    f.round.merge = None
    assert not peer.facts.is_author()


def test_who_slept_waits_for_no_others_to_begin() -> None:
    peer = core("b", min_peers=2, settle_s=5.0)
    peer.receive(Tick(), 6.0)
    assert peer.runs
    peer.receive(Tick(), 60.0)
    assert not peer.runs
    peer.receive(Tick(), 69.0)
    peer.receive(Tick(), 78.0)
    assert len(peer.facts.members) == 0 and peer.runs


def test_a_stamp_fits_its_bounds_whatever_a_book_says() -> None:
    peer = core(sync_every=1)
    f = peer.facts.fragments[0]
    f.tip = replace(f.tip, book=Book({**f.tip.book.ledger, support.ME: Entry(MAX_TOKENS, 0)}))
    peer.receive(Stepped(8), 2.0)
    assert peer.facts.loop.stamp == MAX_TOKENS


def test_a_load_that_is_asked_for_while_a_newcomer_begins_is_not_forgotten() -> None:
    """The tip of one fragment moves while another one is loaded."""
    outer = {"quorum": 1, "optimizer": "delayed_nesterov", "sync_every": 2}
    with story(0, fragments=3, outer_steps=None, outer=outer) as swarm:
        swarm.begin("a")
        swarm.run_until(lambda: swarm.version("a") >= 2, "two versions")
        swarm.starts("b")
        swarm.run_until(lambda: "b" in swarm.nodes(), "b is there")
        anchors, b = swarm.node("b").anchors, swarm.node("b").core
        load, moved = anchors.load, list[int]()

        async def slowly(fragment: int) -> None:
            await load(fragment)
            if len(moved) < 3 and fragment == 0:
                tip = b.facts.fragments[0].tip
                tasks = swarm.node("b").context.tasks
                await tasks.until(lambda: b.facts.fragments[0].tip is not tip)
                moved.append(tip.head.number)

        anchors.load = slowly  # type: ignore[method-assign]
        swarm.run_for(60.0)
        assert moved and swarm.merged("a", "b")[0] > 0


def test_tokens_that_no_batch_has_are_no_contribution() -> None:
    """Nor does the sum of what lines say leave its bounds, for which their author would be
    blamed."""
    peer = core()
    peer.receive(Stepped(8), 2.0)
    captures(peer, 2.1)
    base = peer.facts.control.tip.head.id
    lie = contributions.Line(0, "b", 1, base, 1, MAX_TOKENS, (), 1.0, support.D)
    assert contributions.impossible(peer.facts, lie)
