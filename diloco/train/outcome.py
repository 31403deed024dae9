"""What one peer's part of a run came to."""

from __future__ import annotations

from diloco.rundir.summary import Evaluation, PeerSummary, Summary, Tokens
from diloco.train.loop import Trainer

__all__ = ["summary_of"]


def summary_of(trainer: Trainer, wall_s: float, digest: str | None = None) -> Summary:
    """One peer's summary; `digest` is that of its anchor, where it is known already."""
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
    )
