"""Nodes over the simulated network whose anchors are downloaded."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.config import OuterConfig, SwarmConfig
from diloco.outer import digest
from diloco.outer.fragments import partition
from diloco.outer.replica import Replica
from diloco.protocol.messages.bulk import PartList
from diloco.sim.network import Link, Network
from diloco.sim.virtual_time import VirtualLoop, virtual_time
from diloco.swarm.conversations import parts
from diloco.swarm.conversations.context import Context
from diloco.swarm.node.node import Node
from diloco.swarm.node.options import NodeOptions, RunSpec
from diloco.swarm.wire.streams import BULK, Stream
from diloco.swarm.wire.transport import Transport

PART = 2**15  # elements: small parts, so that a small fragment has many
NUMEL = 10 * PART + 1000
UP, LATENCY_S = 2e5, 0.01  # bytes per second of every donor, and half a round trip between any two peers
MANIFEST = "0" * 64


class Villager:
    """A node, its parameters, and what it said."""

    node: Node

    def __init__(self, replica: Replica, events: list[tuple[str, dict[str, object]]]) -> None:
        self.replica, self.events = replica, events
        self.opened: list[str] = []  # whom bulk streams were opened to

    def said(self, kind: str) -> list[dict[str, object]]:
        return [fields for one, fields in self.events if one == kind]

    async def exchange(self) -> None:
        """One inner step, of ten tokens."""
        await self.node.send({0: (1, 10)})
        assert await self.node.receive([0]) is not None

    def has(self, version: int) -> bool:
        protocol = self.node.protocol
        agrees = protocol.fragments[0].agrees() and self.replica.digests() == protocol.digests
        return agrees and protocol.versions == [version]


class Village:
    """Peers of one fragment in virtual time; `asked` and `came` list the joiner's parts as (donor, part)."""

    def __init__(self, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch, numel: int = NUMEL) -> None:
        self.loop, self.network, self.numel = loop, Network(loop), numel
        self.peers: dict[str, Villager] = {}
        self.asked: list[tuple[str, int]] = []
        self.came: list[tuple[str, int]] = []
        self.broken = False  # as long as this is set, no part arrives
        fetch_part = parts.fetch_part

        async def watched(context: Context, stream: Stream, listed: PartList, part: int, out: Tensor) -> None:
            if context.protocol.me != "joiner":
                return await fetch_part(context, stream, listed, part, out)
            self.asked.append((stream.peer, part))
            if self.broken:
                raise ConnectionResetError("broken")
            await fetch_part(context, stream, listed, part, out)
            self.came.append((stream.peer, part))

        monkeypatch.setattr(digest, "PART", PART)
        monkeypatch.setattr(parts, "PIECE", PART // 4)
        monkeypatch.setattr(parts, "fetch_part", watched)

    def peer(self, name: str, *seeds: str, values: Tensor, down: float | None = None, min_peers: int = 1) -> Villager:
        """A started node."""
        exact = {"lr": 1.0, "momentum": 0.0, "codec_up": "fp32", "codec_down": "fp32"}
        settings = OuterConfig.parse({"method": "diloco", "sync_every": 1, "fragments": 1, **exact})
        events: list[tuple[str, dict[str, object]]] = []
        replica = Replica({"w": values.clone()}, partition({"w": self.numel}, 1), settings)
        villager = self.peers[name] = Villager(replica, events)

        async def connect(options: NodeOptions) -> Transport:
            transport = self.network.join(name, list(seeds), Link(down=down, latency_s=LATENCY_S))
            open_ = transport.open

            async def watched(peer: str, protocol: str) -> Any:
                villager.opened += [peer] * (protocol == BULK)
                return await open_(peer, protocol)

            transport.open = watched  # type: ignore[method-assign]
            return transport

        options = NodeOptions(RunSpec("run", MANIFEST, "{}"), SwarmConfig(min_peers=min_peers), Path(name), name)
        opening = Node.open(options, replica, lambda kind, fields: events.append((kind, fields)), connect)
        with self.loop.owned_by(name):
            villager.node = self.run(opening)
        return villager

    def donors(self, count: int) -> list[Villager]:
        """That many peers at version 1, the syncer first, in the middle of their second round."""
        values = torch.arange(float(self.numel))
        peers = [self.peer("d0", values=values, min_peers=count)]
        peers += [self.peer(f"d{i}", "d0", values=values, min_peers=count) for i in range(1, count)]
        for peer in peers:
            self.run(peer.node.begin())
        self.round(peers, torch.ones(self.numel))
        for name in self.peers:
            self.network.uplinks[name]._bytes_per_s = UP
        return sorted(peers, key=lambda peer: not peer.replica.aggregates)

    def round(self, peers: list[Villager], step: Tensor) -> None:
        """All of them subtract `step`, exchange, and train again."""

        async def one(peer: Villager) -> None:
            peer.replica.local.tensors["w"].sub_(step)
            await peer.exchange()
            await peer.node.enter("training")

        self.run(self.all(peers, one))

    async def all(self, peers: list[Villager], work: Any) -> None:
        await asyncio.gather(*map(work, peers))

    def joiner(self, down: float | None = None) -> Villager:
        return self.peer("joiner", "d0", values=torch.zeros(self.numel), down=down)

    def joins(self) -> Villager:
        """A joiner that has got the donors' first version."""
        joiner = self.joiner()
        self.until(lambda: joiner.has(1))
        return joiner

    def crash(self, name: str) -> None:
        self.network.crash(name)
        self.loop.kill(name)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 200))

    def until(self, condition: Any) -> float:
        """Let time pass until something holds; returns how long it took."""
        began_at = self.loop.time()

        async def wait() -> None:
            while not condition():
                await asyncio.sleep(0.01)

        self.run(wait())
        return self.loop.time() - began_at

    def parts(self) -> list[int]:
        """The parts that came, in their order."""
        return sorted(part for _, part in self.came)

    def served(self, donor: str) -> int:
        """How many parts came from a donor."""
        return sum(source == donor for source, _ in self.came)


@contextmanager
def village_of(monkeypatch: pytest.MonkeyPatch, numel: int = NUMEL) -> Iterator[Village]:
    """A village in a virtual time of its own, whose peers are closed at the end."""
    with virtual_time() as loop:
        village = Village(loop, monkeypatch, numel)
        yield village
        village.run(village.all(list(village.peers.values()), lambda peer: peer.node.close()))
