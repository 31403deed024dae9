"""A joiner's inner optimizer state: a donor's, checked before it is taken; or none, and then its first round is left
out."""

from __future__ import annotations

from pathlib import Path

from tests.support.inner_states import anchors, said
from tests.support.peers import SMOKE, command, eventually


def test_a_real_joiner_gets_the_state_from_a_peer_that_trains(tmp_path: Path) -> None:
    run = (*SMOKE, "run.report=true", "outer.sync_every=10", "budget.outer_steps=40", "train.step_delay_s=0.02")
    first, second = (f"run.dir={tmp_path / name}" for name in ("one", "two"))
    with command("-m", "diloco", "train", *run, first, "run.name=one", directory=tmp_path) as donor:
        written = tmp_path / "one" / "address"
        address = eventually(lambda: written.exists() and written.read_text().strip(), "the donor's address")
        eventually(lambda: len(anchors(tmp_path / "one", "one")) >= 2, "two outer steps")
        seeds = f"swarm.initial_peers=[{address}]"
        with command("-m", "diloco", "train", *run, second, seeds, "run.name=two", directory=tmp_path) as joiner:
            assert joiner.wait() == 0, joiner.stderr
        assert donor.wait() == 0, donor.stderr
    [event] = said(tmp_path / "two", "inner_state")
    assert event["bytes"] > 0 and not said(tmp_path / "two", "cold_start")
    last = [max(anchors(tmp_path / name, name).items()) for name in ("one", "two")]
    assert last[0] == last[1]
