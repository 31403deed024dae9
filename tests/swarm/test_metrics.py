"""The real wandb, offline."""

from pathlib import Path

from tests.support.peers import command


def test_the_real_wandb_logs_offline_into_the_run_directory(tmp_path: Path) -> None:
    script = """
import os, sys
del os.environ["WANDB_MODE"]  # which would win over the setting
from diloco.config import compose
from diloco.rundir.metrics import RunLog, WandbLog
config = compose(["wandb.mode=offline", f"run.dir={sys.argv[1]}", "run.id=a.b"])
log = WandbLog(config, "p0")
with RunLog(config.run.dir, "p0", log) as run:
    run.metric(version=1, inner_step=2, tokens=3, loss=4.0)
"""
    (tmp_path / "start.py").write_text(script)
    with command(f"start.py {tmp_path}", directory=tmp_path) as started:
        done = started.done()
    assert done.stdout == "" and "the run goes on" not in done.stderr
    assert list((tmp_path / "wandb").glob("offline-run-*/run-a-b-p0.wandb"))
