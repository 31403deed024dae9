"""Ways of taking outer steps in real processes over hivemind, and the simulation that has the same
anchors."""

from pathlib import Path

import pytest

from tests.support.peers import SMOKE, diloco, json_lines, summary_of
from tests.support.simulated import RUNS, SMALL, name_of

# Those that ask something of the swarm that no other does. Other tests run diloco; streaming is
# between the two.
REAL = [run for run in RUNS if name_of(run) in ("async", "decoupled")]


@pytest.mark.parametrize("run", REAL, ids=name_of)
def test_it_runs_for_real_and_all_end_with_one_anchor(run: tuple[str, ...], tmp_path: Path) -> None:
    two = ("local.peers=2", *SMOKE, *run, "run.dir=run")
    diloco("local", *two, directory=tmp_path).done()
    summary = summary_of(tmp_path / "run")
    assert len({peer["anchor_digest"] for peer in summary["peers"]}) == 1
    assert summary["tokens"]["applied"] > 0 and summary["exit"] == 0


def test_four_real_peers_and_their_simulation_have_the_same_anchors(tmp_path: Path) -> None:
    """Sums of int8 payloads do not depend on the order in which they arrive, so nothing is left to
    chance."""
    both = (*SMOKE, *SMALL[1:])
    diloco("local", *both, "run.dir=real", directory=tmp_path).done()
    thin = "sim.bandwidth=30kB sim.latency_s=0.1"
    diloco("simulate", *both, "run.dir=sim", thin, directory=tmp_path).done()
    real, simulation = (summary_of(tmp_path / name) for name in ("real", "sim"))
    kinds = {event["kind"] for event in json_lines(tmp_path / "real" / "events.jsonl")}
    assert not kinds & {"missing", "discarded"}
    anchors = [{peer["anchor_digest"] for peer in one["peers"]} for one in (real, simulation)]
    assert anchors[0] == anchors[1] and real["eval"] == simulation["eval"]
    assert real["manifest_hash"] == simulation["manifest_hash"]
