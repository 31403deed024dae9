"""A peer that listens before it has a model: its address can be told to others, and who calls is asked to wait.

1. `swarm.address` is asked for: the daemon listens, and refuses every greeting with `NOT_YET`.
2. A peer that joins at that address greets again and again (`until_ready`).
3. A model is attached: the daemon becomes that of a node, and calls whom the node is to join. Once the node serves its
   peers, greetings are answered; a peer that joins answers at once, because its seeds call it back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo

from diloco.errors import SwarmError
from diloco.swarm.wire.deadline import within
from diloco.swarm.wire.dialing import best_first, call_each
from diloco.swarm.wire.gate import GREETING, GREETING_TIMEOUT_S, GuardedP2P
from diloco.swarm.wire.streams import BROKEN, Stream, Traffic
from diloco.swarm.wire.transport import Reader, Writer

__all__ = ["NOT_YET", "Early", "until_ready"]

NOT_YET = "it listens, and has no model attached yet"
AGAIN_S = 0.5
PATIENCE_S = 600.0  # building a large model and its data may take so long

Welcome = Callable[[StreamInfo, Reader, Writer], Awaitable[None]]


class Early:
    """A daemon that nobody can talk with yet. Whoever has it either passes it to `Libp2p.connect`, or closes it."""

    def __init__(self, p2p: GuardedP2P) -> None:
        self.p2p = p2p
        self.addresses: list[str] = []
        self._node: Welcome | None = None
        self._serves = False

    @classmethod
    async def of(cls, p2p: GuardedP2P, listens: bool) -> Early:
        """With this daemon."""
        self = cls(p2p)
        try:
            await p2p.add_binary_stream_handler(GREETING, self._greeted)
            self.addresses = best_first([str(one) for one in await p2p.get_visible_maddrs()]) if listens else []
        except BaseException:
            await p2p.shutdown()
            raise
        return self

    async def join(self, seeds: Sequence[str], welcome: Welcome) -> None:
        """The daemon is a node's, which joins at these addresses, and which will answer greetings with `welcome`.

        Raises `SwarmError` when nobody answers there.
        """
        self._node, self._serves = welcome, bool(seeds)
        outcome = await call_each(self.p2p, seeds)
        if outcome and all(outcome.values()):
            raise SwarmError(
                f"swarm.initial_peers={','.join(outcome)} cannot be reached; check that a peer is running there and "
                "that its port is open"
            )

    def serve(self) -> None:
        """The node serves its peers from now on."""
        self._serves = True

    async def close(self) -> None:
        """Listen no more; also where `Libp2p.connect` has failed, and ended it."""
        await self.p2p.shutdown()

    async def _greeted(self, info: StreamInfo, reader: Reader, writer: Writer) -> None:
        if self._node is not None and self._serves:
            return await self._node(info, reader, writer)
        stream = Stream(info.peer_id.to_base58(), reader, writer, Traffic())
        try:
            with suppress(*BROKEN):
                await within(GREETING_TIMEOUT_S, stream.refuse(NOT_YET))
        finally:
            stream.close()


async def until_ready(greet: Callable[[], Awaitable[None]]) -> None:
    """Greet until the other side has its model; raises as `greet`."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        try:
            return await greet()
        except SwarmError as error:
            if NOT_YET not in str(error) or loop.time() - began > PATIENCE_S:
                raise
        await asyncio.sleep(AGAIN_S)
