"""The optimizer of a loop: the plain one inside what libraries wrap around it, several as one, and
the state with which that of a late peer starts.

An optimizer is refused that would undo what it gets from the swarm: one with masters, an average of
the parameters, or slow weights to which it returns. Nothing would fail, so it is tried out on small
copies whether a change of the parameters stays.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree

from diloco.attach.devices import forked_random
from diloco.attach.parameters import TORCHRUN, is_sharded, load_rows_
from diloco.attach.ranks import RankGroup
from diloco.errors import ConfigError
from diloco.swarm.node.node import Node, OnEvent
from diloco.swarm.node.runtime import Runtime
from diloco.swarm.rpc.inner_state import InnerLayout, InnerState

# libraries whose wrappers leave parameters alone
LIBRARIES = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
NOT_TRIED = ("torch.optim.", "diloco.")
MOST = 1 << 18  # elements of a group that are copied
# steps before the change, and after it; slow weights come back every 5 to 10 steps
BEFORE, AFTER = 3, 12
STAYS = 0.75  # of the change, at least


def unwrap_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer whose `step()` trains, without Accelerate's or Lightning's; several as one.

    Raises `ConfigError` for DeepSpeed's, those with masters, what is none of torch, and what undoes
    exchanges.
    """
    if isinstance(optimizer, list | tuple):
        parts = [unwrap_optimizer(one) for one in optimizer]
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
            _refuse_hidden_copies(optimizer)
            # a wrapper with hooks of its own tells when its step is over
            if "_optimizer_step_post_hooks" in vars(optimizer):
                break
        optimizer = inside
    _refuse_hidden_copies(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"optimizer={name} is no torch.optim.Optimizer; attach one, after the model is made"
        )
    if getattr(optimizer, "master_weights", False):  # of Apex and Transformer Engine
        raise ConfigError(
            f"optimizer={name} trains copies of its own; drop master_weights, use torch.autocast"
        )
    return optimizer


def _refuse_hidden_copies(optimizer: Any) -> None:
    name = type(optimizer).__name__
    if type(optimizer).__module__.startswith(NOT_TRIED):
        return
    if callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None)):
        raise ConfigError(
            f"optimizer={name} has two sequences of parameters, which its train() and eval()"
            " exchange, and the swarm would adopt one of them; attach an optimizer with one, such"
            " as AdamW"
        )
    try:
        share = _share_that_stays(optimizer)
    except Exception:  # whatever a class that nobody here knows raises: it is believed
        return
    if share < STAYS:
        raise ConfigError(
            f"optimizer={name} returns to a copy of the parameters that it keeps:"
            f" {max(share, 0.0):.0%} of a change between two steps is left after {AFTER} more, so"
            " it would undo what the swarm gives; attach an optimizer without such a copy (instead"
            " of masters: fp32 parameters and torch.autocast)"
        )


def _share_that_stays(optimizer: Any) -> float:
    """The part of a change of the parameters that is left after some steps, in the worst dtype."""
    generator = torch.Generator().manual_seed(0)

    def noise(like: Tensor) -> Tensor:
        made = torch.randn(like.shape, generator=generator, dtype=torch.float32, device="cpu")
        return made.to(like)

    (one, own), (other, changed) = _copy(optimizer), _copy(optimizer)
    with forked_random(own[0].device), torch.no_grad():
        changes = [noise(p) * (0.1 * p.float().square().mean().sqrt().clamp(min=0.1)) for p in own]
        for step in range(BEFORE + AFTER):
            if step == BEFORE:
                starts = [p.clone() for p in changed]
                for p, change in zip(changed, changes, strict=True):
                    p.add_(change)
                # measure the change as the dtype rounded it
                changes = [(p - start).float() for p, start in zip(changed, starts, strict=True)]
            for p, q in zip(own, changed, strict=True):
                p.grad = noise(p)
                q.grad = p.grad.clone()
            for made in (one, other):
                type(made).step(made)
    left, whole = defaultdict[torch.dtype, float](float), defaultdict[torch.dtype, float](float)
    for p, q, change in zip(own, changed, changes, strict=True):
        left[p.dtype] += float(((q - p).detach().float() * change).sum())
        whole[p.dtype] += float(change.square().sum())
    return min(left[dtype] / whole[dtype] for dtype in left)


