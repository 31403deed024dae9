"""Processes that begin with the libraries imported, because they are forked from one that has done
nothing else.

    Popen (here) -> a request with three files -> the server forks -> the child becomes `python -m
    MODULE ...`

To import torch, transformers and hivemind takes four seconds of a core, and a test of real
processes starts several. The server has one thread, so its children may use locks. What a warm
process starts with `subprocess` and the same interpreter is warm as well. The server ends with the
process that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

SCRIPTS = Path(__file__).parents[2] / "scripts"
SERVER = "DILOCO_TEST_SERVER"  # the server's socket, for what a warm process starts
MARKS = (
    # a folder with a file PID.MARK for each warm process: its environment in /proc is the server's
    "DILOCO_TEST_MARKS"
)
MARK = "DILOCO_TEST_MARK"
# that a warm process may become; any script as well
MODULES = ("diloco", "diloco.train", "torch.distributed.run")
RANKS = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
POPEN = ("subprocess", RANKS)  # where the name stands by which a warm process starts others
LIBRARIES = (
    "torch",
    RANKS,
    "torch.distributed.run",
    "transformers",
    "transformers.trainer",
    "hivemind",
    "datasets",
    "accelerate",
    "matplotlib.pyplot",
    "diloco.cli.local",
    "diloco.cli.join",
    "diloco.train.run",
    "diloco.sim.run",
    "diloco.integrations",
)


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """As `subprocess.Popen`; what is this interpreter with a module or script of ours is forked
    from the server."""

    def __new__(cls, args: Any = (), *more: Any, **options: Any) -> Any:
        warm = [] if isinstance(args, str) else becomes([os.fspath(one) for one in args])
        return Warm(warm, **options) if warm and not more else super().__new__(cls)


def becomes(arguments: list[str]) -> list[str]:
    """What of a command a warm process can become: arguments behind the interpreter; nothing if it
    cannot."""
    if os.environ.get(SERVER) is None or not arguments or arguments[0] != sys.executable:
        return []
    rest = [one for one in arguments[1:] if one != "-u"]
    if rest[:1] == ["-m"] and rest[1] in MODULES:
        return rest
    return rest if rest and (rest[0].endswith(".py") or Path(rest[0]).parent == SCRIPTS) else []


class Warm:
    """A process that the server has forked. Should the server die, the process counts as killed."""

    def __init__(
        self,
        args: list[str],
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        env: Any = None,
        cwd: Any = None,
        text: bool = False,
        start_new_session: bool = False,
        encoding: str | None = None,
        errors: str | None = None,
    ) -> None:
        self.args, self.returncode = args, None
        self._text, self._pending = text or encoding is not None, b""
        theirs, ours = [0, 1, 2], [None, None, None]
        opened: list[int] = []
        for number, given in enumerate((stdin, stdout, stderr)):
            if given == subprocess.PIPE:
                read, write = os.pipe()
                theirs[number], mine = (read, write) if number == 0 else (write, read)
                ours[number] = os.fdopen(
                    mine,
                    ("w" if number == 0 else "r") + ("" if self._text else "b"),
                    1 if self._text else -1,
                    errors=errors,
                )
                opened.append(theirs[number])
            elif given == subprocess.DEVNULL:
                theirs[number] = os.open(os.devnull, os.O_RDWR)
                opened.append(theirs[number])
            elif given == subprocess.STDOUT:
                theirs[number] = theirs[1]
            elif given is not None:
                theirs[number] = given if isinstance(given, int) else given.fileno()
        self.stdin, self.stdout, self.stderr = ours
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._line.connect(os.environ[SERVER])
        request = {
            "arguments": args,
            "environment": dict(os.environ if env is None else env),
            "directory": os.fspath(cwd or os.getcwd()),
            "session": start_new_session,
        }
        content = json.dumps(request).encode()
        socket.send_fds(self._line, [len(content).to_bytes(4, "big")], theirs)
        self._line.sendall(content)
        for number in opened:
            os.close(number)
        self.pid = int.from_bytes(_exactly(self._line, 4), "big")

    def poll(self) -> int | None:
        return self._status(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._status(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
        """Of at most one pipe, which is read to its end."""
        if self.stdin is not None:
            self.stdin.close()
        said: list[Any] = [None, None]
        for number, pipe in enumerate((self.stdout, self.stderr)):
            if pipe is not None:
                with pipe:
                    said[number] = pipe.read()
        self.wait(timeout)
        return said[0], said[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()
        self.wait()

    def _status(self, timeout: float | None) -> int | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._line], [], [], left)[0]:
                return None
            try:
                more = self._line.recv(4 - len(self._pending))
            except OSError:
                more = b""
            self._pending += more
            if not more:
                self._pending = (-signal.SIGKILL).to_bytes(4, "big", signed=True)
            if len(self._pending) == 4:
                self.returncode = int.from_bytes(self._pending, "big", signed=True)
                self._line.close()
        return self.returncode


def start_server() -> None:
    """Lets what this process starts from now on be warm."""
    place = Path(tempfile.mkdtemp(prefix="diloco-warm-"))
    (place / "marks").mkdir()
    os.environ |= {MARKS: str(place / "marks")}
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm", str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert process.stdout is not None and process.stdin is not None
    if process.stdout.readline() != b"ready\n":
        raise RuntimeError(f"the server of warm processes ended: {(place / 'log').read_text()}")
    os.environ[SERVER] = str(place / "socket")

    def end() -> None:
        process.communicate()  # closes its input, with which it ends
        for one in sorted(place.rglob("*"), reverse=True):
            one.rmdir() if one.is_dir() else one.unlink()
        place.rmdir()

    atexit.register(end)


class Became(NamedTuple):
    """What a warm process is: RANK in its environment, and its arguments."""

    rank: str | None
    arguments: list[str]


def marked(mark: str) -> dict[int, Became]:
    """The warm processes that live and have that mark in their environment, by their ids."""
    found = {}
    for file in Path(os.environ[MARKS]).glob(f"*.{mark}") if MARKS in os.environ else ():
        process, (begun, rank, *arguments) = (
            int(file.name.partition(".")[0]),
            json.loads(file.read_text()),
        )
        if begun == _begun(process):
            found[process] = Became(rank, arguments)
    return found


def _begun(process: int) -> str | None:
    """When a living process started, in ticks; None of one that has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


