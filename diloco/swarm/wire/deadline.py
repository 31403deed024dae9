"""A deadline for whatever is awaited, as an expression."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

__all__ = ["within"]

T = TypeVar("T")


async def within(timeout_s: float | None, work: Awaitable[T]) -> T:
    """Await something; after so many seconds (None: never) cancel it and raise `TimeoutError`.

    It makes no task of its own, as `asyncio.wait_for` does before Python 3.12: in virtual time the order of events is
    the order of turns of the event loop, and the same swarm would live another life on another version.
    """
    async with asyncio.timeout(timeout_s):
        return await work
