"""What a process prints, line by line."""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

from tests.support.peers import DEADLINE_S


def printed_of(scene: Callable[[], Coroutine[Any, Any, None]]) -> list[str]:
    """What asyncio would print of errors that nobody awaited, until all garbage is collected."""
    printed: list[str] = []

    async def work() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(
            lambda _, context: printed.append(f"{context['message']} {context.get('task')}")
        )
        await asyncio.wait_for(scene(), DEADLINE_S)
        gc.collect()

    asyncio.run(work())
    return printed
