"""Work between two rounds, such as evaluation and checkpoints: whoever is at it is waited for, and nothing tears."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from diloco.errors import SwarmError
from tests.support.village import Village, Villager, village_of

NUMEL = 1000


@pytest.fixture
def village(monkeypatch: pytest.MonkeyPatch) -> Iterator[Village]:
    with village_of(monkeypatch, NUMEL) as village:
        yield village


async def pause_and_round(peer: Villager, busy_s: float = 0.0) -> None:
    """Work between two rounds, announced as a pause, and then a round of one inner step of a tenth of a second."""
    await peer.node.pause()
    await asyncio.sleep(busy_s)
    await peer.node.resume()
    await asyncio.sleep(0.1)
    await peer.round(1.0)


def readers(peer: Villager) -> int:
    """Who holds the anchor in its place."""
    return peer.node.context.locks[0]._readers


def test_who_evaluates_for_long_is_waited_for(village: Village) -> None:
    peers = village.donors(3)
    village.run(village.all(peers, lambda peer: pause_and_round(peer, 90.0 if peer is peers[-1] else 0.0)))
    assert [peer.version for peer in peers] == [2, 2, 2]
    assert {len(peer.node.core.facts.control.tip.head.counted) for peer in peers} == {3}
    assert not any(peer.said("missing") or peer.said("stuck") for peer in peers)


def test_tensors_of_a_checkpoint_move_when_the_peer_goes_on(village: Village) -> None:
    peers = village.donors(2)
    saved = {peer: village.run(peer.node.snapshot(copies=False)) for peer in peers}
    assert all(saved[peer].anchors[0] is peer.replica.anchors[0] for peer in peers)
    assert [readers(peer) for peer in peers] == [1, 1]
    village.run(village.all(peers, pause_and_round))
    assert [readers(peer) for peer in peers] == [0, 0] and [peer.version for peer in peers] == [2, 2]


def test_a_peer_that_leaves_right_after_a_checkpoint_hands_over(village: Village) -> None:
    """What it has learned gets in, and no version waits for the tensors of the checkpoint."""
    leaver, heir = village.donors(2)
    village.run(leaver.node.snapshot(copies=False))
    leaver.replica.local.tensors["w"].sub_(1.0)
    village.run(leaver.node.stepped(10, 1.0))
    village.run(village.all([leaver, heir], lambda peer: peer.node.leave(False) if peer is leaver else peer.round(1.0)))
    assert readers(leaver) == 0 and not leaver.said("stuck")
    village.round([heir], 1.0)
    tip = heir.node.core.facts.control.tip
    assert heir.is_author and {peer: tip.book.of(peer)[1] for peer in (leaver.name, heir.name)} == {
        leaver.name: 20, heir.name: 30
    }  # fmt: skip


def test_a_node_that_cannot_join_leaves_nothing_open(village: Village, monkeypatch: pytest.MonkeyPatch) -> None:
    village.donors(1)

    async def nobody(mesh: object) -> list[str]:
        return []

    monkeypatch.setattr("diloco.swarm.node.mesh.ControlMesh.start", nobody)
    with pytest.raises(SwarmError, match=r"answer, but no diloco peer of run\.id=run is there"):
        village.joiner()
    assert "joiner" not in village.network._transports and not village.loop.tasks_of("joiner")
    del village.peers["joiner"]
