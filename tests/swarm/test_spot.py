"""Contributions checked against data: what raises the loss is left out, and honest work never is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.peers import SMOKE, command, eventually
from tests.support.spots import checked


@pytest.mark.slow
def test_real_peers_are_checked_on_the_units_that_were_leased_to_them(tmp_path: Path) -> None:
    both = ("-m", "diloco", "train", *SMOKE, "outer.sync_every=10", "outer.spot_check=1", "swarm.min_peers=2")
    with command(*both, "run.dir=a", "run.name=a", directory=tmp_path) as first:
        eventually((tmp_path / "a" / "address").exists, "an address")
        joining = ("run.dir=b", "run.name=b", "swarm.initial_peers=@a/address")
        with command(*both, *joining, directory=tmp_path) as second:
            first.done()
            second.done()
    found = [event for peer in "ab" for event in checked(tmp_path / peer)]
    assert {event["fragment"] for event in found} == {0, 1}
    # A peer whose lease comes after its first batch trains in an order of its own, and names fewer sequences.
    assert sum(event["data"] == "leased" for event in found) > len(found) / 2, found
