"""Learning rate schedules that follow the swarm clock, whoever made them and whoever steps them.

A schedule counts its own steps. In a peer that joins late, that was away, or that goes on from a
checkpoint it would be at another place than in the others. So before each step of the optimizer,
every schedule is brought to the inner step that the swarm is at; where the loop has stepped it once
per step of the optimizer, it is there already.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from traceback import walk_stack
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from diloco.attach.inner_optimizer import parts_of
from diloco.attach.state_io import from_json, to_json
from diloco.errors import ConfigError

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


class Schedulers:
    """Learning rate schedulers of torch, brought to the swarm's inner step.

    A schedule goes back by starting again from its state at step 0, which is kept with the
    checkpoints (`state`). Where nobody has that state, one that is too far stays there. Raises
    `ConfigError` for what follows a metric, for a schedule that is shorter than the run, and for
    one that is stepped more than once per step of the optimizer.
    """

    def __init__(self, schedulers: Iterable[Any]) -> None:
        self._paced = [
            one if isinstance(one, ScheduledStep) else ScheduledStep(one) for one in schedulers
        ]
        self._fresh = [_fresh(one.scheduler) for one in self._paced]
        self._too_far = 0

    def step_to(self, step: int) -> None:
        """Bring all of them to the inner step `step` of the swarm clock."""
        behind = False
        for (scheduler, times, every), fresh in zip(self._paced, self._fresh, strict=True):
            place = step * times // every
            if _place(scheduler) > place and fresh is not None:
                behind = True
                _start_again_(scheduler, fresh)
            _forward_(scheduler, place)
        self._too_far = self._too_far + 1 if behind else 0
        if self._too_far > MOST_TOO_FAR:
            raise ConfigError(
                f"schedulers: before {self._too_far} steps of the optimizer in a row, one was"
                " further than the swarm; step it once after each optimizer.step(), or not at all:"
                " attach does"
            )

    def start_again_(self) -> None:
        """Go back to step 0, after the optimizer was given the learning rates of another step."""
        for paced, fresh in zip(self._paced, self._fresh, strict=True):
            if fresh is not None:
                _start_again_(paced.scheduler, fresh)

    def state(self) -> list[Any]:
        """The states at step 0 as JSON; None for those that are not known, or that hold more than
        JSON can."""
        return [_written(fresh) for fresh in self._fresh]

    def restore(self, state: Sequence[Any]) -> None:
        """What `state` gave before a restart, for schedulers that come from a checkpoint and are
        not at step 0."""
        if len(state) == len(self._fresh):
            read = [None if one is None else from_json(one, {}) for one in state]
            self._fresh = [here or there for here, there in zip(self._fresh, read, strict=True)]


def _written(fresh: Mapping[str, Any] | None) -> Any:
    tensors: dict[str, Tensor] = {}
    try:
        written = None if fresh is None else to_json(fresh, "", tensors)
    except TypeError:
        return None
    return None if tensors else written


def _fresh(scheduler: Any) -> dict[str, Any] | None:
    """State of a schedule at step 0, with what it moves in the optimizer; None for one that is
    further. Raises `ConfigError` for what is no schedule of steps.
    """
    name = type(scheduler).__name__
    if name in ("ReduceLROnPlateau", "GreedyLR"):
        raise ConfigError(
            f"schedulers: {name} follows a metric of this peer, and no step of the swarm; leave it"
            " out: each peer has its own then"
        )
    if (
        not all(hasattr(scheduler, part) for part in ("step", "state_dict", "load_state_dict"))
        or _place(scheduler) < 0
    ):
        raise ConfigError(
            f"schedulers: {name} is no learning rate scheduler; name those of"
            " torch.optim.lr_scheduler in a list"
        )
    if _place(scheduler) != 0:
        return None
    groups = [
        {key: group[key] for key in MOVED if key in group}
        for group in _optimizer(scheduler).param_groups
    ]
    try:
        return copy.deepcopy({"scheduler": scheduler.state_dict(), "groups": groups})
    except (TypeError, AttributeError):  # it holds what cannot be copied
        return None


def _place(scheduler: Any) -> int:
    """How many steps it has taken; -1 for what does not say it. Several in a chain step
    together."""
    if hasattr(scheduler, "last_epoch"):
        return int(scheduler.last_epoch)
    chain = getattr(scheduler, "_schedulers", None)
    return _place(chain[0]) if chain else -1


def _optimizer(scheduler: Any) -> Any:
    return (
        scheduler.optimizer
        if hasattr(scheduler, "optimizer")
        else _optimizer(scheduler._schedulers[0])
    )


def _start_again_(scheduler: Any, fresh: Mapping[str, Any]) -> None:
    kept = copy.deepcopy(fresh)
    scheduler.load_state_dict(kept["scheduler"])
    for group, then in zip(_optimizer(scheduler).param_groups, kept["groups"], strict=True):
        for key, value in then.items():
            if isinstance(group[key], Tensor):  # the optimizer's kernels know this object
                group[key].fill_(value)
            else:
                group[key] = value


def _forward_(scheduler: Any, place: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch: no step of the optimizer came before
        while (here := _place(scheduler)) < place:
            try:
                scheduler.step()
            except ValueError as error:  # of those with a fixed length
                raise ConfigError(
                    f"schedulers: {type(scheduler).__name__} is over after {here} steps, and the"
                    f" swarm is at {place}; make it as long as the run"
                ) from error


class StepHooks:
    """Calls before and after each step of an optimizer that is none of those which a GradScaler
    skips.

    Of several optimizers a step begins with the first, and ends when each has taken one;
    `ConfigError` where one takes none for long. Optimizers with fused kernels are called with
    `found_inf` when gradients overflow, and do nothing.
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
        # a gradient of the last step of each
        self._used: dict[torch.optim.Optimizer, tuple[Tensor | None, int]] = {}
        self._hooks = []
        for part in self._parts:
            _attached.add(part)
            self._hooks += [
                part.register_step_pre_hook(self._begin),
                part.register_step_post_hook(self._end),
            ]

    def _begin(self, part: torch.optim.Optimizer, *_: object) -> None:
        if not any(self._steps.values()) and not _within(part):
            self._before()

    def _end(self, part: torch.optim.Optimizer, *_: object) -> None:
        found_inf = getattr(part, "found_inf", None)
        if _within(part) or (found_inf is not None and bool(found_inf)):
            return
        self._steps[part] += 1
        if len(self._parts) > 1:
            self._used[part] = _gradient(part)
        if all(self._steps.values()):
            self._steps = dict.fromkeys(self._parts, 0)
            self._after()
        elif self._steps[part] > MOST_ALONE:
            idle = next(place for place, steps in enumerate(self._steps.values()) if not steps)
            raise ConfigError(
                f"optimizer[{idle}]={type(self._parts[idle]).__name__} has taken no step in"
                f" {self._steps[part]} of another; a step of the swarm is one of each, so attach"
                " those that take steps"
            )

    def free_gradients(self) -> None:
        """Free all gradients but those with which an optimizer has yet to take its step."""
        for part in self._parts:
            (then, version), (now, newer) = self._used.pop(part, (None, 0)), _gradient(part)
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


def _within(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step that calls this is part of another of the same optimizer, as in a class that
    calls `super()`."""
    frames = (frame for frame, _ in walk_stack(None))
    return (
        sum(frame.f_code is _STEP and frame.f_locals.get("self") is optimizer for frame in frames)
        > 1
    )


def _gradient(optimizer: torch.optim.Optimizer) -> tuple[Tensor | None, int]:
    """The smallest gradient that there is, and how often it was written to."""
    found = [
        one.grad
        for group in optimizer.param_groups
        for one in group["params"]
        if one.grad is not None
    ]
    smallest = min(found, key=Tensor.numel, default=None)
    return smallest, 0 if smallest is None else smallest._version
