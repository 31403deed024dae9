"""The real wandb, offline."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.peers import DEADLINE_S
from tests.support.places import ROOT


def test_the_real_wandb_logs_offline_into_the_run_directory(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom diloco.config import compose\nfrom diloco.rundir.metrics import RunLog,"
        " WandbLog\nconfig = compose(['wandb.mode=offline', f'run.dir={sys.argv[1]}',"
        " 'run.id=a.b'])\nlog = WandbLog(config, 'p0')\nwith RunLog(config.run.dir, 'p0', log) as"
        " run: run.metric(version=1, inner_step=2, tokens=3, loss=4.0)"
    )
    options = {
        "check": True,
        "cwd": ROOT,
        "capture_output": True,
        "text": True,
        "timeout": DEADLINE_S,
    }
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], **options)
    assert done.stdout == "" and "the run goes on" not in done.stderr
    assert list((tmp_path / "wandb").glob("offline-run-*/run-a-b-p0.wandb"))
