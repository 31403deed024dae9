"""What a core does while bytes are on their way for longer than anything else takes."""

from math import inf
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as with_fields

from diloco.core import events
from diloco.core.events import Arriving, Asked, Broke, Moved, Served
from diloco.core.fragment import Making, Moving
from diloco.core.rules import author, pace
from diloco.core.settings import ProtocolSettings
from diloco.messages.bulk import Get
from diloco.messages.control import Answer, Offer, Status
from tests.support.core import core
from tests.support.swarm_without_tensors import Peer
from tests.unit.core.test_members import FIRST_STEP_S, STALL_S, member_of, members_of
from tests.unit.core.test_what_happens import Scene


def hear_all(peer: Peer, now: float) -> None:
    """All others have said something."""
    for member in peer.facts.members.all():
        member.heard_at = now


def is_sent(peer: Peer) -> bool:
    """Whether the peer's payload is on its way."""
    item = peer.facts.control.pool.get(peer.name)
    return item is not None and item.sending_since < inf


def of_kind(actions: list[events.Action], kind: type) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def test_a_member_whose_bytes_move_makes_progress_until_they_stop() -> None:
    members = members_of("a")
    for second in range(1, 101):
        members.hear("a", Status(steps=1, steps_per_s=2.0, moved=1000 * second), float(second))
    member = member_of(members)
    assert not member.stalled(100.0 + STALL_S, STALL_S, FIRST_STEP_S)
    members.hear("a", Status(steps=1, steps_per_s=2.0, moved=100_000), 110.0)
    assert member.stalled(100.1 + STALL_S, STALL_S, FIRST_STEP_S)


def test_a_member_that_waits_for_others_may_wait_for_a_round() -> None:
    members = members_of("a")
    members.hear("a", Status(steps=1, steps_per_s=2.0, waits=True), 1.0)
    assert not member_of(members).stalled(601.0, STALL_S, FIRST_STEP_S, round_s=600.0)
    assert member_of(members).stalled(602.0, STALL_S, FIRST_STEP_S, round_s=600.0)


def test_a_contributor_tells_bytes_as_they_arrive_and_sends_them_once() -> None:
    swarm = Scene()
    peer = swarm.contributor()
    author = swarm.author()
    swarm.until(swarm.now + 60.0, lambda: is_sent(peer))
    item = peer.facts.control.pool[peer.name]
    before, now = peer.facts.moved, swarm.now
    for seconds in range(1, 100):
        hear_all(peer, now + seconds)
        moved = Moved(author.name, item.line, seconds)
        assert not of_kind(peer.core.receive(moved, now + seconds), events.SendPayload)
        actions = peer.core.receive(events.Tick(), now + seconds + 0.5)
        assert not of_kind(actions, events.SendPayload)
        assert not [a for a in of_kind(actions, events.Send) if isinstance(a.message, Offer)]
    want = Answer(0, peer.name, item.line.stamp, "want")
    answer = events.Heard(author.name, want)
    assert not of_kind(peer.core.receive(answer, now + 100.0), events.SendPayload)
    assert peer.facts.moved == before + 99 and peer.facts.progress_at == now + 99
    broke = peer.core.receive(Broke(author.name, item.line), now + 101.0)
    broke += peer.core.receive(events.Tick(), now + 103.0)
    assert [a for a in of_kind(broke, events.Send) if isinstance(a.message, Offer)]


def fetching() -> tuple[Scene, Peer, Get, str]:
    """A peer that has just asked a donor for a new version."""
    swarm = Scene()
    peer = swarm.contributor()
    swarm.until(swarm.now + 60.0, lambda: peer.facts.control.inbox.fetch is not None)
    assert peer.facts.control.inbox.fetch is not None
    return swarm, peer, Get(0, peer.tip().key), peer.facts.control.inbox.fetch.donor


