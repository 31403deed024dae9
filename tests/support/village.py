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
from diloco.core.events import Part
from diloco.outer.fragments import partition
from diloco.outer.replica import Replica
from diloco.sim.network import Link, Network
from diloco.sim.virtual_time import VirtualLoop, virtual_time
from diloco.swarm.node.node import Node
from diloco.swarm.node.options import NodeOptions, RunSpec
from diloco.swarm.rpc import state
from diloco.swarm.wire.transport import Transport
from diloco.testing.fuzz.crowd import small_pieces

PART = 2**15  # elements: small parts, so that a small fragment has many
NUMEL = 10 * PART + 1000
UP, LATENCY_S = 2e5, 0.01  # bytes per second of every donor, and half a round trip between any two peers
MANIFEST = "0" * 64


class Villager:
    """A node, its parameters, and what it said."""

    node: Node

    def __init__(self, replica: Replica, events: list[tuple[str, dict[str, object]]]) -> None:
        self.replica, self.events = replica, events

    @property
    def name(self) -> str:
        return self.node.core.facts.me

    @property
    def version(self) -> int:
        return self.node.core.facts.control.tip.head.number

    @property
    def is_author(self) -> bool:
        facts = self.node.core.facts
        return facts.author_of(facts.control) == facts.me

    def said(self, kind: str) -> list[dict[str, object]]:
        return [fields for one, fields in self.events if one == kind]

    async def round(self, step: Tensor | float) -> None:
        """One inner step, of ten tokens, and the exchange."""
        self.replica.local.tensors["w"].sub_(step)
        await self.node.stepped(10, 1.0)
        assert await self.node.exchange() is not None


class Village:
    """Peers of one fragment in virtual time; `asked` and `came` list the joiner's parts as (donor, part), and `at`
    when each came.
    """

    def __init__(self, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch, numel: int = NUMEL) -> None:
        self.loop, self.network, self.numel = loop, Network(loop), numel
        self.peers: dict[str, Villager] = {}
        self.asked: list[tuple[str, int]] = []
        self.came: list[tuple[str, int]] = []
        self.at: list[float] = []
        self.broken = False  # as long as this is set, no part arrives
        ask = state.ask

        async def watched(stream: Any, get: Any, replica: Replica, *rest: Any) -> Any:
            joiner = self.peers.get("joiner")
            if joiner is None or replica is not joiner.replica:
                return await ask(stream, get, replica, *rest)
            self.asked.append((stream.peer, get.part))
            if self.broken:
                raise ConnectionResetError("broken")
            answer = await ask(stream, get, replica, *rest)
            if isinstance(answer, Part):
                self.came.append((stream.peer, answer.part))
                self.at.append(loop.time())
            return answer

        monkeypatch.setattr(state, "ask", watched)

    def peer(self, name: str, *seeds: str, values: Tensor, down: float | None = None, **options: Any) -> Villager:
        """A started node."""
        exact = {"lr": 1.0, "momentum": 0.0, "codec_up": "fp32", "codec_down": "fp32"}
        settings = OuterConfig.parse({"method": "diloco", "sync_every": 1, "fragments": 1, **exact})
        events: list[tuple[str, dict[str, object]]] = []
        replica = Replica({"w": values.clone()}, partition({"w": self.numel}, 1), settings)
        villager = self.peers[name] = Villager(replica, events)

        async def connect(options: NodeOptions) -> Transport:
            return self.network.join(name, list(seeds), Link(down=down, latency_s=LATENCY_S))

        network = SwarmConfig(min_peers=options.pop("min_peers", 1))
        chosen = NodeOptions(RunSpec("run", MANIFEST, "{}"), network, Path(name), name, wall=1e9, **options)
        opening = Node.open(chosen, replica, lambda kind, fields: events.append((kind, fields)), connect)
        with self.loop.owned_by(name):
            villager.node = self.run(opening)
        return villager

    def donors(self, count: int) -> list[Villager]:
        """That many peers at version 1, the author first."""
        values = torch.arange(float(self.numel))
        peers = [self.peer("d0", values=values, min_peers=count)]
        peers += [self.peer(f"d{i}", "d0", values=values, min_peers=count) for i in range(1, count)]
        self.run(self.all(peers, lambda peer: peer.node.begin()))
        self.round(peers, 1.0)
        for name in self.peers:
            self.network.uplinks[name]._bytes_per_s = UP
        return sorted(peers, key=lambda peer: not peer.is_author)

    def round(self, peers: list[Villager], step: Tensor | float) -> None:
        """All of them subtract `step` and exchange."""
        self.run(self.all(peers, lambda peer: peer.round(step)))

    async def all(self, peers: list[Villager], work: Any) -> None:
        await asyncio.gather(*map(work, peers))

    def joiner(self, down: float | None = None) -> Villager:
        """A peer that comes later, and does not train."""
        return self.peer("joiner", "d0", values=torch.zeros(self.numel), down=down, trains=False)

    def joins(self) -> Villager:
        """A joiner that has got the donors' first version."""
        joiner = self.joiner()
        self.until(lambda: joiner.version == 1)
        return joiner

    def crash(self, name: str) -> None:
        self.network.crash(name)
        self.loop.kill(name)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 200))

    def until(self, condition: Any) -> None:
        """Let time pass until something holds."""

        async def wait() -> None:
            while not condition():
                await asyncio.sleep(0.01)

        self.run(wait())

    def parts(self) -> list[int]:
        """The parts that came, in their order."""
        return sorted(part for _, part in self.came)

    def served(self, donor: str) -> int:
        """How many parts came from a donor."""
        return sum(source == donor for source, _ in self.came)


@contextmanager
def village_of(monkeypatch: pytest.MonkeyPatch, numel: int = NUMEL) -> Iterator[Village]:
    """A village in a virtual time of its own, whose peers are closed at the end."""
    with virtual_time() as loop, small_pieces(PART // 4, PART):
        village = Village(loop, monkeypatch, numel)
        yield village
        village.run(village.all(list(village.peers.values()), lambda peer: peer.node.close()))
