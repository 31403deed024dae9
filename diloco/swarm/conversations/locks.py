"""A lock for the anchor of a fragment, which many may read and one may move."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["FragmentLock"]


class FragmentLock:
    """Any number of readers or one writer. A reader that comes while others read does not wait for a writer.

    So a donor serves newcomers while its own checkpoint is written, which reads the anchor for minutes.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()  # held by the writer, or by all readers together
        self._entrance = asyncio.Lock()
        self._readers = 0

    @property
    def moving(self) -> bool:
        """Whether somebody has it for writing."""
        return self._lock.locked() and not self._readers

    def writing(self) -> asyncio.Lock:
        """A context in which nobody else reads or writes."""
        return self._lock

    async def start_reading(self) -> None:
        """Wait for the writer. From now on nobody writes, until as many `stop_reading` as there were calls of this."""
        async with self._entrance:  # the first reader waits for the writer, and those after it for the first
            if self._readers == 0:
                await self._lock.acquire()
            self._readers += 1

    def stop_reading(self) -> None:
        """End what `start_reading` began."""
        self._readers -= 1
        if self._readers == 0:
            self._lock.release()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """A context in which nobody writes."""
        await self.start_reading()
        try:
            yield
        finally:
            self.stop_reading()
