"""The inner optimizer, and the state with which it starts in a peer that joins late: a donor's, or
none.

1. The peer asks others for their inner state, where its optimizer is AdamW, Adam, Muon or SGD.
2. When nobody has any, or the optimizer is another one, it starts cold: its first H inner steps
   warm the optimizer up. The swarm does not wait for them, and their tokens count as discarded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from diloco.attach.muon import Muon
from diloco.attach.ranks import RankGroup
from diloco.attach.sharded import is_sharded, load_rows_
from diloco.config import InnerConfig
from diloco.errors import ConfigError
from diloco.swarm.node.node import Node, OnEvent
from diloco.swarm.node.runtime import Runtime
from diloco.swarm.rpc.inner_state import InnerState, Layout

# A donor's moments are copied while it trains, so a first moment may be a step ahead of its second
# one.
TORN = 2.0
MOMENTS: dict[type, tuple[str, ...]] = {
    torch.optim.Adam: ("exp_avg", "exp_avg_sq"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.SGD: ("momentum_buffer",),
    Muon: ("momentum_buffer",),
    getattr(torch.optim, "Muon", Muon): ("momentum_buffer",),  # since torch 2.9
}


def inner_optimizer(model: nn.Module, inner: InnerConfig) -> torch.optim.Optimizer:
    """AdamW over what requires a gradient, or Muon on the matrices inside the model; weight decay
    on matrices only."""
    hidden, others = _hidden_and_others(model, inner)
    if not hidden:
        return _adamw(others, inner)
    return CombinedOptimizer(
        Muon(hidden, lr=inner.peak_lr, weight_decay=inner.weight_decay), _adamw(others, inner)
    )


def _hidden_and_others(
    model: nn.Module, inner: InnerConfig
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices inside the model, if Muon is for them, and the other trained parameters."""
    parts: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, p in model.named_parameters():
        if p.requires_grad:
            inside = (
                inner.optimizer == "muon"
                and p.ndim == 2
                and "embed" not in name
                and "head" not in name
            )
            parts[not inside].append(p)
    return parts


def moment_numel(model: nn.Module, inner: InnerConfig) -> int:
    """Elements that the optimizer's state will have: two for each parameter with AdamW, one with
    Muon."""
    hidden, others = _hidden_and_others(model, inner)
    return sum(p.numel() for p in hidden) + 2 * sum(p.numel() for p in others)


def _adamw(parameters: list[nn.Parameter], inner: InnerConfig) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": inner.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    # One kernel for all of a step; the default computes each of its operations for lists of
    # parameters.
    fused = all(p.device.type == "cuda" for p in parameters) or None
    return torch.optim.AdamW(groups, lr=inner.peak_lr, betas=inner.betas, fused=fused)


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one; its step is one of each. Raises `ConfigError` for a parameter that
    two have."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        try:
            super().__init__(
                [{"params": group["params"]} for part in parts for group in part.param_groups], {}
            )
        except ValueError as error:
            raise ConfigError(f"optimizer: {error}; give each parameter to one of them") from None
        self.parts = parts
        self._share_groups()

    def _share_groups(self) -> None:
        # no copies
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self._share_groups()


def parts_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers of which one is made."""
    return optimizer.parts if isinstance(optimizer, CombinedOptimizer) else (optimizer,)


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Its class, or those of its parts."""
    return " + ".join(type(part).__name__ for part in parts_of(optimizer))


class InnerStateTransfer:
    """The inner optimizer's state, on its way in and out; `source` is `own` where it comes from a
    checkpoint."""

    source: Literal["own", "donor", "cold"] = "own"

    def __init__(
        self, optimizer: torch.optim.Optimizer, ranks: RankGroup, on_event: OnEvent
    ) -> None:
        self._optimizer, self._ranks, self._on_event = optimizer, ranks, on_event

    @property
    def has_state(self) -> bool:
        """Whether the optimizer has taken steps, or was restored."""
        return any(part.state for part in parts_of(self._optimizer))

    def fetch(
        self, node: Node, runtime: Runtime, stopping: Callable[[], bool]
    ) -> tuple[InnerState | None, bool]:
        """A donor's state, if this peer comes late and somebody has one, and whether the peer
        starts cold."""
        if self.source == "own" or not runtime.call(node.wait_until_ready()):
            return None, False
        why = "swarm.inner_state=cold"
        if self.source == "donor":
            layout = layout_of(self._optimizer)
            if layout is not None and not layout.names:
                return None, False
            state = None if layout is None else runtime.call(node.fetch_inner(layout))
            if state is not None or stopping():
                return state, False
            why = (
                "no donor has any"
                if layout
                else f"{kind_of(self._optimizer)} keeps what is not known here"
            )
        self._on_event("cold_start", {"why": why})
        return None, True

    def take_over_(self, state: InnerState | None) -> None:
        """All ranks: the optimizer goes on from a donor's state, which rank 0 has."""
        layout = layout_of(self._optimizer)
        assert layout is not None, "ranks have different optimizers"
        if state is None:
            state = InnerState(
                layout,
                (1,) * layout.num_steps,
                torch.empty(sum(layout.numels), dtype=torch.float32),
            )
        steps = tuple(int(step) for step in self._ranks.broadcast_floats(state.steps))
        self._ranks.broadcast_(state.values)
        bound_moments_(self._optimizer, state)
        load_moments_(self._optimizer, InnerState(layout, steps, state.values))


