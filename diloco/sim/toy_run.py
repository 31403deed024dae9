"""`diloco simulate sim.mode=toy`: the toy from configuration to summary, with the logs of a run."""

from __future__ import annotations

import time

from diloco.config import Config
from diloco.protocol.phase_seconds import PhaseSeconds
from diloco.rundir.metrics import RunLog
from diloco.rundir.reporting import Listener
from diloco.rundir.summary import Evaluation, PeerSummary, Summary, Tokens
from diloco.sim.outcome import Simulated
from diloco.sim.toy import Toy, ToyPeer

__all__ = ["simulate_toy"]


def simulate_toy(config: Config, listen: Listener) -> Simulated:
    """Run it; leaves metrics.jsonl (`eval_loss` is the mean square distance from the optimum) and events.jsonl."""
    began_at, now = time.monotonic(), 0.0
    with RunLog(config.run.dir, "swarm", clock=lambda: now) as log:

        def on_version(toy: Toy) -> None:
            nonlocal now
            now, version = toy.now, toy.versions[0]
            if version % max(1, config.eval.every) == 0:
                log.metric(version=version, inner_step=toy.steps, tokens=toy.applied_tokens, eval_loss=toy.loss)
                status = {"version": version, "eval_loss": toy.loss, "tokens": toy.applied_tokens}
                listen({"t": "status", "peer": "swarm", "time": now, "state": "training", **status})

        toy = Toy(config, on_version)
        toy.run()
        for at, kind, peer in toy.log:
            now = at
            log.event(kind, subject=peer)
    return Simulated(_summary(toy, config, time.monotonic() - began_at), toy.now)


def _summary(toy: Toy, config: Config, wall_s: float) -> Summary:
    processed = toy.steps * config.inner.batch_size * config.data.sequence_length
    discarded = sum(peer.discarded_tokens for peer in toy.peers)
    return Summary(
        run_id=config.run.id,
        manifest_hash=config.manifest().hash(),
        mode=config.outer.method,
        wall_s=wall_s,
        outer_steps=toy.versions[0],
        tokens=Tokens(processed, toy.applied_tokens, discarded, processed - toy.applied_tokens - discarded),
        eval=Evaluation(toy.loss),
        peers=[_peer(toy, peer, config) for peer in toy.peers],
        heals=0,
        takeovers=sum(lease.term - 1 for lease in toy.leases),
        exit=0,
    )


def _peer(toy: Toy, peer: ToyPeer, config: Config) -> PeerSummary:
    ended_at = toy.now if peer.ended_at is None else peer.ended_at
    compute = peer.steps * peer.step_s
    tokens = peer.steps * config.inner.batch_size * config.data.sequence_length
    seconds = PhaseSeconds(compute=compute, wait=max(0.0, ended_at - peer.began_at - compute))
    return PeerSummary(peer.name, peer.name, peer.steps, tokens, None, 0, 0, seconds)
