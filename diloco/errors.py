"""Everything that can go wrong for a user, with the exit code it ends in.

    DilocoError            1   base; never raised itself
    ├── ConfigError        2   bad configuration, arguments, or an unusable directory
    │   ├── DataError      2   no data, unreadable data, no tokens in it
    │   └── CheckpointError 2  a checkpoint or model directory that cannot be used
    ├── SwarmError         3   the swarm cannot be reached or does not admit this peer
    │   └── JoinError      3   the same in somebody's own program
    ├── DivergedError      4   training produced non-finite or absurd values
    ├── UnsavedError       5   interrupted with work that is in no checkpoint
    ├── DeviceError        6   the accelerator failed, as torch found some time later
    └── PayloadError       1   something from the network is invalid; its receiver catches this

Every text is one line: the key as typed, the value, the remedy. Any other exception that escapes is
a bug of ours (exit code 1, with its traceback). Exit code 0 means that the run is done or that the
peer left cleanly.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from diloco.text import masked, plain, speak_plainly


class DilocoError(Exception):
    """A problem that the user can mend; its text is one line, without secrets that were typed."""

    exit_code = 1

    def __init__(self, text: str = "") -> None:
        super().__init__(masked(text))


class ConfigError(DilocoError):
    """A setting, an argument or a directory cannot be used."""

    exit_code = 2


class DataError(ConfigError):
    """The training data is missing, unreadable or empty."""


class TermsError(DataError):
    """The hub has it for those who accept its terms."""


class CheckpointError(ConfigError):
    """A checkpoint or a model directory is missing, truncated, corrupt or of another run."""


class SwarmError(DilocoError):
    """The swarm cannot be reached, or it refuses this peer."""

    exit_code = 3


class JoinError(SwarmError):
    """A program of somebody else's could not join."""


class DivergedError(DilocoError):
    """Training diverged; going on would waste everybody's compute."""

    exit_code = 4


class UnsavedError(DilocoError):
    """The run was interrupted, and no checkpoint has all of its work."""

    exit_code = 5


class DeviceError(DilocoError):
    """The accelerator failed (`cudaErrorLaunchFailure` and the like); no process recovers."""

    exit_code = 6


class PayloadError(DilocoError):
    """Bytes or a header from another peer are invalid; the receiver refuses them."""


_DEVICE_FAILED = re.compile(r"(?:CUDA|HIP|XPU) error: .*")
# The machine refused, which is no bug: the user frees space or chooses another directory.
_DIRECTORY_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR}
)


def guard(function: Callable[[], int | None]) -> int:
    """Runs `function` and returns the exit code of the process.

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
        place = f"{error.filename}: " if error.filename else ""
        _complain(f"{place}{error.strerror}; free or choose another place with run.dir=DIRECTORY")
        return ConfigError.exit_code
    except Exception as error:
        sys.stderr.write(masked(traceback.format_exc()))
        if not (found := _DEVICE_FAILED.match(str(error))):
            return DilocoError.exit_code
        _complain(
            f"{found[0].rstrip('.')}; start this peer again, it goes on from its checkpoint. Where"
            " several processes share a device, give each its own"
        )
        return DeviceError.exit_code


def in_utf8() -> None:
    """Restarts this process in Python's UTF-8 mode for names of files, if the locale is ASCII."""
    if sys.getfilesystemencoding() == "ascii" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.environ.setdefault("PYTHONIOENCODING", "ascii")
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def end_process(code: int) -> NoReturn:
    """Ends this process with an exit code; a rank of torchrun, or with a failed device, at once.

    A thread of torch's process group, or tensors of the device, may abort the usual end or hang it.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and code != DeviceError.exit_code:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _nobody_reads() -> bool:
    """Whether the reader of the output, such as `head`, has ended; later writes do not fail."""
    try:
        print(flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def _complain(text: str) -> None:
    sys.stderr.write(f"diloco: error: {' '.join(plain(text).split())}\n")  # some may be a peer's
    sys.stderr.flush()


@contextmanager
def on_signals(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Calls `handler` for Ctrl+C, SIGTERM and SIGUSR1 inside the block; in the main thread only.

    SLURM announces with SIGUSR1 that a job will be ended, if it is asked to (--signal=USR1@120).
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
