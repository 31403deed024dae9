"""A training loop around a swarm in virtual time."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from diloco.attach.swarm import Attachment, Swarm
from diloco.core.members import Members
from diloco.outer.replica import Replica
from diloco.sim.link import PeerLink
from diloco.sim.lockstep import Lockstep
from diloco.sim.network import Network
from diloco.sim.peers import SimRuntime
from diloco.sim.virtual_time import virtual_time
from diloco.swarm.node.node import Node
from diloco.swarm.node.options import NodeOptions
from diloco.swarm.node.position import Position
from diloco.swarm.node.saved import Saved
from diloco.swarm.wire.streams import Traffic
from diloco.swarm.wire.transport import Transport

STEP_S = 1.0


class Loop:
    """The training loop of one peer, step by step; `pass_s` lets virtual time pass."""

    swarm: Swarm
    noise: torch.Generator | None = None  # of the gradients, which are ones without

    def __init__(self, name: str, sync: Attachment, optimizer: Any, lockstep: Any) -> None:
        self.name, self.sync, self._optimizer, self._lockstep = name, sync, optimizer, lockstep
        self.events: list[tuple[str, dict[str, Any]]] = []

    @property
    def node(self) -> Node:
        assert self.sync.node is not None
        return self.sync.node.node

    def pass_s(self, seconds: float) -> None:
        self._lockstep.call(asyncio.sleep(seconds))

    def step(self, count: int = 1) -> None:
        """So many inner steps."""
        for _ in range(count):
            self.pass_s(STEP_S)
            groups = self._optimizer.param_groups
            for parameter in (one for group in groups for one in group["params"]):
                parameter.grad = torch.ones_like(parameter)
                if self.noise is not None:
                    parameter.grad = torch.randn(parameter.shape, generator=self.noise)
            self._optimizer.step()

    def told(self, kind: str) -> list[dict[str, Any]]:
        """What was said in events of a kind."""
        return [fields for said, fields in self.events if said == kind]


def train(
    names: str,
    work: Callable[[Loop], None],
    *,
    saved: Saved | None = None,
    width: int = 4,
    attach: Callable[[str, torch.optim.Optimizer], dict[str, Any]] = lambda name, optimizer: {},
    data: Mapping[str, str] | None = None,
    **outer: Any,
) -> dict[str, Loop]:
    """Peers of these names, all there before the first inner step, each in a loop of its own; they
    leave at the end.

    `attach` gives what else `Swarm.attach` is told, and `data` what its numbers of sequences stand
    for.
    """
    loops: dict[str, Loop] = {}
    with virtual_time() as loop:
        network = Network(loop, 0)

        def live(name: str, lockstep: Lockstep[None]) -> None:
            async def connect(options: NodeOptions) -> Transport:
                seeds = [other for other in loops if other != name]
                return network.join(name, seeds, PeerLink(latency_s=0.01))

            model = nn.Linear(width, 1, dtype=torch.float32)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            swarm = Swarm(
                run_id="run",
                name=name,
                identity=Path(name),
                min_peers=len(names),
                runtime=SimRuntime(loop, lockstep, connect),
                on_ready=lambda address: None,
                on_event=lambda kind, fields: loops[name].events.append((kind, fields)),
                **outer,
            )
            swarm._peer.sequences = (data or {}).get(name, "")
            attached = swarm.attach(model, optimizer, saved=saved, **attach(name, optimizer))
            mine = loops[name] = Loop(name, attached, optimizer, lockstep)
            mine.swarm = swarm
            with swarm, mine.sync:
                work(mine)

        async def scene() -> None:
            tasks = []
            for name in names:
                lockstep: Lockstep[None] = Lockstep(lambda name=name: live(name, made[name]), name)  # type: ignore[misc]
                made[name] = lockstep
                with loop.owned_by(name):
                    tasks.append(loop.create_task(lockstep.run()))
                await asyncio.sleep(0.1)
            await asyncio.gather(*tasks)

        made: dict[str, Lockstep[None]] = {}
        loop.run_until_complete(scene())
    return loops


class LastFlight:
    """A node alone, three outer steps in, which exchanges every 4 inner steps; its last
    contribution comes too late."""

    def __init__(self) -> None:
        self.version, self.position_in_cycle, self.cycle, self.discarded = 3, 0, 4, 0
        facts = SimpleNamespace(members=Members("me"), planned=(0, 0, 0))
        self.core = SimpleNamespace(facts=facts, measure=None)
        self.others: list[str] = []
        self.traffic = Traffic()
        self.leased = SimpleNamespace(plan_round=lambda sequences: None)
        self.addresses: list[str] = []
        self.said: list[str] = []

    def position(self, exchanged: int = 0) -> Position:
        own = self.discarded, self.position_in_cycle, self.cycle, self.position_in_cycle
        return Position(-1, self.version, 30, *own, exchanged)

    def record(self) -> Any:
        return SimpleNamespace(
            peer="me",
            addresses=self.addresses,
            others=self.others,
            trainers=["me"],
            live=1,
            version=self.version,
        )

    async def wait_until_ready(self) -> bool:
        return False

    async def begin(self, cold: bool = False) -> Position:
        return self.position()

    async def after_step(self, tokens: int, pace: float, prepare: Callable[[], None]) -> Position:
        self.position_in_cycle += 1
        if self.position_in_cycle < self.cycle:
            return self.position()
        prepare()
        return await self.exchange()

    async def exchange(self) -> Position:
        self.said.append("exchange")
        self.position_in_cycle, self.discarded = 0, 7
        return self.position(exchanged=1)

    async def resume(self, *_: object) -> Position:
        self.said.append("resume")
        return self.position()

    async def load_anchors(self) -> Position:
        self.said.append("load_anchors")
        return self.position()

    def __getattr__(self, name: str) -> Any:
        async def other(*_: object) -> None:
            self.said.append(name)

        return other


class Direct:
    """A runtime without a loop of its own."""

    def __init__(self, node: LastFlight) -> None:
        self._node = node

    def open(self, options: NodeOptions, replica: Replica, on_event: object) -> Any:
        return self._node

    def call(self, work: Any) -> Any:
        return asyncio.run(work)

    def call_soon(self, function: object, *arguments: object) -> None: ...

    def clock(self) -> float:
        return 0.0

    def close(self) -> None: ...


def made(**settings: Any) -> Swarm:
    return Swarm(**{"run_id": "run", "sync_every": 4, **settings})


def attached(swarm: Swarm, numel: int = 4) -> Any:
    model = nn.Linear(numel, 1, bias=False)
    return swarm.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
