"""The swarm clock: learning rate and end of the run follow what the swarm has applied, never a local counter.

A peer that joins late therefore has the learning rate of the others from its first step, and all end together.
"""

from __future__ import annotations

import math
from typing import Protocol

from diloco.config import BudgetConfig, InnerConfig

__all__ = ["Clock", "finished", "learning_rate"]


class Clock(Protocol):
    """What a training loop reads the swarm clock from."""

    @property
    def version(self) -> int: ...
    @property
    def inner_step(self) -> int: ...
    @property
    def applied_tokens(self) -> int: ...


def finished(clock: Clock, budget: BudgetConfig) -> bool:
    """Whether a limit of the budget is reached; between exchanges the answer does not change."""
    steps_over = budget.outer_steps is not None and clock.version >= budget.outer_steps
    tokens_over = budget.tokens is not None and clock.applied_tokens >= budget.tokens
    return steps_over or tokens_over


def learning_rate(clock: Clock, inner: InnerConfig, budget: BudgetConfig, sync_every: int) -> float:
    """Learning rate of the coming inner step: linear warm-up, then constant, or a cosine from `lr` to its last value.

    Progress is the largest part of any limit of the budget that is used up; tokens count when they are applied.
    """
    step = clock.version * sync_every + clock.inner_step
    if step < inner.warmup_steps:
        return inner.lr * (step + 1) / inner.warmup_steps
    if inner.schedule == "constant":
        return inner.lr
    progress = 0.0
    if budget.outer_steps is not None:
        total = budget.outer_steps * sync_every - inner.warmup_steps
        progress = (step - inner.warmup_steps) / max(1, total)
    if budget.tokens is not None:
        progress = max(progress, clock.applied_tokens / budget.tokens)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return inner.lr * (inner.final_lr_ratio + (1 - inner.final_lr_ratio) * cosine)
