"""A process of this package that goes on from what its parent has imported, as if it had been
started anew: streams, signals, environment and what `ps` shows are its own.

A fork copies the calling thread alone, and locks as they are at that moment. So the parent may have
no other thread: see `import_once`.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate
from typing import IO, Any

from diloco.config import Config
from diloco.process import end_process, guard

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14


class Forked:
    """A child, with the methods of `subprocess.Popen`, which threads may share."""

    def __init__(self, pid: int, stdin: IO[str], stdout: IO[str]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self.returncode: Any = None  # an int once it has ended
        self._reaping = threading.Lock()

    def poll(self) -> int | None:
        with self._reaping:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            code: int | None = self.returncode
        return code

    def wait(self) -> int:
        while (code := self.poll()) is None:
            with suppress(ChildProcessError):  # another thread has heard of its end
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def import_once(config: Config) -> set[int] | None:
    """Import what a peer does, for peers that are to be forked: the files that this has opened,
    which they keep. None where they cannot be: elsewhere than on Linux, with code of the user's,
    ranks, or an accelerator, whose driver works in no child.

    Nor can OpenMP and autograd, once the parent has used them: they would wait for threads that the
    fork did not copy. So this process may have one thread before, and the imports, which compute
    nothing, may start none. (Those of numpy's OpenBLAS end at a fork by themselves.)
    """
    is_alone = sys.platform == "linux" and len(_listed("task")) == 1
    if not is_alone or config.outer.method == "data_parallel" or config.run.code:
        return None
    log = config.run.dir / "logs" / "p0.log"
    log.parent.mkdir(exist_ok=True)
    with log.open("a") as errors, _standard_error(errors):
        from diloco.attach.devices import count_devices

        device = config.train.device
        if device != "cpu" and (device != "auto" or count_devices() != ("cpu", 0)):
            return None
        threads, files = _listed("task"), _listed("fd")
        import diloco.train.run  # noqa: F401
        from diloco.model.build import import_model

        import_model(config.model)
        gc.collect()
        gc.freeze()  # what is never freed stays in memory that all of them share
        return _listed("fd") - files if _listed("task") == threads else None


def fork(
    arguments: Sequence[str],
    errors: IO[str],
    environment: Mapping[str, str],
    files: Collection[int],
) -> Forked:
    """Start a process in a session of its own, which is what `python -m diloco.train ...`, with
    these arguments, would be.

    Its standard error is `errors`; of other files it keeps `files` alone, so that no lock of this
    process outlives it.
    """
    import diloco.train.__main__ as train

    (stdin, to_child), (from_child, stdout) = os.pipe(), os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    # a handler of this process must not run in the child
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setsid()
            for number, file in enumerate((stdin, stdout, errors.fileno())):
                os.dup2(file, number)
            _close_all_but({0, 1, 2, *files})
            _reset_signals(blocked)
            _forget_finalizers()
            _become([sys.executable, *arguments], environment)
            end_process(guard(lambda: train.peer([*arguments[2:]])))
        except SystemExit as ended:
            if isinstance(ended.code, int | None):
                code = ended.code or 0
            else:
                print(ended.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
        finally:  # as Python ends; what the parent's frames hold is the parent's
            with suppress(BaseException):
                threading._shutdown()  # type: ignore[attr-defined]
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    os.close(stdin)
    os.close(stdout)
    return Forked(pid, open(to_child, "w"), open(from_child, encoding="utf-8"))


@contextmanager
def _standard_error(file: IO[str]) -> Iterator[None]:
    """Send there what libraries complain of, as if a peer had imported them."""
    sys.stderr.flush()
    before = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(before, 2)
        os.close(before)


def _listed(kind: str) -> set[int]:
    """The threads ("task") or open files ("fd") of this process."""
    return set(map(int, os.listdir(f"/proc/self/{kind}")))


def _close_all_but(files: Collection[int]) -> None:
    for file in _listed("fd").difference(files):
        with suppress(OSError):  # the listing itself
            os.close(file)


def _reset_signals(blocked: Collection[int]) -> None:
    """Handle signals as a process does that begins, and let those through that are not blocked."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _forget_finalizers() -> None:
    """Drop those of the parent's objects: they would delete its temporary folders at the end of
    the child. What modules do at an exit stays."""
    finalize: Any = weakref.finalize
    finalize._registry.clear()


def _become(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Take arguments, environment and standard streams of a command of Python."""
    os.environ.clear()
    os.environ.update(environment)
    sys.orig_argv, sys.argv = list(command), list(command[2:])
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    sys.stdout = open(1, "w", encoding=sys.stdout.encoding, closefd=False)
    sys.stderr = open(2, "w", 1, sys.stderr.encoding, "backslashreplace", closefd=False)
    with suppress(OSError, AttributeError, ValueError):
        _show(command, [f"{name}={value}" for name, value in environment.items()])


_shown: list[object] = []  # memory that the kernel reads


def _show(command: Sequence[str], environment: Sequence[str]) -> None:
    """Let /proc, and so `ps`, show these arguments and this environment. It keeps the parent's
    where the kernel has no PR_SET_MM_MAP."""
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    with open("/proc/self/stat", "rb") as file:
        fields = [b""] * 3 + [*file.read().rpartition(b")")[2].split()]  # numbered as in `man proc`
    both = (command, environment)
    parts = [b"".join(os.fsencode(word) + b"\0" for word in words) for words in both]
    memory = ctypes.create_string_buffer(b"".join(parts))
    first, second, end = accumulate(map(len, parts), initial=ctypes.addressof(memory))
    code, data, stack = map(int, fields[26:28]), map(int, fields[45:48]), int(fields[28])
    ends = (*code, *data, libc.sbrk(0), stack, first, second, second, end)
    no_file = 0xFFFFFFFF << 32
    mapping = (ctypes.c_uint64 * 13)(*ends, 0, no_file)
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, mapping, ctypes.sizeof(mapping), 0) == 0:
        _shown.append(memory)
