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
            visitor = await Libp2p.client([known.address], Gate())
            try:
                with pytest.raises(ConnectionError, match="cannot be reached"):
                    await visitor.open(other.peer_id, BULK)
                visitor.addresses_of = {other.peer_id: [other.address]}.__getitem__
                return (await request_snapshot(visitor, other.peer_id)).run.answered_by
            finally:
                await visitor.close()

        assert asyncio.run(call()) == other.peer_id
    finally:
        for crowd in crowds:
            crowd.close()


def test_members_find_each_other_through_any_one_that_lives(tmp_path: Path) -> None:
    """Also those of two halves that have lost each other, once two peers have met."""

    async def scene() -> None:
        peers = list[Libp2p]()
        try:
            for name, through in (("first", None), ("second", 0), ("third", None), ("fourth", 2)):
                seeds = () if through is None else tuple(peers[through].addresses[:1])
                network = SwarmConfig().model_copy(update={"initial_peers": seeds})
                peers.append(await Libp2p.connect(network, tmp_path / name, Gate(), "run"))
            first, second, third, fourth = peers
            await first.announce(60.0, [])
            assert await second.announced() == {first.me: first.addresses[:4]} and await fourth.announced() == {}
            second.addresses_of = {third.me: third.addresses[:1]}.__getitem__
            with pytest.raises(ConnectionError, match="not supported"):
                await second.open(third.me, BULK)
            for one, met in ((second, [third.me]), (third, [second.me]), (first, [second.me])):
                await one.announce(60.0, met)
            assert await fourth.announced() == {one.me: one.addresses[:4] for one in (first, second, third)}
        finally:
            for peer in peers:
                await peer.close()

    asyncio.run(scene())
