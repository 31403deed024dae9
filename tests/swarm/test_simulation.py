"""Whole runs in virtual time: equal anchors, the same again with the same seed, failures, and the real swarm."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.peers import SMOKE, diloco, json_lines
from tests.support.simulated import SMALL


def test_four_real_peers_and_their_simulation_have_the_same_anchors(tmp_path: Path) -> None:
    """Sums of int8 payloads do not depend on the order in which they arrive, so nothing is left to chance."""
    both = (*SMOKE, *SMALL[1:], "budget.outer_steps=3")
    diloco("local", *both, "run.dir=real", directory=tmp_path).done()
    diloco("simulate", *both, "run.dir=sim", "sim.bandwidth=30000", "sim.latency_s=0.1", directory=tmp_path).done()
    real, simulation = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("real", "sim"))
    assert not [
        event for event in json_lines(tmp_path / "real/events.jsonl") if event["kind"] in ("missing", "discarded")
    ]
    assert {peer["anchor_digest"] for peer in real["peers"]} == {peer["anchor_digest"] for peer in simulation["peers"]}
    assert real["eval"] == simulation["eval"]
    assert real["manifest_hash"] == simulation["manifest_hash"]
