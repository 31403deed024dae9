"""Access to a store: again and again while it is away, with this peer's upload limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from diloco.swarm.context import Context
from diloco.swarm.mailbox.store import Away, Store

T = TypeVar("T")

AT_ONCE = 8  # objects that are read at the same time
RETRY_S = 1.0


class Access:
    """Calls of a store that wait until it answers.

    On failure: while the store is away, the node's clock stands still; events say when it went and
    when it came back.
    """

    def __init__(self, context: Context, store: Store, period_s: float) -> None:
        self.store, self._context, self._period_s = store, context, period_s
        self._away_since: float | None = None
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def tags(self, folder: str) -> dict[str, str]:
        """As in `Store`."""
        return await self._try(lambda: self.store.tags(folder))

    async def read(
        self, name: str, most_bytes: int, on_bytes: Callable[[int], object] = lambda nbytes: None
    ) -> memoryview:
        """As in `Store`."""
        async with self._slots:
            content = await self._try(lambda: self.store.read(name, most_bytes, on_bytes))
        self._context.traffic.bytes_received += len(content)
        return content

    async def write(self, name: str, chunks: Sequence[bytes | memoryview]) -> None:
        """As in `Store`."""
        nbytes = sum(map(len, chunks))
        await self._context.traffic.throttle(nbytes)
        await self._try(lambda: self.store.write(name, chunks))
        self._context.traffic.bytes_sent += nbytes

    async def delete(self, names: Sequence[str]) -> None:
        """As in `Store`."""
        await self._try(lambda: self.store.delete(names))

    async def _try(self, work: Callable[[], Awaitable[T]]) -> T:
        """Call the store, again and again while it is away, after pauses of a period at most."""
        context, pause_s, loop = self._context, RETRY_S, asyncio.get_running_loop()
        while True:
            try:
                result = await work()
            except Away as error:
                if self._away_since is None:
                    self._away_since = loop.time()
                    if self.store.url in context.transport.addresses:
                        context.stop_clock()  # else peers are heard over streams
                    context.note("store_away", url=self.store.url, why=str(error))
                await asyncio.sleep(max(pause_s, error.retry_s))
                pause_s = min(max(RETRY_S, self._period_s), 2 * pause_s)
                continue
            if self._away_since is not None:
                seconds, self._away_since = loop.time() - self._away_since, None
                context.start_clock()
                context.note("store_back", url=self.store.url, seconds=round(seconds, 1))
            return result
