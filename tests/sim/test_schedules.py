"""Learning rate schedules are where the swarm is, whatever they are, and whoever steps them."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torchs

from diloco.attach.optimizer import CombinedOptimizer
from diloco.attach.schedulers import (
    ScheduledStep,
    Schedulers,
    StepHooks,
    swarm_steps,
)
from diloco.errors import ConfigError
from tests.support.loops import Loop, train

Made = Callable[[torch.optim.Optimizer], Any]
SCHEDULES: dict[str, Made] = {
    "lambda": lambda optimizer: torchs.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "step": lambda optimizer: torchs.StepLR(optimizer, 7, 0.3),
    "exponential": lambda optimizer: torchs.ExponentialLR(optimizer, 0.95),
    "cosine": lambda optimizer: torchs.CosineAnnealingLR(optimizer, 20),
    "restarts": lambda optimizer: torchs.CosineAnnealingWarmRestarts(optimizer, 7),
    "one cycle": lambda optimizer: torchs.OneCycleLR(optimizer, 0.5, 40),
    "sequence": lambda optimizer: torchs.SequentialLR(optimizer, two(optimizer), [5]),
    "chain": lambda optimizer: torchs.ChainedScheduler(two(optimizer)),
}


def two(optimizer: torch.optim.Optimizer) -> list[torchs.LRScheduler]:
    return [torchs.LinearLR(optimizer, 0.1, 1.0, 5), torchs.ExponentialLR(optimizer, 0.9)]


def made(schedule: Made) -> tuple[torch.optim.Optimizer, Any]:
    layer = nn.Linear(2, 1)
    groups = [{"params": [layer.weight], "lr": 0.1}, {"params": [layer.bias], "lr": 0.2}]
    optimizer = torch.optim.AdamW(groups)
    return optimizer, schedule(optimizer)


def rates(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [(group["lr"], group["betas"]) for group in optimizer.param_groups]


def looped(schedule: Made, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    """A loop that was never interrupted, before its next step."""
    optimizer, scheduler = made(schedule)
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
    return optimizer, scheduler


def has_rates(optimizer: torch.optim.Optimizer, schedule: Made, steps: int) -> bool:
    """Whether they are those of such a loop."""
    return rates(optimizer) == rates(looped(schedule, steps)[0])


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_is_brought_to_what_a_loop_would_have(schedule: Made) -> None:
    """Forward; where it is further than the swarm, as after a checkpoint in mid-round, it waits."""
    optimizer, scheduler = made(schedule)
    schedules = Schedulers([scheduler])
    for step in (0, 12, 12, 13, 30, 38):
        schedules.step_to(step)
        assert has_rates(optimizer, schedule, step), step
    states = [one.state_dict() for one in looped(schedule, 14)]
    optimizer, scheduler = made(schedule)
    optimizer.load_state_dict(states[0])
    scheduler.load_state_dict(states[1])
    schedules = Schedulers([scheduler])
    for step in (12, 13, 14, 15, 20):
        schedules.step_to(step)
        assert has_rates(optimizer, schedule, max(14, step)), step


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_an_optimizer_from_a_checkpoint_leaves_a_new_schedule_its_rates(schedule: Made) -> None:
    optimizer, scheduler = made(schedule)
    schedules = Schedulers([scheduler])
    with schedules.keeping_rates():
        optimizer.load_state_dict(looped(schedule, 14)[0].state_dict())
    assert has_rates(optimizer, schedule, 0)
    schedules.step_to(16)
    assert has_rates(optimizer, schedule, 16)


@pytest.mark.parametrize(("times", "every", "steps", "taken"), [(1, 4, 11, 2), (3, 1, 5, 15)])
def test_who_steps_seldom_or_often_keeps_its_pace(
    times: int, every: int, steps: int, taken: int
) -> None:
    schedule = SCHEDULES["exponential"]
    optimizer, scheduler = made(schedule)
    Schedulers([ScheduledStep(scheduler, times, every)]).step_to(steps)
    assert has_rates(optimizer, schedule, taken)


def test_learning_rates_that_are_tensors_stay_the_same_tensors() -> None:
    rate = torch.tensor(0.1)
    optimizer = torch.optim.AdamW(nn.Linear(2, 1).parameters(), lr=rate)
    schedules = Schedulers([torchs.ExponentialLR(optimizer, 0.5)])
    schedules.step_to(3)
    assert optimizer.param_groups[0]["lr"] is rate and rate == pytest.approx(0.0125)
    with schedules.keeping_rates():
        rate.fill_(7.0)
    assert optimizer.param_groups[0]["lr"] is rate and rate == pytest.approx(0.0125)


TOO_SHORT = ".*OneCycleLR is over after 40 steps, and the swarm is at 41; make it as long"
WRONG: list[tuple[Made, str]] = [
    (torchs.ReduceLROnPlateau, "ReduceLROnPlateau follows a metric of this peer, no step"),
    (lambda optimizer: optimizer, "AdamW is no learning rate scheduler; name those of torch"),
    (SCHEDULES["one cycle"], TOO_SHORT),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG)
def test_what_is_no_schedule_of_so_many_steps_is_refused(wrong: Made, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^schedulers: {said}.*$"):
        Schedulers([made(wrong)[1]]).step_to(41)


def test_a_schedule_stepped_for_each_micro_batch_is_an_error() -> None:
    """And a skipped step is none."""
    optimizer, scheduler = made(SCHEDULES["exponential"])
    schedules = Schedulers([scheduler])
    optimizer.step()  # or torch warns

    def goes_on(steps: range, twice: int) -> None:
        for step in steps:
            schedules.step_to(step)
            for _ in range(1 + (step % twice == 0)):
                scheduler.step()

    goes_on(range(100), twice=10)  # 9 of 10 times nothing is wrong
    said = "schedulers: before 9 steps of the optimizer in a row, one was further"
    with pytest.raises(ConfigError, match=said):
        goes_on(range(100, 200), twice=1)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_is_no_step(fused: bool) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    calls: list[str] = []
    hooks = StepHooks(optimizer, lambda: calls.append("before"), lambda: calls.append("after"))
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert calls.count("after") == 2
    hooks.remove()
    optimizer.step()
    assert calls.count("after") == 2


def test_torch_compile_traces_nothing_of_an_exchange() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer, traced = torch.optim.SGD([parameter], lr=0.1), list[bool]()

    def called() -> None:
        traced.append(torch.compiler.is_compiling())

    StepHooks(optimizer, called, called)
    traced.clear()

    @torch.compile(backend="eager")
    def step() -> None:
        parameter.square().sum().backward()
        optimizer.step()

    step()
    assert traced == [False, False] and parameter.tolist() == pytest.approx([0.8, 0.8])


@pytest.mark.parametrize("outer", [{}, {"fragments": 4, "staggered": True, "overlap": 3}])
def test_every_step_has_the_learning_rate_of_the_swarm(outer: dict[str, Any]) -> None:
    """Also of one that pauses for so long that the others go on without it; where its clock goes
    back, because its round was lost, the schedule waits."""
    places: list[int] = []

    def attach(name: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"schedulers": [torchs.LambdaLR(optimizer, lambda step: 0.001 / (1 + step))]}

    def work(loop: Loop) -> None:
        furthest = 0
        while loop.sync.version < 5:
            before = swarm_steps(loop.sync, 40)
            furthest = max(furthest, before)
            assert furthest == before or outer
            loop.step()
            rate = loop._optimizer.param_groups[0]["lr"]
            assert rate == pytest.approx(0.1 * 0.001 / (1 + furthest), rel=1e-9)
            if loop.name == "c":
                places.append(before)
                if loop.sync.exchanged and loop.sync.version == 1:
                    with loop.sync.anchored():
                        loop.pass_s(800.0 if outer else 660.0)  # each author waits for it once

    train("abc", work, sync_every=40, attach=attach, **outer)
    jumps = [later - before for before, later in itertools.pairwise(places)]
    assert max(jumps) > 10, "it went on where the others were"


class Twice(torch.optim.SGD):
    """A step within a step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


