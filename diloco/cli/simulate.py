"""`diloco simulate`: a whole run in one process and in virtual time, watched."""

from __future__ import annotations

import time

from rich.console import Console

from diloco.cli.table import LiveView, hear_warnings
from diloco.config import Config
from diloco.rundir.reporting import Message
from diloco.sim.run import simulate

__all__ = ["run"]


def run(config: Config) -> int:
    """Simulate `local.peers` peers; returns the exit code."""
    hear_warnings()
    console = Console()
    peers = config.local.peers
    title = f"{config.run.id}: {peers} simulated peers, {config.outer.method}"
    names = [f"p{index}" for index in range(peers)]
    at_s = 0.0

    def listen(message: Message) -> None:
        nonlocal at_s
        at_s = message.time
        view.update(message)

    # Lines are a record and carry virtual time; a progress bar tells when the command ends, so it runs in real time.
    clock = time.monotonic if console.is_terminal else lambda: at_s
    with LiveView(console, names, config.budget.outer_steps, title, clock) as view:
        outcome = simulate(config, listen)
    summary = outcome.summary
    limit = f" of {config.budget.outer_steps}" if config.budget.outer_steps else ""
    loss = "" if summary.eval.loss is None else f"held-out loss {summary.eval.loss:.3f} nats per token, "
    busy = sum(peer.utilization for peer in summary.peers) / max(1, len(summary.peers))
    console.print(
        f"outer step {summary.outer_steps}{limit}: {loss}{outcome.virtual_s:.0f} virtual seconds at {busy:.0%} "
        f"utilization, {summary.wall_s:.0f} s",
        highlight=False,
    )
    console.print(f"{config.run.dir}: summary.json, metrics.jsonl, events.jsonl, loss.png", highlight=False)
    return summary.exit
