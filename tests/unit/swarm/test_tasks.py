"""The tasks of a node: what outlives its caller, what must not, and who is late when the node
closes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from diloco.swarm.wire.tasks import FragmentLock, Tasks, in_thread
from tests.support.coroutines import PATIENCE_S, Slow, turns, until


@asynccontextmanager
async def closing() -> AsyncIterator[Tasks]:
    """The tasks of a node that closes in the end, and leaves nothing behind."""
    tasks = Tasks()
    yield tasks
    await tasks.close(PATIENCE_S)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_thread_given_up_has_ended_before_its_lock_is_free() -> None:
    lock, written = asyncio.Lock(), list[str]()
    write = Slow(lambda: written.append("by the thread"))

    async def holder() -> None:
        async with lock:
            await in_thread(write)

    task = asyncio.ensure_future(holder())
    await until(write.began.is_set)
    for _ in range(2):
        task.cancel()
        await turns()
    assert lock.locked() and not written
    write.go_on.set()
    async with lock:
        assert written == ["by the thread"]
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_failed_condition_or_task_is_raised_in_who_waits() -> None:
    broken = False

    async def fail() -> None:
        raise ValueError("a task of the node")

    async with closing() as tasks:
        waiting = asyncio.ensure_future(tasks.until(lambda: broken and 1 // 0 == 1))
        await turns()
        broken = True
        tasks.notify()
        with pytest.raises(ZeroDivisionError):
            await waiting
        waiting = asyncio.ensure_future(tasks.until(lambda: False))
        tasks.spawn(fail())
        for work in (waiting, tasks.until(lambda: True)):
            with pytest.raises(ValueError, match="a task of the node"):
                await work


async def test_a_closed_node_starts_nothing_and_names_the_late() -> None:
    go_on = threading.Event()

    async def hash_everything() -> None:
        await in_thread(go_on.wait, PATIENCE_S)

    async with closing() as tasks:
        tasks.spawn(hash_everything())
        waiting = asyncio.ensure_future(tasks.until(lambda: False))
        await turns()
        [late] = await tasks.close(0.01)
        assert late.endswith("hash_everything")
        with pytest.raises(ConnectionError, match="this node is closed"):
            await waiting
        with pytest.raises(ConnectionError, match="this node is closed"):
            tasks.start(hash_everything())
        tasks.spawn(hash_everything())
        go_on.set()


async def test_readers_share_a_fragment_and_a_writer_has_it_alone() -> None:
    lock, order = FragmentLock(), list[str]()

    async def write() -> None:
        async with lock.writing():
            order.append("written")

    await lock.start_reading()
    writing = asyncio.ensure_future(write())
    await turns()
    async with lock.reading():  # does not wait for the writer, who waits for the first reader
        order.append("read")
    await turns()
    assert order == ["read"]
    lock.stop_reading()
    await writing
    assert order == ["read", "written"]
