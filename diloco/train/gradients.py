"""Gradients of an inner step: their precision, the scale of the loss, and the rows per micro-batch.

    bf16   autocast, where the device computes it natively (CUDA from compute capability 8.0 on)
    fp16   autocast with a scaled loss, on other CUDA devices: V100, T4, RTX 20
    fp32   elsewhere; on CUDA with TF32 in matrix products (`train.tf32`)

Weights, gradients and moments are fp32 in all of them, and so is what the swarm exchanges.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from diloco import model as models
from diloco.attach.devices import Precision, empty_cache, forked_random, native_precision
from diloco.attach.ranks import RankGroup
from diloco.config import Config
from diloco.errors import ConfigError, DivergedError
from diloco.model import forward

FIRST_SCALE, GROWTH_STEPS = 2.0**16, 2000  # as torch.amp.GradScaler


def precision_of(config: Config, device: torch.device) -> Precision:
    """Return `train.precision`, with `auto` resolved for this device."""
    return native_precision(device) if config.train.precision == "auto" else config.train.precision


def autocast(config: Config, device: torch.device) -> torch.autocast:
    """Return a context with the precision of the inner steps."""
    precision = precision_of(config, device)
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=precision != "fp32")


def base_form(config: Config, precision: str) -> str:
    """Return `train.base`, with `auto` resolved: FSDP2 gathers weights of one dtype only."""
    train = config.train
    return train.base if train.base != "auto" else precision if train.parallel == "ddp" else "fp32"


def check_base(config: Config) -> None:
    """Raise ConfigError if this peer cannot hold a base as `train.base` says; loads nothing."""
    if config.train.base != "nf4":
        return
    if config.model.adapter == "none":
        raise ConfigError("train.base=nf4 is for a base that is frozen; add adapter=lora")
    if config.train.parallel == "fsdp":
        raise ConfigError("train.base=nf4 cannot be cut into rows; use train.parallel=ddp")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError("train.base=nf4 needs bitsandbytes; pip install 'diloco[qlora]'")


def to_device(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """Move the model to the device, and the base of an adapter into the form of `train.base`."""
    check_base(config)
    precision = precision_of(config, device)
    models.shrink_base_(model, base_form(config, precision), precision)
    return model.to(device)


def prepare_(model: nn.Module, config: Config, device: torch.device) -> dict[str, object]:
    """Set the model up as `train.` says, before `RankGroup.wrap`; return the choices, for the
    log."""
    train, precision = config.train, precision_of(config, device)
    if train.attention.startswith("flash") and (device.type != "cuda" or precision == "fp32"):
        raise ConfigError(
            f"train.attention={train.attention} computes in bf16 or fp16 on CUDA, and this is"
            f" {precision} on {device.type}; use sdpa"
        )
    attention = forward.choose_attention_(model, train.attention)
    chosen: dict[str, object] = {"precision": precision, "attention": attention}
    if device.type == "cuda":
        tf32 = chosen["tf32"] = train.tf32 and precision == "fp32"
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
    forward.never_wait_for_masks()
    if train.checkpointing:
        forward.recompute_layers_(model)
    if train.compile:
        forward.compile_layers_(model)
    return {**chosen, "checkpointing": train.checkpointing, "compile": train.compile}


def norm_of(norm: Any) -> float:
    """All ranks: return the value of a norm of `clip_grad_norm_`. With FSDP2 each rank has a
    part."""
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


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
        """The scale, and the steps since it changed; empty if nothing is scaled."""
        return (self.scale, self._good_steps) if self.enabled else ()

    def restore(self, state: Sequence[float]) -> None:
        """Continue from a `state`; without effect if it, or this, is of another precision."""
        if self.enabled and state:
            self.scale, self._good_steps = float(state[0]), int(state[1])

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss to differentiate."""
        return loss * self.scale if self.enabled else loss

    @torch.no_grad()
    def unscale_(self, model: nn.Module) -> None:
        """Divide the gradients of the scaled loss by the scale."""
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if self.enabled and gradients:
            torch._foreach_mul_(gradients, 1 / self.scale)

    def skips(self, norm: Any) -> bool:
        """All ranks: return True if gradients of this norm overflow. Waits for the device in fp16
        only."""
        if not self.enabled:
            return False
        if self._ranks.all_reduce_min(math.isfinite(norm_of(norm))):
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


class MemoryShort(Exception):
    """Memory ran out between two passes: the peer restarts with `micro_batch` rows at a time."""

    def __init__(self, micro_batch: int) -> None:
        super().__init__(f"train.micro_batch={micro_batch}")
        self.micro_batch = micro_batch


