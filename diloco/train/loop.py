"""The training loop. The algorithm is attached to it, not written into it: `optimizer.step()`
exchanges.

Learning rate and end of the run follow what the swarm has applied, never a local counter, so all
end together.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from diloco import model as models
from diloco.attach.devices import empty_cache, forked_random, peak_memory
from diloco.attach.ranks import RankGroup
from diloco.attach.sharded import full_tensor
from diloco.config import Config
from diloco.config.manifest import raised
from diloco.data import Stream
from diloco.errors import ConfigError, DivergedError
from diloco.rundir.metrics import RunLog
from diloco.rundir.push import Pusher
from diloco.rundir.reporting import Notice, PeerStatus, Report
from diloco.rundir.summary import (
    Evaluation,
    PeerSummary,
    PhaseTimer,
    Summary,
    Tokens,
    write_contributions,
)
from diloco.train.checkpoint import RunCheckpoints, Sync
from diloco.train.evaluate import evaluate, generate, prompt_tokens
from diloco.train.learning_rate import learning_rate
from diloco.train.precision import LossScale, autocast
from diloco.train.speed import token_share

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 0.5


@dataclass
class Trainer:
    """The training loop of one rank; the backward pass of `wrapped`, not that of `model`, averages
    over ranks."""

    config: Config
    ranks: RankGroup
    model: nn.Module
    wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    stream: Stream
    holdout: Tensor
    sync: Sync
    checkpoints: RunCheckpoints
    phases: PhaseTimer
    log: RunLog
    tell: Callable[[Report], None]
    tokenizer: Any = None  # a `Tokenizer`, for `eval.prompts`
    pusher: Pusher | None = None
    eval_loss: float | None = None
    _losses: list[Tensor] = field(default_factory=list)
    _loss: float | None = None
    _shown_loss: float | None = None
    _norm: Any = None  # of the last step's gradient, before it was clipped
    _pace: float = 0.0  # tokens per second, of the whole peer
    _told_at: float = 0.0
    _boundary_version: int = 0
    _saved_version: int = 0  # the newest boundary for which a checkpoint was begun
    # whether a boundary got no checkpoint because another one was being written
    _behind: bool = False
    _unsaved: int = 0  # checkpoints in a row that could not be written
    _logged: tuple[int, float] = (0, 0.0)  # own tokens, and seconds, at the last line with a loss
    _accounted: tuple[int, float] = (0, 0.0)  # the swarm's, at the last outer step
    _anchors: dict[str, str] = field(default_factory=dict)
    _micro_batch: int | None = None  # rows that fit the memory at a time, once some did not
    _tried: int | None = None  # rows at a time that fit all ranks

    def __post_init__(self) -> None:
        # In data parallel only rank 0 is told to lead, and all evaluate with it.
        self.lead = bool(self.ranks.broadcast_floats([self.config.run.lead])[0])
        keys = ("eval.prompts", "eval.prompt_tokens")
        # is there room for it?
        for prompt in self.config.eval.prompts if self.ranks.is_rank0 else ():
            prompt_tokens(self.model, self.tokenizer, prompt, self.config.eval.prompt_tokens, keys)
        self._scale = LossScale(self.config, self.ranks)
        self._ranks_of_batch = 1 if self.config.outer.method == "data_parallel" else self.ranks.size
        self._token_share = token_share(
            self.model, self.config.data.sequence_length, self.ranks.device
        )

    def train(self) -> None:
        """Inner steps until the budget is used up or the run is interrupted."""
        self._follow_plan()
        config, sync = self.config, self.sync
        self._scale.restore(self.checkpoints.loss_scale)
        if self.lead and config.eval.every and sync.version == 0:
            self.evaluate()  # where the curve begins
        began_s = self.phases.seconds().total
        self._logged, self._accounted = (sync.tokens, began_s), (sync.applied_tokens, began_s)
        self._boundary_version = self._saved_version = sync.version
        while (
            not self.config.budget.is_used_up(sync.version, sync.applied_tokens)
            and not sync.interrupted
        ):
            lr = learning_rate(sync, config.inner, self.config.budget, config.outer.sync_every)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            # (B / ranks, T), this rank's part of the peer's batch
            self._inner_step(next(self.stream))
            self._report(lr)
            if sync.exchanged:
                self._boundary()
        if not sync.interrupted:
            sync.finish()

    def _follow_plan(self) -> None:
        """All ranks: the run is as long as the swarm says, where peers have been told different
        budgets."""
        plan = [0, 0, 0] if self.sync.view is None else list(self.sync.view.node.core.facts.planned)
        self.config = self.checkpoints.config = raised(
            self.config, self.ranks.broadcast_floats(plan)
        )

    # -- an inner step -----------------------------------------------------------------------------

    def _inner_step(self, batch: Tensor) -> None:
        """All ranks: forward, backward, clip, step. The optimizer's hook exchanges with the
        swarm."""
        loss = self._gradients(batch)
        self._scale.unscale_(self.model)
        self._norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.inner.clip)
        if self._scale.skips(self._norm):
            # Without gradients the step changes neither parameters nor moments, and its hook still
            # fires.
            self.optimizer.zero_grad(set_to_none=True)
            skipped, scale = self._scale.skipped_steps, self._scale.scale
            self._event(
                "step_skipped", inner_step=self.sync.steps + 1, skipped=skipped, scale=scale
            )
        self._losses.append(loss)
        self.sync.count(batch.numel() * self._ranks_of_batch)
        done = self.sync.inner_step + 1
        if done % self.config.train.log_every == 0 or done >= self.sync.target_steps:
            self._check_losses()
        if self.config.train.step_delay_s:
            # before the exchange, or the measured pace would leave it out
            time.sleep(self.config.train.step_delay_s)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _event(self, kind: str, **fields: Any) -> None:
        if self.ranks.is_rank0:
            self.log.event(kind, **fields)

    def _gradients(self, rows: Tensor) -> Tensor:
        """The loss of this rank's rows, whose gradients are accumulated over as many parts as
        memory asks for.

        A part that does not fit is halved for the rest of the run, on all ranks.
        """
        alone = self.ranks.size == 1
        while True:
            part = min(self._micro_batch or self.config.train.micro_batch or len(rows), len(rows))
            fits = alone or part == self._tried
            try:
                if fits:
                    return self._accumulate(rows, part)
                fits = self._fits_all(rows[:part])
            except torch.OutOfMemoryError:
                if not alone:  # the other ranks wait for this one in a collective
                    raise ConfigError(
                        f"train.micro_batch={part}: so many sequences do not fit"
                        f" {self.ranks.device} of rank {self.ranks.rank}; use {max(1, part // 2)}"
                    ) from None
                fits = False
            if fits:
                self._tried = part
            else:
                self._halve(part, rows.shape[1])

    def _halve(self, part: int, sequence_length: int) -> None:
        if part == 1:
            raise ConfigError(
                f"data.sequence_length={sequence_length}: not even one sequence fits the memory of "
                f"{self.ranks.device}; use train.device=cpu, or a machine with more"
            )
        self._micro_batch = part // 2
        self.optimizer.zero_grad(set_to_none=True)
        empty_cache(self.ranks.device)
        self._event("micro_batch", sequences=self._micro_batch)

    def _fits_all(self, rows: Tensor) -> bool:
        """Whether so many rows at a time fit the memory of all ranks; where sharded layers do not,
        the run ends."""
        fits = True
        with forked_random(self.ranks.device):
            try:
                with self.ranks.no_sync(self.wrapped):
                    # DistributedDataParallel has collectives going forward, too
                    self._backward(self.model, rows, 1.0)
            except torch.OutOfMemoryError:
                if self.ranks.sharded:
                    raise
                fits = False
        self.optimizer.zero_grad(set_to_none=True)
        return bool(self.ranks.all_reduce_min(fits))

    def _accumulate(self, rows: Tensor, micro_batch: int) -> Tensor:
        """Mean loss of the rows, computed in parts of `micro_batch` rows; gradients add up to those
        of the whole."""
        total = torch.zeros((), dtype=torch.float32, device=self.ranks.device)
        *parts, last = torch.split(rows, micro_batch)  # (b, T) each
        with self.ranks.no_sync(self.wrapped) if parts else nullcontext():
            for part in parts:
                total += self._backward(self.wrapped, part, len(part) / len(rows))
        return total + self._backward(self.wrapped, last, len(last) / len(rows))

    def _backward(self, model: nn.Module, rows: Tensor, weight: float) -> Tensor:
        with autocast(self.config, self.ranks.device):
            loss = models.loss(model, rows.to(self.ranks.device, non_blocking=True)) * weight
        self._scale.scaled(loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _check_losses(self) -> None:
        """Before every exchange, at least: end the run at a loss that is not finite, before it
        spreads."""
        [total] = self.ranks.sum(float(torch.stack(self._losses).mean()))
        self._loss = total / self.ranks.size
        self._losses.clear()
        self._norm = float(
            self._norm.full_tensor() if hasattr(self._norm, "full_tensor") else self._norm
        )
        if not math.isfinite(self._loss):
            raise DivergedError(
                f"training diverged: the loss is {self._loss} in outer step"
                f" {self.sync.version + 1}; lower inner.lr or outer.lr; the last checkpoint is good"
            )
        self.sync.report(self._loss)

    # -- after an exchange -------------------------------------------------------------------------

    def _boundary(self) -> None:
        """Account for an exchange; once in a while evaluate the anchor, and write a checkpoint."""
        self._follow_plan()
        config, sync = self.config, self.sync
        if self.ranks.is_rank0:
            self._account()
        over = config.budget.is_used_up(sync.version, sync.applied_tokens)
        if self.lead and not over and self._passed(config.eval.every, self._boundary_version):
            if self.ranks.is_rank0:
                self.tell(self.status("evaluating"))
            self.evaluate()
        if config.checkpoint.every and (
            over or self._passed(config.checkpoint.every, self._saved_version)
        ):
            try:
                self.save(config.checkpoint.background and not over)
            # the swarm has the model, and the next boundary is another chance
            except ConfigError as error:
                self._not_saved(sync.version, error)
            self.push()
        self._boundary_version = sync.version

    def _passed(self, every: int, since: int) -> bool:
        # without a barrier, some are skipped
        return every > 0 and self.sync.version // every > since // every

    def _account(self) -> None:
        figures: dict[str, Any] = {"bytes_sent": self.traffic()[0]}
        if self.sync.view is not None:
            # only those that moved since the line before: lines must stay short
            anchors = self.sync.view.anchors()
            moved = {
                fragment: at
                for fragment, at in anchors.items()
                if self._anchors.get(fragment) != at
            }
            self._anchors = anchors
            figures |= {"anchors": moved, **self.sync.view.membership()}
        seconds, (tokens, at) = self.phases.seconds(), self._accounted
        self._accounted = (self.sync.applied_tokens, seconds.total)
        figures["swarm_tokens_per_s"] = (self.sync.applied_tokens - tokens) / max(
            seconds.total - at, 1e-9
        )
        self._log(
            **figures, **{f"{phase}_s": round(spent, 3) for phase, spent in asdict(seconds).items()}
        )

    def _log(self, **figures: Any) -> None:
        sync = self.sync
        self.log.metric(
            version=sync.version, inner_step=sync.steps, tokens=sync.applied_tokens, **figures
        )

    def evaluate(self) -> None:
        """All ranks: held-out loss of the anchor, where text is held out, and what it writes after
        `eval.prompts`."""
        if not len(self.holdout) and not self.config.eval.prompts:
            return
        rows = max(1, self.config.inner.batch_size // self.ranks.size)
        rows = min(rows, self._micro_batch or self.config.train.micro_batch or rows)
        with self.sync.anchored(), autocast(self.config, self.ranks.device):
            if len(self.holdout):
                self.eval_loss = evaluate(
                    self.model, self.holdout, rows, self.ranks.device, ranks=self.ranks
                ).loss
            written = self._write()
        if not self.ranks.is_rank0:
            return
        if len(self.holdout):
            self._log(eval_loss=self.eval_loss)
        if written:
            self._show(written)

    def _write(self) -> list[tuple[str, str]]:
        """All ranks, as sharded layers are gathered from them: prompts, and what the model writes
        after them."""
        prompts, most = self.config.eval.prompts, self.config.eval.prompt_tokens
        # Each token makes the sequence longer, and would have layers compiled for another length.
        with (
            torch.compiler.set_stance("force_eager")
            if self.config.train.compile and prompts
            else nullcontext()
        ):
            write = partial(
                generate, self.model, self.tokenizer, max_new_tokens=most, temperature=0.0
            )
            return [(prompt, write(prompt)) for prompt in prompts]

    def _show(self, written: list[tuple[str, str]]) -> None:
        version, view = self.sync.version, self.sync.view
        self.log.samples(version, written)
        shown = (written[0][0][-24:] + written[0][1])[:64]
        self.tell(Notice(text=f"v{version} writes {json.dumps(shown, ensure_ascii=False)}"))
        if view is not None:
            view.look(lambda node: node.recorder.add_samples(version, written))

    def save(self, background: bool = False) -> None:
        """All ranks: write a checkpoint of the last boundary, in the `background` while training
        goes on. Where the disk is behind, the next boundary gets it. Raises `CheckpointError`, or
        `ConfigError` for `contributions.csv`.
        """
        checkpoints = self.checkpoints
        [behind] = self.ranks.broadcast_floats([background and checkpoints.writing])
        if behind:
            if not self._behind:  # a slow disk stays slow for long
                logger.warning(
                    "the disk is behind: outer step %d gets no checkpoint", self.sync.version
                )
            self._behind = True
            self.log.event("checkpoint_skipped", version=self.sync.version)
            return
        version, self._saved_version = checkpoints.saved_version, self.sync.version
        error = checkpoints.written()
        if error is not None:
            self._not_saved(version, error)
        [saved] = self.ranks.broadcast_floats([checkpoints.saved_version])
        checkpoints.saved_version, checkpoints.loss_scale = int(saved), self._scale.state
        seconds, traffic, is_rank0 = self.phases.seconds(), self.traffic(), self.ranks.is_rank0
        checkpoints.save(
            self.sync,
            self.model,
            self.optimizer,
            self.stream,
            seconds,
            traffic,
            is_rank0,
            background,
        )
        if self._unsaved and (error is None or not background):
            logger.warning(
                "checkpoints are written again, after %d that could not be", self._unsaved
            )
            self._unsaved = 0
        if self.config.run.lead and self.sync.view is not None:
            write_contributions(
                self.config.run.dir / "contributions.csv", self.sync.view.contributions()
            )

    def _not_saved(self, version: int, error: ConfigError) -> None:
        self._unsaved += 1
        if self._unsaved == 1:  # a full disk stays full for long
            logger.warning("%s", error)
        self.log.event("checkpoint_failed", version=version, why=str(error))

    def push(self, final: bool = False) -> None:
        """All ranks: push the anchor, from a copy, while training goes on."""
        if self.lead and self.config.checkpoint.push is not None:
            with self.sync.anchored():
                place, values = (
                    "cpu" if self.pusher is not None else "meta",
                    self.model.state_dict().items(),
                )
                state = {
                    name: full_tensor(value.detach()).to(place, copy=True) for name, value in values
                }
            if self.pusher is not None:
                self.pusher.begin(self.sync.version, state, final)

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received by this peer, before it went on from a checkpoint as well."""
        sent, received = self.checkpoints.traffic
        if self.sync.view is None:
            return sent, received
        here = self.sync.view.node.traffic
        return sent + here.bytes_sent, received + here.bytes_received

    def _report(self, lr: float) -> None:
        now = time.monotonic()
        if not self.ranks.is_rank0:
            return
        if self._loss is not None:
            (tokens, at), spent = self._logged, self.phases.seconds().total
            pace = (self.sync.tokens - tokens) / max(spent - at, 1e-9)
            self._logged = (self.sync.tokens, spent)
            mfu = (
                None
                if self._token_share is None
                else pace * self._token_share / self._ranks_of_batch
            )
            memory = peak_memory(self.ranks.device)
            self._log(
                loss=self._loss, lr=lr, grad_norm=self._norm, tokens_per_s=pace, mfu=mfu, **memory
            )
            self._pace, self._shown_loss, self._loss = pace, self._loss, None
        if now - self._told_at >= REPORT_EVERY_S or self.sync.exchanged:
            self._told_at = now
            self.tell(self.status("training"))

    def status(self, state: str) -> PeerStatus:
        sync, (sent, received) = self.sync, self.traffic()
        shared = ("version", "inner_step", "target_steps", "exchanged", "tokens")
        return PeerStatus(
            **{name: getattr(sync, name) for name in shared},
            state=state,
            outer_steps=self.config.budget.outer_steps,
            loss=self._shown_loss,
            eval_loss=self.eval_loss,
            discarded=sync.discarded_tokens,
            tokens_per_s=round(self._pace, 1),
            bytes_sent=sent,
            bytes_received=received,
            peers=self.ranks.size if sync.view is None else sync.view.num_peers,
        )

    def summary(self, wall_s: float, digest: str | None = None) -> Summary:
        """One peer's summary; `digest` is that of its anchor, where it is known already."""
        config, sync, view = self.config, self.sync, self.sync.view
        sent, received = self.traffic()
        mine = PeerSummary(
            peer_id=view.node.core.facts.me if view else f"rank{self.ranks.rank}",
            name=config.run.name or "peer",
            steps=sync.steps,
            tokens=sync.tokens,
            anchor_digest=sync.anchor_digest() if digest is None else digest,
            bytes_sent=sent,
            bytes_received=received,
            seconds=self.phases.seconds(),
        )
        return Summary(
            run_id=config.run.id,
            manifest_hash=config.manifest().hash(),
            mode=config.outer.method,
            wall_s=wall_s,
            outer_steps=sync.version,
            tokens=Tokens(sync.tokens, sync.applied_tokens, sync.discarded_tokens),
            eval=Evaluation(self.eval_loss),
            peers=[mine],
            heals=view.node.core.facts.heals if view else 0,
            takeovers=view.node.core.facts.takeovers if view else 0,
            contributions=view.contributions() if view else (),
        )
