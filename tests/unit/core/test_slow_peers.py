"""Nobody works for nothing: a peer that is much slower than the rest sends what it has after fewer
steps."""

from __future__ import annotations

import pytest

from diloco.core.settings import ProtocolSettings
from tests.support.swarm_without_tensors import Swarm

MODES = {
    "barrier": ProtocolSettings(sync_every=10),
    "quorum": ProtocolSettings(sync_every=10, quorum=2, grace_s=1.0),
    "staggered": ProtocolSettings(sync_every=10, staggered=True, fragments=2),
    "overlap": ProtocolSettings(sync_every=10, overlap=2),
    "few late versions": ProtocolSettings(sync_every=10, late=2),
}


@pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
def test_the_tokens_of_a_peer_that_is_twenty_times_slower_arrive(
    settings: ProtocolSettings,
) -> None:
    swarm = Swarm(settings)
    for name in "abc":
        swarm.add(name)
    slow = swarm.add("d", step_s=20.0)
    swarm.until(600.0)
    assert slow.facts.processed > 25
    for f in slow.facts.fragments:
        assert slow.tip(f.index).book.of("d")[1] > 20
        assert slow.core and slow.core.discarded() <= 1
    others = [peer.core for peer in swarm.peers.values() if peer is not slow]
    assert not any(core.discarded() for core in others if core)
    assert slow.tip().head.number > 25, "the others waited"  # for whole rounds of it: 4


def test_peers_of_one_speed_send_after_a_whole_cycle() -> None:
    swarm = Swarm(ProtocolSettings(sync_every=10))
    for name in "abc":
        swarm.add(name)
    swarm.until(200.0)
    assert {line.tokens for _, head in swarm.made for line, _ in head.lines} == {10}
