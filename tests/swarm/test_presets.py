"""Every way of taking outer steps: real processes over hivemind, the simulator, and the small twins of the papers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.peers import SMOKE, diloco
from tests.support.presets import RUNS, name_of

# Those that ask something of the swarm that no other does. Other tests run diloco; streaming is between the two.
REAL = [run for run in RUNS if name_of(run) in ("async", "decoupled")]


@pytest.mark.parametrize("run", REAL, ids=name_of)
def test_it_runs_for_real_and_all_end_with_one_anchor(run: tuple[str, ...], tmp_path: Path) -> None:
    diloco("local", *SMOKE, *run, "run.dir=run", directory=tmp_path).done()
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert len({peer["anchor_digest"] for peer in summary["peers"]}) == 1
    assert summary["tokens"]["applied"] > 0 and summary["exit"] == 0
