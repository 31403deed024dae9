"""The tasks of one node, and the conditions, threads and anchor locks that they wait for.

After a change that other tasks may wait for, call `notify`, which wakes those tasks whose condition
holds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Tasks:
    """Background tasks of a node, beside the coroutines that the training loop calls.

    If a task of `spawn` fails, every `until` raises its error, now and later. After `close` no task
    can be started.
    """

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.closed = False
        # a dict, because the order of sets depends on memory addresses
        self._running: dict[asyncio.Task[Any], None] = {}
        self._waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that the caller awaits; `ConnectionError` if the node is closed."""
        if self.closed:
            work.close()
            raise ConnectionError("this node is closed")
        task = asyncio.get_running_loop().create_task(work)
        self._running[task] = None
        task.add_done_callback(self._ended)
        return task

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine whose error makes the node fail; a closed node drops it."""
        if self.closed:
            work.close()
        else:
            self.start(work).add_done_callback(self._fail_with)

    def fail(self, error: BaseException) -> None:
        """Let every `until` raise this error, unless there was an earlier one."""
        self.failure = self.failure or error
        self.notify()

    async def close(self, timeout_s: float) -> list[str]:
        """Cancel every task; return the names of those that did not end in time."""
        self.closed = True
        self.notify()
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        late = [task for task in tasks if not task.done()]
        return [getattr(task.get_coro(), "__qualname__", task.get_name()) for task in late]

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.pop(task, None)
        if not task.cancelled():
            task.exception()  # retrieve it, as nobody awaits the tasks of a failed node
        self.notify()

    def _fail_with(self, task: asyncio.Task[Any]) -> None:
        if not self.closed and not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("a task of the swarm node failed", exc_info=error)
            self.fail(error)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, which is checked after each `notify`.

        Raises `ConnectionError` if the node is closed meanwhile, and the error of a task that made
        the node fail.
        """
        while True:
            if self.failure is not None:
                raise self.failure
            if condition():
                return
            if self.closed:
                raise ConnectionError("this node is closed")
            woken = asyncio.get_running_loop().create_future()
            self._waiting[woken] = condition
            try:
                await woken
            finally:
                self._waiting.pop(woken, None)

    def notify(self) -> None:
        """Check the conditions of all `until`, after a change that one may depend on."""
        for woken, condition in list(self._waiting.items()):
            if not woken.done() and (self.closed or self.failure is not None or _holds(condition)):
                woken.set_result(None)


def _holds(condition: Callable[[], bool]) -> bool:
    try:
        return condition()
    except Exception:  # the waiting task evaluates it again, and raises it
        return True


class FragmentLock:
    """Lock of an anchor: any number of readers or one writer. A new reader joins others that read,
    even if a writer waits: so a donor serves newcomers while its own checkpoint is written, which
    reads the anchor for minutes.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()  # held by the writer, or by all readers together
        self._entrance = asyncio.Lock()
        self._readers = 0

    def writing(self) -> asyncio.Lock:
        """Context in which nobody else reads or writes."""
        return self._lock

    async def start_reading(self) -> None:
        """Wait for the writer. Each call needs one `stop_reading` before anybody writes again."""
        # the first reader waits for the writer, and those after it for the first
        async with self._entrance:
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
        """Context in which nobody writes."""
        await self.start_reading()
        try:
            yield
        finally:
            self.stop_reading()


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Run a function in a thread of the loop's executor and return its result.

    When the caller is cancelled, this waits until the function has ended, and only then raises
    `CancelledError`: a lock that the caller holds protects the tensors for as long as the thread
    uses them. (`asyncio.to_thread` does not.)
    """
    work = asyncio.get_running_loop().run_in_executor(None, partial(function, *args))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # retrieve it, as nobody else does
        raise
