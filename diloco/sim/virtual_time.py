"""An event loop whose clock is virtual: when nothing is ready, it jumps to the next timer.

The node is asyncio code, so whoever owns the loop owns its time. Nothing sleeps, and no thread is started: what would
run in one runs at once, and takes no virtual time. The same program so always runs in the same order.
"""

from __future__ import annotations

import asyncio
import contextvars
import selectors
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

__all__ = ["DeadlockError", "VirtualLoop", "virtual_time"]

T = TypeVar("T")
RESOLUTION_S = 1e-7  # of timers; floats of 20 years of seconds are finer, else a timer would never be due
NAMED = 5  # tasks that the report of a deadlock names

_owner: contextvars.ContextVar[str | None] = contextvars.ContextVar("diloco_sim_owner", default=None)


class DeadlockError(RuntimeError):
    """Nothing is ready and no timer is left, so nothing can ever happen again: a bug, here or in what was simulated."""


class _Clockwork(selectors.DefaultSelector):
    """Instead of waiting for a file, it moves the clock. Signals still come in by the loop's own pipe."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return []
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise DeadlockError
            self.now_s += timeout
        return ready


class _Task(asyncio.Task[T]):
    """Its hash is a count and no address, so that a set of tasks has the same order in every run."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class VirtualLoop(asyncio.SelectorEventLoop):
    """Seconds begin at 0 and pass only by timers.

    Tasks belong to an owner (a simulated peer), which they inherit from whoever creates them, so that a peer can be
    killed with everything that it does. Raises `DeadlockError` from `run_until_complete`, with the tasks that wait.
    """

    def __init__(self) -> None:
        self._clockwork = _Clockwork()
        self._num_tasks = 0
        self._owned: dict[str, dict[asyncio.Task[Any], None]] = {}  # ordered, unlike a set
        super().__init__(self._clockwork)
        self._clock_resolution = RESOLUTION_S
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._clockwork.now_s

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Run the function here and now; the future is done."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def run_until_complete(self, future: Any) -> Any:
        try:
            return super().run_until_complete(future)
        except DeadlockError:
            names = sorted(task.get_name() + ": " + _place(task) for task in asyncio.all_tasks(self))
            shown = "; ".join(names[:NAMED]) + (f"; and {len(names) - NAMED} more" if len(names) > NAMED else "")
            raise DeadlockError(f"at {self.time():.3f} s nothing can happen any more; these wait: {shown}") from None

    # -- owners -------------------------------------------------------------------------------------------------------

    @contextmanager
    def owned_by(self, owner: str) -> Iterator[None]:
        """Tasks that are created inside, and their children, belong to this owner."""
        token = _owner.set(owner)
        try:
            yield
        finally:
            _owner.reset(token)

    def kill(self, owner: str) -> None:
        """Cancel every task of an owner, in the order in which they were made."""
        for task in list(self._owned.get(owner, ())):
            task.cancel()

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], **options: Any
    ) -> asyncio.Task[T]:
        self._num_tasks += 1
        task = _Task(work, loop=loop, **options)
        task.number = self._num_tasks
        owner = _owner.get()
        if owner is not None:
            self._owned.setdefault(owner, {})[task] = None
            task.add_done_callback(self._owned[owner].pop)
        return task


def _place(task: asyncio.Task[Any]) -> str:
    """Where a task waits: file and line of its innermost frame."""
    stack = task.get_stack(limit=1)
    return f"{stack[-1].f_code.co_name} line {stack[-1].f_lineno}" if stack else "?"


@contextmanager
def virtual_time() -> Iterator[VirtualLoop]:
    """A loop for the length of a `with` block; what is left of its tasks is cancelled at the end."""
    loop = VirtualLoop()
    try:
        yield loop
    finally:
        try:
            _cancel_all(loop)
        finally:
            loop.close()


def _cancel_all(loop: VirtualLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