class _Slot(NamedTuple):
    """What the optimizer keeps for one parameter."""

    name: str
    part: torch.optim.Optimizer
    group: dict[str, Any]
    parameter: Tensor
    keys: tuple[str, ...]
    has_step: bool


def _slots(optimizer: torch.optim.Optimizer) -> Iterator[_Slot]:
    for number, part in enumerate(parts_of(optimizer)):
        parameters = [
            (group, p) for group in part.param_groups for p in group["params"] if p.requires_grad
        ]
        for index, (group, parameter) in enumerate(parameters):
            keys = () if group.get("momentum") == 0 else MOMENTS.get(type(part), ())
            if group.get("amsgrad"):
                keys = (*keys, "max_exp_avg_sq")
            yield _Slot(f"{number}.{index}", part, group, parameter, keys, "exp_avg" in keys)


def layout_of(optimizer: torch.optim.Optimizer) -> Layout | None:
    """The shape of its state once every parameter has had a gradient; None for classes that are not
    known here."""
    if not all(type(part) in MOMENTS for part in parts_of(optimizer)):
        return None
    slots = list(_slots(optimizer))
    names = tuple(f"{slot.name}.{key}" for slot in slots for key in slot.keys)
    numels = tuple(slot.parameter.numel() for slot in slots for _ in slot.keys)
    return Layout(names, numels, sum(slot.has_step for slot in slots))


def snapshot(optimizer: torch.optim.Optimizer) -> InnerState | None:
    """A copy of its state, on the CPU; None while some parameter has none, and where other ranks
    have parts of it."""
    layout = layout_of(optimizer)
    if (
        layout is None
        or not layout.names
        or any(is_sharded(slot.parameter) for slot in _slots(optimizer))
    ):
        return None
    values, at, steps = torch.empty(sum(layout.numels), dtype=torch.float32), 0, []
    for slot in _slots(optimizer):
        state = slot.part.state.get(slot.parameter, {})  # not by index: the defaultdict would grow
        for key in slot.keys:
            if state.get(key) is None:
                return None
            values[at : at + slot.parameter.numel()].copy_(state[key].detach().reshape(-1))
            at += slot.parameter.numel()
        if slot.has_step:
            steps.append(int(state["step"]))
    return InnerState(layout, tuple(steps), values)


@torch.no_grad()
def load_moments_(optimizer: torch.optim.Optimizer, state: InnerState) -> None:
    """Copy a state into the optimizer, in tensors of the dtype and on the device that torch would
    choose."""
    assert state.layout == layout_of(optimizer), "a state of another layout"
    values, steps = iter(torch.split(state.values, list(state.layout.numels))), iter(state.steps)
    for slot in _slots(optimizer):
        parameter, kept = slot.parameter, slot.part.state[slot.parameter]
        if slot.has_step:
            beside = slot.group.get("capturable") or slot.group.get("fused")
            device = parameter.device if beside else torch.device("cpu")
            kept["step"] = torch.tensor(float(next(steps)), dtype=torch.float32, device=device)
        for key in slot.keys:
            kept[key] = torch.empty_like(parameter, memory_format=torch.preserve_format)
            load_rows_(kept[key], next(values))


@torch.no_grad()
def bound_moments_(optimizer: torch.optim.Optimizer, state: InnerState) -> None:
    """Clamp first moments that no Adam can have beside its second ones; a foreign state then moves
    nothing far.

    m and v are averages of g and g^2 with weights (1 - b1) b1^k and (1 - b2) b2^k, so by Cauchy and
    Schwarz
    |m| <= (1 - b1) sqrt(v) / sqrt((1 - b2) (1 - b1^2 / b2)), if b1^2 < b2. Honest moments stay as
    they are, also where a copy was torn between two steps (`TORN`). Momentum without second moments
    has no such bound.
    """
    values = iter(torch.split(state.values, list(state.layout.numels)))
    for slot in _slots(optimizer):
        kept = {key: next(values) for key in slot.keys}
        if "exp_avg_sq" not in kept:
            continue
        b1, b2 = slot.group["betas"]
        if b1**2 < b2 < 1:
            most = (
                kept["exp_avg_sq"]
                .sqrt()
                .mul_(TORN * (1 - b1) / math.sqrt((1 - b2) * (1 - b1**2 / b2)))
            )
            kept["exp_avg"].copy_(torch.clamp(kept["exp_avg"], -most, most))
