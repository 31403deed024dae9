"""Work between two rounds, such as evaluation and checkpoints: whoever is at it is waited for, and nothing tears."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from diloco.errors import SwarmError
from diloco.protocol.fragment import Busy
from diloco.swarm.node.node import Node
from tests.support.village import Village, Villager, village_of

NUMEL = 1000


@pytest.fixture
def village(monkeypatch: pytest.MonkeyPatch) -> Iterator[Village]:
    with village_of(monkeypatch, NUMEL) as village:
        yield village


async def step_and_exchange(peer: Villager, busy_s: float = 0.0) -> None:
    """Work between two rounds, announced as a pause, and then a round of one inner step of a tenth of a second."""
    await peer.node.pause()
    await asyncio.sleep(busy_s)
    await peer.node.enter("training")
    peer.replica.local.tensors["w"].sub_(1.0)
    peer.node.protocol.progress(1, 1, 10.0, 10)
    await asyncio.sleep(0.1)
    await peer.exchange()


def test_tensors_of_a_checkpoint_move_when_the_peer_goes_on(village: Village) -> None:
    peers = village.donors(2)
    village.run(village.all(peers, step_and_exchange))
    saved = {peer: village.run(peer.node.snapshot()) for peer in peers}
    assert all(saved[peer].anchors[0] is peer.replica.anchors[0] for peer in peers)
    assert all(peer.node.context.locks[0]._readers == 1 for peer in peers)
    village.run(village.all(peers, step_and_exchange))
    assert all(peer.node.context.locks[0]._readers == 0 for peer in peers)
    assert [peer.node.protocol.versions for peer in peers] == [[3], [3]]


def test_a_peer_that_leaves_first_ends_the_version_that_it_makes(village: Village) -> None:
    """Also right after a checkpoint, whose tensors a version waits for."""
    peers = village.donors(2)
    village.run(village.all(peers, step_and_exchange))
    [leaver] = [peer for peer in peers if peer.node.protocol.syncers]
    [heir] = [peer for peer in peers if peer is not leaver]
    village.run(leaver.node.snapshot())
    fragment = leaver.node.protocol.fragments[0]
    fragment.busy = Busy.MERGING

    async def leave() -> None:
        leaving = asyncio.create_task(leaver.node.leave(False))
        await asyncio.sleep(1.0)
        assert leaver.node.protocol.state != "leaving" and not leaver.node.context.locks[0]._readers
        fragment.busy = Busy.NO
        leaver.node.context.tasks.notify()
        await leaving

    village.run(leave())
    assert 0 in heir.node.protocol.syncers and not leaver.said("gave_up_waiting")


def test_a_node_that_cannot_join_leaves_nothing_open(village: Village, monkeypatch: pytest.MonkeyPatch) -> None:
    [donor] = village.donors(1)

    async def nobody(mesh: object) -> list[str]:
        return []

    monkeypatch.setattr("diloco.swarm.node.mesh.ControlMesh.start", nobody)
    with pytest.raises(SwarmError, match=r"answer, but no diloco peer of run\.id=run is there"):
        village.joiner()
    assert "joiner" not in village.network._transports and not village.loop.tasks_of("joiner")
    del village.peers["joiner"]
    assert isinstance(donor.node, Node)
