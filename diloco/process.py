"""Terminal and exit of this package's own processes; a user's program is left alone."""

from __future__ import annotations

import codecs
import errno
import io
import os
import re
import signal
import sys
import threading
import traceback
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, TextIO

from diloco.errors import ConfigError, DeviceError, DilocoError, UnsavedError
from diloco.text import BARS, masked, plain

_ASCII = dict(zip(BARS, "_.-~=+*#", strict=True)) | {"±": "+-"}
_DEVICE_FAILED = re.compile(r"(?:CUDA|HIP|XPU) error: .*")
# The machine refused, which is no bug: the user frees space or chooses another directory.
_DIRECTORY_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR}
)


def speak_plainly() -> None:
    """Print plain characters in place of those that the terminal cannot show, from now on."""
    codecs.register_error("plain", _plainly)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with suppress(OSError):  # of a file that became a pipe; the errors are set all the same
                stream.reconfigure(errors="plain")


class LastingStream:
    """A stream that outlives its terminal or reader; what is written later is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, work: Callable[..., object], *arguments: object) -> None:
        try:
            work(*arguments)
        except OSError:
            with suppress(OSError):  # what is buffered goes there, too, and what others write
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlast_terminal() -> None:
    """Go on without a terminal or a reader of the output: drop what is written, and ignore SIGHUP
    where nothing handles it. A process started from now on ignores it, too."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for name in ("stdout", "stderr"):
        if not isinstance(stream := getattr(sys, name), LastingStream):
            setattr(sys, name, LastingStream(stream))


def _plainly(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking = unicodedata.normalize("NFKD", error.object[error.start : error.end])
    shown = [char for char in lacking if not unicodedata.combining(char)]
    return "".join(_ASCII.get(char, char if char.isascii() else "?") for char in shown), error.end


def guard(function: Callable[[], int | None]) -> int:
    """Run `function` and return the exit code of the process.

    `DilocoError` and unusable directories (no space, no permission) print `diloco: error: <one
    line>` on stderr. A Ctrl+C that nobody handled ends with 5. Any other exception is a bug: its
    traceback is printed, and the code is 1.
    """
    speak_plainly()
    try:
        code = function() or 0
        sys.stdout.flush()
        return code
    except DilocoError as error:
        _complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _complain("interrupted")
        return UnsavedError.exit_code
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return 0
        if error.errno not in _DIRECTORY_ERRNOS:
            sys.stderr.write(masked(traceback.format_exc()))
            return DilocoError.exit_code
        path = f"{error.filename}: " if error.filename else ""
        _complain(f"{path}{error.strerror}; free or choose another place with run.dir=DIRECTORY")
        return ConfigError.exit_code
    except Exception as error:
        sys.stderr.write(masked(traceback.format_exc()))
        if not (fault := _DEVICE_FAILED.match(str(error))):
            return DilocoError.exit_code
        _complain(
            f"{fault[0].rstrip('.')}; start this peer again, it goes on from its checkpoint. Where"
            " several processes share a device, give each its own"
        )
        return DeviceError.exit_code


def in_utf8() -> None:
    """Restart this process in Python's UTF-8 mode for names of files, if the locale is ASCII."""
    if sys.getfilesystemencoding() == "ascii" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.environ.setdefault("PYTHONIOENCODING", "ascii")
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def end_process(code: int) -> NoReturn:
    """End this process with an exit code; a rank of torchrun, or after a device failed, at once.

    A thread of torch's process group, or tensors of the device, may abort the usual end or hang it.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and code != DeviceError.exit_code:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _nobody_reads() -> bool:
    """Return True if the reader of stdout, such as `head`, has ended; drops further output."""
    try:
        print(flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _complain(text: str) -> None:
    sys.stderr.write(f"diloco: error: {' '.join(plain(text).split())}\n")  # some may be a peer's
    sys.stderr.flush()
