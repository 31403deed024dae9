"""The notebook of scripts/examples joins a swarm, and shows its curve."""

import json
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.peers import SMOKE, command, summary_of
from tests.support.places import ROOT


def test_the_notebook_joins_and_draws_the_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = nbformat.read(ROOT / "scripts" / "examples" / "join.ipynb", as_version=4)
    train = ("-m diloco train", *SMOKE, "run.dir=run", "swarm.min_peers=2")
    with command(*train, directory=tmp_path) as starter:
        monkeypatch.setenv("ADDRESS", starter.address())
        client = NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}})
        client.execute()
        starter.done()
    shown = json.dumps(notebook.cells[-1].outputs)
    assert "image/png" in shown
    [joined] = summary_of(tmp_path / "joined")["peers"]
    assert joined["anchor_digest"] == summary_of(tmp_path / "run")["peers"][0]["anchor_digest"]
