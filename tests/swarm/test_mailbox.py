"""Processes that exchange through a directory: the page of the mailbox, followed word for word."""

from pathlib import Path

import pytest

from tests.support.pages import DOCS, typed
from tests.support.peers import SMOKE, command, eventually, summary_of

pytestmark = pytest.mark.usefixtures("own_home")
PAGE_URL = "file:///tmp/diloco-box"


def test_the_page_of_the_mailbox(own_home: Path, tmp_path: Path) -> None:
    """With a smaller model and quicker looks; who joins knows nothing but the URL."""
    train, join, doctor = (
        line.replace(PAGE_URL, f"file://{tmp_path}/box").replace("experiment=quickstart", SMOKE[0])
        for line in typed(DOCS / "mailbox.md")[:3]
    )
    small = "run.dir=run budget.outer_steps=3 outer.sync_every=4 eval.every=0"
    quick = "swarm.heartbeat_s=0.2"
    with command("-m", train, small, quick, directory=tmp_path) as first:
        eventually((tmp_path / "box" / "run").exists, "the run is in the store")
        with command("-m", join, quick, directory=tmp_path) as second:
            first.done()
            second.done()
    [guest] = own_home.glob("peer-*/runs/box")
    there, here = summary_of(tmp_path / "run"), summary_of(guest)
    digests = {peer["anchor_digest"] for run in (there, here) for peer in run["peers"]}
    assert there["outer_steps"] == here["outer_steps"] == 3 and len(digests) == 1
    with command("-m", doctor, "train.device=cpu", directory=tmp_path) as checked:
        said = checked.done().stdout
    assert "an object can be written in " in said and "nothing stands in the way" in said
    assert not [*tmp_path.glob("box/doctor/*")]