@pytest.mark.parametrize("moves", [True, False])
def test_a_download_is_given_up_when_no_bytes_come_and_not_before(moves: bool) -> None:
    swarm, peer, get, donor = fetching()
    now, asked = swarm.now, list[Any]()
    for seconds in range(1, 100):
        if moves:
            peer.core.receive(Moved(donor, get, seconds), now + seconds)
        asked += of_kind(peer.core.receive(events.Tick(), now + seconds), events.AskDonor)
        hear_all(peer, now + seconds)
    assert bool(asked) != moves


def test_what_comes_while_the_anchor_moves_is_asked_for_again() -> None:
    """Else its question stays open for ever, as bytes have come."""
    swarm, peer, get, donor = fetching()
    inbox, tip = peer.facts.control.inbox, swarm.peers[donor].tip()
    peer.core.receive(Moved(donor, get, 5), swarm.now)
    inbox.moving = Moving(peer.tip().head, peer.tip().book, None, own=True)
    part = events.AnchorPart(tip.head, tip.book, tip.parts, 0, ())
    peer.core.receive(events.Gave(donor, get, part), swarm.now)
    assert inbox.fetch is None
    inbox.moving = None
    asked = of_kind(peer.core.receive(events.Tick(), swarm.now), events.AskDonor)
    assert [action.peer for action in asked] == [donor] or inbox.fetch is not None


def test_parts_are_passed_on_while_they_arrive_to_two_at_a_time() -> None:
    swarm, peer, get, donor = fetching()
    head, now = swarm.peers[donor].tip().head, swarm.now
    told = of_kind(peer.core.receive(Arriving(donor, get, head), now), events.Broadcast)
    assert told and told[-1].message.arriving == {0: head.key}
    others = [name for name in swarm.peers if name not in (peer.name, donor)]
    for name in [*others, donor]:
        replies = of_kind(peer.core.receive(Asked(name, get), now), events.Reply)
        given = name != donor  # two are served already
        assert [reply.answer is not None for reply in replies] == [given]
        if given:
            [record] = replies[0].answer.records
            assert (record.head, record.update) == (head, None)
    peer.core.receive(Served(others[0], get), now)
    [reply] = of_kind(peer.core.receive(Asked(donor, get), now), events.Reply)
    assert reply.answer is not None


@pytest.mark.parametrize("lives", [True, False])
def test_parts_of_an_update_that_nobody_completes_are_not_passed_on(lives: bool) -> None:
    """1. The author is killed before anybody has all of its update. 2. Two peers have parts of it.
    3. Neither waits for the other: the next author makes that version anew at once."""
    swarm, peer, get, donor = fetching()
    peer.core.receive(Arriving(donor, get, swarm.peers[donor].tip().head), swarm.now)
    if not lives:
        peer.core.receive(events.Lost(donor, "killed"), swarm.now)
    asker = next(name for name in swarm.peers if name not in (donor, peer.name))
    [reply] = of_kind(peer.core.receive(Asked(asker, get), swarm.now), events.Reply)
    assert (reply.answer is not None) == lives


@given(now=st.floats(0.0, 1e6), round_s=st.floats(0.0, 1e4))
def test_the_next_look_is_later(now: float, round_s: float) -> None:
    facts = core().facts
    facts.control.sent_s = round_s
    facts.begin(now)
    author._look_again(facts, facts.control)
    [wake] = facts.out
    assert isinstance(wake, events.Wake) and now < wake.at <= now + max(1.0, round_s / 50)


@given(at=st.floats(0.0, 1e6), period_s=st.floats(0.01, 1e4))
def test_a_shared_look_is_later_by_two_periods_at_most(at: float, period_s: float) -> None:
    facts = core().facts
    facts.begin(0.0)
    facts.wake_after(at, period_s)
    [wake] = facts.out
    assert isinstance(wake, events.Wake) and at < wake.at <= at + 2 * period_s


