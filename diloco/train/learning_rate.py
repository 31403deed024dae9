"""The learning rate of an inner step: it follows what the swarm has applied, never a local
counter."""

from __future__ import annotations

import math

from diloco.attach.schedulers import swarm_steps
from diloco.config import BudgetConfig, InnerConfig
from diloco.train.checkpoint import Sync


def learning_rate(clock: Sync, inner: InnerConfig, budget: BudgetConfig, sync_every: int) -> float:
    """Learning rate of the coming inner step: linear warm-up, then the rest of the schedule over
    the present budget.

    Progress is the largest part of any limit that is used up. During the warm-up this peer's own
    tokens count at once.
    """
    step, warmup = swarm_steps(clock, sync_every), inner.warmup_steps
    if warmup >= 1:
        risen = (step + 1) / warmup
    else:
        risen = _progress(
            budget, sync_every, step + 1, max(1, clock.applied_tokens + clock.unsent_tokens)
        )
        risen = risen / warmup if warmup else 1.0
    if risen < 1:
        return inner.peak_lr * risen
    if inner.schedule == "constant":
        return inner.peak_lr
    if warmup >= 1:  # as a part of the run, if the run is so many steps
        warmup = 0.0 if budget.outer_steps is None else warmup / (budget.outer_steps * sync_every)
    begins = max(warmup, 1 - inner.decay_ratio) if inner.schedule == "wsd" else warmup
    progress = (_progress(budget, sync_every, step, clock.applied_tokens) - begins) / max(
        1 - begins, 1e-9
    )
    progress = min(1.0, max(0.0, progress))
    left = 0.5 * (1 + math.cos(math.pi * progress)) if inner.schedule == "cosine" else 1 - progress
    return inner.peak_lr * (inner.final_lr_ratio + (1 - inner.final_lr_ratio) * left)


def _progress(budget: BudgetConfig, sync_every: int, steps: int, tokens: int) -> float:
    """The part of the run that is over after so many inner steps of a peer and so many tokens of
    all."""
    by_steps = 0.0 if budget.outer_steps is None else steps / (budget.outer_steps * sync_every)
    by_tokens = 0.0 if budget.tokens is None else tokens / budget.tokens
    return max(by_steps, by_tokens)
