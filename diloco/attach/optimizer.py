"""The optimizer of a loop: unwrapping it from libraries, combining several, and transferring a
donor's inner state to a late peer.

An optimizer with fp32 masters, or slow weights to which it returns, would silently undo exchanges:
`ExchangeGuard` raises an error that names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from diloco.attach.node_thread import NodeThread
from diloco.attach.parameters import SAMPLED, TORCHRUN, is_sharded, load_rows_, local_tensor
from diloco.attach.ranks import RankGroup
from diloco.errors import ConfigError
from diloco.swarm.node.node import OnEvent
from diloco.swarm.rpc.inner_state import InnerLayout, InnerState

# libraries whose wrappers leave parameters alone
LIBRARIES = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
STEPS_WATCHED = 12  # after exchanges; slow weights come back every 5 to 10 steps
MOST_DECAY = 0.1  # in a step that is watched: it takes parameters back, too
Parameters = Mapping[str, Tensor]  # of the model, by name
NONE: Parameters = {}


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """Return the optimizer inside Accelerate's or Lightning's wrappers; combine a list of them.

    Raises `ConfigError` for an optimizer of DeepSpeed, with masters, that is none of torch, or that
    undoes exchanges.
    """
    if isinstance(optimizer, list | tuple):
        parts = [unwrap_optimizer(part) for part in optimizer]
        return parts[0] if len(parts) == 1 else CombinedOptimizer(*parts)
    while True:
        name, library = type(optimizer).__name__, type(optimizer).__module__
        if "deepspeed" in library:
            raise ConfigError(
                f"optimizer={name}: DeepSpeed trains flat copies of the parameters; {TORCHRUN}"
            )
        inside = getattr(optimizer, "optimizer", None)
        if not isinstance(inside, Optimizer):
            break
        if library.partition(".")[0] not in LIBRARIES:
            _refuse_two_sequences(optimizer)
            # a wrapper that has step hooks calls them itself
            if "_optimizer_step_post_hooks" in vars(optimizer):
                break
        optimizer = inside
    _refuse_two_sequences(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer={name} is no torch.optim.Optimizer; attach one, after the model is made"
        )
    if name == "ZeroRedundancyOptimizer":
        raise ConfigError(
            f"optimizer={name} has its state on several ranks, where no checkpoint finds it; use"
            " FSDP2 (fully_shard) with an ordinary optimizer"
        )
    if getattr(optimizer, "master_weights", False):  # of Apex and Transformer Engine
        raise ConfigError(
            f"optimizer={name} trains copies of its own; drop master_weights, use torch.autocast"
        )
    return optimizer


def decay_of(optimizer: Optimizer) -> float:
    """Share by which a step shrinks the parameters: learning rate times weight decay (AdamW)."""
    groups = optimizer.param_groups
    return max(
        float(group.get("lr", 0.0)) * float(group.get("weight_decay", 0.0)) for group in groups
    )


def _refuse_two_sequences(optimizer: Any) -> None:
    if type(optimizer).__module__.startswith("torch.optim."):
        return
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise ConfigError(
            f"optimizer={type(optimizer).__name__} has two sequences of parameters, which its"
            " train() and eval() exchange, and the swarm would adopt one of them; attach an"
            " optimizer with one, such as AdamW"
        )


class ExchangeGuard:
    """Checks after exchanges that neither the loop nor its optimizer undoes them.

    1. An exchange moves the parameters by `way`; joining is the first. A copy of them stays behind:
       an average in the loop, or masters or slow weights in the optimizer.
    2. The loop writes its copy back before the next step (`check_kept`), or a step of the optimizer
       does. That step moves along `-way`; other steps follow gradients, hardly along `way`.
    3. So a single step that goes back is an error (`check_step`). Detection needs three steps, and
       some hundred parameters.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._to_watch = STEPS_WATCHED
        self._way: Tensor | None = None  # sampled move of the last exchange
        self._given: Tensor | None = None  # sample after that exchange, until the next step begins
        self._start: Tensor | None = None  # sample before the step under way
        # by step since the exchange: share of `_way` that it moved, and cosine with `_way`
        self._steps: list[tuple[float, float]] = []

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Measure by how far the exchange in the block moves the parameters."""
        before = self._sample() if self._to_watch else None
        yield
        if before is not None:
            self._given = self._sample()
            self._way = self._given - before
            self._steps.clear()  # they were measured along another way

    def check_kept(self) -> None:
        """Before a step: raise `ConfigError` if the loop undid most of an exchange."""
        if self._way is None or not self._way.any():
            return
        self._start, given, self._given = self._sample(), self._given, None
        if given is not None and (given - self._start) @ self._way > 0.5 * self._way @ self._way:
            raise ConfigError(
                "model: between two steps, something went back to the parameters of before the"
                " exchange; write no copy or average into the model while it is attached"
            )

    def check_step(self, name: str, decay: float = 0.0) -> None:
        """After a step: raise `ConfigError` if the optimizer `name` undid an exchange.

        `decay` is the share by which the step shrinks the parameters, which may look alike.
        """
        if self._start is None or self._way is None or decay > MOST_DECAY:
            return
        step, way, self._start = self._sample() - self._start, self._way, None
        along, least = float(step @ way), 1e-30
        lengths = max(float(step.norm() * way.norm()), least)
        self._steps.append((along / max(float(way @ way), least), along / lengths))
        (share, cosine), *others = sorted(self._steps)
        most = max((abs(other) for other, _ in others), default=math.inf)
        is_alone = len(others) >= 2 and share < -max(0.25, 4 * most)
        # the cosine of n random values is about 1 / sqrt(n); the bound is six times that
        is_back = cosine < -max(0.3, 6 / math.sqrt(way.numel()))
        if is_alone and is_back and share > 2 * cosine:  # at most twice as long as the way
            raise ConfigError(
                f"optimizer={name} returns to a copy of the parameters that it keeps: a step took"
                f" back {-share:.0%} of what an exchange gave; attach an optimizer without such a"
                " copy (instead of masters: fp32 parameters and torch.autocast)"
            )
        self._to_watch -= 1
        if not self._to_watch:
            self._way = None

    def _sample(self) -> Tensor:
        """Copy a few values of each parameter (fp32, on the CPU)."""
        local = (local_tensor(parameter.detach()) for parameter in self._parameters.values())
        return torch.cat([values.reshape(-1)[:SAMPLED].float().cpu() for values in local])


# -- several as one --------------------------------------------------------------------------------


class CombinedOptimizer(Optimizer):
    """Several optimizers as one; its step makes one step of each.

    Raises `ConfigError` for a parameter that two of them have.
    """

    def __init__(self, *parts: Optimizer) -> None:
        groups = [{"params": group["params"]} for part in parts for group in part.param_groups]
        try:
            super().__init__(groups, {})
        except ValueError as error:
            raise ConfigError(f"optimizer: {error}; give each parameter to one of them") from None
        self.parts = parts
        self._share_groups()

    def _share_groups(self) -> None:
        # the groups of the parts themselves, so that schedulers move these
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


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers of a `CombinedOptimizer`, or the optimizer itself."""
    return optimizer.parts if isinstance(optimizer, CombinedOptimizer) else (optimizer,)