def test_who_is_told_that_a_version_is_arriving_elsewhere_asks_there() -> None:
    swarm, peer, get, donor = fetching()
    head, now = swarm.peers[donor].tip().head, swarm.now
    other = next(name for name in swarm.peers if name not in (peer.name, donor))
    peer.core.receive(events.Gave(donor, get, None), now)  # not now
    assert peer.facts.control.inbox.fetch and not peer.facts.control.inbox.fetch.donor
    status = with_fields(swarm.peers[other].core.status(whole=False), arriving={0: head.key})
    [ask] = of_kind(peer.core.receive(events.Heard(other, status), now + 0.1), events.AskDonor)
    assert (ask.peer, ask.get) == (other, get)


def test_who_is_refused_asks_the_next_donor_and_decides_nothing_else_at_once() -> None:
    """In a large swarm most questions are refused; a decision for each cost half of all of them."""
    swarm, peer, get, donor = fetching()
    head, now = swarm.peers[donor].tip().head, swarm.now
    other = next(name for name in swarm.peers if name not in (peer.name, donor))
    status = with_fields(swarm.peers[other].core.status(whole=False), arriving={0: head.key})
    peer.core.receive(events.Heard(other, status), now)
    assert peer.core.receive(events.Gave(donor, get, None), now) == [events.AskDonor(other, get)]
    [wake] = peer.core.receive(events.Gave(other, get, None), now)
    pause = peer.facts.control.inbox.fetch
    assert isinstance(wake, events.Wake) and pause and pause.until < wake.at < pause.until + 0.11


def test_no_author_makes_a_rival_of_a_version_that_is_arriving() -> None:
    """1. The author leaves when others have its version. 2. This peer is the next author."""
    swarm, peer, get, donor = fetching()
    head, now = swarm.peers[donor].tip().head, swarm.now
    peer.core.receive(Arriving(donor, get, head), now)
    facts = peer.facts
    facts.control.inbox.ahead.clear()
    assert facts.control.inbox.behind()
    peer.core.receive(Broke(donor, get), now)
    assert not facts.control.inbox.behind()


def test_a_version_without_a_peer_is_said_there_with_what_was_under_way() -> None:
    swarm = Scene()
    peer, author = swarm.contributor(), swarm.author()
    swarm.until(swarm.now + 60.0, lambda: peer.name in peer.facts.control.pool)
    carry = swarm.carry

    def slowly(sender: str, to: str, event: Any, *rest: Any, **how: Any) -> None:
        if not (isinstance(event, events.Delivered) and sender == peer.name):
            carry(sender, to, event, *rest, **how)

    swarm.carry = slowly  # type: ignore[method-assign]
    number = swarm.next_version().number + 1
    item = peer.facts.control.pool.get(peer.name)
    swarm.until(swarm.now + 200.0, lambda: peer.tip().head.number >= number)
    said = [fields for _, kind, fields in peer.notes if kind == "missed"]
    assert said and said[0]["version"] in (number, number - 1) and said[0]["author"] == author.name
    assert item is None or said[0]["nbytes"] == 1
    assert not [
        n for p in swarm.peers.values() if p is not peer for n in p.notes if n[1] == "missed"
    ]


@pytest.mark.parametrize("moves_s", [0.0, 30.0, 1e4])
def test_a_barrier_waits_for_a_payload_that_arrives_until_it_stops(moves_s: float) -> None:
    swarm = Scene()
    author, peer, carry = swarm.author(), swarm.contributor(), swarm.carry
    swarm.until(swarm.now + 60.0, lambda: peer.name in author.facts.control.pool)

    def slowly(sender: str, to: str, event: Any, *rest: Any, **how: Any) -> None:
        if not (isinstance(event, events.Delivered) and sender == peer.name):
            carry(sender, to, event, *rest, **how)

    swarm.carry = slowly  # type: ignore[method-assign]
    swarm.next_version()
    swarm.until(swarm.now + 60.0, lambda: is_sent(peer))
    line = peer.facts.control.pool[peer.name].line
    made, began_at = len(swarm.made), swarm.now
    while len(swarm.made) == made and swarm.now < began_at + 500.0:
        if swarm.now < began_at + moves_s:
            author.core.receive(Moved(peer.name, line, int(swarm.now - began_at)), swarm.now)
        swarm.until(swarm.now + 1.0)
    waited_s = swarm.now - began_at
    floor_s, stall_s = author.settings.floor_s, author.settings.stall_s
    longest_s = pace.patience_s(author.facts, author.facts.control)
    match moves_s:
        case 0.0:
            assert waited_s < floor_s + 5.0
        case 30.0:
            assert 30.0 < waited_s < 30.0 + stall_s + 2.0
        case _:
            assert longest_s < waited_s < longest_s + 5.0


