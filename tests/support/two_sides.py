"""Both sides of a bulk stream of new messages, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from diloco.errors import PayloadError
from diloco.messages import codec
from diloco.swarm.wire.streams import Stream, Traffic


class _End:
    """What one side writes, the other reads."""

    def __init__(self, there: asyncio.StreamReader) -> None:
        self._there = there

    def write(self, data: Any) -> None:
        self._there.feed_data(bytes(data))

    async def drain(self) -> None: ...

    def close(self) -> None:
        with suppress(AssertionError):
            self._there.feed_eof()


class Transport:
    """Each stream that it opens is answered by `answer`; `PayloadError` is told as a refusal, as a server does."""

    seeds: tuple[str, ...] = ("donor",)
    addresses: tuple[str, ...] = ()

    def __init__(self, answer: Callable[[Stream, Any], Awaitable[None]], asker: str = "asker") -> None:
        self._answer, self._asker = answer, asker
        self._serving: dict[asyncio.Task[None], None] = {}

    async def open(self, peer: str, protocol: str) -> tuple[asyncio.StreamReader, Any]:
        here, there = asyncio.StreamReader(), asyncio.StreamReader()
        stream = Stream(self._asker, there, _End(here), Traffic())
        self._serving[asyncio.create_task(self._serve(stream))] = None
        return here, _End(there)

    async def _serve(self, stream: Stream) -> None:
        try:
            await self._answer(stream, await stream.receive())
        except PayloadError as error:
            await stream.send(codec.Refusal(str(error)))
