"""Peers in processes of their own, watched by one: `diloco local`, and `diloco join` on several accelerators.

Their JSON lines become the live table. The first Ctrl+C makes each peer leave cleanly, or kills it if it is not ready
and has nothing to lose; the second kills all. A peer's standard input is a pipe from here: if this process is killed,
the pipe closes and the peer leaves by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from diloco.cli.table import LiveView
from diloco.errors import DilocoError, UnsavedError, on_signals
from diloco.rundir.reporting import Finished, Message, Ready, Status, read_message
from diloco.rundir.summary import Summary

__all__ = ["Child", "Words", "follow", "forwarding", "free_port", "started"]


@dataclass
class Child:
    """One peer process and what it said."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    log_start: int  # bytes that earlier sessions wrote
    ready: bool = False
    begun: bool = False  # it or another one trains: ranks of data parallel say nothing of themselves
    summary: Summary | None = None

    @property
    def exit(self) -> int:
        """Exit code: what the peer itself says, because torchrun calls it a failure when Ctrl+C has ended a peer."""
        return self.process.returncode if self.summary is None else self.summary.exit

    def stop(self, number: int = signal.SIGINT) -> None:
        """Make it leave, or end it at once if it is not ready: then it may wait for others, and hears no signal.

        A second SIGINT ends a peer at once; another signal may come several times.
        """
        if self.process.poll() is None:
            self.process.send_signal(number if self.ready or self.begun else signal.SIGKILL)

    def complaint(self) -> str | None:
        """The one-line error that the peer ended with."""
        lines = self.log.read_bytes()[self.log_start :].decode(errors="replace").splitlines()
        found = [line for line in lines if line.startswith("diloco: error: ")]
        return found[-1].removeprefix("diloco: error: ") if found else (lines[-1] if lines else None)

    def error(self) -> DilocoError:
        """That error, with the exit code."""
        error = DilocoError(f"{self.name}: {self.complaint()} (log: {self.log})")
        error.exit_code = self.exit
        return error


LINGERING_S = 5.0

Words = queue.Queue[tuple[Child, Message | None]]
"""What the peers say, in the order in which they say it; None when one has ended."""


@contextlib.contextmanager
def started(
    name: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str], words: Words
) -> Iterator[Child]:
    """Starts `python ARGUMENTS`, one peer, which never outlives this context."""
    log.parent.mkdir(exist_ok=True)
    with log.open("a") as errors:
        log_start = log.stat().st_size
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,  # Ctrl+C in the terminal reaches this process only, which passes it on once
        )
    child = Child(name, process, log, log_start)
    assert process.stdout is not None
    listening = threading.Thread(target=_listen, args=(child, process.stdout, words), daemon=True)
    listening.start()
    threading.Thread(target=_wait, args=(child, listening, words), daemon=True).start()
    try:
        yield child
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _listen(child: Child, output: IO[str], words: Words) -> None:
    for line in output:
        with contextlib.suppress(ValueError):
            content = json.loads(line)
            message = read_message(content) if isinstance(content, dict) else None
            if message is not None:
                words.put((child, message))


def _wait(child: Child, listening: threading.Thread, words: Words) -> None:
    """Say that a peer has ended; what it has started may outlive it, and keep its output open."""
    child.process.wait()
    listening.join(LINGERING_S)
    words.put((child, None))


def follow(children: list[Child], words: Words, view: LiveView) -> None:
    """Show what the peers say until all have ended; a peer that fails before it is ready ends the others."""
    running = {child.name for child in children}
    while running:
        child, message = words.get()
        if message is not None:
            child.ready |= isinstance(message, Ready)
            if isinstance(message, Status) and message.state == "training":
                for one in children:
                    one.begun = True
            if isinstance(message, Finished):
                child.summary = message.summary
            view.update(message)
            continue
        running.discard(child.name)
        child.process.wait()
        code = child.exit
        if code == 0:
            continue
        state = "killed" if code < 0 else "failed"
        view.update(Status(child.name, state=state))
        view.note(f"{child.name} {state}: {child.complaint() if code > 0 else signal.Signals(-code).name}")
        if code > 0 and not child.ready:
            for other in children:
                other.stop(signal.SIGTERM)


@contextlib.contextmanager
def forwarding(children: list[Child]) -> Iterator[list[int]]:
    """Ctrl+C, or notice that the machine will be taken away: all leave cleanly. Ctrl+C twice: all are killed. Yields
    the signals that came.
    """
    received: list[int] = []

    def stop(number: int, frame: object) -> None:
        received.append(number)
        killing = received.count(signal.SIGINT) > 1
        for child in children:
            if killing:
                child.process.kill()
            elif len(received) == 1:
                child.stop()
        if killing:
            os._exit(UnsavedError.exit_code)

    with on_signals(stop):
        yield received


def free_port() -> int:
    """A port of this machine on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