@pytest.mark.parametrize(
    ("order", "ends"), [("aba", 1), ("ababab", 3), ("aabaab", 2), ("baabaa", 2), ("bbbabba", 2)]
)
def test_a_step_of_several_optimizers_is_one_of_each(order: str, ends: int) -> None:
    """In any order, also where one takes more steps. Gradients that wait for a step stay."""
    parameters = {name: nn.Parameter(torch.ones(2)) for name in "ab"}
    torch.optim.SGD(parameters.values(), lr=0.1)  # whose class then calls hooks, too
    optimizers = {name: Twice([one], lr=0.1) for name, one in parameters.items()}
    calls: list[str] = []

    def after() -> None:
        calls.append("after")
        hooks.free_gradients()

    both = CombinedOptimizer(*optimizers.values())
    hooks = StepHooks(both, lambda: calls.append("before"), after)
    for name in order:
        parameters[name].grad = torch.ones(2)
    waiting = parameters["a"].grad
    for number, name in enumerate(order):
        optimizers[name].step()
        if calls[-1] == "after":
            assert parameters[name].grad is None, "it is used up"
            parameters[name].grad = torch.ones(2)
        if number == 0 and name == "b":
            assert parameters["a"].grad is waiting
    assert calls.count("after") == ends
    assert calls.count("before") == ends + 1 + (calls[-1] == "before")
    hooks.remove()
    optimizers["a"].step()
    assert calls.count("after") == ends


def test_gradients_of_the_next_step_are_not_freed() -> None:
    a, b = (nn.Parameter(torch.ones(2)) for _ in "ab")
    one, other = torch.optim.SGD([a], lr=0.1), torch.optim.SGD([b], lr=0.1)
    hooks = StepHooks(CombinedOptimizer(one, other), lambda: None, lambda: hooks.free_gradients())
    for _ in range(3):
        (a + b).sum().backward()
        one.step()
        a.grad.add_(1.0)  # type: ignore[union-attr]
        other.step()
        assert a.grad is not None and b.grad is None


def test_an_optimizer_that_takes_no_steps_is_named() -> None:
    kinds = (torch.optim.SGD, torch.optim.Adam)
    one, other = (kind([nn.Parameter(torch.ones(2))]) for kind in kinds)
    StepHooks(CombinedOptimizer(one, other), lambda: None, lambda: None)
    said = r"^optimizer\[1\]=Adam has taken no step in 101 of another; a step of the swarm is"
    with pytest.raises(ConfigError, match=said):
        for _ in range(200):
            one.step()
