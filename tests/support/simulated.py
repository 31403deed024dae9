"""Runs of the simulator."""

from __future__ import annotations

from pathlib import Path

from diloco.config import compose
from diloco.sim.run import Simulated, simulate

SMALL = ("experiment=smoke", "local.peers=4", "budget.outer_steps=2", "outer.sync_every=4")


def simulated(run_dir: Path, *overrides: str) -> Simulated:
    return simulate(compose([*SMALL, f"run.dir={run_dir}", *overrides]), lambda message: None)


def digests(outcome: Simulated) -> set[str | None]:
    return {peer.anchor_digest for peer in outcome.summary.peers}
