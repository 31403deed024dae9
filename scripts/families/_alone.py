"""Swarms of a family's loop, in virtual time and in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from diloco.attach.swarm import Swarm
from diloco.sim.lockstep import Lockstep
from diloco.sim.network import Network, PeerLink
from diloco.sim.peers import SimRuntime
from diloco.sim.virtual_time import VirtualLoop, virtual_time
from diloco.swarm.node.options import NodeOptions
from diloco.swarm.wire.transport import Transport

STEP_S = 1.0
# An exchange changes nothing in a swarm of one: rate 1, no momentum, nothing rounded.
NEUTRAL = {"lr": 1.0, "momentum": 0.0, "codec_up": "fp32", "codec_down": "fp32", "sync_every": 4}


class Peer:
    """What the loop of a peer is told: `swarm` gives a swarm, `step` lets time pass."""

    def __init__(self, name: str, loop: VirtualLoop, network: Network, work: Work) -> None:
        self.name, self._loop, self._network = name, loop, network
        self.lockstep: Lockstep[None] = Lockstep(lambda: work(self), name)
        self.events: list[tuple[str, dict[str, Any]]] = []

    def settings(self, **settings: Any) -> dict[str, Any]:
        """What a `Swarm`, or a callback of the product, is told."""
        return {
            "run_id": "run",
            "name": self.name,
            **NEUTRAL,
            **settings,
            "runtime": SimRuntime(self._loop, self.lockstep, self._connect),
            "on_event": lambda kind, fields: self.events.append((kind, fields)),
            "quiet": True,
        }

    def swarm(self, **settings: Any) -> Swarm:
        return Swarm(**self.settings(**{"identity": self.name, **settings}))

    def step(self, seconds: float = STEP_S) -> None:
        self.lockstep.call(asyncio.sleep(seconds))

    async def _connect(self, options: NodeOptions) -> Transport:
        link = PeerLink(latency_s=0.01)
        return self._network.join(self.name, [one for one in "ab" if one < self.name], link)


Work = Callable[[Peer], None]


def play_peers(*works: Work, late_s: float = 0.0) -> list[Peer]:
    """Peers a, b, ... do their works; each begins so long after the one before it."""
    with virtual_time() as loop:
        network = Network(loop, 0)
        peers = [Peer("ab"[number], loop, network, work) for number, work in enumerate(works)]

        async def live(peer: Peer, after_s: float) -> None:
            await asyncio.sleep(after_s)
            await peer.lockstep.run()

        async def scene() -> None:
            tasks = []
            for number, peer in enumerate(peers):
                with loop.owned_by(peer.name):
                    tasks.append(loop.create_task(live(peer, number * late_s)))
            await asyncio.gather(*tasks)

        loop.run_until_complete(scene())
    return peers
