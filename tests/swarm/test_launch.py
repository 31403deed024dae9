"""`diloco launch`: what it writes is valid for its engine, quotes everything, and a SLURM task really trains."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.cli.engines import ENGINES
from diloco.cli.launch import run as launch
from diloco.config import Start
from tests.support import warm
from tests.support.peers import MARK, SMOKE, eventually, json_lines, marked
from tests.support.slurm import started


@pytest.mark.slow
def test_tasks_of_slurm_train_leave_at_the_end_of_their_time_and_go_on(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, out = tmp_path / "the run", tmp_path / "out"
    settings = [f"run.dir='{run_dir}'", "swarm.listen=[/ip4/127.0.0.1/tcp/0]", "swarm.min_peers=3"]
    settings += ["budget.outer_steps=12", "eval.every=0", "train.step_delay_s=0.05"]
    python = (sys.executable, "-S", warm.__file__, "run")  # bash starts it
    monkeypatch.setitem(ENGINES, "slurm", replace(ENGINES["slurm"], python=python))
    assert launch("slurm", [*SMOKE, *settings], Start(), out, True, False, {"peers": 2, "gpus": 0}) == 0
    peers = [run_dir / name for name in ("peer-0", "peer-1")]

    def logs() -> str:
        return "\n".join(f"{path.name}\n{path.read_text()}" for path in out.glob("*.log"))

    def trained(version: int) -> bool:
        lines = [json_lines(peer / "metrics.jsonl") for peer in peers]
        return all(any(line.get("version", 0) >= version for line in one) for one in lines)

    eventually(lambda: trained(2), "training")
    for script, process in started(cluster):
        if script == "peers.sbatch":
            os.kill(process, signal.SIGUSR1)
    eventually(lambda: len(started(cluster)) == 5, "both tasks to be queued again")
    eventually(lambda: all((peer / "summary.json").exists() for peer in peers), "both to leave")
    ended = eventually(lambda: [json.loads((peer / "summary.json").read_text()) for peer in peers], "summaries")
    assert all(2 <= one["outer_steps"] < 12 for one in ended), logs()
    eventually(lambda: all(json.loads((p / "summary.json").read_text())["outer_steps"] == 12 for p in peers), "the end")
    eventually(lambda: not set(marked(os.environ[MARK])) - {os.getpid()}, "host and peers to end")
    first, second = ([json.loads((peer / "summary.json").read_text())["peers"][0]] for peer in peers)
    assert first[0]["anchor_digest"] == second[0]["anchor_digest"], logs()
    for peer in peers:
        assert [line["version"] for line in json_lines(peer / "events.jsonl") if line["kind"] == "resume"], logs()
    assert len(started(cluster)) == 5 and "Traceback" not in logs(), logs()
