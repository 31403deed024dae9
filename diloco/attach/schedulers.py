"""Learning rate schedules that follow the swarm clock, and what is called around each step.

A schedule counts its own steps. In a peer that joins late, that was away, or that goes on from a
checkpoint it would be at another place than in the others. So before each step of the optimizer
every schedule is brought to the inner step that the swarm is at.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from traceback import walk_stack
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from diloco.attach.optimizer import kind_of, parts_of
from diloco.errors import CheckpointError, ConfigError
from diloco.rundir.containers import from_json, to_json

MOVED = ("lr", "momentum", "betas")  # what torch's schedulers move in the groups of an optimizer
MOST_ALONE = 100  # steps that an optimizer takes while another one takes none
MOST_TOO_FAR = 8  # steps of the optimizer in a row before which a schedule was too far
# of the function that calls the hooks
_STEP = torch.optim.Optimizer.profile_hook_step(print).__code__
_attached: WeakSet[torch.optim.Optimizer] = WeakSet()


def swarm_steps(sync: Any, sync_every: int) -> int:
    """Inner steps on the swarm clock: H for each outer step, and those of this peer since then."""
    return int(sync.version * sync_every + sync.inner_step)


class ScheduledStep(NamedTuple):
    """A schedule that is stepped `times` after each `every`-th step of the optimizer."""

    scheduler: Any
    times: int = 1
    every: int = 1

    @classmethod
    def of(cls, scheduler: Any, ranks: int) -> ScheduledStep:
        """One of Accelerate steps that inside it once for each rank, unless batches are split."""
        inside = getattr(scheduler, "scheduler", None)
        if isinstance(scheduler, ScheduledStep) or inside is None:
            return scheduler if isinstance(scheduler, ScheduledStep) else cls(scheduler)
        once = getattr(scheduler, "split_batches", False)
        once = once or not getattr(scheduler, "step_with_optimizer", True)
        return cls(inside, times=1 if once else ranks)


class Schedulers:
    """Learning rate schedulers of torch, brought to the swarm's inner step.

    A schedule goes back by starting again from its state at step 0, which checkpoints keep. Where
    nobody has that state, one that is too far stays there. Raises `ConfigError` for what follows a
    metric, for a schedule that is shorter than the run, and for one that is stepped more than once
    per step of the optimizer.

    Attributes:
        fresh: of each the state at step 0, or None.
    """

    def __init__(self, schedulers: Iterable[Any], ranks: int = 1) -> None:
        self._scheduled = [ScheduledStep.of(scheduler, ranks) for scheduler in schedulers]
        self.fresh = [_fresh(one.scheduler) for one in self._scheduled]
        self._too_far = 0

    def step_to(self, step: int) -> None:
        """Bring all of them to the inner step `step` of the swarm clock."""
        too_far = False
        for (scheduler, times, every), fresh in zip(self._scheduled, self.fresh, strict=True):
            position = step * times // every
            if _position(scheduler) > position and fresh is not None:
                too_far = True
                _start_again_(scheduler, fresh)
            _forward_(scheduler, position)
        self._too_far = self._too_far + 1 if too_far else 0
        if self._too_far > MOST_TOO_FAR:
            raise ConfigError(
                f"schedulers: before {self._too_far} steps of the optimizer in a row, one was"
                " further than the swarm; step it once after each optimizer.step(), or not at all:"
                " attach does"
            )

    def start_again_(self) -> None:
        """Go back to step 0, after the optimizer was given the learning rates of another step."""
        for one, fresh in zip(self._scheduled, self.fresh, strict=True):
            if fresh is not None:
                _start_again_(one.scheduler, fresh)

    def restore(self, fresh: Sequence[dict[str, Any] | None]) -> None:
        """States at step 0 from a checkpoint, for schedulers that are further already."""
        if len(fresh) == len(self.fresh):
            self.fresh = [here or there for here, there in zip(self.fresh, fresh, strict=True)]


def _fresh(scheduler: Any) -> dict[str, Any] | None:
    """State of a schedule at step 0, and what it moves in the optimizer; None if it is further."""
    name = type(scheduler).__name__
    if name in ("ReduceLROnPlateau", "GreedyLR"):
        raise ConfigError(
            f"schedulers: {name} follows a metric of this peer, no step of the swarm; leave it out"
        )
    has_parts = all(hasattr(scheduler, part) for part in ("step", "state_dict", "load_state_dict"))
    if not has_parts or _position(scheduler) < 0:
        raise ConfigError(
            f"schedulers: {name} is no learning rate scheduler; name those of"
            " torch.optim.lr_scheduler in a list"
        )
    if _position(scheduler) != 0:
        return None
    groups = _optimizer(scheduler).param_groups
    groups = [{key: group[key] for key in MOVED if key in group} for group in groups]
    try:
        return copy.deepcopy({"scheduler": scheduler.state_dict(), "groups": groups})
    except (TypeError, AttributeError):  # it holds what cannot be copied
        return None


def _position(scheduler: Any) -> int:
    """How many steps it has taken; -1 if it does not say. Several in a chain step together."""
    if hasattr(scheduler, "last_epoch"):
        return int(scheduler.last_epoch)
    chain = getattr(scheduler, "_schedulers", None)
    return _position(chain[0]) if chain else -1


def _optimizer(scheduler: Any) -> Any:
    own = hasattr(scheduler, "optimizer")
    return scheduler.optimizer if own else _optimizer(scheduler._schedulers[0])


def _start_again_(scheduler: Any, fresh: Mapping[str, Any]) -> None:
    kept = copy.deepcopy(fresh)
    scheduler.load_state_dict(kept["scheduler"])
    for group, then in zip(_optimizer(scheduler).param_groups, kept["groups"], strict=True):
        for key, value in then.items():
            if isinstance(group[key], Tensor):  # the optimizer's kernels know this object
                group[key].fill_(value)
            else:
                group[key] = value


def _forward_(scheduler: Any, position: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch: no step of the optimizer came before
        while (here := _position(scheduler)) < position:
            try:
                scheduler.step()
            except ValueError as error:  # of those with a fixed length
                raise ConfigError(
                    f"schedulers: {type(scheduler).__name__} is over after {here} steps, and the"
                    f" swarm is at {position}; make it as long as the run"
                ) from error


class NotEntered:
    """Until the attachment is entered, a step of its optimizer is a `ConfigError`: it is lost."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._hooks = [one.register_step_pre_hook(self._refuse) for one in parts_of(optimizer)]

    def _refuse(self, *_: object) -> None:
        raise ConfigError(
            "attach: a step before the swarm was joined would reach nobody; train inside `with"
            " swarm.attach(...):`, or call open() on what attach returns"
        )

    def remove(self) -> None:
        """Steps are welcome."""
        for hook in self._hooks:
            hook.remove()


