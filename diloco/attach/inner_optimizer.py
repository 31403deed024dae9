"""The inner optimizer of `diloco train`, AdamW or Muon; and the state with which the one of a peer
starts that joins late: a donor's, or none.

1. The peer asks others for their inner state, where its optimizer is AdamW, Adam, Muon or SGD.
2. When nobody has any, or the optimizer is another one, it starts cold: its first H inner steps
   warm the optimizer up. The swarm does not wait for them, and their tokens count as discarded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from diloco.attach.ranks import RankGroup
from diloco.attach.sharded import is_sharded, load_rows_
from diloco.attach.unwrap import CombinedOptimizer, kind_of, parts_of
from diloco.config import InnerConfig
from diloco.config.registry import INNER_OPTIMIZERS
from diloco.swarm.node.node import Node, OnEvent
from diloco.swarm.node.runtime import Runtime
from diloco.swarm.rpc.inner_state import InnerLayout, InnerState

# Newton and Schulz's iteration, steep at zero: five steps take singular values to 0.7 to 1.2
STEPS, A, B, C = 5, 3.4445, -4.7750, 2.0315
EPS = 1e-7


def inner_optimizer(model: nn.Module, inner: InnerConfig) -> torch.optim.Optimizer:
    """AdamW over what requires a gradient, or Muon on the matrices inside the model, or what a user
    registered; weight decay on matrices only."""
    hidden, others = _hidden_and_others(model, inner)
    if inner.optimizer not in INNER_OPTIMIZERS.own:
        kind: type[torch.optim.Optimizer] = INNER_OPTIMIZERS[inner.optimizer]
        return kind(_groups(others, inner), inner)  # type: ignore[arg-type]
    if not hidden:
        return _adamw(others, inner)
    muon = Muon(hidden, lr=inner.peak_lr, weight_decay=inner.weight_decay)
    return CombinedOptimizer(muon, _adamw(others, inner))


def _hidden_and_others(
    model: nn.Module, inner: InnerConfig
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices inside the model, if Muon is for them, and the other trained parameters."""
    hidden: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        inside = p.ndim == 2 and "embed" not in name and "head" not in name
        if p.requires_grad:
            (hidden if inside and inner.optimizer == "muon" else others).append(p)
    return hidden, others


def moment_numel(model: nn.Module, inner: InnerConfig) -> int:
    """Elements of the optimizer's state: two for each parameter with AdamW, one with Muon; as many
    as AdamW's where a class does not say its `moments`."""
    hidden, others = _hidden_and_others(model, inner)
    moments = moments_of(INNER_OPTIMIZERS.found.get(inner.optimizer, torch.optim.AdamW))
    each = 2 if moments is None else len(moments)
    return sum(p.numel() for p in hidden) + each * sum(p.numel() for p in others)


def _groups(parameters: list[nn.Parameter], inner: InnerConfig) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": inner.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def _adamw(parameters: list[nn.Parameter], inner: InnerConfig) -> torch.optim.AdamW:
    # one kernel for all of a step; the default has one for each of its operations
    fused = all(p.device.type == "cuda" for p in parameters) or None
    groups = _groups(parameters, inner)
    return torch.optim.AdamW(groups, lr=inner.peak_lr, betas=inner.betas, fused=fused)


