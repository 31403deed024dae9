"""A sweep of real simulations."""

import sys
from pathlib import Path

import pytest

from diloco.cli import sweep as command
from tests.support import warm
from tests.support.command_line import Typed, typed
from tests.support.peers import summary_of

__all__ = ["typed"]


@pytest.mark.slow
def test_a_sweep_of_simulations_ends_in_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Typed
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "PROGRAM", (sys.executable, "-m", "diloco"))
    monkeypatch.setattr(command.subprocess, "Popen", warm.Popen)
    arguments = "sweep simulate experiment=smoke outer.lr=0.5,0.9 --dir s".split()
    shown = typed(*arguments)
    rows = [line.split()[0] for line in shown.splitlines() if line.startswith("outer.lr=")]
    assert sorted(rows) == ["outer.lr=0.5", "outer.lr=0.9"]  # the lower loss is first
    assert all(summary_of(tmp_path / "s" / one)["virtual_s"] == 12 for one in "01")
    assert "2 of 2 members have ended before" in typed(*arguments)
