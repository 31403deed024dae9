"""One member of a sweep: its command line, what an earlier sweep left of it, and its process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from diloco.config import Start, compose
from diloco.config.overrides import quoted
from diloco.errors import ConfigError, DivergedError, on_signals
from diloco.rundir.compare import read_json
from diloco.rundir.files import write_atomic

__all__ = ["Member", "Processes", "ended_before", "read_members"]

PROGRAM = (sys.executable, "-m", "diloco")

# Settings that say where and how a member runs, not what it computes.
NOT_COMPARED = {"run": ("dir", "id"), "train": ("threads",)}


@dataclass(frozen=True)
class Member:
    """One run of a sweep. `exit` is None until it has ended; with `interrupted` we stopped it before its end."""

    name: str
    command: str
    overrides: tuple[str, ...]
    exit: int | None = None
    interrupted: bool = False

    @property
    def state(self) -> str:
        if self.interrupted:
            return "interrupted"
        return {None: "pending", 0: "done", DivergedError.exit_code: "diverged"}.get(self.exit, "failed")

    def arguments(self, directory: Path, start: Start) -> list[str]:
        """The command line of the process."""
        place = str(directory / self.name)
        shown = place if re.fullmatch(r"[\w./-]+", place) else quoted(directory / self.name)
        return [self.command, *start.arguments(), *self.overrides, f"run.dir={shown}"]


def ended_before(place: Path, member: Member, start: Start) -> Member:
    """The member as an earlier sweep left it: ended, or still to be run.

    Raises ConfigError if the directory holds a run with other settings.
    """
    theirs = _settings(None, Start(place / "config.yaml"))
    if theirs is not None and theirs != _settings(member, start):
        raise ConfigError(f"{place} holds a run with other settings; choose another --dir")
    record = read_json(place / "member.json")
    if record.get("interrupted"):
        return member
    summary = read_json(place / "summary.json")
    code = summary.get("exit") if "exit" in summary else record.get("exit")
    ended = code == DivergedError.exit_code or (code == 0 and bool(summary))
    return replace(member, exit=code) if ended else member


def read_members(directory: Path) -> list[Member]:
    """The members of a sweep that were started, read from their member.json, in order."""
    records = [read_json(file) for file in directory.glob("*/member.json")]
    fields = ("name", "command", "exit", "interrupted")
    found = [
        Member(overrides=tuple(record["overrides"]), **{name: record[name] for name in fields})
        for record in records
        if "overrides" in record and all(name in record for name in fields)
    ]
    return sorted(found, key=lambda one: (int(re.sub(r"\D.*", "", one.name) or 0), one.name))


def _settings(member: Member | None, start: Start) -> dict[str, Any] | None:
    """The settings that decide what a run computes; None without a configuration."""
    try:
        content = compose(() if member is None else member.overrides, start).model_dump(mode="json")
    except ConfigError:
        return None
    del content["sweep"]
    for group, names in NOT_COMPARED.items():
        for name in names:
            del content[group][name]
    return content


class Processes:
    """The running members. As a context manager it catches Ctrl+C and SIGTERM and passes them on.

    Members are in sessions of their own, so that a Ctrl+C in the terminal reaches each once, from here. None outlives
    the context.
    """

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.RLock()  # a signal may arrive while it is held
        self._signals = on_signals(lambda *_: self.stop(signal.SIGINT))
        self.stopped = 0

    def __enter__(self) -> Processes:
        self._signals.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._signals.__exit__(None, None, None)
        self._kill()

    def stop(self, number: int) -> None:
        """Starts no more members and sends the signal to the running ones; a second call kills them."""
        with self._lock:
            self.stopped += 1
            if self.stopped > 1:
                return self._kill()
            for process in list(self._running):
                process.send_signal(number)

    def _kill(self) -> None:
        for process in list(self._running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def run(self, member: Member, directory: Path, start: Start) -> Member:
        """Runs one member to its end, and leaves member.json."""
        place = directory / member.name
        place.mkdir(parents=True, exist_ok=True)
        _write_member(place, member)
        with (place / "output.log").open("ab") as output, self._lock:
            process = subprocess.Popen(
                [*PROGRAM, *member.arguments(directory, start)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "WANDB_RUN_GROUP": directory.resolve().name},
                start_new_session=True,
            )
            self._running.add(process)
            if self.stopped:
                process.send_signal(signal.SIGINT)
        code = process.wait()
        with self._lock:
            self._running.discard(process)
        ended = replace(member, exit=code, interrupted=self.stopped > 0)
        _write_member(place, ended)
        return ended


def _write_member(place: Path, member: Member) -> None:
    write_atomic(place / "member.json", json.dumps(asdict(member), indent=2) + "\n")
