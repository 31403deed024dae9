"""Peers that are out of phase: with the presets without a barrier everybody's contributions are merged."""

from __future__ import annotations

from collections import Counter

import pytest

from diloco.config import compose
from diloco.protocol.fragment import CONTROL_FRAGMENT
from diloco.testing.fuzz.crowd import Member
from tests.support.slow import slow
from tests.support.stories import story

STEP_S = 0.5


def out_of_phase(preset: str, sync_every: int, paces: list[float], rounds: int) -> tuple[Counter[str], Counter[str]]:
    """Peers of these step times begin one after another, evenly over a round, and train for some rounds.

    Returns how many contributions of each peer were merged, and how many were discarded, once all of them trained.
    """
    overrides = [f"outer={preset}", f"outer.sync_every={sync_every}", "outer.fragments=2"]
    outer = compose(["experiment=smoke", *overrides]).outer.model_dump(exclude={"method", "fragments"})
    with story(fragments=2, outer_steps=None, outer=outer, heartbeat_s=2.0) as swarm:
        for number, step_s in enumerate(paces):
            swarm.crowd.start(Member(f"p{number:02}", step_s=step_s, latency_s=0.02))
            swarm.run_for(STEP_S + sync_every * STEP_S / len(paces))
        swarm.run_for(2 * sync_every * max(paces))
        begun = len(swarm.crowd.story)
        newest = max(node.protocol.versions[CONTROL_FRAGMENT] for node in swarm.nodes().values())
        swarm.run_for(rounds * sync_every * max(paces))
        merged: Counter[str] = Counter()
        for made in swarm.made():
            if made.fragment == CONTROL_FRAGMENT and made.version > newest:
                merged.update(whose.peer for whose, _ in made.contributions)
        told = [line.split() for line in swarm.crowd.story[begun:]]
    return merged, Counter(words[1] for words in told if words[2] == "discarded")


@pytest.mark.parametrize(
    ("preset", "sync_every", "paces"),
    [slow("decoupled", 24, [0.5 + 0.24 / 7 * number for number in range(8)]), ("async", 12, [STEP_S] * 16)],
)
def test_peers_out_of_phase_are_all_merged(preset: str, sync_every: int, paces: list[float]) -> None:
    merged, discarded = out_of_phase(preset, sync_every, paces, rounds=2)
    assert len(merged) == len(paces) and min(merged.values()) >= 1, "nobody is left out"
    assert discarded.total() <= 0.05 * (merged.total() + discarded.total())
