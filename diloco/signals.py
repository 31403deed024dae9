"""Signals to this process: to commands, `diloco train`, and peers in anybody's loop.

A handler tells whoever watches, and does nothing else: these end what they do between two steps. A
second signal of a kind ends the process at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from diloco.errors import UnsavedError

# SLURM announces the end of a job with SIGUSR1, if it is asked to (--signal=USR1@120)
NUMBERS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
OF_COMMANDS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
AGAIN_S = 2.0  # schedulers and torchrun send the same signal twice

_watchers: list[Callable[[int], object]] = []
_before: dict[int, Any] = {}
_received: dict[int, float] = {}
_process = 0


def watch(tell: Callable[[int], object], over: Sequence[int] = ()) -> Callable[[], None]:
    """Tell of each signal of `NUMBERS` and `over`, until the returned function is called.

    A handler of the program's own stays, unless its signal is in `over`. Without effect outside the
    main thread.
    """
    global _process
    if threading.current_thread() is threading.main_thread():
        _process = os.getpid()
        _watchers.append(tell)
        for number in {*NUMBERS, *over}:
            here = signal.getsignal(number)
            if here == signal.SIG_DFL or (number in over and callable(here) and here is not _hear):
                _before[number] = signal.signal(number, _hear)

    def end() -> None:
        _watchers[:] = (other for other in _watchers if other is not tell)
        if not _watchers and threading.current_thread() is threading.main_thread():
            _received.clear()
            for number, before in _before.items():
                if signal.getsignal(number) is _hear:  # nobody has put another one over it
                    signal.signal(number, before)
            _before.clear()

    return end


def _hear(number: int, frame: FrameType | None) -> None:
    before = _before.get(number, signal.SIG_DFL)
    if not _watchers or os.getpid() != _process:  # in a process that was forked from this one
        signal.signal(number, before)
        return os.kill(os.getpid(), number)
    interactive, now = number == signal.SIGINT, time.monotonic()
    if (interactive and number in _received) or now - _received.get(number, now) > AGAIN_S:
        os._exit(UnsavedError.exit_code if interactive else 128 + number)
    _received.setdefault(number, now)
    if callable(before) and before is not signal.default_int_handler:
        before(number, frame)
    for tell in list(_watchers):
        tell(number)


@contextmanager
def on_signals(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Call `handler` for the signals of a command inside the block; in the main thread only."""
    before = {number: signal.signal(number, handler) for number in OF_COMMANDS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
