"""When fragments are due: each once in a cycle, and its update as many inner steps later as training overlaps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.protocol.schedule import Due, Schedule


def cycle(schedule: Schedule, steps: int) -> list[tuple[int, str, tuple[int, ...]]]:
    """What is due after which inner step."""
    found: list[tuple[int, str, tuple[int, ...]]] = []
    for step in range(1, steps + 1):
        due = schedule.advance()
        found += [(step, what, one) for what, one in (("send", due.send), ("receive", due.receive)) if one]
    return found


def started(*settings: object, **begin: int) -> Schedule:
    schedule = Schedule(*settings)  # type: ignore[arg-type]
    schedule.begin(**begin)
    return schedule


def test_at_a_barrier_everything_is_sent_and_received_at_the_end_of_the_cycle() -> None:
    schedule = started(2, 3)
    both = (0, 1)
    assert cycle(schedule, 6) == [(3, "send", both), (3, "receive", both), (6, "send", both), (6, "receive", both)]
    assert schedule.inner_step == 0 and schedule.flying == ()


def test_staggered_fragments_take_turns_and_are_received_an_overlap_later() -> None:
    schedule = started(3, 6, True, 1)
    assert cycle(schedule, 9) == [
        (2, "send", (0,)),
        (3, "receive", (0,)),
        (4, "send", (1,)),
        (5, "receive", (1,)),
        (6, "send", (2,)),
        (7, "receive", (2,)),
        (8, "send", (0,)),
        (9, "receive", (0,)),
    ]


def test_with_overlap_the_update_is_due_in_the_next_cycle() -> None:
    schedule = started(1, 4, False, 2)
    assert cycle(schedule, 5) == [(4, "send", (0,))]
    assert schedule.flying == (0,) and schedule.inner_step == 1
    assert cycle(schedule, 5) == [(1, "receive", (0,)), (3, "send", (0,)), (5, "receive", (0,))]


def test_who_joins_in_the_middle_sends_what_is_left_of_the_cycle() -> None:
    assert cycle(started(1, 10, position=7), 3) == [(3, "send", (0,)), (3, "receive", (0,))]
    assert [step for step, what, _ in cycle(started(5, 10, True, position=4), 6) if what == "send"] == [2, 4, 6]


def test_a_shorter_cycle_comes_sooner() -> None:
    schedule = started(1, 10)
    schedule.target_steps = 3
    assert [step for step, what, _ in cycle(schedule, 6) if what == "send"] == [3, 6]


@given(st.data())
def test_every_fragment_is_sent_once_in_every_cycle_and_received_once(data: st.DataObject) -> None:
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
    steps = [step for step, what, _ in cycle(started(fragments, 22, True), 22) if what == "send"]
    gaps = [b - a for a, b in zip([0, *steps], steps, strict=False)]
    assert steps[-1] == 22 and max(gaps) - min(gaps) <= 1


@given(st.data())
def test_a_peer_that_others_outran_comes_to_each_fragment_in_their_order(data: st.DataObject) -> None:
    """The others come to the fragments that it missed last of all, so it must not come to one of them earlier."""
    fragments = data.draw(st.integers(1, 6))
    sync_every = data.draw(st.integers(fragments, 24))
    position = data.draw(st.integers(0, sync_every - 1))
    dues = cycle(started(fragments, sync_every, True, position=position), sync_every)
    ahead = [f for _, what, one in dues if what == "send" for f in one]
    behind_by = data.draw(st.integers(0, fragments))  # turns that the others had and this peer had not
    in_flight = data.draw(st.integers(0, max(0, fragments - 1 - behind_by)))  # it came amid these
    outrun = ahead[:behind_by] + ahead[fragments - in_flight :]

    schedule = started(fragments, sync_every, True, position=position)
    schedule.begin(schedule.position_after(outrun, Due((), ())))
    turns = [f for _, what, one in cycle(schedule, sync_every) if what == "send" for f in one]
    assert turns == ahead[behind_by % fragments :] + ahead[: behind_by % fragments]


def test_what_a_peer_is_exchanging_is_no_turn_that_it_could_leave_out() -> None:
    schedule = started(2, 6, True, 1)
    assert schedule.position_after([0], Due((), (1,))) == 0
    assert schedule.position_after([0], Due((), ())) == 3, "the other one's turn comes first"