# -- in the server ---------------------------------------------------------------------------------


def serve(place: Path) -> dict[str, Any]:
    """Forks for every request, until its input closes; returns the request in each child."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(place / "socket"))
    listener.listen(64)
    woken, wakes = socket.socketpair()
    for end in (woken, wakes):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    lines: dict[int, socket.socket] = {}
    gc.freeze()
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([0, listener, woken], [], [])
        if 0 in ready:
            os._exit(0)
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                woken.recv(1 << 16)
            _reap(lines)
        if listener in ready:
            line, _ = listener.accept()
            length, files, _, _ = socket.recv_fds(line, 4, 3)
            request: dict[str, Any] = json.loads(_exactly(line, int.from_bytes(length, "big")))
            process = os.fork()
            if process == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for one in (listener, woken, wakes, line, *lines.values()):
                    one.close()
                for number, file in enumerate(files):
                    os.dup2(file, number)
                os.closerange(3, max(files) + 1)
                return request
            for file in files:
                os.close(file)
            line.sendall(process.to_bytes(4, "big"))
            lines[process] = line


def _reap(lines: dict[int, socket.socket]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            process, status = ended
            with lines.pop(process) as line, contextlib.suppress(OSError):
                line.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "big", signed=True))


def become(request: dict[str, Any]) -> None:
    """This process goes on as `python ARGUMENTS` would."""
    if request["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    if MARK in os.environ:
        own = Path(os.environ[MARKS]) / f"{os.getpid()}.{os.environ[MARK]}"
        draft = own.with_name(f".{own.name}")
        rank = os.environ.get("RANK")
        draft.write_text(json.dumps([_begun(os.getpid()), rank, *request["arguments"]]))
        draft.rename(own)  # a reader sees all of it or none
    for module in ("random", "numpy.random"):
        sys.modules[module].seed()
    assert random is sys.modules["random"]
    for module in POPEN:
        sys.modules[module].Popen = Popen  # type: ignore[attr-defined]
    path = [one for one in os.environ.get("PYTHONPATH", "").split(":") if one]
    arguments = request["arguments"]
    own_place = os.getcwd() if arguments[0] == "-m" else str(Path(arguments[0]).parent)
    sys.path[:] = list(dict.fromkeys([own_place, *path, *sys.path]))
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def _exactly(line: socket.socket, length: int) -> bytes:
    content = b""
    while len(content) < length:
        more = line.recv(length - len(content))
        if not more:
            raise ConnectionError("the server of warm processes ended")
        content += more
    return content


if __name__ == "__main__":
    for library in LIBRARIES:
        importlib.import_module(library)
    become(serve(Path(sys.argv[1])))