class Gradients:
    """Forward and backward passes of one rank, in micro-batches that fit its memory.

    The backward pass of `wrapped`, not that of `model`, averages over ranks.

    Attributes:
        micro_batch: rows at a time, after more did not fit; None before.
        norm: of the last gradient before it was clipped, for `norm_of`.
    """

    def __init__(
        self,
        config: Config,
        ranks: RankGroup,
        model: nn.Module,
        wrapped: nn.Module,
        on_event: Callable[..., None],
    ) -> None:
        self.scale = LossScale(config, ranks)
        self.micro_batch = config.train.micro_batch
        self.norm: Any = None
        self._config, self._ranks = config, ranks
        self._model, self._wrapped = model, wrapped
        self._on_event = on_event
        self._fitting: int | None = None  # rows at a time that fit all ranks

    def compute_(self, rows: Tensor) -> Tensor:
        """All ranks: return the mean loss of this rank's `rows`, (B, T) or (B, 2, T) int64.

        Adds the gradients to the parameters. Rows that do not fit are halved for the rest of the
        run, on all ranks. Raises `ConfigError` where not even one fits.
        """
        alone = self._ranks.size == 1
        while True:
            part = min(self.micro_batch or len(rows), len(rows))
            fits = alone or part == self._fitting
            try:
                if fits:
                    return self._accumulate(rows, part)
                fits = self._fits_all(rows[:part])
            except torch.OutOfMemoryError:
                self._check_alone(part)
                fits = False
            if fits:
                self._fitting = part
            else:
                self._halve(part, rows.shape[-1])

    def clip_(self) -> bool:
        """All ranks: clip the gradients to `inner.clip`. False if they overflowed and were
        dropped."""
        self.scale.unscale_(self._model)
        self.norm = torch.nn.utils.clip_grad_norm_(
            self._model.parameters(), self._config.inner.clip
        )
        if self.scale.skips(self.norm):
            self._model.zero_grad()
            return False
        return True

    def halve(self, rows: int, sequence_length: int) -> MemoryShort:
        """Return the error of a rank whose memory ran out elsewhere, with a batch of `rows`.

        Drops the gradients. Raises `ConfigError` beside other ranks, or where one row was too much.
        """
        part = min(self.micro_batch or rows, rows)
        self._check_alone(part)
        self._halve(part, sequence_length)
        return MemoryShort(part // 2)

    def _check_alone(self, part: int) -> None:
        if self._ranks.size > 1:  # the other ranks wait for this one in a collective
            raise ConfigError(
                f"train.micro_batch={part}: so many sequences do not fit"
                f" {self._ranks.device} of rank {self._ranks.rank}; use {max(1, part // 2)}"
            ) from None

    def _halve(self, part: int, sequence_length: int) -> None:
        if part == 1:
            raise ConfigError(
                f"data.sequence_length={sequence_length}: not even one sequence fits the memory of "
                f"{self._ranks.device}; use train.device=cpu, or a machine with more"
            )
        self.micro_batch = part // 2
        self._model.zero_grad()
        empty_cache(self._ranks.device)
        self._on_event("micro_batch", sequences=self.micro_batch)

    def _fits_all(self, rows: Tensor) -> bool:
        """Return True if so many rows fit the memory of all ranks; FSDP2 raises if they do not."""
        fits = True
        with forked_random(self._ranks.device):
            try:
                with self._ranks.no_sync(self._wrapped):
                    # DistributedDataParallel has collectives in its forward pass, too
                    self._backward(self._model, rows, 1.0)
            except torch.OutOfMemoryError:
                if self._ranks.sharded:
                    raise
                fits = False
        self._model.zero_grad()
        return bool(self._ranks.all_reduce_min(fits))

    def _accumulate(self, rows: Tensor, micro_batch: int) -> Tensor:
        """Return the mean loss of the rows, computed in parts, whose gradients add up."""
        total = torch.zeros((), dtype=torch.float32, device=self._ranks.device)
        targets = float(models.num_targets(rows))
        if rows.ndim == 3 and self._ranks.size > 1:  # ranks have different numbers of answers
            [summed] = self._ranks.sum(targets)
            targets = summed / self._ranks.size
        *parts, last = torch.split(rows, micro_batch)  # (b, ..., T) each
        with self._ranks.no_sync(self._wrapped) if parts else nullcontext():
            for part in parts:
                total += self._backward(self._wrapped, part, models.num_targets(part) / targets)
        return total + self._backward(self._wrapped, last, models.num_targets(last) / targets)

    def _backward(self, model: nn.Module, rows: Tensor, weight: float) -> Tensor:
        device = self._ranks.device
        with autocast(self._config, device):
            loss = models.loss(model, rows.to(device, non_blocking=True)) * weight
        self.scale.scaled(loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach()
