"""A deadline for whatever is awaited, which costs the same turns of the event loop on every version of Python.

`asyncio.wait_for` made a task of its own before Python 3.12 and makes none since. In virtual time, where the order of
events is the order of turns, the same swarm would live another life on another version; and before 3.12 it may swallow
a cancellation that arrives together with the result.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable
from typing import TypeVar

__all__ = ["within"]

T = TypeVar("T")


async def within(timeout_s: float | None, work: Awaitable[T]) -> T:
    """Await something; after so many seconds (None: never) cancel it and raise `asyncio.TimeoutError`."""
    if timeout_s is None:
        return await work
    task, passed = asyncio.current_task(), False
    assert task is not None
    cancelled_before = sys.version_info >= (3, 11) and task.cancelling()  # Python 3.10 does not count

    def expire() -> None:
        nonlocal passed
        passed = True
        task.cancel()

    timer = asyncio.get_running_loop().call_later(timeout_s, expire)
    try:
        return await work
    except asyncio.CancelledError:
        # The request to end is ours: it is taken back, unless others have asked too.
        if passed and (sys.version_info < (3, 11) or task.uncancel() == cancelled_before):
            raise asyncio.TimeoutError from None
        raise
    finally:
        timer.cancel()
