"""A joiner's inner optimizer state: a donor's, checked before it is taken; or none, and then its first round is left
out."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.inner_states import anchors, said
from tests.support.peers import SMOKE, command, eventually


@pytest.mark.slow
def test_a_real_joiner_gets_the_state_from_a_peer_that_trains(tmp_path: Path) -> None:
    run = (*SMOKE, "outer.sync_every=10", "budget.outer_steps=40000", "train.step_delay_s=0.02", "eval.every=0")
    one, two = (tmp_path / name for name in ("one", "two"))
    with command("-m", "diloco", "train", *run, f"run.dir={one}", "run.name=one", directory=tmp_path) as donor:
        address = eventually(lambda: (one / "address").exists() and (one / "address").read_text().strip(), "an address")
        eventually(lambda: len(anchors(one, "one")) >= 2, "two outer steps")
        own = (f"run.dir={two}", f"swarm.initial_peers=[{address}]", "run.name=two")
        with command("-m", "diloco", "train", *run, *own, directory=tmp_path) as joiner:
            eventually(lambda: said(two, "inner_state") and len(anchors(two, "two")) >= 2, "outer steps of the joiner")
            joiner.process.send_signal(signal.SIGINT)
            joiner.done()
        donor.process.send_signal(signal.SIGINT)
        donor.done()
    [event] = said(two, "inner_state")
    assert event["bytes"] > 0 and not said(two, "cold_start")
    here, there = anchors(one, "one"), anchors(two, "two")
    assert (both := here.keys() & there.keys()) and all(here[version] == there[version] for version in both)
