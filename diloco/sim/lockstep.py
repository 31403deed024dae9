"""Runs the trainer of `diloco train`, which knows no event loop, in virtual time.

Each peer's training loop has a thread, and only one thread ever runs. Until the training loop calls
`Lockstep.call` with a coroutine (a sleep, an exchange), the event loop stands still: computing
takes no virtual time. Then the thread stops until the coroutine has a result.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Killed(BaseException):
    """Unwinds the thread of a peer that crashed; nothing may catch it."""


class Lockstep(Generic[R]):
    """One function in a thread, and its turns with the event loop.

    `run` returns what the function returns, and raises what it raises. When `run` is cancelled,
    `Killed` is raised in the function where it waits, and again from whatever it still asks for.
    """

    def __init__(self, work: Callable[[], R], name: str) -> None:
        self._work = work
        run = partial(contextvars.copy_context().run, self._run)  # the thread has its maker's owner
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._asked, self._answered = threading.Semaphore(0), threading.Semaphore(0)
        self._request: Coroutine[Any, Any, Any] | None = None
        self._answer: Any = None
        self._error: BaseException | None = None
        self._killed = False
        self._result: list[R] = []

    def call(self, request: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the event loop and return its result; called in the thread."""
        if self._killed:
            request.close()
            raise Killed
        self._request = request
        self._asked.release()
        self._answered.acquire()
        error, self._error = self._error, None
        if error is not None:
            raise error
        answer: T = self._answer
        return answer

    async def run(self) -> R:
        """Run the whole function; awaited in the event loop."""
        self._thread.start()
        while True:
            self._asked.acquire()  # blocks the loop: the function computes now
            request, self._request = self._request, None
            if request is None:
                break
            try:
                self._answer = await request
            except Exception as error:
                self._error = error
            except BaseException:
                self._kill()
                raise
            self._answered.release()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _kill(self) -> None:
        self._killed, self._error = True, Killed()
        self._answered.release()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._result.append(self._work())
        except BaseException as error:
            self._error = error
        finally:
            self._asked.release()
