"""Learning rate schedules that follow the swarm clock, and hooks around each optimizer step.

A schedule counts its own steps. In a peer that joins late, was away, or resumes from a checkpoint,
it would differ from those of other peers. So before each step of the optimizer every schedule is
stepped forward to the inner step of the swarm. A schedule that is ahead waits: its round was lost,
or a trainer's checkpoint is from the middle of a round.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from traceback import walk_stack
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from diloco.attach.optimizer import kind_of, parts_of
from diloco.errors import ConfigError

MOVED = ("lr", "momentum", "betas")  # keys of parameter groups that torch's schedulers change
MOST_ALONE = 100  # steps of an optimizer while another of the same peer takes none
MOST_TOO_FAR = 8  # optimizer steps in a row at which the lead of a schedule may grow
# code of the function that calls the step hooks
_STEP = torch.optim.Optimizer.profile_hook_step(print).__code__
_attached: WeakSet[torch.optim.Optimizer] = WeakSet()
_refusing: WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle] = WeakKeyDictionary()


def swarm_steps(sync: Any, sync_every: int) -> int:
    """Inner steps of the swarm: H for each outer step, plus this peer's since the last one."""
    return int(sync.version * sync_every + sync.inner_step)


class ScheduledStep(NamedTuple):
    """A schedule that is stepped `times` after each `every`-th step of the optimizer."""

    scheduler: Any
    times: int = 1
    every: int = 1

    @classmethod
    def of(cls, scheduler: Any, ranks: int) -> ScheduledStep:
        """Unwrap a schedule of Accelerate, which steps once per rank unless batches are split."""
        inside = getattr(scheduler, "scheduler", None)
        if isinstance(scheduler, ScheduledStep) or inside is None:
            return scheduler if isinstance(scheduler, ScheduledStep) else cls(scheduler)
        once = getattr(scheduler, "split_batches", False)
        once = once or not getattr(scheduler, "step_with_optimizer", True)
        return cls(inside, times=1 if once else ranks)


class Schedulers:
    """Learning rate schedulers of torch, stepped forward to the swarm's inner step.

    Raises `ConfigError` for a schedule that follows a metric, is shorter than the run, or is
    stepped more than once per step of the optimizer.
    """

    def __init__(self, schedulers: Iterable[Any], ranks: int = 1) -> None:
        self._scheduled = [ScheduledStep.of(scheduler, ranks) for scheduler in schedulers]
        for scheduled in self._scheduled:
            _check(scheduled.scheduler)
        self._leads = [0] * len(self._scheduled)  # steps by which each is ahead of the swarm
        self._grown = 0  # optimizer steps in a row at which a lead has grown

    def step_to(self, step: int) -> None:
        """Step all schedules forward to the inner step `step` of the swarm."""
        before, self._leads = self._leads, []
        for scheduler, times, every in self._scheduled:
            position = step * times // every
            self._leads.append(max(0, _position(scheduler) - position))
            _forward_(scheduler, position)
        grows = any(lead > earlier for lead, earlier in zip(self._leads, before, strict=True))
        self._grown = self._grown + 1 if grows else 0
        if self._grown > MOST_TOO_FAR:
            raise ConfigError(
                f"schedulers: before {self._grown} steps of the optimizer in a row, one was further"
                " ahead of the swarm; step it once after each optimizer.step(), or not at all:"
                " attach does"
            )

    @contextmanager
    def keeping_rates(self) -> Iterator[None]:
        """Restore the learning rates after a block that loads the state of another step."""
        optimizers = [_optimizer(scheduled.scheduler) for scheduled in self._scheduled]
        kept = [
            copy.deepcopy([{key: group[key] for key in MOVED if key in group} for group in groups])
            for groups in (optimizer.param_groups for optimizer in optimizers)
        ]
        yield
        for optimizer, rates in zip(optimizers, kept, strict=True):
            for group, before in zip(optimizer.param_groups, rates, strict=True):
                for key, value in before.items():
                    if isinstance(group[key], Tensor):  # captured kernels read this very tensor
                        group[key].fill_(value)
                    else:
                        group[key] = value


def _check(scheduler: Any) -> None:
    name = type(scheduler).__name__
    if name in ("ReduceLROnPlateau", "GreedyLR"):
        raise ConfigError(
            f"schedulers: {name} follows a metric of this peer, no step of the swarm; leave it out"
        )
    if not hasattr(scheduler, "step") or _position(scheduler) < 0:
        raise ConfigError(
            f"schedulers: {name} is no learning rate scheduler; name those of"
            " torch.optim.lr_scheduler in a list"
        )


def _position(scheduler: Any) -> int:
    """Steps that a schedule has taken; -1 if unknown. Chained ones count the same steps."""
    if hasattr(scheduler, "last_epoch"):
        return int(scheduler.last_epoch)
    chain = getattr(scheduler, "_schedulers", None)
    return _position(chain[0]) if chain else -1


def _optimizer(scheduler: Any) -> Any:
    own = hasattr(scheduler, "optimizer")
    return scheduler.optimizer if own else _optimizer(scheduler._schedulers[0])