def kind_of(optimizer: Optimizer) -> str:
    """Name the class of an optimizer, or those of its parts."""
    return " + ".join(type(part).__name__ for part in parts_of(optimizer))


# -- the state of a late joiner --------------------------------------------------------------------
# The peer asks others for their inner state, where its optimizer is AdamW, Adam, Muon or SGD. When
# nobody has any, or the optimizer is another one, it starts cold: its first H inner steps warm the
# optimizer up. The swarm does not wait for them, and their tokens count as discarded.

# A donor's moments are copied while it trains, so a first moment may be a step ahead of the second.
TORN = 2.0
MOMENTS: dict[type, tuple[str, ...]] = {
    torch.optim.Adam: ("exp_avg", "exp_avg_sq"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.SGD: ("momentum_buffer",),
    getattr(torch.optim, "Muon", torch.optim.SGD): ("momentum_buffer",),  # since torch 2.9
}


def moments_of(kind: type) -> tuple[str, ...] | None:
    """Names of the tensors of an optimizer's state; None for a class that is not registered."""
    return MOMENTS.get(kind, getattr(kind, "moments", None))


class InnerStateTransfer:
    """Initial state of the inner optimizer; `source` is `own` if it is from a checkpoint."""

    source: Literal["own", "donor", "cold"] = "own"

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Parameters,
        ranks: RankGroup,
        on_event: OnEvent,
    ) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        self._ranks, self._on_event = ranks, on_event

    def set_source(self, setting: Literal["donor", "cold"], saved_steps: int) -> None:
        """Use the peer's own state if it was saved after a step, even if its class keeps none."""
        if not saved_steps:
            self.source = setting

    def fetch(
        self, node: NodeThread, stopping: Callable[[], bool]
    ) -> tuple[InnerState | None, bool]:
        """Fetch a donor's state for a late peer, if any has one; True for a cold start."""
        if self.source == "own" or not node.is_late():
            return None, False
        why = "swarm.inner_state=cold"
        if self.source == "donor":
            layout = layout_of(self._optimizer, self._parameters)
            if layout is not None and not layout.names:
                return None, False
            state = None if layout is None else node.fetch_inner(layout)
            if state is not None or stopping():
                return state, False
            unknown = f"{kind_of(self._optimizer)} keeps what is not known here"
            why = "no donor has any" if layout else unknown
        self._on_event("cold_start", {"why": why})
        return None, True

    def take_over_(self, state: InnerState | None) -> None:
        """All ranks: load a donor's state, which rank 0 has, into the optimizer."""
        layout = layout_of(self._optimizer, self._parameters)
        assert layout is not None, "ranks have different optimizers"
        if state is None:
            values = torch.empty(sum(layout.numels), dtype=torch.float32)
            state = InnerState(layout, (1,) * layout.num_steps, values)
        steps = tuple(int(step) for step in self._ranks.broadcast_floats(state.steps))
        self._ranks.broadcast_(state.values)
        bound_moments_(self._optimizer, state, self._parameters)
        load_moments_(self._optimizer, InnerState(layout, steps, state.values), self._parameters)


