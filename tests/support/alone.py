"""A node without a network, in virtual time: it makes its versions alone."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from diloco.config import OuterConfig, SwarmConfig
from diloco.core.events import Discovered
from diloco.outer.fragments import partition
from diloco.outer.replica import Replica
from diloco.sim.virtual_time import virtual_time
from diloco.swarm.node.node import Node
from diloco.swarm.node.options import NodeOptions, RunSpec, make_context
from diloco.swarm.node.saved import Saved
from tests.support.core import ME, D, Nobody
from tests.support.stub_wire import NoNetwork

T = TypeVar("T")
EXACT = {"lr": 1.0, "momentum": 0.0, "momentum_warmup": 0, "codec_up": "fp32", "codec_down": "fp32"}


class Unconnected(NoNetwork, Nobody):
    """The transport of a peer that others could call."""

    reachable, advice, addresses, store = True, "", (), None

    def may_call(self, address: str) -> bool:
        return True


class Alone(Node):
    """A node with one tensor of parameters, `w`; `said` are the kinds of its events."""

    @classmethod
    async def made(
        cls,
        numel: int = 6,
        saved: Saved | None = None,
        local: Callable[[Any], Any] = lambda values: values,
        **outer: Any,
    ) -> Self:
        """One that has not begun yet; `local` puts its parameters on a device."""
        parameters, said = {"w": torch.arange(float(numel))}, list[str]()
        settings = OuterConfig.parse({"method": "diloco", "sync_every": 1, **EXACT, **outer})
        replica = Replica(local(parameters), partition({"w": numel}, settings.fragments), settings)
        options = NodeOptions(RunSpec("run", D, "{}"), SwarmConfig(), Path("key"), saved=saved)
        told = lambda kind, fields: said.append(kind)  # noqa: E731
        node = cls(options, await make_context(options, replica, Unconnected(ME), told))
        node.parameters, node.said = parameters, said
        node.context.tasks.spawn(node._tick())
        node.context.do(Discovered())
        return node

    parameters: dict[str, torch.Tensor]
    said: list[str]

    async def learn(self, tokens: int = 10) -> None:
        """An inner step that takes 1 from each parameter, and the exchange after it."""
        self.parameters["w"].sub_(1.0)
        assert (await self.after_step(tokens)).stopped_by < 0


def alone(
    scene: Callable[[Alone], Awaitable[T]], numel: int = 6, saved: Saved | None = None, **outer: Any
) -> T:
    """What a scene with such a node comes to, once it has begun."""

    async def work() -> T:
        node = await Alone.made(numel, saved, **outer)
        await node.begin()
        try:
            return await scene(node)
        finally:
            await node.context.tasks.close(1.0)

    with virtual_time() as loop:
        return loop.run_until_complete(work())
