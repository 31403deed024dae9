"""An event loop whose clock is virtual: when nothing is ready, it jumps to the next timer.

Nothing sleeps, and no thread runs beside the loop, so a program runs in the same order each time.

A fuzz makes the loop as unkind as an operating system: work for threads takes time (`executor_s`),
a peer's clock has a rate of its own (`set_clock`), and a peer stops anywhere (`freeze`, `kill`).
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
RESOLUTION_S = 1e-7  # of timers; coarser than floats of 20 years of seconds
NAMED = 5  # tasks that the report of a deadlock names
POLL_EVERY = 256  # turns of the loop between two looks for signals
MANY_TURNS = 100_000  # in which no time passes: something is busy for ever
MANY_CANCELLED = 100  # timers; as many of them, and half of all, are worth a new heap

_owner: ContextVar[str | None] = ContextVar("diloco_sim_owner", default=None)
_NOBODY = Context()
_TRUE_CLOCK = (1.0, 0.0)  # an owner's clock shows offset + rate * virtual seconds


class DeadlockError(RuntimeError):
    """Nothing is ready and no timer is left, or much happens and no time passes: a bug."""


class _Task(asyncio.Task[T]):
    """A task whose hash is a count, so that a set of tasks has the same order in every run."""

    def __init__(self, work: Coroutine[Any, Any, T], *, loop: VirtualLoop, **options: Any) -> None:
        self.number = loop.count_task()  # asyncio asks for the hash while it makes the task
        super().__init__(work, loop=loop, **options)

    def __hash__(self) -> int:
        return self.number


_Work = tuple[asyncio.TimerHandle, asyncio.Future[Any]]  # what a thread does, and who waits for it


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose seconds begin at 0 and pass only by timers.

    Tasks, timers and callbacks belong to an owner (a simulated peer), which they inherit from their
    creator. `time` is the clock of the owner that asks; `seconds` is the clock of the simulation.
    `run_until_complete` raises `DeadlockError`, which names the tasks that wait.

    executor_s: draws the virtual seconds before and after a thread's work; None does it at once.
    on_turn: called after every turn of the loop.
    """

    _timer_cancelled_count: int  # asyncio's own

    def __init__(self) -> None:
        self.seconds = 0.0
        self.turns = 0
        self._turns_by = MANY_TURNS  # before which time has to pass
        self.executor_s: Callable[[], float] | None = None
        self.on_turn: Callable[[], None] | None = None
        self._num_tasks = 0
        self._owned: dict[str, dict[asyncio.Task[Any], None]] = {}  # ordered, unlike a set
        self._num_works = 0
        self._working: dict[str | None, dict[int, _Work]] = {}
        self._clocks: dict[str | None, tuple[float, float]] = {}
        self._frozen: dict[str, list[asyncio.Handle]] = {}
        super().__init__()
        self._clock_resolution = RESOLUTION_S
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]

    # -- time --------------------------------------------------------------------------------------

    def time(self) -> float:
        """Return the seconds of the clock of the owner that asks."""
        rate, offset_s = self._clocks.get(_owner.get(), _TRUE_CLOCK)
        return offset_s + rate * self.seconds

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        rate, offset_s = self._clocks.get(_owner.get(), _TRUE_CLOCK)
        return super().call_at((when - offset_s) / rate, callback, *args, context=context)

    def at(self, second: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Call back at a second of the simulation, whatever happens to any owner."""
        return super().call_at(second, callback, *args, context=_NOBODY)

    def set_clock(self, owner: str, rate: float, offset_s: float) -> None:
        """Let the owner's clock show offset_s + rate * virtual seconds."""
        self._clocks[owner] = (rate, offset_s)

    def set_back(self, owner: str, seconds: float) -> None:
        """Set the owner's clock back by so many virtual seconds: its machine was suspended."""
        rate, offset_s = self._clocks.get(owner, _TRUE_CLOCK)
        self._clocks[owner] = (rate, offset_s - rate * seconds)

    # -- turns -------------------------------------------------------------------------------------

    def _run_once(self) -> None:
        """Run everything that is ready. (asyncio's own turn would wait for files and real time.)"""
        ready, timers = self._ready, self._scheduled  # type: ignore[attr-defined]
        self._drop_cancelled(timers)
        if self.turns % POLL_EVERY == 0:
            self._poll()
        if self.turns > self._turns_by:
            raise DeadlockError
        if not ready:
            if self._stopping:  # type: ignore[attr-defined]
                return
            if not timers:
                self._poll()
                if not ready:
                    raise DeadlockError
            elif timers[0]._when > self.seconds:
                self.seconds, self._turns_by = timers[0]._when, self.turns + MANY_TURNS
        self._take_due(timers)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            if self._frozen and (held := self._frozen.get(handle._context.get(_owner))) is not None:
                held.append(handle)
                continue
            handle._run()
        self.turns += 1
        if self.on_turn is not None:
            self.on_turn()

    def _take_due(self, timers: list[Any]) -> None:
        end = self.seconds + RESOLUTION_S
        while timers and timers[0]._when <= end:
            timer = heapq.heappop(timers)
            timer._scheduled = False
            self._ready.append(timer)  # type: ignore[attr-defined]

    def _poll(self) -> None:
        """Handle signals, which come by the loop's own pipe."""
        self._process_events(self._selector.select(0))  # type: ignore[attr-defined]

    def _drop_cancelled(self, timers: list[Any]) -> None:
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
            self._timer_cancelled_count -= 1
        if self._timer_cancelled_count > max(MANY_CANCELLED, len(timers) // 2):
            for timer in timers:
                timer._scheduled = not timer._cancelled
            timers[:] = [timer for timer in timers if not timer._cancelled]
            heapq.heapify(timers)
            self._timer_cancelled_count = 0

    def run_until_complete(self, future: Any) -> Any:
        self._turns_by = self.turns + MANY_TURNS
        try:
            return super().run_until_complete(future)
        except DeadlockError:
            names = sorted(f"{task.get_name()}: {_place(task)}" for task in asyncio.all_tasks(self))
            more = [f"and {len(names) - NAMED} more"] if len(names) > NAMED else []
            waiting = "; ".join(names[:NAMED] + more)
            busy = "time does not pass" if self._ready else "nothing can happen"  # type: ignore[attr-defined]
            text = f"at {self.seconds:.3f} s {busy} any more; these wait: {waiting}"
            raise DeadlockError(text) from None

    # -- threads -----------------------------------------------------------------------------------

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Do the work here: at once, or in the middle of the time that `executor_s` gives it."""
        future: asyncio.Future[T] = self.create_future()
        if self.executor_s is None:
            _settle(future, *_outcome(func, args))
            return future
        owner, before_s, after_s = _owner.get(), self.executor_s(), self.executor_s()

        def work() -> None:
            result, error = _outcome(func, args)
            self._later(owner, future, after_s, lambda: _settle(future, result, error))

        self._later(owner, future, before_s, work)
        return future

    def _later(
        self, owner: str | None, future: asyncio.Future[Any], delay_s: float, callback: Any
    ) -> None:
        self._num_works += 1
        number, working = self._num_works, self._working.setdefault(owner, {})

        def run() -> None:  # knows its timer by number, for a cycle would wait for the collector
            del working[number]
            callback()

        working[number] = self.call_later(delay_s, run), future

    # -- owners ------------------------------------------------------------------------------------

    def count_task(self) -> int:
        """Return the number of a task that is being made."""
        self._num_tasks += 1
        return self._num_tasks

    @property
    def owner(self) -> str | None:
        """The owner whose turn it is."""
        return _owner.get()

    @contextmanager
    def owned_by(self, owner: str | None) -> Iterator[None]:
        """Assign what is created inside, and what that creates, to this owner."""
        token = _owner.set(owner)
        try:
            yield
        finally:
            _owner.reset(token)

    def kill(self, owner: str) -> None:
        """End an owner as SIGKILL would: its threads' work is lost, its tasks are cancelled."""
        for timer, future in self._working.pop(owner, {}).values():
            timer.cancel()
            future.cancel()  # else a task that shields its wait would wait for ever
        self.thaw(owner)
        for task in self.tasks_of(owner):
            task.cancel()

    def tasks_of(self, owner: str) -> list[asyncio.Task[Any]]:
        """List the tasks of an owner that are not over, the oldest first."""
        return list(self._owned.get(owner, ()))

    def freeze(self, owner: str) -> None:
        """Stop an owner as SIGSTOP would: its callbacks wait. Its clock goes on (`set_back`)."""
        self._frozen.setdefault(owner, [])

    def thaw(self, owner: str) -> None:
        """Continue a frozen owner: its callbacks run in the order in which they came."""
        for handle in self._frozen.pop(owner, ()):
            self._ready.append(handle)  # type: ignore[attr-defined]

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], **options: Any
    ) -> asyncio.Task[T]:
        task = _Task(work, loop=self, **options)
        owner = _owner.get()
        if owner is not None:
            self._owned.setdefault(owner, {})[task] = None
            task.add_done_callback(self._owned[owner].pop)
        return task


def _outcome(func: Callable[..., T], args: tuple[Any, ...]) -> tuple[T | None, Exception | None]:
    try:
        return func(*args), None
    except Exception as error:
        return None, error


def _settle(future: asyncio.Future[Any], result: object, error: Exception | None) -> None:
    if error is None and not future.cancelled():
        future.set_result(result)
    elif error is not None and not future.cancelled():
        future.set_exception(error)


def _place(task: asyncio.Task[Any]) -> str:
    """Return file and line at which a task waits."""
    stack = task.get_stack(limit=1)
    return f"{stack[-1].f_code.co_name} line {stack[-1].f_lineno}" if stack else "?"


@contextmanager
def virtual_time() -> Iterator[VirtualLoop]:
    """Yield a loop for the length of a `with` block; its tasks are cancelled at the end."""
    loop = VirtualLoop()
    try:
        yield loop
    finally:
        try:
            loop.on_turn = None
            for owner in list(loop._frozen):
                loop.thaw(owner)
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        finally:
            loop.close()
