"""Processes that begin with the libraries imported, which takes four seconds of a core otherwise.

    Popen (here) -> a request with three files -> the server, which has imported them, forks
    -> the child becomes `python -m MODULE ...`

The server has one thread, so its children may use locks. What a warm process starts with
`subprocess` and the same interpreter is warm as well. The server ends with its starter.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PLACE = "DILOCO_TEST_SERVER"  # a folder: the server's socket, and a file for each warm process
MARK = "DILOCO_TEST_MARK"
MODULES = ("diloco", "diloco.train", "torch.distributed.run")  # warm; any script of ours as well
RANKS = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
POPEN = ("subprocess", RANKS)  # where the name stands by which a warm process starts others
LIBRARIES = (
    f"torch {RANKS} torch.distributed.run transformers transformers.trainer hivemind datasets"
    " accelerate matplotlib.pyplot diloco.cli.local diloco.cli.join diloco.train.run diloco.sim.run"
    " diloco.integrations".split()
)


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """As `subprocess.Popen`; what is this interpreter with a module or script of ours is forked
    from the server. Should the server die, the process counts as killed."""

    _line: socket.socket | None = None  # on which the server says the process's id, and its end

    def _execute_child(self, *given: Any) -> None:  # type: ignore[override]
        words = becomes(given[0])
        if not words:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        cwd, env, pipes, session = given[5], given[6], given[10:16], given[21]
        theirs = (pipes[0], pipes[3], pipes[5])  # -1 is a file of this process
        files = [own if one == -1 else one for own, one in enumerate(theirs)]
        env, cwd = dict(os.environ if env is None else env), os.fspath(cwd or os.getcwd())
        content = json.dumps([words, env, cwd, session]).encode()
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._line.connect(f"{os.environ[PLACE]}/socket")
        socket.send_fds(self._line, [len(content).to_bytes(4, "big")], files)
        self._line.sendall(content)
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self.pid = int.from_bytes(_exactly(self._line, 4), "big")
        self._child_created = True

    def _wait(self, timeout: float | None) -> int:
        if self._line is None:
            return super()._wait(timeout)  # type: ignore[misc, no-any-return]
        if (code := self._internal_poll(timeout=timeout)) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def _internal_poll(self, *given: Any, timeout: float | None = 0.0, **named: Any) -> int | None:
        if self._line is None:
            return super()._internal_poll(*given, **named)  # type: ignore[misc, no-any-return]
        if self.returncode is None and select.select([self._line], [], [], timeout)[0]:
            try:
                self.returncode = int.from_bytes(_exactly(self._line, 4), "big", signed=True)
            except OSError:
                self.returncode = -signal.SIGKILL
            self._line.close()
        return self.returncode


def becomes(command: Any) -> list[str]:
    """The arguments of a command behind the interpreter; none if it cannot be warm."""
    arguments = [] if isinstance(command, str) else [os.fspath(one) for one in command]
    if PLACE not in os.environ or arguments[:1] != [sys.executable]:
        return []
    rest = [one for one in arguments[1:] if one != "-u"]
    if rest[:1] == ["-m"]:
        return rest if rest[1] in MODULES else []
    ours = rest and (rest[0].endswith(".py") or Path(rest[0]).parent == ROOT / "scripts")
    return rest if ours else []


def start_server() -> None:
    """Lets what this process starts from now on be warm."""
    place = Path(tempfile.mkdtemp(prefix="diloco-warm-"))
    command = [sys.executable, "-m", "tests.support.warm", str(place)]
    env = {**os.environ, PLACE: str(place), "OMP_NUM_THREADS": "1"}
    with (place / "log").open("wb") as log:
        files = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        process = subprocess.Popen(command, **files, start_new_session=True, cwd=ROOT, env=env)
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        raise RuntimeError(f"the server of warm processes ended: {(place / 'log').read_text()}")
    os.environ[PLACE] = str(place)

    def end() -> None:
        process.communicate()  # closes its input, with which it ends
        shutil.rmtree(place)

    atexit.register(end)


def marked(mark: str) -> dict[int, list[str]]:
    """Arguments of the warm processes that live and have that mark in their environment, by their
    ids; of ranks also RANK=NUMBER."""
    found = {}
    for file in Path(os.environ[PLACE]).glob(f"*.{mark}") if PLACE in os.environ else ():
        process, (begun, *arguments) = int(file.stem), json.loads(file.read_text())
        if begun == _begun(process):
            found[process] = arguments
    return found


def _begun(process: int) -> str | None:
    """When a living process started, in ticks; None of one that has ended."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


# -- in the server ---------------------------------------------------------------------------------


def serve(place: Path) -> list[Any]:
    """Forks for every request, until its input closes; returns the request in each child.

    Another fork stands between the server and the child, and waits for its end.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(place / "socket"))
    listener.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    print("ready", flush=True)
    while 0 not in select.select([0, listener], [], [])[0]:
        line, _ = listener.accept()
        if os.fork():
            line.close()
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        length, files, _, _ = socket.recv_fds(line, 4, 3)
        request: list[Any] = json.loads(_exactly(line, int.from_bytes(length, "big")))
        process = os.fork()
        if process == 0:
            for one in (listener, line):
                one.close()
            for number, file in enumerate(files):
                os.dup2(file, number)
            os.closerange(3, max(files) + 1)
            return request
        os.closerange(0, 3)
        for file in files:
            os.close(file)
        line.sendall(process.to_bytes(4, "big"))
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        line.sendall(code.to_bytes(4, "big", signed=True))
        os._exit(0)
    os._exit(0)


def become(arguments: list[str], environment: dict[str, str], cwd: str, session: bool) -> None:
    """This process goes on as `python ARGUMENTS` would."""
    if session:
        os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    if MARK in os.environ:
        own = Path(os.environ[PLACE]) / f"{os.getpid()}.{os.environ[MARK]}"
        words = [_begun(os.getpid()), *arguments, f"RANK={os.environ.get('RANK')}"]
        draft = own.with_name(f".{own.name}")
        draft.write_text(json.dumps(words))
        draft.rename(own)  # a reader sees all of it or none
    for module in ("random", "numpy.random"):
        sys.modules[module].seed()
    for module in POPEN:
        sys.modules[module].Popen = Popen  # type: ignore[attr-defined]
    path = [one for one in os.environ.get("PYTHONPATH", "").split(":") if one]
    is_module = arguments[0] == "-m"
    own_place = os.getcwd() if is_module else str(Path(arguments[0]).parent)
    sys.path[:] = list(dict.fromkeys([own_place, *path, *sys.path]))
    sys.argv = arguments[is_module:]
    if is_module:
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
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
    import random  # noqa: F401

    for library in LIBRARIES:
        importlib.import_module(library)
    become(*serve(Path(sys.argv[1])))
