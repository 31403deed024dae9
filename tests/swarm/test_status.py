"""Seeing a swarm: what a node remembers, how it travels, and what `diloco status` makes of it."""

import asyncio
import json
from pathlib import Path

import pytest

from diloco.config.address import Address
from diloco.errors import SwarmError
from diloco.messages.snapshot import Snapshot
from diloco.swarm.client.watch import SwarmWatcher
from tests.support.peers import Crowd, dead_port, diloco


def test_a_visitor_sees_a_swarm_and_finds_another_peer_when_the_first_dies(tmp_path: Path) -> None:
    crowd = Crowd(tmp_path, {"w": (8, 8)}, fragments=2)
    try:
        peers = crowd.start(2)
        watched, other = peers

        async def watch() -> tuple[Snapshot, Snapshot]:
            async with SwarmWatcher(Address.parse(watched.address).peers) as visitor:
                before = await visitor.ask()
                await asyncio.to_thread(watched.close)
                return before, await visitor.ask()

        before, after = asyncio.run(watch())
        assert (before.run.answered_by, after.run.answered_by) == (watched.peer_id, other.peer_id)
        places = {peer.peer_id: peer.address for peer in peers}
        assert {row.peer_id: row.addresses[0] for row in before.peers} == places
        assert {row.author for row in before.fragments} <= {peer.peer_id for peer in peers}
        assert len(other.members) <= 1  # who only looks is no member

        with pytest.raises(SwarmError, match="cannot be reached"):
            asyncio.run(watch())
    finally:
        crowd.close()


def test_status_prints_one_object_with_the_documented_lists_and_exits_with_three_where_nobody_is(
    tmp_path: Path,
) -> None:
    crowd = Crowd(tmp_path, {"w": (8, 8)}, fragments=2)
    try:
        [peer] = crowd.start(1)
        csv = f"--json --csv {tmp_path / 'table.csv'}"
        done = diloco("status", peer.address, csv, directory=tmp_path).done()
        content = json.loads(done.stdout)
        assert all(isinstance(content[name], list) for name in ("peers", "fragments", "rounds"))
        ledger = content["ledger"]
        assert ledger["processed"] == ledger["applied"] + ledger["discarded"] + ledger["in_flight"]
        table = (tmp_path / "table.csv").read_text()
        assert table.startswith("peer_id,name,outer_steps,tokens,bytes,")
        tables = diloco("status", peer.address, directory=tmp_path).done()
        assert "fragments" in tables.stdout
        nobody = f"/ip4/127.0.0.1/tcp/{dead_port()}/p2p/{peer.peer_id}"
        dead = diloco("status", nobody, directory=tmp_path).done(3)
        assert dead.stderr.startswith(f"diloco: error: {nobody} cannot be reached")
        assert dead.stderr.count("\n") == 1
    finally:
        crowd.close()
