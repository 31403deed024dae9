"""The loop of the README runs."""

from __future__ import annotations

from pathlib import Path

from tests.support.pages import block
from tests.support.peers import program


def test_the_swarm_loop_runs_and_learns(tmp_path: Path) -> None:
    code = block("swarm loop") + "\nprint('exchanges', swarm.attachment.version, 'loss', float(loss))\n"
    assert "exchanges 3 " in program(code, directory=tmp_path).stdout
