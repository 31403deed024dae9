"""Where peers can be called: what hellos say of it, and that it is enough where libp2p knows nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from diloco.config import SwarmConfig
from diloco.swarm.client.watch import request_snapshot
from diloco.swarm.wire.gate import Gate
from diloco.swarm.wire.libp2p import Libp2p
from diloco.swarm.wire.streams import BULK
from tests.support.peers import Crowd


@pytest.mark.slow
def test_a_peer_that_libp2p_cannot_find_is_called_where_it_said_that_it_is(tmp_path: Path) -> None:
    crowds = [Crowd(tmp_path / name, {"w": (8, 8)}, fragments=2) for name in ("one", "two")]
    try:
        [known], [other] = (crowd.start(1) for crowd in crowds)  # neither has ever heard of the other

        async def call() -> str:
            visitor = await Libp2p.visit([known.address], Gate())
            try:
                with pytest.raises(ConnectionError, match="cannot be reached"):
                    await visitor.open(other.peer_id, BULK)
                visitor.where = {other.peer_id: [other.address]}.__getitem__
                return (await request_snapshot(visitor, other.peer_id)).run.answered_by
            finally:
                await visitor.close()

        assert asyncio.run(call()) == other.peer_id
    finally:
        for crowd in crowds:
            crowd.close()


def test_members_find_each_other_through_any_one_that_lives(tmp_path: Path) -> None:
    async def scene() -> None:
        network, peers = SwarmConfig(), list[Libp2p]()
        try:
            for name in ("first", "second", "third"):
                seeds = tuple(peers[-1].addresses[:1]) if peers else ()  # each knows the one before
                joining = network.model_copy(update={"initial_peers": seeds})
                peers.append(await Libp2p.connect(joining, tmp_path / name, Gate(), "run"))
            first, _, third = peers
            await first.announce(60.0)
            assert await third.announced() == {first.me: first.addresses[:4]}
        finally:
            for peer in peers:
                await peer.close()

    asyncio.run(scene())
