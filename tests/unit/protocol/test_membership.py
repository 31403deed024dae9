"""Membership: who is there, and deadlines that come from what was measured and never from a fixed ladder."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.protocol.membership import (
    AWAKE_S,
    SILENCE_FACTOR,
    SILENCE_FLOOR_S,
    STALL_FACTOR,
    STALL_FLOOR_S,
    STALL_UNMEASURED_S,
    Member,
    Membership,
)
from diloco.protocol.messages.control import Status
from diloco.protocol.states import State
from tests.support.core import hello_of


def status_of(state: State = "training", inner_step: int = 0, steps_per_s: float = 0.0, *versions: int) -> Status:
    return Status(state=state, versions=list(versions or (0,)), inner_step=inner_step, steps_per_s=steps_per_s)


def member_of(status: Status) -> Member:
    return Member("a", "a", True, True, status, 0.0, 0.0)


def members_of(**versions: list[int]) -> Membership:
    members = Membership()
    for peer, its in versions.items():
        members.join(peer, hello_of(status_of("training", 0, 0.0, *its)), 0.0)
    return members


def beat(members: Membership, interval_s: float, count: int, start_s: float = 0.0) -> float:
    """Statuses of `a` in that interval; returns the time of the last one. This peer looks at its members each time."""
    now = start_s
    for _ in range(count):
        now += interval_s
        members.get("a").hear(status_of(), now)
        members.silent(now)
    return now


@pytest.mark.parametrize("interval_s", [0.5, 1.0, 4.0])
def test_the_silence_deadline_follows_the_measured_heartbeat(interval_s: float) -> None:
    members = members_of(a=[0])
    now = beat(members, interval_s, 20)
    deadline_s = max(SILENCE_FLOOR_S, SILENCE_FACTOR * interval_s)
    for waited_s in [*range(1, int(deadline_s)), deadline_s]:
        assert members.silent(now + waited_s) == []
    assert members.silent(now + deadline_s + 0.001) == ["a"]


def test_nobody_was_silent_while_this_peer_was_asleep() -> None:
    members = members_of(a=[0], b=[0])
    now = beat(members, 1.0, 3)
    assert members.silent(now + 300.0) == []
    assert members.silent(now + 300.0 + SILENCE_FLOOR_S - AWAKE_S - 3.0) == []
    assert all(now + 300.0 - member.progress_at < STALL_FLOOR_S for member in members.all())
    members.get("a").hear(status_of(), now + 303.0)
    assert members.silent(now + 300.0 + SILENCE_FLOOR_S) == ["b"]


def test_progress_is_a_change_of_state_version_or_inner_step() -> None:
    member = members_of(a=[0]).get("a")
    for now, status in enumerate((("training", 1, 1.0), ("exchanging", 1, 1.0), ("exchanging", 1, 1.0, 1)), start=1):
        member.hear(status_of(*status), float(now))  # type: ignore[arg-type]
        assert member.progress_at == now
    member.hear(status_of("exchanging", 1, 2.0, 1), 9.0)
    assert (member.progress_at, member.heard_at) == (3.0, 9.0)


@pytest.mark.parametrize(
    ("steps_per_s", "stall_s"),
    [(0.0, STALL_UNMEASURED_S), (100.0, STALL_FLOOR_S), (0.5, STALL_FLOOR_S), (0.01, STALL_FACTOR * 100)],
)
def test_the_stall_deadline_follows_the_measured_step_time(steps_per_s: float, stall_s: float) -> None:
    assert member_of(status_of("training", 0, steps_per_s)).stall_s() == stall_s


def test_the_versions_a_round_began_from_outlast_the_exchange() -> None:
    member = member_of(status_of("exchanging", 0, 0.0, 3, 3))
    assert member.round_versions is None  # unknown: it was in the middle of its exchange when we met
    member.hear(status_of("training", 0, 0.0, 4, 4), 1.0)
    member.hear(status_of("exchanging", 8, 0.0, 4, 5), 2.0)
    assert member.round_versions == [4, 4]


small = st.integers(0, 3)
kinds, states = st.sampled_from(["join", "hear", "remove"]), st.sampled_from(["training", "done"])


@settings(max_examples=50)
@given(st.lists(st.tuples(kinds, st.sampled_from("abcd"), st.tuples(small, small), states), max_size=30))
def test_what_is_counted_along_is_what_a_walk_finds(happened: list[Any]) -> None:
    members = Membership()
    for kind, peer, versions, state in happened:
        there, generation = [m.peer for m in members.all() if not m.status.gone], members.generation
        if kind == "join":
            members.join(peer, hello_of(status_of(state, 0, 0.0, *versions)), 0.0)
        elif peer in members and kind == "remove":
            members.remove(peer)
        elif peer in members:
            members.hear(peer, status_of(state, 0, 0.0, *versions), 0.0)
        for fragment in (0, 1):
            highest = max((m.status.versions[fragment] for m in members.all()), default=-1)
            assert members.highest_version(fragment) == highest
            for version in range(5):
                able = [m.peer for m in members.all() if m.status.versions[fragment] >= version]
                assert sorted(members.donors(fragment, version)) == able
        if there != [m.peer for m in members.all() if not m.status.gone]:
            assert members.generation > generation


def test_a_peer_that_says_little_does_not_stall_by_that() -> None:
    """In a large swarm its heartbeats come every 15 s; one that is 6 s late must not put it out of the round."""
    members = members_of(a=[0])
    member, now = members.get("a"), beat(members, 15.0, 20)
    member.hear(status_of("training", 1, 10.0), now)
    assert not member.stalled(now + 21.0) and member.stalled(now + 50.0)


def test_donors_have_the_version_and_the_latest_comes_first() -> None:
    members = members_of(a=[3, 0], b=[5, 0], c=[4, 9], d=[5, 1])
    assert members.donors(0, 4) == ["b", "d", "c"] and members.donors(0, 6) == []
    assert members.highest_version(0) == 5 and members.highest_version(1) == 9
