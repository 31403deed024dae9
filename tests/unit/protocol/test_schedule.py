"""When fragments are due: each once in a cycle, and its update as many inner steps later as training overlaps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.protocol.schedule import Due, Schedule


def cycle(schedule: Schedule, steps: int) -> list[tuple[int, str, tuple[int, ...]]]:
    """What is due after which inner step."""
    found: list[tuple[int, str, tuple[int, ...]]] = []
    for step in range(1, steps + 1):
        due = schedule.advance()
        found += [(step, what, one) for what, one in (("send", due.send), ("receive", due.receive)) if one]
    return found


def sends(schedule: Schedule, steps: int) -> list[tuple[int, int]]:
    """After which inner step each fragment is sent."""
    return [(step, fragment) for step, what, one in cycle(schedule, steps) if what == "send" for fragment in one]


def started(*settings: object, **begin: int) -> Schedule:
    schedule = Schedule(*settings)  # type: ignore[arg-type]
    schedule.begin(**begin)
    return schedule


def test_a_shorter_cycle_or_what_is_left_of_one_ends_sooner() -> None:
    assert cycle(started(1, 10, position=7), 3) == [(3, "send", (0,)), (3, "receive", (0,))]
    assert sends(started(5, 10, True, position=4), 6) == [(2, 2), (4, 3), (6, 4)]
    schedule = started(1, 10)
    schedule.target_steps = 3
    assert sends(schedule, 6) == [(3, 0), (6, 0)]


@settings(max_examples=50)
@given(st.data())
def test_every_fragment_is_sent_and_received_once_in_a_cycle(data: st.DataObject) -> None:
    fragments, staggered = data.draw(st.integers(1, 8)), data.draw(st.booleans())
    sync_every = data.draw(st.integers(fragments, 40))
    overlap = data.draw(st.integers(0, max(0, (sync_every // fragments if staggered else sync_every) - 1)))
    dues = cycle(started(fragments, sync_every, staggered, overlap), 3 * sync_every + overlap)
    sent = [(step, f) for step, what, one in dues if what == "send" for f in one if step <= 3 * sync_every]
    received = [(step, f) for step, what, one in dues if what == "receive" for f in one]
    assert sorted(f for _, f in sent) == sorted(list(range(fragments)) * 3)
    assert received[: len(sent)] == [(step + overlap, f) for step, f in sent]


@pytest.mark.parametrize("fragments", [1, 3, 7])
def test_staggered_sends_are_evenly_spread(fragments: int) -> None:
    steps = [step for step, _ in sends(started(fragments, 22, True), 22)]
    gaps = [b - a for a, b in zip([0, *steps], steps, strict=False)]
    assert steps[-1] == 22 and max(gaps) - min(gaps) <= 1


@settings(max_examples=50)
@given(st.data())
def test_who_was_outrun_comes_to_each_fragment_in_their_order(data: st.DataObject) -> None:
    """The others come to the fragments that it missed last of all, so it must not come to one of them earlier."""
    fragments = data.draw(st.integers(1, 6))
    sync_every = data.draw(st.integers(fragments, 24))
    position = data.draw(st.integers(0, sync_every - 1))
    ahead = [f for _, f in sends(started(fragments, sync_every, True, position=position), sync_every)]
    behind_by = data.draw(st.integers(0, fragments))  # turns that the others had and this peer had not
    in_flight = data.draw(st.integers(0, max(0, fragments - 1 - behind_by)))  # it came amid these
    outrun = ahead[:behind_by] + ahead[fragments - in_flight :]

    schedule = started(fragments, sync_every, True, position=position)
    schedule.begin(schedule.position_after(outrun, Due((), ())))
    turns = [f for _, f in sends(schedule, sync_every)]
    assert turns == ahead[behind_by % fragments :] + ahead[: behind_by % fragments]


def test_what_a_peer_is_exchanging_is_no_turn_to_leave_out() -> None:
    schedule = started(2, 6, True, 1)
    assert schedule.position_after([0], Due((), (1,))) == 0
    assert schedule.position_after([0], Due((), ())) == 3, "the other one's turn comes first"
