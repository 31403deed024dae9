"""The swarm clock: equal learning rates at equal versions, and one moment at which all stop."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.config import BudgetConfig, InnerConfig, compose
from diloco.train.host import Host
from diloco.train.loop import learning_rate


@dataclass(frozen=True)
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
        (budget(3), Time(4), True),
        (budget(tokens=100), Time(10**6, 0, 99), False),
        (budget(3, 100), Time(3, 0, 0), True),
        (budget(3, 100), Time(0, 0, 100), True),
        (budget(3, 100), Time(2, 0, 99), False),
    ],
)
def test_a_run_ends_with_the_first_limit_that_is_reached(
    limits: BudgetConfig, time: Time, over: bool
) -> None:
    assert limits.is_used_up(time.version, time.applied_tokens) is over


HIGH, LOW = (0.2 + 1.8 * 0.5 * (1 + half) for half in (math.sqrt(0.5), -math.sqrt(0.5)))
COSINE = [2.0, HIGH, 1.1, LOW, 0.2, 0.2]


def at(*steps: int) -> list[Time]:
    return [Time(step // 10, step % 10) for step in steps]


# Settings, and the rate by time; a round has ten steps.
RATES: dict[str, tuple[tuple[InnerConfig, BudgetConfig], dict[Time, float]]] = {
    "of two limits the nearer one counts": (
        (inner(), budget(10, 1000)),
        {Time(5, 0, 100): 1.1, Time(1, 0, 500): 1.1},
    ),
    "the cosine goes from the peak to its last part, and stays there past the end": (
        (inner(warmup_steps=10), budget(11)),
        dict(zip(at(10, 35, 60, 85, 110, 150), COSINE, strict=True)),
    ),
    "a line, too": (
        (inner(schedule="linear", warmup_steps=10), budget(11)),
        dict(zip(at(0, 10, 35, 60, 110, 150), [0.2, 2.0, 1.55, 1.1, 0.2, 0.2], strict=True)),
    ),
    "wsd is constant until its decay, a line over the last part of the run": (
        (inner(schedule="wsd", warmup_steps=2, decay_ratio=0.4), budget(10)),
        dict(zip(at(0, 2, 60, 80, 100, 120), [1.0, 2.0, 2.0, 1.1, 0.2, 0.2], strict=True)),
    ),
    "a decay longer than what the warm-up leaves begins after it": (
        (inner(schedule="wsd", warmup_steps=0.5, decay_ratio=1.0), budget(10)),
        dict(zip(at(24, 50, 75, 100), [1.0, 2.0, 1.1, 0.2], strict=True)),
    ),
    "a part of a budget of tokens follows those applied, and between exchanges the own ones": (
        (inner(warmup_steps=0.5), budget(tokens=80)),
        {
            Time(0, 0, 0, 1): 0.05,
            Time(1, 3, 8, 4): 0.6,
            Time(5, 0, 40, 0): 2.0,
            Time(0, 0, 60): 1.1,
        },
    ),
    "a constant schedule is constant after its warm-up": (
        (inner(schedule="constant", warmup_steps=2), budget(1)),
        {Time(0, 0): 1, Time(0, 1): 2, Time(0, 3): 2},
    ),
}


@pytest.mark.parametrize("rule", RATES)
def test_the_rate_is_that_of_the_swarm_clock(rule: str) -> None:
    settings, rates = RATES[rule]
    found = {time: learning_rate(time, *settings, 10) for time in rates}
    assert found == pytest.approx(rates)


@pytest.mark.parametrize(
    ("steps", "trains", "over"),
    [
        (0, [], False),  # nobody has come yet
        (0, [True], False),
        (0, [False], False),  # another host
        (3, [], True),
        (3, [False], True),
        (3, [True], False),  # it has not heard of the last version
    ],
)
def test_a_host_ends_with_the_budget_when_nobody_trains(
    steps: int, trains: list[bool], over: bool
) -> None:
    tip = {"version": steps, "applied_tokens": 0, "planned": (0, 0, 0)}
    record = SimpleNamespace(others_that_train=sum(trains), **tip)
    host = object.__new__(Host)
    host.manifest, host._used_up = compose(["experiment=smoke"]).manifest(), False
    host.node = SimpleNamespace(record=lambda: record)  # type: ignore[assignment]
    assert host.is_over() is over
    record.others_that_train = 0
    assert host.is_over() is (steps == 3), "what is used up stays so"