def _copy(optimizer: Any) -> tuple[Any, list[Tensor]]:
    """A copy over copies of the smallest parameters, which it hardly moves; and these."""
    nested = [optimizer, *(one for one in vars(optimizer).values() if isinstance(one, Optimizer))]
    inside = [one for one in nested if isinstance(one, Optimizer)]  # which has parameters and state
    memo: dict[int, Any] = {id(one): object.__new__(type(one)) for one in nested}
    copies: dict[int, nn.Parameter] = {}
    for params in (group["params"] for one in inside for group in one.param_groups):
        ordered = sorted(params, key=Tensor.numel)
        sizes = accumulate(one.untyped_storage().nbytes() // one.element_size() for one in ordered)
        small = {id(one) for one, upto in zip(ordered, sizes, strict=True) if upto <= MOST}
        for one in params:
            # through `memo`, so that aliases of its storage become aliases of the copy
            if id(one) not in copies:
                values = deepcopy(one.data, memo) if id(one) in small else one.new_empty(0)
                copies[id(one)] = nn.Parameter(values)
        memo[id(params)] = [copies[id(one)] for one in params if copies[id(one)].numel()]
    memo |= copies
    for one in inside:
        large = (key for key in one.state if id(key) in copies and not copies[id(key)].numel())
        memo |= {id(one.state[key]): {} for key in large}
    for one in nested:
        # torch's schedulers put their own `step` into the instance
        own = {key: value for key, value in vars(one).items() if key != "step"}
        memo |= {id(value): type(value)() for key, value in own.items() if key.endswith("_hooks")}
        leaves = (leaf for leaf in _pytree.tree_leaves(own) if isinstance(leaf, Tensor))
        # large tensors of its own, such as masters, are not copied either
        memo = {id(leaf): leaf.new_empty(0) for leaf in leaves if leaf.numel() > MOST} | memo
        memo[id(one)].__dict__.update(deepcopy(own, memo))
    for group in (group for one in inside for group in memo[id(one)].param_groups):
        for key in ("lr", "weight_decay"):
            if group.get(key) is not None:
                group[key] = 1e-3 * group[key]
    return memo[id(optimizer)], [one for one in copies.values() if one.numel()]


# -- several as one --------------------------------------------------------------------------------


class CombinedOptimizer(Optimizer):
    """Several optimizers as one; its step is one of each.

    Raises `ConfigError` for a parameter that two have.
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
    """The optimizers of which one is made."""
    return optimizer.parts if isinstance(optimizer, CombinedOptimizer) else (optimizer,)


def kind_of(optimizer: Optimizer) -> str:
    """Its class, or those of its parts."""
    return " + ".join(type(part).__name__ for part in parts_of(optimizer))


# -- the state of a late joiner --------------------------------------------------------------------
# The peer asks others for their inner state, where its optimizer is AdamW, Adam, Muon or SGD. When
# nobody has any, or the optimizer is another one, it starts cold: its first H inner steps warm the
# optimizer up. The swarm does not wait for them, and their tokens count as discarded.

Parameters = Mapping[str, Tensor]  # of the model, by name
NONE: Parameters = {}
# A donor's moments are copied while it trains, so a first moment may be a step ahead of the second.
TORN = 2.0
MOMENTS: dict[type, tuple[str, ...]] = {
    torch.optim.Adam: ("exp_avg", "exp_avg_sq"),
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.SGD: ("momentum_buffer",),
    getattr(torch.optim, "Muon", torch.optim.SGD): ("momentum_buffer",),  # since torch 2.9
}


def moments_of(kind: type) -> tuple[str, ...] | None:
    """The tensors of an optimizer's state; a registered class says them itself."""
    return MOMENTS.get(kind, getattr(kind, "moments", None))


class InnerStateTransfer:
    """The inner optimizer's state on its way in; `source` is `own` if a checkpoint has it."""

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

    def set_source(self, setting: Literal["donor", "cold"], is_saved: bool) -> None:
        """A saved peer has its own state, unless it was saved before the first step."""
        if not (is_saved and any(part.state for part in parts_of(self._optimizer))):
            self.source = setting

    def fetch(
        self, node: Node, runtime: Runtime, stopping: Callable[[], bool]
    ) -> tuple[InnerState | None, bool]:
        """A donor's state for a late peer, if somebody has one; and whether it starts cold."""
        if self.source == "own" or not runtime.call(node.wait_until_ready()):
            return None, False
        why = "swarm.inner_state=cold"
        if self.source == "donor":
            layout = layout_of(self._optimizer, self._parameters)
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
    """What the optimizer keeps for one parameter."""

    name: str
    part: torch.optim.Optimizer
    group: dict[str, Any]
    parameter: Tensor
    keys: tuple[str, ...]
    has_step: bool


def _slots(optimizer: torch.optim.Optimizer, parameters: Parameters) -> Iterator[_Slot]:
    """In the order of the model: each peer may have its groups in another one."""
    order = {id(parameter): place for place, parameter in enumerate(parameters.values())}
    for number, part in enumerate(parts_of(optimizer)):
        both = [(group, p) for group in part.param_groups for p in group["params"]]
        trained = [(group, p) for group, p in both if p.requires_grad]
        places = [order.get(id(p), place) for place, (_, p) in enumerate(trained)]
        for index, (group, parameter) in sorted(zip(places, trained, strict=True), key=_first):
            keys = () if group.get("momentum") == 0 else moments_of(type(part)) or ()
            if group.get("amsgrad"):
                keys = (*keys, "max_exp_avg_sq")
            yield _Slot(f"{number}.{index}", part, group, parameter, keys, "exp_avg_sq" in keys)


def _first(pair: tuple[int, object]) -> int:
    return pair[0]


def layout_of(
    optimizer: torch.optim.Optimizer, parameters: Parameters = NONE
) -> InnerLayout | None:
    """The shape of its state once every parameter has had a gradient; None for unknown classes.

    Its order is that of the model's `parameters`.
    """
    if any(moments_of(type(part)) is None for part in parts_of(optimizer)):
        return None
    slots = list(_slots(optimizer, parameters))
    names = tuple(f"{slot.name}.{key}" for slot in slots for key in slot.keys)
    numels = tuple(slot.parameter.numel() for slot in slots for _ in slot.keys)
    return InnerLayout(names, numels, sum(slot.has_step for slot in slots))


def snapshot(optimizer: torch.optim.Optimizer, parameters: Parameters = NONE) -> InnerState | None:
    """A copy of its state, on the CPU.

    None while some parameter has none, and where other ranks have parts of it.
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
    """Clamp first moments that no Adam can have beside its second ones.

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
