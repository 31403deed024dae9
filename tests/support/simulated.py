"""Runs of the simulator."""

from pathlib import Path

from diloco.config import compose
from diloco.sim.run import Simulated, simulate

SMALL = ("experiment=smoke", "local.peers=4", "budget.outer_steps=2", "outer.sync_every=4")
# small twins of the presets
PRESETS = {
    "diloco": [],
    "streaming": ["outer.overlap=1"],
    "async": ["budget.outer_steps=6"],
    "async_nesterov": ["budget.outer_steps=6", "outer.lr=0.1"],
    "decoupled": ["outer.overlap=1", "budget.outer_steps=6"],
    "sparse": [],
    "two_bit": [],
}
SIZES = ["outer.sync_every=4", "outer.fragments=2"]


def name_of(run: tuple[str, ...]) -> str:
    return run[0].partition("=")[2]


RUNS = [(f"outer={name}", *SIZES, *settings) for name, settings in PRESETS.items()]


def simulated(run_dir: Path, *overrides: str) -> Simulated:
    return simulate(compose([*SMALL, f"run.dir={run_dir}", *overrides]), lambda message: None)


def digests(outcome: Simulated) -> set[str | None]:
    return {peer.anchor_digest for peer in outcome.summary.peers}
