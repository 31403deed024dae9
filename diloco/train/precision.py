"""The arithmetic of the inner steps: its precision, chosen for the device, and the scale of the
loss that fp16 needs.

    bf16   autocast, where the device computes it natively (CUDA from compute capability 8.0 on)
    fp16   autocast with a scaled loss, on other CUDA devices: V100, T4, RTX 20
    fp32   elsewhere; on CUDA with TF32 in matrix products (`train.tf32`)

Weights, gradients and moments are fp32 in all of them, and what the swarm exchanges does not depend
on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diloco.attach.devices import Precision, native_precision
from diloco.attach.ranks import RankGroup
from diloco.config import Config
from diloco.errors import ConfigError, DivergedError
from diloco.model.forward import (
    choose_attention_,
    compile_layers_,
    never_wait_for_masks,
    recompute_layers_,
)

FIRST_SCALE, GROWTH_STEPS = 2.0**16, 2000  # as torch.amp.GradScaler


def precision_of(config: Config, device: torch.device) -> Precision:
    """`train.precision`, with `auto` resolved for this device."""
    return native_precision(device) if config.train.precision == "auto" else config.train.precision


def autocast(config: Config, device: torch.device) -> torch.autocast:
    """A context with the precision of the inner steps."""
    precision = precision_of(config, device)
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=precision != "fp32")


def prepare_(model: nn.Module, config: Config, device: torch.device) -> dict[str, object]:
    """Have the model compute as `train.` says, before `RankGroup.wrap`; returns what was chosen,
    for the log."""
    settings, precision = config.train, precision_of(config, device)
    if settings.attention.startswith("flash") and (device.type != "cuda" or precision == "fp32"):
        raise ConfigError(
            f"train.attention={settings.attention} computes in bf16 or fp16 on CUDA, and this is"
            f" {precision} on {device.type}; use sdpa"
        )
    chosen: dict[str, object] = {
        "precision": precision,
        "attention": choose_attention_(model, settings.attention),
    }
    if device.type == "cuda":
        tf32 = chosen["tf32"] = settings.tf32 and precision == "fp32"
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
    never_wait_for_masks()
    if settings.checkpointing:
        recompute_layers_(model)
    if settings.compile:
        compile_layers_(model)
    return {**chosen, "checkpointing": settings.checkpointing, "compile": settings.compile}


class LossScale:
    """The factor by which an fp16 loss is multiplied, or small gradients would be rounded to zero
    (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2). It halves when gradients overflow,
    and doubles after `GROWTH_STEPS` steps without.

    All ranks skip a step whose gradients overflow; it counts as an inner step, as its tokens were
    read. `DivergedError` is raised when gradients are not finite even unscaled.
    """

    def __init__(self, config: Config, ranks: RankGroup) -> None:
        self._ranks = ranks
        self.enabled = precision_of(config, ranks.device) == "fp16"
        self.scale = FIRST_SCALE if self.enabled else 1.0
        self.skipped_steps = 0
        self._good_steps = 0

    @property
    def state(self) -> tuple[float, ...]:
        """Where to go on: the scale, and the steps since it changed. Empty if nothing is scaled."""
        return (self.scale, self._good_steps) if self.enabled else ()

    def restore(self, state: Sequence[float]) -> None:
        """Go on from a `state`; without effect if it, or this, is of another precision."""
        if self.enabled and state:
            self.scale, self._good_steps = float(state[0]), int(state[1])

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to compute gradients of."""
        return loss * self.scale if self.enabled else loss

    @torch.no_grad()
    def unscale_(self, model: nn.Module) -> None:
        """Gradients of the scaled loss become those of the loss."""
        gradients = [
            parameter.grad for parameter in model.parameters() if parameter.grad is not None
        ]
        if self.enabled and gradients:
            torch._foreach_mul_(gradients, 1 / self.scale)

    def skips(self, norm: Any) -> bool:
        """All ranks: whether to skip the step whose gradients have this norm. Only for fp16 it
        waits for the device."""
        if not self.enabled:
            return False
        # A norm that is not finite belongs to gradients that are not. With FSDP2 each rank has a
        # part of it.
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if self._ranks.all_reduce_min(math.isfinite(float(norm))):
            self._good_steps += 1
            if self._good_steps == GROWTH_STEPS:
                self.scale, self._good_steps = 2 * self.scale, 0
            return False
        if self.scale <= 1:
            raise DivergedError(
                "training diverged: gradients overflow fp16 also without a scaled loss; use"
                " train.precision=fp32, or lower inner.lr; the last checkpoint is good"
            )
        self.scale, self._good_steps = self.scale / 2, 0
        self.skipped_steps += 1
        return True
