"""The swarm clock: equal learning rates at equal versions, and one moment at which all stop."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.config import BudgetConfig, InnerConfig
from diloco.train.loop import finished, learning_rate


@dataclass
class Time:
    version: int = 0
    inner_step: int = 0
    applied_tokens: int = 0
    unsent_tokens: int = 0


def inner(**settings: Any) -> InnerConfig:
    return InnerConfig(**{"lr": 2.0, "batch_size": 1, "final_lr_ratio": 0.1, **settings})


def budget(outer_steps: int | None = None, tokens: int | None = None) -> BudgetConfig:
    return BudgetConfig(outer_steps=outer_steps, tokens=tokens)


@pytest.mark.parametrize(
    ("limits", "time", "over"),
    [
        (budget(3), Time(2, 99, 10**9), False),
        (budget(3), Time(3), True),
        (budget(3), Time(4), True),
        (budget(tokens=100), Time(10**6, 0, 99), False),
        (budget(tokens=100), Time(0, 0, 100), True),
        (budget(3, 100), Time(3, 0, 0), True),
        (budget(3, 100), Time(0, 0, 100), True),
        (budget(3, 100), Time(2, 0, 99), False),
    ],
)
def test_a_run_ends_with_the_first_limit_that_is_reached(limits: BudgetConfig, time: Time, over: bool) -> None:
    assert finished(time, limits) is over


def test_warm_up_is_linear_and_reaches_the_peak_with_its_last_step() -> None:
    settings = inner(warmup_steps=4)
    rates = [learning_rate(Time(step // 3, step % 3), settings, budget(10), 3) for step in range(5)]
    assert rates == [0.5, 1.0, 1.5, 2.0, 2.0]


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_a_part_of_the_run_is_so_many_of_its_steps(schedule: str) -> None:
    times = [Time(step // 5, step % 5) for step in range(45)]
    part, steps = inner(warmup_steps=0.25, schedule=schedule), inner(warmup_steps=10, schedule=schedule)
    rates = [learning_rate(time, part, budget(8), 5) for time in times]
    assert rates == pytest.approx([learning_rate(time, steps, budget(8), 5) for time in times])
    assert rates[9] == 2.0, "the tenth of forty steps"


def test_a_part_of_a_budget_of_tokens_follows_those_applied_and_between_exchanges_the_own_ones() -> None:
    settings, limits = inner(warmup_steps=0.5, schedule="constant"), budget(tokens=80)
    times = [Time(0, 0, 0, 1), Time(0, 1, 0, 2), Time(1, 0, 8, 1), Time(1, 3, 8, 4), Time(5, 0, 40, 0)]
    assert [learning_rate(time, settings, limits, 4) for time in times] == pytest.approx([0.05, 0.1, 0.45, 0.6, 2.0])


def test_after_a_warm_up_over_a_part_of_the_tokens_the_cosine_begins_at_its_peak() -> None:
    settings, limits = inner(warmup_steps=0.5), budget(tokens=80)
    rates = [learning_rate(Time(0, 0, tokens), settings, limits, 4) for tokens in (40, 60, 80)]
    assert rates == pytest.approx([2.0, 1.1, 0.2])


def test_with_muon_inside_the_peak_is_its_own() -> None:
    settings = inner(optimizer="muon", muon_lr_ratio=4.0, warmup_steps=4)
    rates = [learning_rate(Time(0, step), settings, budget(1), 8) for step in range(5)]
    assert rates == pytest.approx([2.0, 4.0, 6.0, 8.0, 8.0])


def test_cosine_goes_from_the_peak_to_its_last_part() -> None:
    settings, limits = inner(warmup_steps=10), budget(11)
    rate = {step: learning_rate(Time(step // 10, step % 10), settings, limits, 10) for step in (10, 35, 60, 85, 110)}
    assert rate == pytest.approx(
        {
            10: 2.0,
            35: 0.2 + 1.8 * 0.5 * (1 + math.sqrt(0.5)),
            60: 1.1,
            85: 0.2 + 1.8 * 0.5 * (1 - math.sqrt(0.5)),
            110: 0.2,
        }
    )
    assert learning_rate(Time(15), settings, limits, 10) == pytest.approx(0.2), "past the end it stays there"


def test_a_constant_schedule_is_constant_after_its_warm_up() -> None:
    settings = inner(schedule="constant", warmup_steps=2)
    assert [learning_rate(Time(0, step), settings, budget(1), 9) for step in range(4)] == [1.0, 2.0, 2.0, 2.0]


def test_with_a_budget_of_tokens_the_rate_follows_what_was_applied() -> None:
    limits = budget(tokens=1000)
    assert learning_rate(Time(7, 3, 500), inner(), limits, 10) == pytest.approx(1.1)
    assert learning_rate(Time(7, 9, 500), inner(), limits, 10) == pytest.approx(1.1)
    assert learning_rate(Time(7, 3, 1000), inner(), limits, 10) == pytest.approx(0.2)


def test_of_two_limits_the_nearer_one_counts() -> None:
    assert learning_rate(Time(5, 0, 100), inner(), budget(10, 1000), 10) == pytest.approx(1.1)
    assert learning_rate(Time(1, 0, 500), inner(), budget(10, 1000), 10) == pytest.approx(1.1)


def test_who_joins_late_has_the_rate_of_the_others() -> None:
    settings, limits = inner(warmup_steps=30), budget(10)
    assert learning_rate(Time(4, 2), settings, limits, 10) == learning_rate(Time(4, 2, 999), settings, limits, 10)
    assert learning_rate(Time(4, 0), settings, limits, 10) < settings.lr, "its warm-up is over with that of the others"


@given(
    version=st.integers(0, 200),
    step=st.integers(0, 19),
    tokens=st.integers(0, 10**7),
    warmup=st.integers(0, 3000) | st.floats(0.001, 0.999),
    limits=st.tuples(st.integers(1, 100) | st.none(), st.integers(1, 10**6) | st.none()).filter(any),
)
def test_the_rate_is_positive_and_never_above_the_peak_even_past_the_end(
    version: int, step: int, tokens: int, warmup: float, limits: tuple[int | None, int | None]
) -> None:
    rate = learning_rate(Time(version, step, tokens), inner(warmup_steps=warmup), budget(*limits), 20)
    assert 0 < rate <= 2.0
