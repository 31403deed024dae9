"""A sweep of real simulations, here and by a launcher of Hydra."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.cli import sweep as command
from tests.support import warm
from tests.support.exit_codes import exit_code
from tests.support.peers import DEADLINE_S


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_a_sweep_of_simulations_ends_in_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "PROGRAM", (sys.executable, "-m", "diloco"))
    monkeypatch.setattr(command.subprocess, "Popen", warm.Popen)
    arguments = ("sweep", "simulate", "experiment=smoke", "outer.lr=0.5,0.9", "--dir", "s")
    assert exit_code(*arguments) == 0
    shown = capsys.readouterr().out
    rows = [line.split()[0] for line in shown.splitlines() if line.startswith("outer.lr=")]
    assert sorted(rows) == ["outer.lr=0.5", "outer.lr=0.9"]  # the lower loss is first
    assert all(json.loads(Path("s", one, "summary.json").read_text())["virtual_s"] == 12 for one in "01")
    assert exit_code(*arguments) == 0
    assert "2 of 2 members have ended before" in capsys.readouterr().out


@pytest.mark.slow
def test_optuna_chooses_and_submitit_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = """# @package _global_
defaults: [smoke, {override /hydra/sweeper: optuna}, {override /hydra/launcher: submitit_local}, _self_]
hydra:
  sweeper: {n_trials: 2, n_jobs: 2, sampler: {seed: 1}, params: {inner.lr: 'tag(log,interval(1e-3,1e-2))'}}
  launcher: {timeout_min: 2}
"""
    (tmp_path / "configs" / "experiment").mkdir(parents=True)
    (tmp_path / "configs" / "experiment" / "page.yaml").write_text(page)
    command = [sys.executable, "-m", "diloco", "sweep", "simulate", "experiment=page", "--dir", "s"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert all(json.loads(Path("s", one, "member.json").read_text())["exit"] == 0 for one in "01")
    assert len(list(Path("s/.submitit").glob("*/*_result.pkl"))) == 2
    assert "inner.lr: 0.00" in (Path("s") / "optimization_results.yaml").read_text()
