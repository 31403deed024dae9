"""Who misbehaves is refused for longer and longer, until a day without an offence has passed."""

from __future__ import annotations

from diloco.core.penalties import FIRST_S, FORGET_S, LONGEST_S, Penalties


def test_each_offence_doubles_the_time_and_a_day_forgets_it() -> None:
    penalties, now = Penalties(), 100.0
    for expected in (FIRST_S, 2 * FIRST_S, 4 * FIRST_S):
        assert penalties.offence("a", "sent nonsense", now) == expected
        assert penalties.refusal("a", now + expected - 1) == "refused for 1 s more: sent nonsense"
        assert penalties.refusal("b", now) is None
        now += expected
        assert penalties.refusal("a", now) is None
    for _ in range(30):
        now += penalties.offence("a", "sent nonsense", now)
    assert penalties.offence("a", "sent nonsense", now) == LONGEST_S
    assert penalties.offence("a", "sent nonsense", now + LONGEST_S + FORGET_S) == FIRST_S


def test_offences_on_streams_that_were_open_already_count_once() -> None:
    penalties = Penalties()
    assert [penalties.offence("a", "x", now) for now in (0.0, 4.0, FIRST_S)] == [FIRST_S, FIRST_S - 4, 2 * FIRST_S]
