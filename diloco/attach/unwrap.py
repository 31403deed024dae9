"""The plain model and the plain optimizer inside what libraries wrap around them; refuses what has
no plain inside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from diloco.attach.hidden_copies import refuse_hidden_copies
from diloco.attach.inner_optimizer import CombinedOptimizer
from diloco.attach.schedulers import ScheduledStep
from diloco.errors import ConfigError

# Of torch.compile, of activation checkpoints, and of Lightning's Fabric.
INSIDE = ("_orig_mod", "_checkpoint_wrapped_module", "_forward_module")
# wrap, and change no parameter
LIBRARIES = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")
TORCHRUN = (
    "share the model among processes with DistributedDataParallel (torchrun), or with FSDP2"
    " (fully_shard)"
)


def unwrap_model(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """The model inside what is around it; of several, a list of them. Raises `ConfigError` for
    FSDP1 and DeepSpeed."""
    if isinstance(model, list | tuple):
        return (
            unwrap_model(model[0]) if len(model) == 1 else nn.ModuleList(map(unwrap_model, model))
        )
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
    """The submodule around which a module is wrapped, whose parameters others know by names without
    it."""
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return "module"
    library = type(module).__module__
    if library.startswith("peft."):
        return next(
            (
                at
                for at in ("base_model", "model")
                if at in module._modules and ".layer" not in library
            ),
            None,
        )
    return next((at for at in INSIDE if at in getattr(module, "_modules", ())), None)


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
    return (
        (unwrapped_name(model, name), parameter) for name, parameter in model.named_parameters()
    )


def class_name(model: nn.Module) -> str:
    """The class of a plain model, or of each of several. FSDP2 derives one of its own from it."""
    if isinstance(model, nn.ModuleList):
        return " + ".join(map(class_name, model))
    while (inside := _inside(model)) is not None:
        model = getattr(model, inside)
    return next(
        kind.__name__
        for kind in type(model).__mro__
        if not kind.__module__.startswith("torch.distributed")
    )


def unwrap_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer whose `step()` trains, inside what Accelerate and Lightning put around it;
    several as one.

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
        if not isinstance(inside, torch.optim.Optimizer):
            break
        if library.partition(".")[0] not in LIBRARIES:
            refuse_hidden_copies(optimizer)
            # it says itself when a step is over
            if "_optimizer_step_post_hooks" in vars(optimizer):
                break
        optimizer = inside
    refuse_hidden_copies(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer={name} is no torch.optim.Optimizer; attach one of those, after the model is"
            " made"
        )
    if getattr(optimizer, "master_weights", False):  # of Apex and Transformer Engine
        raise ConfigError(
            f"optimizer={name} trains copies of its own; drop master_weights, and use"
            " torch.autocast"
        )
    return optimizer


def scheduled_step(scheduler: Any, ranks: int) -> ScheduledStep:
    """A scheduler and its pace. One of Accelerate steps that inside it once for each rank, unless
    batches are split."""
    inside = getattr(scheduler, "scheduler", None)
    if isinstance(scheduler, ScheduledStep) or inside is None:
        return scheduler if isinstance(scheduler, ScheduledStep) else ScheduledStep(scheduler)
    splits = getattr(scheduler, "split_batches", False) or not getattr(
        scheduler, "step_with_optimizer", True
    )
    return ScheduledStep(inside, times=1 if splits else ranks)
