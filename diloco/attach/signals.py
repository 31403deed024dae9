"""What SIGTERM and its like do to a peer, in `diloco train` and in anybody's program: it says
goodbye before it ends.

A loop that looks at `interrupted` is told, and ends itself. Any other is ended by `SystemExit` with
the status that a shell has for the signal: at once while the program's own code runs, and else
after the step or the exchange under way.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from diloco.errors import UnsavedError

# SLURM announces the end of a job with SIGUSR1
NUMBERS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
AGAIN_S = 2.0  # schedulers and torchrun send the same signal twice
# what is not left half-done
WHOLE = ("diloco.attach.attachment", "diloco.attach.swarm", "torch.optim.optimizer")


@dataclass(frozen=True, eq=False)
class _Watcher:
    interrupt: Callable[[int], bool]
    leave: Callable[[], None]


_watchers: list[_Watcher] = []
_before: dict[int, Any] = {}
_received: dict[int, float] = {}
_process = 0


def watch(
    interrupt: Callable[[int], bool],
    leave: Callable[[], None] = lambda: None,
    over: Sequence[int] = (),
) -> Callable[[], None]:
    """Until the returned function is called, call `interrupt` with each signal; a second one of its
    kind ends at once.

    It says whether the loop may be ended here and now, by `leave` and `SystemExit`. A handler of
    the program's own stays, unless its signal is in `over`. Without effect outside the main thread.
    """
    global _process
    watcher = _Watcher(interrupt, leave)
    if threading.current_thread() is threading.main_thread():
        _process = os.getpid()
        _watchers.append(watcher)
        for number in {*NUMBERS, *over}:
            here = signal.getsignal(number)
            if here == signal.SIG_DFL or (number in over and callable(here) and here is not _stop):
                _before[number] = signal.signal(number, _stop)

    def end() -> None:
        if watcher in _watchers:
            _watchers.remove(watcher)
        if not _watchers and threading.current_thread() is threading.main_thread():
            _received.clear()
            for number, before in _before.items():
                if signal.getsignal(number) is _stop:  # nobody has put another one over it
                    signal.signal(number, before)
            _before.clear()

    return end


def leave(number: int) -> NoReturn:
    """End the program as this signal does; the innermost peer leaves first."""
    for watcher in reversed(list(_watchers)):
        watcher.leave()
    raise SystemExit(128 + number)


def _stop(number: int, frame: FrameType | None) -> None:
    before = _before.get(number, signal.SIG_DFL)
    if not _watchers or os.getpid() != _process:  # in a process that was forked from this one
        signal.signal(number, before)
        return os.kill(os.getpid(), number)
    if number in _received and (
        number == signal.SIGINT or time.monotonic() - _received[number] > AGAIN_S
    ):
        os._exit(UnsavedError.exit_code if number == signal.SIGINT else 128 + number)
    _received.setdefault(number, time.monotonic())
    if callable(before) and before is not signal.default_int_handler:
        before(number, frame)
    now = all([watcher.interrupt(number) for watcher in list(_watchers)])
    while frame is not None and frame.f_globals.get("__name__") not in WHOLE:
        frame = frame.f_back
    if now and frame is None:
        leave(number)