def _forward_(scheduler: Any, position: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch expects an optimizer step before
        while (here := _position(scheduler)) < position:
            try:
                scheduler.step()
            except ValueError as error:  # a schedule with a fixed length is over
                raise ConfigError(
                    f"schedulers: {type(scheduler).__name__} is over after {here} steps, and the"
                    f" swarm is at {position}; make it as long as the run"
                ) from error


class NotEntered:
    """Raises `ConfigError` for optimizer steps, which are lost, until the attachment is entered.

    A later one of the same optimizer takes its place.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._hooks = []
        for part in parts_of(optimizer):
            if part in _refusing:
                _refusing[part].remove()
            _refusing[part] = part.register_step_pre_hook(self._refuse)
            self._hooks.append(_refusing[part])

    def _refuse(self, *_: object) -> None:
        raise ConfigError(
            "attach: a step before the swarm was joined would reach nobody; train inside `with"
            " swarm.attach(...):`, or call open() on what attach returns"
        )

    def remove(self) -> None:
        """Allow steps."""
        for hook in self._hooks:
            hook.remove()


class StepHooks:
    """Calls hooks before and after each step of an optimizer, except steps that a GradScaler skips.

    Raises `ConfigError` after a step of another optimizer on the same parameters, which would not
    be counted. With several optimizers a step begins with the first, and ends when each has taken
    one; `ConfigError` if one takes none for long. Fused kernels are called with `found_inf` when
    gradients overflow, and do nothing.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        before: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        before()
        self._parts, self._before, self._after = parts_of(optimizer), before, after
        self._steps = dict.fromkeys(self._parts, 0)  # since the last step of all
        # each optimizer's smallest gradient at its last step, and that tensor's version
        self._used: dict[torch.optim.Optimizer, tuple[Tensor | None, int]] = {}
        # a loop that compiles its step must not trace exchanges
        begin, end, check = map(torch.compiler.disable, (self._begin, self._end, self._check_seen))
        self._hooks = [part.register_step_pre_hook(begin) for part in self._parts]
        self._hooks += [part.register_step_post_hook(end) for part in self._parts]
        # by other optimizer: steps of the attached ones at its last step
        self._seen = WeakKeyDictionary[torch.optim.Optimizer, int]()
        self._count, self._name = 0, kind_of(optimizer)
        self._hooks.append(register_optimizer_step_post_hook(check))
        _attached.update(self._parts)

    def _check_seen(self, other: torch.optim.Optimizer, *_: object) -> None:
        if other in self._parts:
            return
        is_part = any(map(_steps_inside, self._parts))  # inside a step that will be counted
        before, self._seen[other] = self._seen.get(other, 0), self._count + is_part
        if is_part or self._count > before:
            return
        own = {id(parameter) for part in self._parts for parameter in _parameters(part)}
        if any(id(parameter) in own for parameter in _parameters(other)):
            name = type(other).__name__
            raise ConfigError(
                f"optimizer={self._name} is attached and takes no steps, while {name} moves its"
                f" parameters; attach that {name}, or call step() of the attached one"
            )

    def _begin(self, part: torch.optim.Optimizer, *_: object) -> None:
        if not any(self._steps.values()) and not _is_nested(part):
            self._before()

    def _end(self, part: torch.optim.Optimizer, *_: object) -> None:
        found_inf = getattr(part, "found_inf", None)
        if _is_nested(part) or (found_inf is not None and bool(found_inf)):
            return
        self._count += 1
        self._steps[part] += 1
        if len(self._parts) > 1:
            self._used[part] = _smallest_gradient(part)
        if all(self._steps.values()):
            self._steps = dict.fromkeys(self._parts, 0)
            self._after()
        elif self._steps[part] > MOST_ALONE:
            idle = next(index for index, steps in enumerate(self._steps.values()) if not steps)
            raise ConfigError(
                f"optimizer[{idle}]={type(self._parts[idle]).__name__} has taken no step in"
                f" {self._steps[part]} of another; a step of the swarm is one of each, so attach"
                " those that take steps"
            )

    def free_gradients(self) -> None:
        """Free all gradients except those of an optimizer whose step is still to come."""
        for part in self._parts:
            then, version = self._used.pop(part, (None, 0))
            now, newer = _smallest_gradient(part)
            if len(self._parts) == 1 or (then is now and version == newer):
                part.zero_grad(set_to_none=True)

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        _attached.difference_update(self._parts)


def is_attached(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if an optimizer has the hooks of an attachment."""
    return any(part in _attached for part in parts_of(optimizer))


def _is_nested(optimizer: torch.optim.Optimizer) -> bool:
    """Return True inside a nested step, such as `super().step()` in a subclass's step."""
    return _steps_inside(optimizer) > 1


def _steps_inside(optimizer: torch.optim.Optimizer) -> int:
    """Count the optimizer's `step` calls on the stack."""
    steps = (frame.f_locals for frame, _ in walk_stack(None) if frame.f_code is _STEP)
    return sum(step.get("self") is optimizer for step in steps)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _smallest_gradient(optimizer: torch.optim.Optimizer) -> tuple[Tensor | None, int]:
    """Return the smallest gradient, or None, and the version counter of its tensor."""
    gradients = (p.grad for p in _parameters(optimizer) if p.grad is not None)
    smallest = min(gradients, key=Tensor.numel, default=None)
    return smallest, 0 if smallest is None else smallest._version
