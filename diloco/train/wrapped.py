"""The plain model and the plain optimizer inside what libraries wrap around them; refuses what has no plain inside."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from diloco.errors import ConfigError
from diloco.train.schedules import Paced

__all__ = ["paced", "plain_model", "plain_optimizer"]

# Of DataParallel and DistributedDataParallel, and of torch.compile.
INSIDE = ("module", "_orig_mod")
TORCHRUN = "share the model among processes with DistributedDataParallel (torchrun), or with FSDP2 (fully_shard)"


def plain_model(model: nn.Module) -> nn.Module:
    """The model that others know by the same names of parameters, whatever is around it.

    Raises `ConfigError` for models whose parameters are parts of flat ones: those of FSDP1 and DeepSpeed.
    """
    while True:
        name = type(model).__name__
        if "deepspeed" in type(model).__module__:
            raise ConfigError(f"model={name}: DeepSpeed keeps the parameters to itself; {TORCHRUN}")
        if any(type(part).__name__ == "FullyShardedDataParallel" for part in model.modules()):
            raise ConfigError(f"model={name}: FSDP1 makes flat parameters of it; {TORCHRUN}")
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel) or hasattr(model, "_orig_mod"):
            model = next(inside for at in INSIDE if (inside := getattr(model, at, None)) is not None)
        else:
            return model


def plain_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer whose `step()` trains, inside what Accelerate and Lightning put around it.

    Raises `ConfigError` for DeepSpeed's, for those of Apex with masters, and for what is none of torch.
    """
    while True:
        name = type(optimizer).__name__
        if "deepspeed" in type(optimizer).__module__:
            raise ConfigError(f"optimizer={name}: DeepSpeed trains flat copies of the parameters; {TORCHRUN}")
        inside = getattr(optimizer, "optimizer", None)
        if not isinstance(inside, torch.optim.Optimizer):
            break
        optimizer = inside
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer={name} is no torch.optim.Optimizer; attach one of those, after the model is made")
    if getattr(optimizer, "master_weights", False):  # of Apex and Transformer Engine
        raise ConfigError(f"optimizer={name} trains copies of its own; drop master_weights, and use torch.autocast")
    return optimizer


def paced(scheduler: Any, ranks: int) -> Paced:
    """A scheduler and its pace. One of Accelerate steps that inside it once for each rank, unless batches are split."""
    inside = getattr(scheduler, "scheduler", None)
    if isinstance(scheduler, Paced) or inside is None:
        return scheduler if isinstance(scheduler, Paced) else Paced(scheduler)
    splits = getattr(scheduler, "split_batches", False) or not getattr(scheduler, "step_with_optimizer", True)
    return Paced(inside, times=1 if splits else ranks)
