"""The training loop. DiLoCo is attached to it, not written into it: `optimizer.step()` exchanges.

Learning rate and end of the run follow what the swarm has applied, never a local counter, so all
peers end together.
"""

from __future__ import annotations

import json
import logging
import math
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from diloco.attach.parameters import full_tensor
from diloco.attach.ranks import RankGroup
from diloco.attach.schedulers import swarm_steps
from diloco.config import BudgetConfig, Config, InnerConfig
from diloco.config.manifest import raised
from diloco.data import BatchStream
from diloco.errors import ConfigError, DivergedError
from diloco.model import saved_state
from diloco.rundir.push import Pusher
from diloco.rundir.reporting import Notice
from diloco.rundir.summary import write_contributions
from diloco.train.checkpoint import RunCheckpoints, Sync
from diloco.train.evaluate import evaluate, generate, prompt_tokens
from diloco.train.gradients import Gradients, autocast, norm_of
from diloco.train.reporter import Reporter

logger = logging.getLogger(__name__)


@dataclass
class Trainer:
    """The training loop of one rank; the backward pass of `wrapped` averages over ranks."""

    config: Config
    ranks: RankGroup
    model: nn.Module
    wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    stream: BatchStream
    holdout: Tensor
    sync: Sync
    checkpoints: RunCheckpoints
    report: Reporter
    tokenizer: Any = None  # a `Tokenizer`, for `eval.prompts`
    pusher: Pusher | None = None
    _losses: list[Tensor] = field(default_factory=list)
    _norm: float = math.nan  # of the last gradient, when the loss was last measured
    _evaluated: int = 0  # outer step of the boundary before this one
    _saved: int = 0  # outer step for which a checkpoint was last begun
    _disk_is_behind: bool = False  # whether an outer step got no checkpoint because of that
    _unsaved: int = 0  # checkpoints in a row that could not be written

    def __post_init__(self) -> None:
        # In data parallel only rank 0 is told to lead, and all evaluate with it.
        self.lead = bool(self.ranks.broadcast_floats([self.config.run.lead])[0])
        keys = ("eval.prompts", "eval.prompt_tokens")
        for prompt in (
            self._prompts() if self.ranks.is_rank0 else ()
        ):  # raises for one that does not fit
            prompt_tokens(self.model, self.tokenizer, prompt, self.config.eval.prompt_tokens, keys)
        self.gradients = Gradients(
            self.config,
            self.ranks,
            self.model,
            self.wrapped,
            lambda kind, **fields: self.report.event(kind, **fields),
        )

    def train(self) -> None:
        """Make inner steps until the budget is used up or the run is interrupted."""
        self._follow_plan()
        sync = self.sync
        self.gradients.scale.restore(self.checkpoints.loss_scale)
        if self.lead and self.config.eval.every and sync.version == 0:
            self.evaluate()  # where the curve begins
        self.report.begin()
        self._evaluated = self._saved = sync.version
        while not (self._is_over() or sync.interrupted):
            config = self.config
            lr = learning_rate(sync, config.inner, config.budget, config.outer.sync_every)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            batch = next(self.stream)  # (B / ranks, T), this rank's part of the peer's batch
            loss = self._inner_step(batch)
            self.report.step(lr, loss, self._norm)
            if sync.exchanged:
                self._outer_step()
        if not sync.interrupted:
            sync.finish()

    def _is_over(self) -> bool:
        return self.config.budget.is_used_up(self.sync.version, self.sync.applied_tokens)

    def _follow_plan(self) -> None:
        """All ranks: take over the length of the run that the swarm has agreed on."""
        node = self.sync.node
        plan = (0, 0, 0) if node is None else node.record().planned
        config = raised(self.config, self.ranks.broadcast_floats(plan))
        self.config = self.checkpoints.config = self.report.config = config

    def _inner_step(self, batch: Tensor) -> float | None:
        """All ranks: forward, backward, clip, step; return the mean loss since it was last
        measured, if it is now. The optimizer's hook exchanges with the swarm."""
        self._losses.append(self.gradients.compute_(batch))
        if not self.gradients.clip_():
            # Without gradients the step changes nothing, and its hook still counts it.
            scale, inner_step = self.gradients.scale, self.sync.steps + 1
            self.report.event(
                "step_skipped",
                inner_step=inner_step,
                skipped=scale.skipped_steps,
                scale=scale.scale,
            )
        self.sync.count(batch.shape[0] * batch.shape[-1] * self.report.num_ranks)
        done, loss = self.sync.inner_step + 1, None
        if done % self.config.train.log_every == 0 or done >= self.sync.target_steps:
            loss = self._mean_loss()
        if self.config.train.step_delay_s:
            # before the exchange, or the measured pace would leave it out
            time.sleep(self.config.train.step_delay_s)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def _mean_loss(self) -> float:
        """All ranks, at least before every exchange: return the mean loss since the last call.

        Raises `DivergedError` if it is not finite, before the exchange spreads that.
        """
        [total] = self.ranks.sum(float(torch.stack(self._losses).mean()))
        loss = total / self.ranks.size
        self._losses.clear()
        self._norm = norm_of(self.gradients.norm)
        if not math.isfinite(loss):
            raise DivergedError(
                f"training diverged: the loss is {loss} in outer step {self.sync.version + 1};"
                " lower inner.lr or outer.lr; the last checkpoint is good"
            )
        self.sync.report(loss)
        return loss

    # -- after an exchange -------------------------------------------------------------------------

    def _outer_step(self) -> None:
        """Report an exchange; at intervals evaluate the anchor, and write a checkpoint."""
        self._follow_plan()
        self.report.outer_step()
        version, is_over, settings = self.sync.version, self._is_over(), self.config.checkpoint
        if self.lead and not is_over and self._passed(self.config.eval.every, self._evaluated):
            self.report.state("evaluating")
            self.evaluate()
        if settings.every and (is_over or self._passed(settings.every, self._saved)):
            try:
                self.save(settings.background and not is_over)
            # the swarm has the model, and the next outer step is another chance
            except ConfigError as error:
                self._not_saved(version, error)
            self.push()
        self._evaluated = version

    def _passed(self, every: int, since: int) -> bool:
        # without a barrier, some are skipped
        return every > 0 and self.sync.version // every > since // every

    def evaluate(self) -> None:
        """All ranks: measure the anchor's held-out loss, if text is held out, and let it continue
        `eval.prompts`."""
        if not len(self.holdout) and not self.config.eval.prompts:
            return
        rows = max(1, self.config.inner.batch_size // self.ranks.size)
        rows = min(rows, self.gradients.micro_batch or rows)
        with self.sync.anchored(), autocast(self.config, self.ranks.device):
            if len(self.holdout):
                result = evaluate(
                    self.model, self.holdout, rows, self.ranks.device, ranks=self.ranks
                )
                self.sync.report(eval_loss=result.loss)
            written = self._write()
        if not self.ranks.is_rank0:
            return
        if len(self.holdout):
            self.report.metric(eval_loss=result.loss)
        if written:
            self._show(written)

    def _write(self) -> list[tuple[str, str]]:
        """All ranks, as sharded layers are gathered: pair prompts with the model's texts."""
        prompts, most = self._prompts(), self.config.eval.prompt_tokens
        # Each token makes the sequence longer, and would have layers compiled for another length.
        is_compiled = self.config.train.compile and prompts
        with torch.compiler.set_stance("force_eager") if is_compiled else nullcontext():
            return [
                (
                    prompt,
                    generate(
                        self.model, self.tokenizer, prompt, max_new_tokens=most, temperature=0.0
                    ),
                )
                for prompt in prompts
            ]

    def _prompts(self) -> list[str]:
        """Return `eval.prompts`, as questions of a user where conversations are learned."""
        asks = self.config.data.has_conversations
        return [
            self.tokenizer.question(prompt) if asks else prompt
            for prompt in self.config.eval.prompts
        ]

    def _show(self, written: list[tuple[str, str]]) -> None:
        version, node = self.sync.version, self.sync.node
        self.report.log.samples(version, written)
        shown = (written[0][0][-24:] + written[0][1])[:64]
        text = f"v{version} writes {json.dumps(shown, ensure_ascii=False)}"
        self.report.tell(Notice(text=text))
        if node is not None:
            node.add_samples(version, written)

    def save(self, background: bool = False) -> None:
        """All ranks: write a checkpoint of the last boundary, in the `background` while training
        goes on. Where the disk is behind, the next boundary gets it. Raises `CheckpointError`, or
        `ConfigError` for `contributions.csv`.
        """
        checkpoints, sync = self.checkpoints, self.sync
        if self.ranks.broadcast_floats([background and checkpoints.writing])[0]:
            if not self._disk_is_behind:  # a slow disk stays slow for long
                logger.warning("the disk is behind: outer step %d gets no checkpoint", sync.version)
            self._disk_is_behind = True
            self.report.event("checkpoint_skipped", version=sync.version)
            return
        version, self._saved = checkpoints.saved_version, sync.version
        error = checkpoints.written()
        if error is not None:
            self._not_saved(version, error)
        checkpoints.saved_version = int(self.ranks.broadcast_floats([checkpoints.saved_version])[0])
        checkpoints.loss_scale = self.gradients.scale.state
        figures = sync.figures()
        checkpoints.save(
            sync,
            self.model,
            self.optimizer,
            self.stream,
            self.report.phases.seconds(),
            (figures.bytes_sent, figures.bytes_received),
            self.ranks.is_rank0,
            background,
        )
        if self._unsaved and (error is None or not background):
            logger.warning(
                "checkpoints are written again, after %d that could not be", self._unsaved
            )
            self._unsaved = 0
        if self.config.run.lead and sync.node is not None:
            path = self.config.run.dir / "contributions.csv"
            write_contributions(path, sync.node.record().contributions)

    def _not_saved(self, version: int, error: ConfigError) -> None:
        self._unsaved += 1
        if self._unsaved == 1:  # a full disk stays full for long
            logger.warning("%s", error)
        self.report.event("checkpoint_failed", version=version, why=str(error))

    def push(self, final: bool = False) -> None:
        """All ranks: push the anchor, from a copy, while training goes on."""
        if not self.lead or self.config.checkpoint.push is None:
            return
        with self.sync.anchored():
            device = "cpu" if self.pusher is not None else "meta"
            values = saved_state(self.model).items()
            state = {name: full_tensor(value).to(device, copy=True) for name, value in values}
        if self.pusher is not None:
            self.pusher.begin(self.sync.version, state, final)


def learning_rate(clock: Sync, inner: InnerConfig, budget: BudgetConfig, sync_every: int) -> float:
    """Return the learning rate of the coming inner step: linear warm-up, then the rest of the
    schedule over the present budget.

    Progress is the largest part of any limit that is used up. During the warm-up this peer's own
    tokens count at once.
    """
    step, warmup = swarm_steps(clock, sync_every), inner.warmup_steps
    if warmup >= 1:
        risen = (step + 1) / warmup
    else:
        tokens = max(1, clock.applied_tokens + clock.unsent_tokens)
        risen = _progress(budget, sync_every, step + 1, tokens) / warmup if warmup else 1.0
    if risen < 1:
        return inner.peak_lr * risen
    if inner.schedule == "constant":
        return inner.peak_lr
    if warmup >= 1:  # as a part of the run, if the run is so many steps
        warmup = 0.0 if budget.outer_steps is None else warmup / (budget.outer_steps * sync_every)
    begins = max(warmup, 1 - inner.decay_ratio) if inner.schedule == "wsd" else warmup
    progress = _progress(budget, sync_every, step, clock.applied_tokens) - begins
    progress = min(1.0, max(0.0, progress / max(1 - begins, 1e-9)))
    left = 0.5 * (1 + math.cos(math.pi * progress)) if inner.schedule == "cosine" else 1 - progress
    return inner.peak_lr * (inner.final_lr_ratio + (1 - inner.final_lr_ratio) * left)


def _progress(budget: BudgetConfig, sync_every: int, steps: int, tokens: int) -> float:
    """Return the part of the run that is over after these steps of a peer, and tokens of all."""
    by_steps = 0.0 if budget.outer_steps is None else steps / (budget.outer_steps * sync_every)
    by_tokens = 0.0 if budget.tokens is None else tokens / budget.tokens
    return max(by_steps, by_tokens)
