"""Pace: however messages and changes come, everything is told and acted upon in time, and not much more often."""

from __future__ import annotations

import heapq
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from diloco.protocol.pace import HEARTBEATS_PER_S, LOOK_S, STATUSES_PER_S, TICK_S, Pace

times = st.lists(st.floats(0.0, 20.0), min_size=1, max_size=60).map(sorted)
sizes = st.sampled_from([0, 3, 64, 256, 1024])


@given(times, sizes)
def test_every_change_is_told_within_the_spacing(changes: list[float], others: int) -> None:
    pace, told, wakes = Pace(), [], [(at, True) for at in changes]
    heapq.heapify(wakes)
    untold_since: float | None = None
    while wakes:
        now, changed = heapq.heappop(wakes)
        if not changed:
            pace.ticks(now)
        if changed or pace.untold:
            if pace.tells(now, others):
                told.append(now)
                untold_since = None
            else:
                untold_since = now if untold_since is None else untold_since
                for wake in pace.wake(pace.tell_due(others)):
                    heapq.heappush(wakes, (wake.at, False))
        assert untold_since is None or now - untold_since <= others / STATUSES_PER_S
    assert untold_since is None and not pace.untold and told[-1] >= changes[-1]
    assert all(b - a >= others / STATUSES_PER_S - 1e-9 for a, b in pairwise(told))


@given(times)
def test_every_message_leads_to_a_tick_soon_and_many_to_few(messages: list[float]) -> None:
    pace, ticks, events = Pace(), [], [(at, True) for at in messages]
    heapq.heapify(events)
    while events:
        now, heard = heapq.heappop(events)
        if not heard or now >= pace.tick_due:
            pace.ticks(now)
            ticks.append(now)
        else:
            for wake in pace.wake(pace.tick_due):
                heapq.heappush(events, (wake.at, False))
    for at in messages:
        assert any(at <= tick <= at + TICK_S + 1e-9 for tick in ticks)
    assert all(b - a >= TICK_S - 1e-9 for a, b in pairwise(ticks))


def test_a_later_wake_is_asked_for_once_whatever_comes_before() -> None:
    pace = Pace()
    assert [wake.at for wake in pace.wake(5.0)] == [5.0]
    for now in (1.0, 2.0, 3.0):
        assert [wake.at for wake in pace.wake(now + 0.5)] == [now + 0.5]
        pace.ticks(now + 0.5)
        assert pace.wake(5.0) == []
    pace.ticks(5.0)
    assert [wake.at for wake in pace.wake(6.0)] == [6.0]


def test_looks_and_heartbeats_have_their_own_spacing() -> None:
    pace, others = Pace(), int(2 * HEARTBEATS_PER_S)
    assert [now for now in range(6) if pace.looks(now * LOOK_S / 2)] == [0, 2, 4]
    assert [now for now in range(6) if pace.beats(float(now), others)] == [0, 2, 4]