# -- Muon ------------------------------------------------------------------------------------------


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised, with decoupled weight decay (Jordan et al. 2024).

    Each step has AdamW's root mean square of 0.2 (arXiv 2502.16982). Unlike `torch.optim.Muon`,
    which is in torch since 2.9, it iterates in float32 where that is four times as fast as
    bfloat16. Raises `ValueError` for a parameter that is no matrix.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        shapes = [tuple(one.shape) for group in self.param_groups for one in group["params"]]
        if others := [shape for shape in shapes if len(shape) != 2]:
            raise ValueError(f"Muon takes matrices, and not a parameter of shape {others[0]}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                mean = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                update = _orthogonal(parameter.grad.lerp(mean, group["momentum"]))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update, alpha=-group["lr"] * (0.2 * math.sqrt(max(parameter.shape))))
        return loss


@functools.cache
def iteration_dtype(device: torch.device) -> torch.dtype:
    """The fastest dtype of products on a device that has it natively: bfloat16 or float32."""
    native = True
    if device.type == "cpu":
        # Old versions of torch do not tell: float32 is then right, and may be slower.
        known: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
        native = any(known.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    elif device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if native else torch.float32


def _orthogonal(matrix: Tensor) -> Tensor:
    """U V^T, nearly, of a matrix U S V^T."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(iteration_dtype(matrix.device))
    x = x.T if tall else x
    x = x / x.norm().clamp(min=EPS)  # no singular value above 1
    for _ in range(STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.T if tall else x


# -- the state of a late joiner --------------------------------------------------------------------

# A donor's moments are copied while it trains, so a first moment may be a step ahead of the second.
TORN = 2.0
MOMENTS: dict[type, tuple[str, ...]] = {
    torch.optim.Adam: ("exp_avg", "exp_avg_sq"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.SGD: ("momentum_buffer",),
    Muon: ("momentum_buffer",),
    getattr(torch.optim, "Muon", Muon): ("momentum_buffer",),  # since torch 2.9
}


def moments_of(kind: type) -> tuple[str, ...] | None:
    """The tensors of an optimizer's state; a registered class says them itself."""
    return MOMENTS.get(kind, getattr(kind, "moments", None))


class InnerStateTransfer:
    """The inner optimizer's state on its way in; `source` is `own` if a checkpoint has it."""

    source: Literal["own", "donor", "cold"] = "own"

    def __init__(
        self, optimizer: torch.optim.Optimizer, ranks: RankGroup, on_event: OnEvent
    ) -> None:
        self._optimizer, self._ranks, self._on_event = optimizer, ranks, on_event

    def set_source(self, setting: Literal["donor", "cold"], is_saved: bool) -> None:
        """A saved peer has its own state, unless it was saved before the first step."""
        if not (is_saved and any(part.state for part in parts_of(self._optimizer))):
            self.source = setting

    def fetch(
        self, node: Node, runtime: Runtime, stopping: Callable[[], bool]
    ) -> tuple[InnerState | None, bool]:
        """A donor's state, if this peer comes late and somebody has one, and whether it starts
        cold."""
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
            unknown = f"{kind_of(self._optimizer)} keeps what is not known here"
            why = "no donor has any" if layout else unknown
        self._on_event("cold_start", {"why": why})
        return None, True

    def take_over_(self, state: InnerState | None) -> None:
        """All ranks: the optimizer goes on from a donor's state, which rank 0 has."""
        layout = layout_of(self._optimizer)
        assert layout is not None, "ranks have different optimizers"
        if state is None:
            values = torch.empty(sum(layout.numels), dtype=torch.float32)
            state = InnerState(layout, (1,) * layout.num_steps, values)
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
        both = [(group, p) for group in part.param_groups for p in group["params"]]
        trained = [(group, p) for group, p in both if p.requires_grad]
        for index, (group, parameter) in enumerate(trained):
            keys = () if group.get("momentum") == 0 else moments_of(type(part)) or ()
            if group.get("amsgrad"):
                keys = (*keys, "max_exp_avg_sq")
            yield _Slot(f"{number}.{index}", part, group, parameter, keys, "exp_avg_sq" in keys)


def layout_of(optimizer: torch.optim.Optimizer) -> InnerLayout | None:
    """The shape of its state once every parameter has had a gradient; None for unknown classes."""
    if any(moments_of(type(part)) is None for part in parts_of(optimizer)):
        return None
    slots = list(_slots(optimizer))
    names = tuple(f"{slot.name}.{key}" for slot in slots for key in slot.keys)
    numels = tuple(slot.parameter.numel() for slot in slots for _ in slot.keys)
    return InnerLayout(names, numels, sum(slot.has_step for slot in slots))


def snapshot(optimizer: torch.optim.Optimizer) -> InnerState | None:
    """A copy of its state, on the CPU.

    None while some parameter has none, and where other ranks have parts of it.
    """
    layout, slots = layout_of(optimizer), list(_slots(optimizer))
    if not layout or not layout.names or any(is_sharded(slot.parameter) for slot in slots):
        return None
    values, at, steps = torch.empty(sum(layout.numels), dtype=torch.float32), 0, []
    for slot in slots:
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
    """Copy a state into the optimizer, with the dtypes and devices that torch would choose."""
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
    """Clamp first moments that no Adam can have beside its second ones.

    m and v are averages of g and g^2 with weights (1 - b1) b1^k and (1 - b2) b2^k, so by Cauchy and
    Schwarz |m| <= (1 - b1) sqrt(v) / sqrt((1 - b2) (1 - b1^2 / b2)), if b1^2 < b2. A foreign state
    then moves nothing far. Honest moments stay as they are, also where a copy was torn between two
    steps (`TORN`). Momentum without second moments has no such bound.
    """
    values = iter(torch.split(state.values, list(state.layout.numels)))
    for slot in _slots(optimizer):
        kept = {key: next(values) for key in slot.keys}
        if "exp_avg_sq" not in kept:
            continue
        b1, b2 = slot.group["betas"]
        if b1**2 < b2 < 1:
            factor = TORN * (1 - b1) / math.sqrt((1 - b2) * (1 - b1**2 / b2))
            most = kept["exp_avg_sq"].sqrt().mul_(factor)
            kept["exp_avg"].copy_(torch.clamp(kept["exp_avg"], -most, most))
