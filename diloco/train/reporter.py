"""The reports of one peer: `metrics.jsonl`, `events.jsonl`, its status, and its summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from diloco.attach import devices
from diloco.attach.ranks import RankGroup
from diloco.config import Config
from diloco.messages.snapshot import Tokens
from diloco.rundir.metrics import RunLog
from diloco.rundir.reporting import PeerStatus, Report
from diloco.rundir.summary import Evaluation, PeerSummary, PhaseTimer, Summary
from diloco.train.checkpoint import Sync

REPORT_EVERY_S = 0.5
OWN_LINES = {"loss", "eval_loss", "tokens_per_s", "tokens"}  # `tokens` of a line are the swarm's


class Reporter:
    """The reports of the training loop of one rank; only rank 0 writes.

    Attributes:
        config: that of the run now, whose budget may grow.
    """

    def __init__(
        self,
        config: Config,
        ranks: RankGroup,
        sync: Sync,
        phases: PhaseTimer,
        log: RunLog,
        tell: Callable[[Report], None],
        earlier_traffic: Sequence[int] = (0, 0),
        token_share: float | None = None,
    ) -> None:
        self.config, self.ranks, self.sync = config, ranks, sync
        self.phases, self.log, self.tell = phases, log, tell
        self.num_ranks = 1 if config.outer.method == "data_parallel" else ranks.size
        self.sync.progress.earlier_traffic, self._token_share = earlier_traffic, token_share
        self._told_at = 0.0
        self._own: tuple[int, float] = (0, 0.0)  # tokens and seconds at the last line with a loss
        self._swarm: tuple[int, float] = (0, 0.0)  # the same of the swarm, at the last outer step
        self._anchors: Mapping[str, str] = {}

    def begin(self) -> None:
        """Start the clocks of the paces: training begins."""
        seconds = self.phases.seconds().total
        self._own, self._swarm = (self.sync.tokens, seconds), (self.sync.applied_tokens, seconds)

    def event(self, kind: str, **fields: Any) -> None:
        if self.ranks.is_rank0:
            self.log.event(kind, **fields)

    def metric(self, **measured: Any) -> None:
        sync = self.sync
        self.log.metric(
            version=sync.version, inner_step=sync.steps, tokens=sync.applied_tokens, **measured
        )

    def state(self, state: str) -> None:
        """Tell the display the state of this peer."""
        if self.ranks.is_rank0:
            self.tell(self._status(state))

    def step(self, lr: float, loss: float | None, norm: float) -> None:
        """Report an inner step; with a `loss` if it was measured."""
        if not self.ranks.is_rank0:
            return
        if loss is not None:
            (tokens, at), now = self._own, self.phases.seconds().total
            self._own = (self.sync.tokens, now)
            pace = (self.sync.tokens - tokens) / max(now - at, 1e-9)  # of the whole peer
            self.sync.report(tokens_per_s=pace)
            mfu = self._token_share and pace * self._token_share / self.num_ranks
            memory = devices.peak_memory(self.ranks.device)
            self.metric(loss=loss, lr=lr, grad_norm=norm, tokens_per_s=pace, mfu=mfu, **memory)
        if time.monotonic() - self._told_at >= REPORT_EVERY_S or self.sync.exchanged:
            self._told_at = time.monotonic()
            self.state("training")

    def outer_step(self) -> None:
        """Report an outer step: seconds of each phase, and the anchors that moved."""
        if not self.ranks.is_rank0:
            return
        sync, seconds, (tokens, at) = self.sync, self.phases.seconds(), self._swarm
        own = sync.figures().shared().items()
        figures: dict[str, Any] = {name: value for name, value in own if name not in OWN_LINES}
        if sync.node is not None:
            # only those that moved since the line before: lines must stay short
            record, before = sync.node.record(), self._anchors
            moved = {key: at for key, at in record.anchors.items() if before.get(key) != at}
            self._anchors = record.anchors
            figures["anchors"] = moved
            figures |= {name: getattr(record, name) for name in ("live", "training", "merged")}
        self._swarm = (sync.applied_tokens, seconds.total)
        figures["swarm_tokens_per_s"] = (sync.applied_tokens - tokens) / max(
            seconds.total - at, 1e-9
        )
        spent = {f"{phase}_s": round(value, 3) for phase, value in asdict(seconds).items()}
        self.metric(**figures, **spent)

    def _status(self, state: str) -> PeerStatus:
        sync = self.sync
        at = ("version", "inner_step", "target_steps", "exchanged")
        return PeerStatus(
            **{name: getattr(sync, name) for name in at},
            state=state,
            outer_steps=self.config.budget.outer_steps,
            figures=sync.figures(),
            peers=self.ranks.size if sync.node is None else sync.node.num_peers,
            merged=None if sync.node is None else sync.node.merged,
        )

    def summary(self, wall_s: float, digest: str | None = None) -> Summary:
        """Return this peer's summary; `digest` is that of its anchor, where it is known already."""
        config, sync, figures = self.config, self.sync, self.sync.figures()
        record = None if sync.node is None else sync.node.record()
        mine = PeerSummary(
            peer_id=record.peer if record else f"rank{self.ranks.rank}",
            name=config.run.name or "peer",
            steps=sync.steps,
            anchor_digest=sync.anchor_digest() if digest is None else digest,
            seconds=self.phases.seconds(),
            **figures.shared(),
        )
        return Summary(
            run_id=config.run.id,
            manifest_hash=config.manifest().hash(),
            mode=config.outer.method,
            wall_s=wall_s,
            outer_steps=sync.version,
            tokens=Tokens(sync.tokens, sync.applied_tokens, sync.discarded_tokens),
            eval=Evaluation(figures.eval_loss),
            peers=[mine],
            heals=record.heals if record else 0,
            takeovers=record.takeovers if record else 0,
            contributions=record.contributions if record else (),
        )


def token_share(model: nn.Module, sequence_length: int, device: torch.device) -> float | None:
    """Return the MFU at one token per second: the part of the device's peak (Chowdhery et al. 2022,
    arXiv:2204.02311, appendix B): 6 operations per parameter, 4 where it is frozen, none where its
    rows are only looked up, and 12 LHQT for attention. None without a known peak, for models that
    do not say L, H and Q, and for experts."""
    peak = devices.peak_flops(device)
    if peak is None:
        return None
    any_model: Any = model
    shape = any_model.config.get_text_config()
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    sizes: list[Any] = [getattr(shape, name, None) for name in names]
    layers, heads, width = sizes
    is_sparse = getattr(shape, "num_experts_per_tok", None)
    if is_sparse or not all(isinstance(size, int) for size in sizes):
        return None
    head_dim = getattr(shape, "head_dim", None) or width // heads
    attention = 12 * layers * heads * head_dim * sequence_length
    rows, head = any_model.get_input_embeddings().weight, any_model.get_output_embeddings()
    is_tied = head is not None and head.weight is rows
    multiplied = [p for p in model.parameters() if p is not rows or is_tied]
    products = sum((6 if p.requires_grad else 4) * p.numel() for p in multiplied)
    products += sum(4 * p.numel() for p in multiplied if p.dtype == torch.uint8)  # NF4: two in each
    return float(products + attention) / peak
