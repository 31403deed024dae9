"""A node in a thread of its own, for a training loop that knows nothing of event loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from diloco.outer.replica import Replica
from diloco.protocol.ledger import Units
from diloco.protocol.messages.control import State
from diloco.protocol.peer import Peer
from diloco.protocol.shares import Contributor
from diloco.protocol.snapshot import Snapshot
from diloco.swarm.conversations.inner_state import InnerState, Layout
from diloco.swarm.conversations.probe import ask_to_be_called
from diloco.swarm.node.node import Node, OnEvent
from diloco.swarm.node.options import NodeOptions
from diloco.swarm.node.rounds import Count, Exchanged
from diloco.swarm.node.saved import Saved
from diloco.swarm.wire.libp2p import Libp2p
from diloco.swarm.wire.malloc import give_back
from diloco.swarm.wire.streams import Traffic
from diloco.swarm.wire.transport import Transport

__all__ = ["NodeRunner", "connect"]

T = TypeVar("T")
JOIN_S = 10.0
CLOSE_S = 5.0


async def connect(options: NodeOptions) -> Transport:
    """The real network."""
    return await Libp2p.connect(
        options.network, options.identity_path, options.gate, options.run.id, ask=ask_to_be_called
    )


class NodeRunner:
    """Calls into a node from the training loop; each blocks its caller until the node's loop has the answer.

    What fails in the node is raised here. `interrupt` may be called from a signal handler at any time.
    """

    def __init__(self, options: NodeOptions, replica: Replica, on_event: OnEvent) -> None:
        self.loop = asyncio.new_event_loop()
        self.options, self.replica, self._on_event = options, replica, on_event
        self._per_round, self._asked_to_stop = 0, False
        self._thread = threading.Thread(target=self._run, name="swarm", daemon=True)

    @property
    def protocol(self) -> Peer:
        """The node's protocol core; there is one after `start`. Look, but do not touch: it lives in another thread."""
        return self.node.protocol

    @property
    def traffic(self) -> Traffic:
        """Bytes so far."""
        return self.node.traffic

    @property
    def addresses(self) -> list[str]:
        """Where others reach this peer."""
        return self.node.addresses

    @property
    def address(self) -> str:
        """The best of its addresses; empty when it has none."""
        return next(iter(self.addresses), "")

    @property
    def num_peers(self) -> int:
        """Connected peers, this one included."""
        return 1 + (len(self.protocol.members) if hasattr(self.node, "protocol") else 0)

    def membership(self) -> dict[str, int]:
        """Peers that are connected (`live`), that train, and that the newest version of fragment 0 is made of."""
        protocol = self.protocol
        return {"live": self.num_peers, "training": protocol.num_trainers(), "merged": protocol.num_merged()}

    def contributions(self) -> list[Contributor]:
        """As `Peer.contributions`, also after `close`."""

        async def here() -> list[Contributor]:  # in the node's loop, where nothing of it moves meanwhile
            return self.protocol.contributions()

        return self.call(here()) if self._thread.is_alive() else self.protocol.contributions()

    def start(self) -> None:
        """As `Node.start`."""
        self._thread.start()
        self._opened(self.call(Node.open(self.options, self.replica, self._on_event, connect)))

    def _opened(self, node: Node) -> None:
        self.node = node
        node.leased.expect(self._per_round)
        if self._asked_to_stop:
            node.interrupt()

    def joins_late(self) -> bool:
        """As `Node.joins_late`."""
        return self.call(self.node.joins_late())

    def fetch_inner(self, layout: Layout) -> InnerState | None:
        """As `Node.fetch_inner`."""
        return self.call(self.node.fetch_inner(layout))

    def begin(self, cold: bool = False) -> int | None:
        """As `Node.begin`."""
        return self.call(self.node.begin(cold))

    def take_part(self, tokens: int) -> Exchanged | None:
        """As `Node.take_part`."""
        return self.call(self.node.end_warmup(tokens))

    def send(self, counts: Mapping[int, Count]) -> None:
        """As `Node.send`."""
        give_back()  # where gradients were, there is room now
        self.call(self.node.send(counts))

    def receive(self, fragments: Sequence[int]) -> Exchanged | None:
        """As `Node.receive`."""
        outcome = self.call(self.node.receive(fragments))
        give_back()
        return outcome

    def turn(self, counts: Mapping[int, Count]) -> Exchanged | None:
        """As `Node.turn`."""
        return self.call(self.node.exchange_late(counts))

    def exchange(self, steps: int, tokens: int) -> Exchanged | None:
        """As `Node.exchange`."""
        give_back()
        outcome = self.call(self.node.exchange(steps, tokens))
        give_back()
        return outcome

    def show_anchors(self) -> None:
        """As `Node.show_anchors`."""
        self.call(self.node.show_anchors())

    def snapshot(self) -> Saved:
        """As `Node.snapshot`."""
        return self.call(self.node.snapshot())

    def settle(self) -> int:
        """As `Node.settle`."""
        return self.call(self.node.load_anchors())

    def interrupt(self) -> None:
        """As `Node.interrupt`, before and after `start` too; nothing when the node is closed."""
        self._asked_to_stop = True
        if hasattr(self, "node") and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.node.interrupt)

    def enter(self, state: State) -> None:
        """As `Node.enter`."""
        self.call(self.node.enter(state))

    def progress(self, inner_step: int, target_steps: int, steps_per_s: float, tokens: int) -> None:
        """Figures for the next heartbeat; does not block."""
        self.loop.call_soon_threadsafe(self.protocol.progress, inner_step, target_steps, steps_per_s, tokens)

    def measured(self, loss: float, rounds: int, seconds: Sequence[float], discarded: int = 0) -> None:
        """As `Peer.measured`; does not block."""
        self.loop.call_soon_threadsafe(self.protocol.measured, loss, rounds, seconds, discarded)

    def observe(self) -> Snapshot | None:
        """What this peer knows of the swarm; None when it has left."""
        return self.call(self.node.observe()) if self._thread.is_alive() else None

    def expect_units(self, sequences_per_round: int) -> None:
        """As `Reserve.expect`, also before `start`."""
        self._per_round = sequences_per_round

    def take_units(self, number: int) -> Units | None:
        """As `Reserve.take`; does not block."""
        return self.node.leased.take(number)

    def leave(self, finished: bool) -> None:
        """As `Node.leave`."""
        self.call(self.node.leave(finished))

    def close(self) -> None:
        """As `Node.close`, and end the thread. Can be called twice."""
        if not self._thread.is_alive():
            return
        try:
            self.call(self._close())
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(timeout=JOIN_S)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine in the node's loop."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self.loop)
        return future.result()

    async def _close(self) -> None:
        if hasattr(self, "node"):
            await self.node.close()
        remains = asyncio.all_tasks() - {asyncio.current_task()}  # hivemind's own, which it leaves pending
        for task in remains:
            task.cancel()
        if remains:
            await asyncio.wait(remains, timeout=CLOSE_S)
        await self.loop.shutdown_default_executor()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()
