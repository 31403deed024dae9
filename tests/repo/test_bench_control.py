"""The benchmark of the control plane runs, and finds what a node of 256 peers hears and does per second bounded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.protocol.pace import HEARTBEATS_PER_S, STATUSES_PER_S, TICK_S
from tests.support.places import SCRIPTS

SCRIPT = SCRIPTS / "bench_control"


@pytest.mark.slow
def test_what_a_node_hears_and_does_is_bounded_in_a_large_swarm(tmp_path: Path) -> None:
    """Counts, and no seconds: those depend on the machine."""
    out = tmp_path / "rows.json"
    subprocess.run([sys.executable, str(SCRIPT), "--quick", "--json", str(out)], check=True, capture_output=True)
    rows = json.loads(out.read_text())["rows"]
    assert [(row["peers"], row["role"]) for row in rows] == [(256, "member"), (256, "syncer")]
    for row in rows:
        assert 200 < row["heard_per_s"] < HEARTBEATS_PER_S + STATUSES_PER_S + 24
        assert row["ticks_per_s"] < 1 / TICK_S + 4
