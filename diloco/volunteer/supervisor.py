"""The process of a worker: it keeps a peer running, as `diloco.volunteer.rules` decide.

    python -m diloco.volunteer.supervisor DIRECTORY

The peer is a process of its own, with the command that a person would type. SIGTERM ends both: the
peer leaves cleanly. If the supervisor is killed, its peer goes on; the next supervisor ends it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from logging import Formatter, LogRecord, makeLogRecord
from logging.handlers import RotatingFileHandler
from pathlib import Path

from diloco.errors import ConfigError
from diloco.process import guard
from diloco.rundir.files import exclusive
from diloco.signals import on_signals
from diloco.volunteer import machine
from diloco.volunteer.rules import Action, MachineFacts, decide
from diloco.volunteer.worker import Worker, signal_to

EVERY_S = 15.0  # between looks at the machine
LOG_BYTES = 4 * 10**6
ERROR = "diloco: error: "


class Supervisor:
    """Runs the peer of a worker until its state is "ended"; `end` is a signal's handler."""

    def __init__(self, worker: Worker) -> None:
        began_at = time.time()
        state = worker.state.resumed(began_at)
        self.worker = replace(worker, pid=os.getpid(), began_at=began_at, state=state)
        self._log = _Log(worker.log, maxBytes=LOG_BYTES, backupCount=1)
        self._log.setFormatter(Formatter("%(asctime)s %(message)s", "%m-%d %H:%M:%S"))
        self._quiet, self._stop, self._wake = machine.Quiet(), False, threading.Event()
        self._peer: subprocess.Popen[str] | None = None
        self._ended: int | None = None  # its exit code; set by the thread that waits for it
        self._error = ""

    def end(self, *_: object) -> None:
        """Let the peer leave, and end."""
        self._stop = True
        self._wake.set()

    def run(self) -> None:
        """Look, decide and act, every few seconds and whenever something happens."""
        self._save()
        self.worker.end_orphan()
        while True:
            self._wake.clear()
            before, now = self.worker, time.time()
            state, action = decide(now, before.state, self._facts(), before.when, before.disk_bytes)
            self.worker = replace(before, state=state)
            if str(state) != str(before.state):
                self._note(f"worker: {state}")
            self._carry_out(action)
            if self.worker != before:
                self._save()
            if action is Action.END:
                return self._log.close()
            pause_s = state.next_at - now if state.phase == "waiting" else EVERY_S
            if action is not Action.CLEAN:
                self._wake.wait(pause_s if 0 < pause_s < EVERY_S else EVERY_S)

    def _facts(self) -> MachineFacts:
        code, self._ended = self._ended, None
        if code is not None:
            self._peer = None
        worker, now = self.worker, datetime.now()
        return MachineFacts(
            running=self._peer is not None,
            code=code,
            error=self._error,
            joined=machine.has_trained(worker.directory, worker.state.since),
            stop=self._stop,
            hour=now.hour + now.minute / 60,
            plugged_in=machine.plugged_in(),
            quiet_s=self._quiet.measure(worker.peer_pid),
            used=0 if worker.disk_bytes is None else machine.used_bytes(worker.directory),
            free=shutil.disk_usage(worker.directory).free,
        )

    def _carry_out(self, action: Action) -> None:
        directory = self.worker.directory
        if action is Action.START:
            self._start()
        elif action is Action.CLEAN:
            for path in (directory / "cache", *directory.glob("diloco/*/runs/*/checkpoints/*")):
                shutil.rmtree(path, ignore_errors=True)
        elif self._peer is not None and action in (Action.LEAVE, Action.KILL):
            self._peer.terminate() if action is Action.LEAVE else self._peer.kill()

    def _start(self) -> None:
        worker = self.worker
        environment = {**os.environ, **worker.environment, "XDG_DATA_HOME": str(worker.directory)}
        if worker.disk_bytes is not None:
            environment["XDG_CACHE_HOME"] = str(worker.directory / "cache")
        self._error = ""
        try:
            with exclusive(worker.directory / "peer-lock") as lock:  # the peer holds it from now on
                self._peer = subprocess.Popen(
                    [sys.executable, *worker.command],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    env=environment,
                    cwd=worker.cwd,
                    pass_fds=[lock],
                    start_new_session=True,
                )
        except (OSError, ConfigError) as error:
            self._ended, self._error = ConfigError.exit_code, str(error)
            return self._wake.set()
        self.worker = replace(worker, peer_pid=self._peer.pid)
        hearing = threading.Thread(target=self._hear, args=(self._peer,), daemon=True)
        hearing.start()
        threading.Thread(target=self._await_end, args=(self._peer, hearing), daemon=True).start()

    def _hear(self, peer: subprocess.Popen[str]) -> None:
        assert peer.stdout is not None
        with peer.stdout:
            for line in peer.stdout:
                if line.startswith(ERROR):
                    self._error = line.removeprefix(ERROR).strip()
                self._note(line.rstrip("\n"))

    def _await_end(self, peer: subprocess.Popen[str], hearing: threading.Thread) -> None:
        code = peer.wait()
        signal_to(os.killpg, peer.pid, signal.SIGKILL)  # they keep its output, port or memory
        hearing.join()
        self._ended = code
        self._wake.set()

    def _note(self, line: str) -> None:
        self._log.handle(makeLogRecord({"msg": line}))

    def _save(self) -> None:
        with suppress(OSError):  # a full disk, which the facts show
            self.worker.write()


class _Log(RotatingFileHandler):
    def handleError(self, record: LogRecord) -> None:
        """Lose a line that a full disk does not take."""


def main(directory: Path) -> None:
    """Run the worker in this directory, unless it was stopped or has ended."""
    with exclusive(directory / "lock"):
        worker = Worker.read(directory)
        if not worker.is_stopped:
            supervisor = Supervisor(worker)
            with on_signals(supervisor.end):
                supervisor.run()


if __name__ == "__main__":
    sys.exit(guard(lambda: main(Path(sys.argv[1]))))
