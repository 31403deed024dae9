"""Tests that are coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import wraps


def played(scene: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test that plays the scene in real time; however slow the machine is, it ends within this time."""

    @wraps(scene)
    def test(*args: object, **fields: object) -> None:
        asyncio.run(asyncio.wait_for(scene(*args, **fields), 120))  # type: ignore[arg-type]

    return test
