"""A simulated peer: the production trainer and node over a simulated clock and network.

Nothing of the algorithm is here. An inner step takes its virtual seconds when it fetches its batch, evaluation and the
arithmetic of outer steps take none, and transfers take what the links make of them.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from diloco.data import Stream
from diloco.protocol.shares import Contributor
from diloco.rundir.summary import Phases
from diloco.sim.adversary import Lying
from diloco.sim.lockstep import Lockstep
from diloco.sim.virtual_time import VirtualLoop
from diloco.swarm.node.node import Connect, Node
from diloco.swarm.node.runner import NodeRunner
from diloco.swarm.wire.gate import Gate
from diloco.train.api import Attachment, Saved, Swarm
from diloco.train.evaluate import EvalResult
from diloco.train.island import Island
from diloco.train.loop import Trainer

__all__ = ["PacedStream", "SimRunner", "SimSwarm", "SimTrainer"]

T = TypeVar("T")


class SimRunner(NodeRunner):
    """Calls into a node from a trainer in lockstep with the event loop; as `NodeRunner`, without its thread."""

    def __init__(self, opening: Any, loop: VirtualLoop, thread: Lockstep[Any]) -> None:
        self.options, self.replica, self._on_event, self._connect = opening
        self._per_round, self._asked_to_stop = 0, False
        self.loop = loop
        self._lockstep = thread
        self._closed = False

    def start(self) -> None:
        self._opened(self.call(Node.open(self.options, self.replica, self._on_event, self._connect)))

    def contributions(self) -> list[Contributor]:
        return self.protocol.contributions()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if hasattr(self, "node"):
                self.call(self.node.close())

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return self._lockstep.call(work)


class SimSwarm(Swarm):
    """A peer's membership in a simulated run: `Swarm`, over another network and without threads of its own.

    `connect`, `loop` and `thread` are set before `attach`; `lie` is what contributions are multiplied with, and `seed`
    that of the run.
    """

    lie = 1.0
    seed = 0

    connect: Connect
    loop: VirtualLoop
    thread: Lockstep[Any]

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        island: Island | None = None,
        saved: Saved | None = None,
        phases: Phases | None = None,
    ) -> Attachment:
        return _SimAttachment(self, model, optimizer, island or Island(torch.device("cpu")), saved, phases or Phases())


class _SimAttachment(Attachment):
    """Measures its pace in virtual seconds: those of this machine say nothing."""

    def _make_node(self, saved: Saved | None) -> NodeRunner:
        real = super()._make_node(saved)
        real.loop.close()
        swarm = self.swarm
        assert isinstance(swarm, SimSwarm)
        if swarm.lie != 1.0:
            real.replica.up = Lying(real.replica.up, swarm.lie)
        seed = f"{swarm.seed}/{swarm.name}"  # and there are no strangers
        real.replica.draw = random.Random(seed)
        options = replace(swarm.options(self.parameters, saved), gate=Gate(), seed=seed)
        return SimRunner((options, real.replica, swarm.on_event, swarm.connect), swarm.loop, swarm.thread)

    def begin(self) -> None:
        super().begin()
        self._paced = (self.steps, self._now())

    def resume(self) -> None:
        super().resume()
        self._paced = (self.steps, self._now())

    def _measure_pace(self) -> None:
        steps, at = self._paced
        self._steps_per_s = (self.steps - steps) / max(self._now() - at, 1e-9)

    def _now(self) -> float:
        assert isinstance(self.swarm, SimSwarm)
        return self.swarm.loop.time()


class PacedStream:
    """A stream of batches, each of which takes an inner step's virtual seconds, spread by `jitter`."""

    def __init__(self, stream: Stream, step_s: float, jitter: float, seed: str, lockstep: Lockstep[Any]) -> None:
        self._stream, self._step_s, self._lockstep = stream, step_s, lockstep
        self._jitter, self._random = jitter, random.Random(seed)

    def __iter__(self) -> PacedStream:
        return self

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
    """The trainer of `diloco train`. Peers with one anchor are evaluated once."""

    evaluated: dict[str | None, EvalResult] = field(default_factory=dict)  # by anchor digest; one for all peers

    def evaluate(self) -> EvalResult:
        digest = self.sync.anchor_digest()
        if digest not in self.evaluated:
            self.evaluated[digest] = super().evaluate()
        result = self.evaluated[digest]
        self.eval_loss = result.loss
        return result
