"""Seconds of an inner step on this machine, and the part of its arithmetic that a token takes."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch
from torch import nn

from diloco import model as models
from diloco.attach import devices
from diloco.config import Config
from diloco.train.precision import autocast

WARMUP_STEPS, TIMED_STEPS = 2, 5


def step_seconds(config: Config, micro_batch: int | None = None) -> float:
    """Median seconds of an inner step of this configuration on this machine, on random tokens; with
    a `micro_batch` only that part of a batch is measured, and a step counts as so many parts.
    """
    device = devices.pick_device(config.train.device)
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    model = models.build(
        config.model, config.run.seed, sequence_length=config.data.sequence_length
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    weight = model.get_input_embeddings().weight  # type: ignore[operator]
    vocabulary = 256 if config.data.tokenizer == "bytes" else weight.shape[0]
    generator = torch.Generator().manual_seed(config.run.seed)
    batch_size = config.inner.batch_size
    measured = min(batch_size, micro_batch or batch_size)
    shape = (measured, config.data.sequence_length)
    seconds = []
    for _ in range(WARMUP_STEPS + TIMED_STEPS):
        tokens = torch.randint(vocabulary, shape, generator=generator).to(device)  # (B, T)
        began_at = time.perf_counter()
        with autocast(config, device):
            loss = models.loss(model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.inner.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        float(loss.detach())  # waits for the device
        devices.synchronize(device)
        seconds.append(time.perf_counter() - began_at)
    return statistics.median(seconds[WARMUP_STEPS:]) * math.ceil(batch_size / measured)


def token_share(model: nn.Module, sequence_length: int, device: torch.device) -> float | None:
    """Tokens per second times this are the part of the device's peak that training uses (MFU,
    Chowdhery et al. 2022, arXiv:2204.02311, appendix B): 6 operations per parameter, 4 where it is
    frozen, none where its rows are only looked up, and 12 LHQT for attention. None without a known
    peak, for models that do not say L, H and Q, and for experts.
    """
    peak = devices.peak_flops(device)
    if peak is None:
        return None
    any_model: Any = model
    shape = any_model.config.get_text_config()
    sizes: list[Any] = [
        getattr(shape, name, None)
        for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    ]
    if not all(isinstance(size, int) for size in sizes) or getattr(
        shape, "num_experts_per_tok", None
    ):
        return None
    layers, heads, width = sizes
    attention = (
        12 * layers * heads * (getattr(shape, "head_dim", None) or width // heads) * sequence_length
    )
    rows, head = any_model.get_input_embeddings().weight, any_model.get_output_embeddings()
    multiplied = (
        p for p in model.parameters() if p is not rows or (head is not None and head.weight is rows)
    )
    return (
        float(sum((6 if p.requires_grad else 4) * p.numel() for p in multiplied) + attention) / peak
    )
