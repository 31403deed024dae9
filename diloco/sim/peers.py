"""A simulated peer: the production trainer and node over a simulated clock and network.

An inner step takes its virtual seconds when it fetches its batch, evaluation and the arithmetic of
outer steps take none, and transfers take what the links make of them.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor

from diloco.data import BatchStream
from diloco.outer.replica import Replica
from diloco.sim.lockstep import Lockstep
from diloco.sim.virtual_time import VirtualLoop
from diloco.swarm.node.node import Connect, Node, OnEvent
from diloco.swarm.node.options import NodeOptions
from diloco.swarm.wire.gate import Gate
from diloco.train.loop import Trainer

T = TypeVar("T")


class SimRuntime:
    """A stand-in for `Runtime`: a node in virtual time, and a training loop in lockstep with it.

    Each peer draws from a seed of its own, made of the run's. Without a gate all are admitted.
    """

    node_type = Node

    def __init__(
        self,
        loop: VirtualLoop,
        lockstep: Lockstep[Any],
        connect: Connect,
        seed: int = 0,
        gate: Gate | None = None,
    ) -> None:
        self._loop, self._lockstep, self._connect = loop, lockstep, connect
        self._seed, self._gate = seed, gate

    def open(self, options: NodeOptions, replica: Replica, on_event: OnEvent) -> Node:
        replica.rng = random.Random(f"{self._seed}/{options.name}")
        options = replace(options, gate=self._gate or Gate(), wall=1e9 + self._loop.time())
        return self.call(self.node_type.open(options, replica, on_event, self._connect))

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return self._lockstep.call(work)

    def call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(function, *arguments)

    def clock(self) -> float:
        return self._loop.time()

    def close(self) -> None:
        """Do nothing: the loop belongs to the simulation."""


class PacedStream:
    """A stream of batches, each of which takes the virtual seconds of an inner step."""

    def __init__(
        self, stream: BatchStream, step_s: float, jitter: float, seed: str, lockstep: Lockstep[Any]
    ) -> None:
        self._stream, self._step_s, self._lockstep = stream, step_s, lockstep
        self._jitter, self._random = jitter, random.Random(seed)

    def __next__(self) -> Tensor:
        batch = next(self._stream)
        spread = math.exp(self._random.gauss(0.0, self._jitter)) if self._jitter else 1.0
        self._lockstep.call(asyncio.sleep(self._step_s * spread))
        return batch

    def state(self) -> dict[str, Any]:
        return self._stream.state()

    def restore(self, state: dict[str, Any]) -> None:
        self._stream.restore(state)


@dataclass
class SimTrainer(Trainer):
    """The trainer of `diloco train`. Peers with equal anchors are evaluated once."""

    evaluated: dict[str | None, float | None] = field(default_factory=dict)  # by anchor digest

    def evaluate(self) -> None:
        digest = self.sync.anchor_digest()
        if digest not in self.evaluated:
            super().evaluate()
            self.evaluated[digest] = self.sync.figures().eval_loss
        self.sync.report(eval_loss=self.evaluated[digest])
