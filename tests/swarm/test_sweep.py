"""A sweep of real simulations."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from diloco.cli import sweep as command
from tests.support import warm
from tests.support.command_line import exit_code


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
    assert all(
        json.loads(Path("s", one, "summary.json").read_text())["virtual_s"] == 12 for one in "01"
    )
    assert exit_code(*arguments) == 0
    assert "2 of 2 members have ended before" in capsys.readouterr().out
