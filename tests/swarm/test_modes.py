"""Ways of taking outer steps in real processes over hivemind, and the simulation that has the same
anchors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.peers import SMOKE, diloco, json_lines
from tests.support.presets import RUNS, name_of
from tests.support.simulated import SMALL

# Those that ask something of the swarm that no other does. Other tests run diloco; streaming is
# between the two.
REAL = [run for run in RUNS if name_of(run) in ("async", "decoupled")]


@pytest.mark.parametrize("run", REAL, ids=name_of)
def test_it_runs_for_real_and_all_end_with_one_anchor(run: tuple[str, ...], tmp_path: Path) -> None:
    diloco("local", *SMOKE, *run, "run.dir=run", directory=tmp_path).done()
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert len({peer["anchor_digest"] for peer in summary["peers"]}) == 1
    assert summary["tokens"]["applied"] > 0 and summary["exit"] == 0


def test_four_real_peers_and_their_simulation_have_the_same_anchors(tmp_path: Path) -> None:
    """Sums of int8 payloads do not depend on the order in which they arrive, so nothing is left to
    chance."""
    both = (*SMOKE, *SMALL[1:], "budget.outer_steps=3")
    diloco("local", *both, "run.dir=real", directory=tmp_path).done()
    diloco(
        "simulate",
        *both,
        "run.dir=sim",
        "sim.bandwidth=30000",
        "sim.latency_s=0.1",
        directory=tmp_path,
    ).done()
    real, simulation = (
        json.loads((tmp_path / name / "summary.json").read_text()) for name in ("real", "sim")
    )
    assert not [
        event
        for event in json_lines(tmp_path / "real/events.jsonl")
        if event["kind"] in ("missing", "discarded")
    ]
    assert {peer["anchor_digest"] for peer in real["peers"]} == {
        peer["anchor_digest"] for peer in simulation["peers"]
    }
    assert real["eval"] == simulation["eval"]
    assert real["manifest_hash"] == simulation["manifest_hash"]
