"""Runtimes of a node, which runs beside the training loop: here, in a thread.

The simulator's runtime stops the training loop and lets virtual time pass instead.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import torch

from diloco.outer.replica import Replica
from diloco.swarm.node.node import Node, OnEvent
from diloco.swarm.node.options import NodeOptions
from diloco.swarm.rpc.probe import ask_to_be_called
from diloco.swarm.wire.transport import Transport

T = TypeVar("T")
JOIN_S = 10.0
CLOSE_S = 5.0


class Runtime(Protocol):
    """An event loop with one node in it, which a training loop uses from another thread."""

    def open(self, options: NodeOptions, replica: Replica, on_event: OnEvent) -> Node:
        """Make a node that is connected to its swarm."""

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop, wait for it, and return its result."""

    def call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        """Have the loop call a function later; does not wait, and is safe in signal handlers."""

    def clock(self) -> float:
        """Seconds, for measuring how long something takes."""

    def close(self) -> None:
        """End whatever still runs in the loop. Can be called twice, and without a node."""


async def connect(options: NodeOptions) -> Transport:
    """Join the real network; only with a mailbox and no address, no stream is ever opened."""
    network, identity, gate = options.network, options.identity_path, options.gate
    store = None
    if network.mailbox is not None:
        from diloco.swarm.mailbox.store import FileStore
        from diloco.swarm.mailbox.transport import NoStreams

        store = FileStore(network.mailbox)
        if not network.initial_peers:
            return NoStreams(identity, gate, store, network.reachable != "no")
    from diloco.swarm.wire.libp2p import Libp2p  # imports hivemind

    transport = await Libp2p.connect(network, identity, gate, options.run.id, ask_to_be_called)
    transport.store = store
    return transport


class EventLoopThread:
    """An event loop in a thread of its own, as `Runtime`. The thread begins with `open`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def open(self, options: NodeOptions, replica: Replica, on_event: OnEvent) -> Node:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="swarm", daemon=True)
        self._thread.start()
        return self.call(Node.open(options, replica, on_event, connect))

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result()

    def call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        if self._thread is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    def clock(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            return
        try:
            self.call(self._end())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=JOIN_S)

    async def _end(self) -> None:
        # hivemind leaves tasks of its own pending
        remains = asyncio.all_tasks() - {asyncio.current_task()}
        for task in remains:
            task.cancel()
        if remains:
            await asyncio.wait(remains, timeout=CLOSE_S)
        ending = asyncio.ensure_future(self._loop.shutdown_default_executor())
        await asyncio.wait([ending], timeout=CLOSE_S)

    def _run(self) -> None:
        # so that all peers apply updates alike; a thread inherits the mode of its creator
        torch.set_flush_denormal(False)
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()
