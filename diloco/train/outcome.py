"""What one peer's part of a run came to, beside what was predicted."""

from __future__ import annotations

import math

from diloco.rundir.summary import Evaluation, PeerSummary, Summary, Tokens
from diloco.train.loop import Trainer
from diloco.train.planning import Exchange, Link, predict

__all__ = ["summary_of"]


def summary_of(trainer: Trainer, wall_s: float, bandwidth: float | None = None, digest: str | None = None) -> Summary:
    """One peer's summary; `bandwidth` is that of its link in bytes per second, where it is known, and `digest` that of
    its anchor.
    """
    config, sync, view = trainer.config, trainer.sync, trainer.sync.view
    sent, received = trainer.traffic()
    mine = PeerSummary(
        peer_id=view.node.protocol.me if view else f"rank{trainer.island.rank}",
        name=config.run.name or "peer",
        steps=sync.steps,
        tokens=sync.tokens,
        anchor_digest=sync.anchor_digest() if digest is None else digest,
        bytes_sent=sent,
        bytes_received=received,
        seconds=trainer.phases.seconds(),
    )
    return Summary(
        run_id=config.run.id,
        manifest_hash=config.manifest().hash(),
        mode=config.outer.method,
        wall_s=wall_s,
        outer_steps=sync.version,
        tokens=Tokens(sync.tokens, sync.applied_tokens, sync.discarded_tokens),
        eval=Evaluation(trainer.eval_loss),
        peers=[mine],
        heals=view.node.protocol.heals if view else 0,
        takeovers=view.node.protocol.takeovers if view else 0,
        contributions=view.contributions() if view else (),
        predicted=_predicted(trainer, bandwidth or config.swarm.upload_limit),
    )


def _predicted(trainer: Trainer, bandwidth: float | None) -> dict[str, float | None] | None:
    """What `diloco plan` says of this run, given its measured inner step and the limit of its link."""
    sync, compute_s = trainer.sync, trainer.phases.seconds().compute
    if not sync.steps or not compute_s:
        return None
    numel = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    bits_per_s = math.inf if bandwidth is None else 8 * bandwidth
    exchange = Exchange.of(trainer.config.outer, numel, max(trainer.most_peers, 1))
    found = predict(exchange, Link(bits_per_s), compute_s / sync.steps)
    return {
        "utilization": found.utilization,
        "bytes_sent": round(found.bytes_sent * sync.steps / exchange.sync_every),
        "step_s": compute_s / sync.steps,
        "bits_per_s": None if bandwidth is None else bits_per_s,
    }