class StepHooks:
    """Calls before and after each step of an optimizer, but for those that a GradScaler skips.

    `ConfigError` after a step of another optimizer that moves the same parameters: nobody counts
    it. Of several optimizers a step begins with the first, and ends when each has taken one;
    `ConfigError` where one takes none for long. Fused kernels are called with `found_inf` when
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
        # torch.compile of a loop's step would trace all that an exchange does
        begin, end, check = map(torch.compiler.disable, (self._begin, self._end, self._check_seen))
        self._hooks = [part.register_step_pre_hook(begin) for part in self._parts]
        self._hooks += [part.register_step_post_hook(end) for part in self._parts]
        # of other optimizers: how many steps of the attached ones there were at their last
        self._seen = WeakKeyDictionary[torch.optim.Optimizer, int]()
        self._count, self._name = 0, kind_of(optimizer)
        self._hooks.append(register_optimizer_step_post_hook(check))
        _attached.update(self._parts)

    def _check_seen(self, other: torch.optim.Optimizer, *_: object) -> None:
        if other in self._parts:
            return
        is_part = any(map(_steps_inside, self._parts))  # of a step that is about to be counted
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
        """Free all gradients but those with which an optimizer has yet to take its step."""
        for part in self._parts:
            then, version = self._used.pop(part, (None, 0))
            now, newer = _smallest_gradient(part)
            if len(self._parts) == 1 or (then is now and version == newer):
                part.zero_grad(set_to_none=True)

    def remove(self) -> None:
        """Call nothing any more."""
        for hook in self._hooks:
            hook.remove()
        _attached.difference_update(self._parts)


def is_attached(optimizer: torch.optim.Optimizer) -> bool:
    """Whether something is called after its steps already."""
    return any(part in _attached for part in parts_of(optimizer))


def _is_nested(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step that calls this is part of another, as in a class that calls `super()`."""
    return _steps_inside(optimizer) > 1


def _steps_inside(optimizer: torch.optim.Optimizer) -> int:
    """How many of its steps are under way."""
    steps = (frame.f_locals for frame, _ in walk_stack(None) if frame.f_code is _STEP)
    return sum(step.get("self") is optimizer for step in steps)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _smallest_gradient(optimizer: torch.optim.Optimizer) -> tuple[Tensor | None, int]:
    """The smallest gradient that there is, and how often it was written to."""
    found = (parameter.grad for parameter in _parameters(optimizer) if parameter.grad is not None)
    smallest = min(found, key=Tensor.numel, default=None)
    return smallest, 0 if smallest is None else smallest._version


def flatten_schedules(schedulers: Schedulers) -> list[Any]:
    """Their states at step 0; None for one that is not known, or holds more than JSON can."""
    found: list[Any] = []
    for fresh in schedulers.fresh:
        tensors: dict[str, Tensor] = {}
        try:
            written = None if fresh is None else to_json(fresh, "", tensors)
        except CheckpointError:
            written = None
        found.append(None if tensors else written)
    return found


def restore_schedules(schedulers: Schedulers, saved: Sequence[Any]) -> None:
    """The inverse of `flatten_schedules`."""
    schedulers.restore([one and from_json(one, {}) for one in saved])
