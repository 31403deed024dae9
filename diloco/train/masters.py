"""Refuses optimizers that keep masters of their own: wider copies of the parameters, which they train instead of them.

A step of such an optimizer computes new masters and rounds them into the parameters. What an exchange writes into the
parameters is overwritten by the next step, so the peer would never follow the swarm, and nothing would fail.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from diloco.errors import ConfigError
from diloco.train.inner import layout_of
from diloco.train.rows import own_rows

__all__ = ["refuse_masters"]

Optimizer = torch.optim.Optimizer


def refuse_masters(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
    """Raises `ConfigError` with a parameter's name if the optimizer has a master of it.

    A step with zero gradients and a learning rate of zero must leave a parameter as it is that was changed before it.
    Only the smallest parameter of each group and dtype has a gradient in it, so the check costs little. Parameters,
    gradients, state and random generators are as before afterwards. Optimizers that `inner` knows have no masters;
    those that need a closure, have no `lr`, or refuse such a step are not checked.
    """
    if layout_of(optimizer) is not None or not _can_step(optimizer):
        return
    for name, parameter in _samples(optimizer, parameters):
        if _moves(optimizer, parameter):
            raise ConfigError(
                f"{name} is moved by a step of {type(optimizer).__name__} without gradient and learning rate, so this "
                "optimizer trains a copy of its own, which would undo every outer step; use fp32 parameters with "
                "torch.autocast, and an optimizer that trains them"
            )


def _can_step(optimizer: Optimizer) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    required = closure is not None and closure.default is inspect.Parameter.empty
    return not required and all("lr" in group for group in optimizer.param_groups)


def _samples(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of the smallest parameter of each group and dtype."""
    names = {parameter: name for name, parameter in parameters.items()}
    for group in optimizer.param_groups:
        known = [parameter for parameter in group["params"] if parameter in names and parameter.numel()]
        for dtype in dict.fromkeys(parameter.dtype for parameter in known):
            smallest = min((one for one in known if one.dtype == dtype), key=torch.numel)
            yield names[smallest], smallest


@torch.no_grad()
def _moves(optimizer: Optimizer, parameter: Tensor) -> bool:
    device, own = parameter.device, own_rows(parameter.detach())
    before = own.clone()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), _tried(optimizer, parameter):
        try:
            optimizer.step()  # masters may be made only now
            own.add_(1)  # the parameter is not what its master is any more
            expected = own.clone()
            optimizer.step()
            return not torch.equal(own, expected)
        except RuntimeError:
            return False
        finally:
            own.copy_(before)


@contextmanager
def _tried(optimizer: Optimizer, parameter: Tensor) -> Iterator[None]:
    """Inside, only `parameter` has a gradient, which is zero like learning rates and weight decay, and hooks are off.
    Steps then change copies: afterwards all objects that the optimizer had are back.
    """
    any_optimizer: Any = optimizer
    trained = [one for group in optimizer.param_groups for one in group["params"]]
    gradients = [one.grad for one in trained]
    groups = [dict(group) for group in optimizer.param_groups]
    state = dict(optimizer.state)
    plain = {
        key: value for key, value in vars(optimizer).items() if key.endswith("_hooks") or type(value) in (int, float)
    }
    try:
        any_optimizer._optimizer_step_pre_hooks, any_optimizer._optimizer_step_post_hooks = {}, {}
        for group in optimizer.param_groups:
            group |= {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            group |= {key: 0 * group[key] for key in ("lr", "weight_decay") if group.get(key) is not None}
        for key, value in state.items():
            if key is parameter or not isinstance(key, Tensor):
                optimizer.state[key] = copy.deepcopy(value)
        for one in trained:
            one.grad = torch.zeros_like(one) if one is parameter else None
        yield
    finally:
        vars(optimizer).update(plain)
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, kept in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(kept)
        for one, gradient in zip(trained, gradients, strict=True):
            one.grad = gradient
