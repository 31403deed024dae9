"""Work on whole fragments runs in a thread beside the event loop, and ends before the task that awaits it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

__all__ = ["in_thread"]

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Run a function in a thread of the loop's executor and return its result.

    A thread cannot be cancelled. So when the caller is cancelled, this waits until the function has ended, and only
    then raises `CancelledError`: a lock that the caller holds protects the tensors for as long as the thread uses them.
    (`asyncio.to_thread` raises at once, and the lock is free while the thread still writes.)
    """
    work = asyncio.get_running_loop().run_in_executor(None, partial(function, *args))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # retrieved, because nobody else will ask for it
        raise
