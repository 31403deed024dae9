"""Synchronous data parallel training, the baseline: gradients are averaged in every inner step.

There is no swarm. `sync_every` inner steps count as one outer step, so that budgets, evaluations
and curves of both methods line up.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from diloco.attach.node_thread import Measured, Progress
from diloco.attach.parameters import full_tensor
from diloco.attach.ranks import RankGroup
from diloco.outer.digest import digest_of
from diloco.rundir.summary import PhaseTimer


class DataParallel(Measured):
    """Data parallel training behind the methods of `Attachment`. If one process dies, all end."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ranks: RankGroup,
        sync_every: int,
        phases: PhaseTimer,
    ) -> None:
        self.ranks, self.phases = ranks, phases
        self.progress = Progress(phases, time.monotonic)
        self.target_steps = sync_every
        self.version = self.applied_tokens = self.inner_step = 0
        self.steps = self.tokens = self.discarded_tokens = self.unsent_tokens = 0
        self.exchanged = self.interrupted = self._asked_to_stop = False
        self.node = None
        self._model, self._optimizer = model, optimizer
        self._counted_tokens = 0
        self._hook: Any = None

    def __enter__(self) -> DataParallel:
        self._hook = self._optimizer.register_step_post_hook(lambda *_: self._after_step())
        self.phases.switch("compute")
        return self

    def __exit__(self, *_: object) -> None:
        self.phases.switch(None)
        self._hook.remove()

    def interrupt(self) -> None:
        """End after the inner step under way or the next one; all processes agree on it."""
        self._asked_to_stop = True

    def count(self, tokens: int) -> None:
        """Count this process's tokens of the coming step."""
        self._counted_tokens += tokens

    @contextmanager
    def anchored(self) -> Iterator[None]:
        """Do nothing: the parameters are the anchor."""
        yield

    def finish(self) -> None:
        """Do nothing: no exchange is under way."""

    def _after_step(self) -> None:
        self.inner_step += 1
        self.steps += 1
        self.tokens += self._counted_tokens
        self.applied_tokens += self._counted_tokens * self.ranks.size
        self._counted_tokens = 0
        self.exchanged = self.inner_step >= self.target_steps
        self.interrupted = bool(self.ranks.broadcast_floats([self._asked_to_stop])[0])
        if self.exchanged:
            self.version += 1
            self.inner_step = 0

    def anchor_digest(self) -> str:
        """All ranks: return the digest of the parameters, which are equal everywhere."""
        with torch.no_grad():
            own = (full_tensor(p.detach()) for p in self._model.parameters() if p.requires_grad)
            flat = torch.cat([values.flatten().float().cpu() for values in own])
        return digest_of(flat)
