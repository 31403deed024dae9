"""The plain model and the plain optimizer inside what libraries wrap around them.

What has no plain inside is refused, and so is an optimizer that would undo what it gets from the
swarm: one with masters, an average of the parameters, or slow weights to which it returns. Nothing
would fail, so it is tried out on small copies whether a change of the parameters stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree

from diloco.attach.devices import forked_random
from diloco.errors import ConfigError

# of torch.compile, of activation checkpoints, and of Lightning's Fabric
INSIDE = ("_orig_mod", "_checkpoint_wrapped_module", "_forward_module")
# wrap, and change no parameter
LIBRARIES = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
TORCHRUN = "share the model with DistributedDataParallel (torchrun), or with FSDP2 (fully_shard)"
NOT_TRIED = ("torch.optim", "diloco.attach")
MOST = 1 << 18  # elements of a group that are copied
# steps before the change, and after it; slow weights come back every 5 to 10 steps
BEFORE, AFTER = 3, 12
STAYS = 0.75  # of the change, at least


# -- models ----------------------------------------------------------------------------------------


def unwrap_model(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """The model inside what is around it; of several, a list of them.

    Raises `ConfigError` for FSDP1 and DeepSpeed.
    """
    if isinstance(model, list | tuple):
        several = [unwrap_model(one) for one in model]
        return several[0] if len(several) == 1 else nn.ModuleList(several)
    while True:
        name = type(model).__name__
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"model={name} is no torch.nn.Module; attach one, or several in a list"
            )
        if "deepspeed" in type(model).__module__:
            raise ConfigError(f"model={name}: DeepSpeed keeps the parameters to itself; {TORCHRUN}")
        if any(type(part).__name__ == "FullyShardedDataParallel" for part in model.modules()):
            raise ConfigError(f"model={name}: FSDP1 makes flat parameters of it; {TORCHRUN}")
        inside = _inside(model)
        # beside them adapters may have parameters of their own
        if inside is None or inside in ("base_model", "model"):
            return model
        model = getattr(model, inside)


def _inside(module: Any) -> str | None:
    """The submodule around which a module is wrapped, and whose names have no word of that."""
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return "module"
    library = type(module).__module__
    if library.startswith("peft."):
        names: tuple[str, ...] = () if ".layer" in library else ("base_model", "model")
    else:
        names = INSIDE
    return next((name for name in names if name in getattr(module, "_modules", ())), None)


def unwrapped_name(model: nn.Module, name: str) -> str:
    """The name of a parameter or buffer as if nothing in the model were wrapped."""
    at: Any = model
    parts = []
    for part in name.split("."):
        if part != _inside(at):
            parts.append(part)
        at = getattr(at, part, None)
    return ".".join(parts)


def named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a model, by names that do not depend on wrappers."""
    return ((unwrapped_name(model, name), one) for name, one in model.named_parameters())


def class_name(model: nn.Module) -> str:
    """The class of a plain model, or of each of several. FSDP2 derives one of its own from it."""
    if isinstance(model, nn.ModuleList):
        return " + ".join(map(class_name, model))
    while (inside := _inside(model)) is not None:
        model = getattr(model, inside)
    kinds = type(model).__mro__
    return next(one.__name__ for one in kinds if not one.__module__.startswith("torch.distributed"))


# -- optimizers ------------------------------------------------------------------------------------


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
            # it says itself when a step is over
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
                # as rounded
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
            # with its storage, which the optimizer may know under another name
            if id(one) not in copies:
                values = deepcopy(one.data, memo) if id(one) in small else one.new_empty(0)
                copies[id(one)] = nn.Parameter(values)
        memo[id(params)] = [copies[id(one)] for one in params if copies[id(one)].numel()]
    memo |= copies
    for one in inside:
        large = (key for key in one.state if id(key) in copies and not copies[id(key)].numel())
        memo |= {id(one.state[key]): {} for key in large}
    for one in nested:
        # put there by a scheduler
        own = {key: value for key, value in vars(one).items() if key != "step"}
        memo |= {id(value): type(value)() for key, value in own.items() if key.endswith("_hooks")}
        leaves = (leaf for leaf in _pytree.tree_leaves(own) if isinstance(leaf, Tensor))
        # such as a master
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


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers of which one is made."""
    return optimizer.parts if isinstance(optimizer, CombinedOptimizer) else (optimizer,)


def kind_of(optimizer: Optimizer) -> str:
    """Its class, or those of its parts."""
    return " + ".join(type(part).__name__ for part in parts_of(optimizer))
