"""The state of any torch optimizer, as named tensors and JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from diloco.attach.optimizer import NONE, Parameters, kind_of, parts_of
from diloco.attach.parameters import full_tensor, sharded_like
from diloco.errors import CheckpointError
from diloco.rundir.containers import from_json, to_json

KERNELS = ("fused", "foreach")  # how a torch optimizer computes a step, not what
Tensors = dict[str, Tensor]
_Groups = list[list[str]]  # names of parameters


def flatten_optimizer(
    optimizer: Optimizer, parameters: Parameters = NONE
) -> tuple[Tensors, dict[str, Any]]:
    """All ranks: the state of any torch optimizer as named tensors, no copies, and JSON.

    Sharded tensors become whole on rank 0. Where `parameters` name them, the groups may be in
    another order when it is restored. Raises `CheckpointError` for what JSON cannot hold.
    """
    tensors: Tensors = {}
    state = to_json(optimizer.state_dict(), "", tensors)
    tensors = {name: full_tensor(tensor) for name, tensor in tensors.items()}
    saved = {"type": kind_of(optimizer), "shapes": _shapes(optimizer)}
    return tensors, {**saved, "names": _names(optimizer, parameters), "state_dict": state}


def restore_optimizer(
    optimizer: Optimizer,
    tensors: Tensors,
    saved: Mapping[str, Any],
    key: str = "run.dir",
    parameters: Parameters = NONE,
) -> None:
    """The inverse of `flatten_optimizer`; the optimizer may keep the tensors themselves.

    Raises `CheckpointError` for the state of another optimizer, of other shapes or other groups;
    `key` is what chose the checkpoint.
    """
    names = _names(optimizer, parameters)
    before = saved.get("names", names)
    here, there = _by_name(names, _shapes(optimizer)), _by_name(before, saved["shapes"])
    if (kind_of(optimizer), here) != (saved["type"], there):
        raise CheckpointError(
            f"{key}: its checkpoint holds the state of {saved['type']} for"
            f" {_numel(saved['shapes'])} parameters, this run has {kind_of(optimizer)} for"
            f" {_numel(_shapes(optimizer))} with other shapes, order or groups; resume with the"
            f" configuration that wrote it, or choose another {key}"
        )
    state = from_json(saved["state_dict"], tensors)
    both = zip(parts_of(optimizer), state.get("parts", [state]), before, names, strict=True)
    if not all({"state", "param_groups"} <= part.keys() for part in state.get("parts", [state])):
        if before != names:
            raise CheckpointError(
                f"{key}: its checkpoint holds the state of {saved['type']} for parameters in"
                " another order; build the optimizer as in the run that wrote it"
            )
        return optimizer.load_state_dict(state)  # a wrapper with a form of its own
    parts = [_sharded(part, _renumbered(one, *order)) for part, one, *order in both]
    optimizer.load_state_dict({"parts": parts} if "parts" in state else parts[0])


def _renumbered(state: dict[str, Any], before: _Groups, names: _Groups) -> dict[str, Any]:
    """The state of an optimizer whose groups, or the parameters in these, had another order."""
    if before == names:
        return state
    settings = dict(zip(map(frozenset, before), state["param_groups"], strict=True))
    numbers = {name: number for number, name in enumerate(chain(*before))}
    order = [numbers[name] for name in chain(*names)]
    places, kept = iter(range(len(order))), state["state"]
    groups = [
        settings[frozenset(group)] | {"params": [next(places) for _ in group]} for group in names
    ]
    moved = {place: kept[number] for place, number in enumerate(order) if number in kept}
    shared = {name: value for name, value in kept.items() if name not in order}  # of no parameter
    return {**state, "state": moved | shared, "param_groups": groups}


def _sharded(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The same state, cut like the optimizer's parameters, for the kernels that compute here."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for there, here in zip(state["param_groups"], optimizer.param_groups, strict=True):
        there |= {name: here[name] for name in KERNELS if name in here}
    for index, parameter in enumerate(parameters):
        kept = state["state"].get(index, {})
        for name, value in kept.items():
            if isinstance(value, Tensor):
                kept[name] = sharded_like(value, parameter)
    return state


def _names(optimizer: Optimizer, parameters: Parameters) -> list[_Groups]:
    """Of each part's groups the names of the parameters, or their numbers."""
    known, numbers = {id(one): name for name, one in parameters.items()}, count()
    return [
        [[known.get(id(p)) or str(next(numbers)) for p in group["params"]] for group in groups]
        for groups in (part.param_groups for part in parts_of(optimizer))
    ]


def _by_name(names: list[_Groups], shapes: list[list[int]]) -> list[dict[frozenset[str], Any]]:
    """The shapes of each part's groups, whatever their order."""
    sizes = dict(zip(chain(*chain(*names)), shapes, strict=False))
    return [
        {frozenset(group): {name: sizes.get(name) for name in group} for group in groups}
        for groups in names
    ]


def _shapes(optimizer: Optimizer) -> list[list[int]]:
    return [list(one.shape) for group in optimizer.param_groups for one in group["params"]]


def _numel(shapes: list[list[int]]) -> int:
    return sum(torch.Size(shape).numel() for shape in shapes)