def test_an_author_whose_versions_are_still_to_come_is_not_stuck() -> None:
    swarm, peer, _, _ = fetching()
    author, now = swarm.author(), swarm.now
    [item] = peer.facts.control.pool.values()
    item.sent_to, item.held_since = author.name, now - 1e4
    peer.core.receive(events.Tick(), now)
    assert item.held_since == now and not peer.facts.shunned


@pytest.mark.parametrize("given", ["to nobody", "long ago", "to one"])
def test_with_a_quorum_what_comes_while_a_version_is_sent_is_merged_together(given: str) -> None:
    swarm = Scene(ProtocolSettings(sync_every=10, quorum=1), after=5.0)
    author, peer = swarm.author(), swarm.contributor()
    f = author.facts.control
    swarm.next_version()
    f.outbox.serving, f.outbox.served_at = (
        {(peer.name, "", 0): f.tip.head.id},
        {(peer.name, "", 0): swarm.now},
    )
    for member in author.facts.members.all():
        member.tips = {0: f.tip.key if given == "to one" else (0, "")}
    swarm.carry = lambda *_, **__: None  # type: ignore[method-assign]  # nobody says or sends more
    made, now = len(swarm.made), swarm.now
    if given == "long ago":
        f.outbox.served_at = {(peer.name, "", 0): now - 2 * pace.patience_s(author.facts, f)}
    for second in range(1, 10):  # the author contributes after 7.7
        swarm.until(now + second, lambda: len(swarm.made) > made)
        hear_all(author, swarm.now)
    ticks = [author.core.receive(events.Tick(), swarm.now + turn / 100) for turn in range(10)]
    assert sum(len(of_kind(actions, events.Wake)) for actions in ticks) <= 2  # they share a look
    assert (len(swarm.made) > made) == (given != "to nobody")


@pytest.mark.parametrize("moves", [True, False])
def test_an_author_may_wait_twice_as_long_for_a_peer_whose_bytes_move(moves: bool) -> None:
    swarm = Scene()
    author, peer = swarm.author(), swarm.contributor()
    swarm.until(swarm.now + 60.0, lambda: is_sent(peer))
    facts, item = peer.facts, peer.facts.control.pool[peer.name]
    now = swarm.now + 1e3
    hear_all(peer, now)
    item.sent_to, item.sending_since = author.name, inf
    item.held_since = now - 1.5 * pace.patience_s(facts, facts.control)
    facts.members.all()[-1].progress_at = now if moves else swarm.now
    peer.core.receive(events.Tick(), now)
    assert bool(facts.shunned) != moves


@pytest.mark.parametrize("serves", [True, False])
def test_who_has_finished_stays_while_its_last_version_is_under_way(serves: bool) -> None:
    swarm, peer, _, donor = fetching()
    author, facts = swarm.peers[donor], swarm.peers[donor].facts
    began_at = swarm.now
    author.core.receive(events.Leave(finished=True), began_at)
    facts.control.outbox.served_at = {}
    late = facts.life.leave_by + 1.0
    hear_all(author, late)
    if serves:
        facts.control.outbox.served_at[peer.name, "", 0] = late - 1.0
    exits = of_kind(author.core.receive(events.Tick(), late), events.Exit)
    assert bool(exits) != serves
    last = facts.life.leave_by + 3 * pace.patience_s(facts, facts.control) + 1.0
    hear_all(author, last)
    facts.control.outbox.served_at[peer.name, "", 0] = last
    assert serves == bool(of_kind(author.core.receive(events.Tick(), last), events.Exit))


