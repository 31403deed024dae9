"""Outer optimizers and codecs from users' code: what is registered, what is refused, and what a
name may import."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.extensions import MISSING, installed
from tests.support.peers import SMOKE, command, eventually


@pytest.mark.slow
def test_who_joins_a_run_whose_optimizer_is_not_installed_here_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    places = {name: tmp_path / name for name in ("installed", "starter", "joiner")}
    for place in places.values():
        place.mkdir()
    folder = Path(installed(places["installed"], lion="lion_code"))
    settings = (
        *SMOKE,
        "outer.optimizer=lion",
        "swarm.min_peers=2",
        "wandb.mode=disabled",
        "swarm.identity_path=key",
    )
    with command(
        "-m", "diloco", "train", *settings, directory=places["starter"], modules=folder
    ) as starter:
        printed = re.compile(r"/ip4/127\.0\.0\.1/tcp/\d+/p2p/\w+(?=\n)")
        address = eventually(lambda: printed.search(starter.stdout), "an address")[0]
        with command(
            "-m", "diloco", "join", address, "--yes", directory=places["joiner"]
        ) as joiner:
            joiner.done(2)
        assert f"outer.optimizer=lion {MISSING}" in joiner.stderr
        with command(
            "-m", "diloco", "join", address, "--yes", directory=places["joiner"], modules=folder
        ) as other:
            other.done()
        starter.done()
