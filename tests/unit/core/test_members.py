"""Who is there, who makes progress, and for whom a version waits: by what each peer does, never by
a fixed ladder."""

import pytest

from diloco.core.events import Broadcast, Heard, Loaded, Tick, Wake
from diloco.core.members import PAUSE_LIMIT_S, Member, Members, Patience
from diloco.messages.control import Status
from tests.support.core import advance, core, hello_of, join, status

FLOOR_S, BEATS, STALL_S, FIRST_STEP_S = 10.0, 8.0, 20.0, 180.0


def beat(members: Members, interval_s: float, count: int, **said: float) -> float:
    """Statuses of `a` in that interval; returns the time of the last one."""
    for beats in range(1, count + 1):
        members.hear("a", Status(**said), beats * interval_s)  # type: ignore[arg-type]
    return count * interval_s


def members_of(*peers: str) -> Members:
    members = Members("me")
    for peer in peers:
        members.join(peer, hello_of(), 0.0)
    return members


def member_of(members: Members) -> Member:
    member = members.get("a")
    assert member is not None
    return member


@pytest.mark.parametrize("interval_s", [0.5, 1.0, 4.0])
def test_the_silence_deadline_follows_the_measured_heartbeat(interval_s: float) -> None:
    members = members_of("a")
    now = beat(members, interval_s, 20)
    deadline_s = max(FLOOR_S, BEATS * interval_s)
    assert members.silent(now + deadline_s, FLOOR_S, BEATS) == []
    assert members.silent(now + deadline_s + 0.001, FLOOR_S, BEATS) == ["a"]


@pytest.mark.parametrize(
    ("steps_per_s", "limit_s"),
    [(0.0, FIRST_STEP_S), (100.0, STALL_S), (0.5, STALL_S), (0.01, 1000.0)],
)
def test_the_stall_deadline_follows_the_measured_step_time(
    steps_per_s: float, limit_s: float
) -> None:
    members = members_of("a")
    members.hear("a", Status(steps=1, steps_per_s=steps_per_s), 1.0)
    member = member_of(members)
    assert not member.stalled(1.0 + limit_s, STALL_S, FIRST_STEP_S)
    assert member.stalled(1.1 + limit_s, STALL_S, FIRST_STEP_S)


def test_progress_is_a_step_or_the_first_head_after_one() -> None:
    """A peer whose training hangs goes on getting heads."""
    members = members_of("a")
    for now, said in enumerate((Status(steps=1), Status(steps=1, tips={0: (1, "")})), start=1):
        members.hear("a", said, float(now))
        assert member_of(members).progress_at == now
    members.hear("a", Status(steps=1, tips={0: (2, "")}), 9.0)
    assert (member_of(members).progress_at, member_of(members).heard_at) == (2.0, 9.0)


def test_a_peer_that_says_little_does_not_stall_by_that() -> None:
    """In a large swarm its heartbeats come every 15 s; one that is 6 s late must not put it out of
    the round."""
    members = members_of("a")
    now = beat(members, 15.0, 20)
    members.hear("a", Status(steps=1, steps_per_s=10.0), now)
    member = member_of(members)
    assert not member.stalled(now + 21.0, STALL_S, FIRST_STEP_S)
    assert member.stalled(now + 50.0, STALL_S, FIRST_STEP_S)


def test_who_evaluates_does_not_stall_for_ten_minutes() -> None:
    members = members_of("a")
    members.hear("a", Status(steps=1, steps_per_s=1.0, pauses=True), 1.0)
    member = member_of(members)
    assert not member.stalled(PAUSE_LIMIT_S, STALL_S, FIRST_STEP_S)
    assert member.stalled(1.0 + PAUSE_LIMIT_S, STALL_S, FIRST_STEP_S)


def test_in_a_large_swarm_each_peer_says_less() -> None:
    members = members_of(*map(str, range(640)))
    assert members.beat_s(1.25) == 10.0 and members_of("a").beat_s(1.25) == 1.25


def test_a_slow_peer_is_waited_for_once_and_again_when_it_is_quick() -> None:
    patience = Patience(floor_s=20.0)
    assert patience.wait_s([30.0, 40.0, 1000.0]) == 80.0, "two median rounds"
    assert patience.wait_s([1.0]) == 20.0
    patience.closed({"a": 10.0, "b": 12.0}, {"c": None})
    assert patience.slow == {"c"}
    patience.closed({"a": 10.0, "b": 12.0, "c": 37.0}, {})
    assert patience.slow == {"c"}, "longer than the rest of the round and the patience after it"
    patience.closed({"a": 10.0, "b": 12.0, "c": 35.0}, {})
    assert patience.slow == set()


def test_pauses_come_out_of_a_budget_that_refills_slowly() -> None:
    members = members_of("a")
    patience, member = Patience(floor_s=20.0), member_of(members)
    missing = {"a": member}
    assert not patience.pauses(missing, 0.0, 0.0), "it does not say that it pauses"
    members.hear("a", Status(pauses=True), 0.0)
    assert patience.pauses(missing, 400.0, 0.0)
    assert not patience.pauses(missing, PAUSE_LIMIT_S - 399.0, 0.0)
    assert patience.pauses(missing, PAUSE_LIMIT_S - 351.0, 1000.0), "5 % of all time"


def test_statuses_that_come_together_wake_a_peer_once() -> None:
    """And less often in a large swarm. Whoever acts at once in between sets no second wake."""
    ticks = []
    for members in (2, 64):
        peer = core()
        for number in range(members):
            join(peer, f"p{number}")
        now, wakes = 1.0, list[Wake]()
        peer.receive(Tick(), now)
        for step in range(30):
            now += 1e-3
            event = Loaded(0, "") if step == 3 else Heard("p1", status(steps=5))
            wakes += [act for act in peer.receive(event, now) if isinstance(act, Wake)]
        [wake] = [wake for wake in wakes if wake.at < 1.5]  # when a heartbeat is due
        ticks.append(wake.at)  # the first of them is acted upon at once
    assert ticks == pytest.approx([1.05, 1.2])


@pytest.mark.parametrize("having", [0, 40])
@pytest.mark.parametrize("members", [2, 64])
def test_a_large_swarm_hears_of_versions_together_but_soon_of_a_rare_one(
    members: int, having: int
) -> None:
    peer, told = core(), list[list[int]]()
    for number in range(members):
        join(peer, f"p{number}")
    facts, times = peer.facts, [1.0, 1.06, 1.25]
    for now, f in zip(times, [*facts.fragments, None], strict=True):
        if f:
            advance(facts, f, "p1")
            for member in facts.members.all()[:having]:
                member.tips[f.index] = f.tip.key
        acts = peer.receive(Tick(), now)
        statuses = [act.message for act in acts if isinstance(act, Broadcast)]
        told.append([index for status in statuses for index in status.tips])
    assert told == ([[0], [], [1]] if having and members > 2 else [[0], [1], []])