@pytest.mark.parametrize("refused", [True, False])
def test_who_has_finished_stays_while_another_has_a_later_version(refused: bool) -> None:
    swarm, peer, _, donor = fetching()
    if refused:
        peer.facts.control.inbox.refused[peer.facts.control.inbox.ahead[donor][1]] = None
    actions = [*peer.core.receive(events.Leave(finished=True), swarm.now)]
    actions += peer.core.receive(events.Tick(), swarm.now)
    assert bool(of_kind(actions, events.Exit)) == refused


@pytest.mark.parametrize("over", [True, False])
def test_no_version_is_made_after_the_last_one(over: bool) -> None:
    """The run ends while an update is made: others may have gone, and would never have it."""
    swarm = Scene()
    author = swarm.author()
    facts, f = author.facts, author.facts.control
    swarm.until(swarm.now + 60.0, lambda: bool(f.pool))
    line = next(item.line for item in f.pool.values())
    shares = (events.Share(line, None, 1.0, 1.0),)
    f.round.merge = events.Merge(0, f.tip.head.id, f.tip.head.number + 1, shares, 0, 1)
    facts.planned = (f.tip.head.number if over else 0, 0, 0)
    merged = events.Merged(0, f.tip.head.id, torch.zeros(1), "0" * 64)
    assert bool(of_kind(author.core.receive(merged, swarm.now), events.Apply)) != over


def test_before_the_first_version_a_round_is_a_cycle_and_what_sending_takes() -> None:
    swarm = Scene(bulk_s=0.5)
    facts = swarm.contributor().facts
    f = facts.control
    f.adopted_at = {f.tip.head.id: swarm.now}
    facts.loop.steps_per_s, f.sent_s = 0.01, 70.0
    assert pace.round_s(facts, f) == pytest.approx(facts.loop.cycle / 0.01 + 70.0)
    assert pace.patience_s(facts, f) == 4 * pace.round_s(facts, f)
    assert pace.deadline_s(facts, f) == pace.round_s(facts, f) / 8


def test_a_first_step_may_take_ten_of_the_others_steps() -> None:
    facts = Scene().contributor().facts
    for member in facts.members.all():
        member.status = with_fields(member.status, steps_per_s=0.01)
    facts.loop.steps_per_s = 0.0
    assert pace.first_step_s(facts) == pytest.approx(1000.0)
    assert ProtocolSettings().first_step_s == 180.0


def test_a_wait_for_the_grace_is_planned_once() -> None:
    """It was planned anew at every look, for another time: each look had a look of its own."""
    settings = ProtocolSettings(sync_every=10, quorum=1, overlap=5, grace_slack=0.8)
    swarm = Scene(settings, after=5.0)
    facts, f = swarm.author().facts, swarm.author().facts.control
    swarm.until(swarm.now + 60.0, lambda: f.round.state(f.tip.head.id) is Making.QUORUM)
    assert f.round.state(f.tip.head.id) is Making.QUORUM and f.pool
    quorum_at = f.round.quorum[1]
    times = set[float]()
    for turn in range(100):
        actions = swarm.author().core.receive(events.Tick(), swarm.now + turn / 1000)
        times |= {wake.at for wake in of_kind(actions, events.Wake)}
    item = next(iter(f.pool.values()))
    due_at = item.captured_at + 5 / facts.loop.steps_per_s
    assert len(times) <= 2
    assert author._grace_until(facts, quorum_at, {facts.me: item}) == pytest.approx(
        (quorum_at + 0.8 * due_at) / 1.8
    )
