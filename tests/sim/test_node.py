"""Production nodes of the new core, over the simulated network, with tiny parameters."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.config import OuterConfig, SwarmConfig
from diloco.outer.fragments import partition
from diloco.outer.replica import Replica
from diloco.sim.network import Link, Network
from diloco.sim.virtual_time import VirtualLoop, virtual_time
from diloco.swarm.node.node import Node
from diloco.swarm.node.options import NodeOptions, RunSpec
from diloco.swarm.node.saved import Saved
from diloco.swarm.wire.transport import Transport

NUMEL = 3000


class Peer:
    """A node with a training loop: each inner step takes a second, and moves the parameters at random."""

    def __init__(
        self, crowd: Crowd, name: str, seeds: list[str], saved: Saved | None = None, step_s: float = 1.0
    ) -> None:
        self.crowd, self.name, self.seeds, self.saved, self.step_s = crowd, name, seeds, saved, step_s
        self.events: list[tuple[str, dict[str, object]]] = []
        self.parameters = {"w": torch.zeros(NUMEL)}
        self.versions: list[int] = []
        self.steps = 0
        self.node: Node | None = None

    async def live(self) -> None:
        crowd = self.crowd
        outer = crowd.outer
        replica = Replica(self.parameters, partition({"w": NUMEL}, outer.fragments), outer)

        async def connect(options: NodeOptions) -> Transport:
            return crowd.network.join(self.name, list(self.seeds), Link(latency_s=0.02))

        options = NodeOptions(
            RunSpec("run", "0" * 64, "{}"), SwarmConfig(min_peers=crowd.min_peers), Path(self.name), self.name,
            saved=self.saved, wall=1e9,
        )  # fmt: skip
        random = torch.Generator().manual_seed(ord(self.name[1]))
        self.node = node = await Node.open(
            options, replica, lambda kind, said: self.events.append((kind, said)), connect
        )
        if await node.begin() is None:
            return
        while self.steps < crowd.steps:
            await asyncio.sleep(self.step_s)
            self.parameters["w"].add_(0.01 * torch.randn(NUMEL, generator=random))
            self.steps += 1
            if (await node.stepped(8, 1.0))[0]:
                assert await node.exchange() is not None
                self.versions.append(node.clock()[0])
        await node.leave(finished=False)
        await node.close()


class Crowd:
    def __init__(self, loop: VirtualLoop, peers: int, steps: int, **outer: Any) -> None:
        self.loop, self.network, self.steps, self.min_peers = loop, Network(loop), steps, peers
        settings = {"method": "diloco", "sync_every": 5, "fragments": 1, "codec_up": "int8", "codec_down": "int8"}
        self.outer = OuterConfig.parse({**settings, **outer})
        self.peers = {f"p{i}": Peer(self, f"p{i}", ["p0"] if i else []) for i in range(peers)}
        self.tasks = {name: self.start(peer) for name, peer in self.peers.items()}

    def start(self, peer: Peer) -> asyncio.Task[None]:
        with self.loop.owned_by(peer.name):
            return self.loop.create_task(peer.live())

    def kill(self, name: str) -> None:
        self.network.crash(name)
        self.loop.kill(name)

    def run(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))


MODES: dict[str, dict[str, Any]] = {
    "barrier": {},
    "fragments": {"fragments": 3},
    "staggered": {"fragments": 3, "staggered": True, "sync_every": 6, "overlap": 1, "mixing": 0.5},
    "quorum": {"quorum": 2, "grace_s": 0.5},
    "at once": {"quorum": 1, "optimizer": "delayed_nesterov"},
    "e3m0": {"codec_up": "e3m0", "codec_down": "e3m0", "error_feedback": 1.0},
}


@pytest.mark.parametrize("mode", MODES)
def test_peers_train_together(mode: str) -> None:
    with virtual_time() as loop:
        crowd = Crowd(loop, 3, 40, **MODES[mode])
        crowd.run(30)
        nodes = [peer.node for peer in crowd.peers.values()]
        tips = [[f.tip.head.id for f in node.core.facts.fragments] for node in nodes if node]
        numbers = [[f.tip.head.number for f in node.core.facts.fragments] for node in nodes if node]
        print(mode, numbers, [peer.steps for peer in crowd.peers.values()])
        assert min(map(min, numbers)) >= 2
        crowd.run(100)
        for name, task in crowd.tasks.items():
            assert task.done(), name
            task.result()
        assert tips
