"""A program that uses the package is changed by nothing of it, once its peer has left."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.places import ROOT

LIBRARIES = "import torch, omegaconf, hydra, transformers, hivemind, hivemind.p2p\n"
IMPORTS = """
def work():
    import diloco, diloco.errors, diloco.cli.main, diloco.config
    from diloco import RankGroup, Swarm, compare, register
"""
ATTACHES = """
def work():
    swarm = Swarm(run_id="guest", identity="identity.key", sync_every=2, quiet=True)
    with swarm, swarm.attach(model, optimizer):
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert swarm.steps == 4
"""
SETUP = """
from diloco import Swarm
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""


def changed_by(work: str, place: Path, setup: str = "") -> list[str]:
    code = f"{LIBRARIES}from tests.support.guest import changes\n{setup}{work}"
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(place)}
    command = [sys.executable, "-W", "ignore", "-c", f"{code}\nprint(changes(work))"]
    ended = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return list(eval(ended.stdout.splitlines()[-1]))


def test_an_import_changes_nothing_of_the_process(tmp_path: Path) -> None:
    assert changed_by(IMPORTS, tmp_path) == []


def test_a_peer_that_has_left_leaves_nothing_changed(tmp_path: Path) -> None:
    assert changed_by(ATTACHES, tmp_path, SETUP) == []


@pytest.mark.parametrize(
    ("statement", "table"),
    [
        ("import sys; sys.excepthook = print", "hooks: sys.excepthook"),
        ("import logging; logging.getLogger().setLevel(5)", "logging: root"),
        ("hivemind.p2p.P2P._UNIX_SOCKET_PREFIX = ''", "patched: hivemind.p2p.p2p_daemon.P2P"),
        ("torch.nn.Linear.forward = print", "patched: torch.nn.modules.linear.Linear.forward"),
        ("omegaconf.OmegaConf.register_new_resolver('x', print)", "resolvers: x"),
    ],
)
def test_what_is_changed_is_found(statement: str, table: str, tmp_path: Path) -> None:
    found = changed_by(f"\ndef work():\n    {statement}\n", tmp_path)
    assert any(one.startswith(table) for one in found), found
