"""Tests that are coroutine functions, and what they wait for."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from diloco.sim.virtual_time import VirtualLoop, virtual_time

__all__ = ["PATIENCE_S", "Slow", "loop", "pytest_pyfunc_call", "turns", "until"]

# for what a slow machine does late; a test that hangs ends in pytest's own time limit
PATIENCE_S = 120.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Play a test that is a coroutine function; in virtual time if it, or one of its fixtures, has
    a `loop`."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    scene = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    virtual = pyfuncitem.funcargs.get("loop")
    asyncio.run(scene) if virtual is None else virtual.run_until_complete(scene)
    return True


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    """Where virtual time passes."""
    with virtual_time() as made:
        yield made


async def until(condition: Callable[[], object]) -> None:
    """Let others run until something is so."""
    while not condition():
        await asyncio.sleep(0)


async def turns(number: int = 5) -> None:
    """Let others run for so many turns of the loop."""
    for _ in range(number):
        await asyncio.sleep(0)


class Slow:
    """A function that waits, in its thread, until it may go on."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.threads = function, set[threading.Thread]()
        self.began, self.go_on = threading.Event(), threading.Event()

    def __call__(self, *arguments: Any) -> Any:
        self.threads.add(threading.current_thread())
        self.began.set()
        self.go_on.wait(PATIENCE_S)
        return self.function(*arguments)