class _Slot(NamedTuple):
    """Names and place of the optimizer's state of one parameter."""

    name: str
    part: torch.optim.Optimizer
    group: dict[str, Any]
    parameter: Tensor
    keys: tuple[str, ...]
    has_step: bool


def _slots(optimizer: torch.optim.Optimizer, parameters: Parameters) -> Iterator[_Slot]:
    """Yield slots in the order of the model, as peers may order their groups differently."""
    order = {id(parameter): position for position, parameter in enumerate(parameters.values())}
    for number, part in enumerate(parts_of(optimizer)):
        both = [(group, p) for group in part.param_groups for p in group["params"]]
        trained = [(group, p) for group, p in both if p.requires_grad]
        positions = [order.get(id(p), position) for position, (_, p) in enumerate(trained)]
        for index, (group, parameter) in sorted(zip(positions, trained, strict=True), key=_first):
            keys = () if group.get("momentum") == 0 else moments_of(type(part)) or ()
            if group.get("amsgrad"):
                keys = (*keys, "max_exp_avg_sq")
            yield _Slot(f"{number}.{index}", part, group, parameter, keys, "exp_avg_sq" in keys)


def _first(pair: tuple[int, object]) -> int:
    return pair[0]


def layout_of(
    optimizer: torch.optim.Optimizer, parameters: Parameters = NONE
) -> InnerLayout | None:
    """Layout of the state once every parameter has had a gradient; None for unknown classes.

    Its order is that of the model's `parameters`.
    """
    if any(moments_of(type(part)) is None for part in parts_of(optimizer)):
        return None
    slots = list(_slots(optimizer, parameters))
    names = tuple(f"{slot.name}.{key}" for slot in slots for key in slot.keys)
    numels = tuple(slot.parameter.numel() for slot in slots for _ in slot.keys)
    return InnerLayout(names, numels, sum(slot.has_step for slot in slots))


def snapshot(optimizer: torch.optim.Optimizer, parameters: Parameters = NONE) -> InnerState | None:
    """Copy the optimizer's state to the CPU.

    None while some parameter has no state, and if other ranks have parts of it.
    """
    layout, slots = layout_of(optimizer, parameters), list(_slots(optimizer, parameters))
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
def load_moments_(
    optimizer: torch.optim.Optimizer, state: InnerState, parameters: Parameters = NONE
) -> None:
    """Copy a state into the optimizer, with the dtypes and devices that torch would choose."""
    assert state.layout == layout_of(optimizer, parameters), "a state of another layout"
    values, steps = iter(torch.split(state.values, list(state.layout.numels))), iter(state.steps)
    for slot in _slots(optimizer, parameters):
        parameter, kept = slot.parameter, slot.part.state[slot.parameter]
        if slot.has_step:
            beside = slot.group.get("capturable") or slot.group.get("fused")
            device = parameter.device if beside else torch.device("cpu")
            kept["step"] = torch.tensor(float(next(steps)), dtype=torch.float32, device=device)
        for key in slot.keys:
            kept[key] = torch.empty_like(parameter, memory_format=torch.preserve_format)
            load_rows_(kept[key], next(values))


@torch.no_grad()
def bound_moments_(
    optimizer: torch.optim.Optimizer, state: InnerState, parameters: Parameters = NONE
) -> None:
    """Clamp first moments to the largest that Adam can have with these second moments.

    m and v are averages of g and g^2 with weights (1 - b1) b1^k and (1 - b2) b2^k, so by Cauchy and
    Schwarz |m| <= (1 - b1) sqrt(v) / sqrt((1 - b2) (1 - b1^2 / b2)), if b1^2 < b2. A foreign state
    then moves nothing far. Honest moments stay as they are, also where a copy was torn between two
    steps (`TORN`). Momentum without second moments has no such bound.
    """
    values = iter(torch.split(state.values, list(state.layout.numels)))
    for slot in _slots(optimizer, parameters):
        kept = {key: next(values) for key in slot.keys}
        if "exp_avg_sq" not in kept:
            continue
        b1, b2 = slot.group["betas"]
        if b1**2 < b2 < 1:
            factor = TORN * (1 - b1) / math.sqrt((1 - b2) * (1 - b1**2 / b2))
            most = kept["exp_avg_sq"].sqrt().mul_(factor)
            kept["exp_avg"].copy_(torch.clamp(kept["exp_avg"], -most, most))
