"""The README keeps its word: its code runs, its commands exist, its tree is the tree."""

from __future__ import annotations

import subprocess
import sys

from tests.support.pages import block
from tests.support.peers import DEADLINE_S


def test_the_swarm_loop_runs_and_learns() -> None:
    code = block("swarm loop") + "\nprint('exchanges', swarm.attachment.version, 'loss', float(loss))\n"
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE_S, capture_output=True, text=True)
    assert "exchanges 3 " in done.stdout
