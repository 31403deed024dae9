"""The inner optimizer's state as it travels to a peer that joins (`swarm.inner`): which tensors, out and in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diloco.swarm.conversations.inner_state import InnerState, Layout

__all__ = ["layout_of", "load_moments_", "moments", "snapshot"]


class _Slot(NamedTuple):
    """What the optimizer keeps for one parameter."""

    name: str
    part: torch.optim.Optimizer
    group: dict[str, Any]
    parameter: Tensor
    keys: tuple[str, ...]
    counts: bool  # whether it has a step counter


def layout_of(optimizer: torch.optim.Optimizer) -> Layout | None:
    """The shape of its state once every parameter has had a gradient; None for classes that are not known here."""
    slots = list(_slots(optimizer))
    if not all(type(part) in _KEYS for part in _parts(optimizer)):
        return None
    named = [(f"{slot.name}.{key}", slot.parameter.numel()) for slot in slots for key in slot.keys]
    return Layout(
        tuple(name for name, _ in named), tuple(numel for _, numel in named), sum(slot.counts for slot in slots)
    )


def snapshot(optimizer: torch.optim.Optimizer) -> InnerState | None:
    """A copy of its state, on the CPU; None while some parameter has none. The optimizer may take steps meanwhile."""
    layout = layout_of(optimizer)
    if layout is None or not layout.names:
        return None
    values, at, steps = torch.empty(sum(layout.numels)), 0, []
    for slot in _slots(optimizer):
        state = slot.part.state.get(slot.parameter, {})  # not by index: the defaultdict would grow
        for key in slot.keys:
            if state.get(key) is None:
                return None
            values[at : at + slot.parameter.numel()].copy_(state[key].detach().reshape(-1))
            at += slot.parameter.numel()
        if slot.counts:
            steps.append(int(state["step"]))
    return InnerState(layout, tuple(steps), values)


@torch.no_grad()
def load_moments_(optimizer: torch.optim.Optimizer, state: InnerState) -> None:
    """Copy a state into the optimizer, in tensors of the dtype and on the device that torch would choose."""
    assert state.layout == layout_of(optimizer), "a state of another layout"
    values, steps = iter(torch.split(state.values, list(state.layout.numels))), iter(state.steps)
    for slot in _slots(optimizer):
        parameter, kept = slot.parameter, slot.part.state[slot.parameter]
        if slot.counts:
            beside = slot.group.get("capturable") or slot.group.get("fused")
            device = parameter.device if beside else torch.device("cpu")
            kept["step"] = torch.tensor(float(next(steps)), dtype=torch.float32, device=device)
        for key in slot.keys:
            kept[key] = torch.empty_like(parameter, memory_format=torch.preserve_format)
            kept[key].copy_(next(values).view(parameter.shape))


def moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The optimizer's own tensors, without the step counters."""
    return [slot.part.state[slot.parameter][key] for slot in _slots(optimizer) for key in slot.keys]


def _parts(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    parts: tuple[torch.optim.Optimizer, ...] = getattr(optimizer, "parts", (optimizer,))  # of an `inner.Pair`
    return parts


def _slots(optimizer: torch.optim.Optimizer) -> Iterator[_Slot]:
    for number, part in enumerate(_parts(optimizer)):
        parameters = [(group, p) for group in part.param_groups for p in group["params"] if p.requires_grad]
        for index, (group, parameter) in enumerate(parameters):
            keys = () if group.get("momentum") == 0 else _KEYS.get(type(part), ())
            if group.get("amsgrad"):
                keys = (*keys, "max_exp_avg_sq")
            yield _Slot(f"{number}.{index}", part, group, parameter, keys, "exp_avg" in keys)


_KEYS: dict[type, tuple[str, ...]] = {
    torch.optim.Adam: ("exp_avg", "exp_avg_sq"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.Muon: ("momentum_buffer",),
    torch.optim.SGD: ("momentum_buffer",),
}
