"""The members of a sweep: their directories, what an earlier sweep left there, and their processes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from diloco.errors import ConfigError, DivergedError, on_signals
from diloco.rundir.compare import read_json
from diloco.rundir.files import write_atomic

__all__ = ["Member", "has_ended", "run_members", "state_of"]

PROGRAM = (sys.executable, "-m", "diloco")


class Member(NamedTuple):
    """One run of a sweep."""

    place: Path
    settings: tuple[str, ...]  # by which it is known again
    varied: str  # what of them no other member has, for people
    arguments: tuple[str, ...]  # of its process

    def write(self, exit: int | None) -> dict[str, Any]:
        """Leaves member.json, which is returned; `exit` is None until it has ended by itself."""
        content = {"overrides": self.settings, "exit": exit}
        write_atomic(self.place / "member.json", json.dumps(content, indent=2) + "\n")
        return content

    def loss(self) -> float:
        """The held-out loss that it ended with; infinite if it has none."""
        summary = read_json(self.place / "summary.json")
        loss = (summary.get("eval") or {}).get("loss") if summary.get("exit") == 0 else None
        return float(loss) if isinstance(loss, int | float) else math.inf


def state_of(record: dict[str, Any]) -> str:
    """In words what a member.json says."""
    said = {None: "unfinished", 0: "done", DivergedError.exit_code: "diverged"}
    return said.get(record.get("exit"), f"failed with exit code {record.get('exit')}")


def has_ended(member: Member) -> bool:
    """Whether an earlier sweep ran it to its end. Raises ConfigError if its directory holds something else."""
    record = read_json(member.place / "member.json")
    if record and record.get("overrides") != list(member.settings):
        raise ConfigError(f"{member.place} holds a run with other settings; choose another --dir")
    return state_of(record) in ("done", "diverged")


def run_members(members: Sequence[Member], jobs: int) -> None:
    """Runs the members that have not ended, `jobs` at a time.

    Ctrl+C lets those that run leave cleanly, a second one kills them; then KeyboardInterrupt is raised. Members are in
    sessions of their own, so that a Ctrl+C in the terminal reaches each once, from here. None outlives the call.
    """
    waiting = [one for one in members if not has_ended(one)]
    if len(waiting) < len(members):
        click.echo(f"{len(members) - len(waiting)} of {len(members)} members have ended before")
    running: dict[subprocess.Popen[bytes], Member] = {}
    stops, began = list[int](), time.monotonic()

    def stop(number: int, _: object) -> None:
        stops.append(number)
        for process in running:
            if len(stops) == 1:
                process.send_signal(signal.SIGINT)
            else:
                os.killpg(process.pid, signal.SIGKILL)

    try:
        with on_signals(stop):
            while running or (waiting and not stops):
                while waiting and len(running) < jobs and not stops:
                    member = waiting.pop(0)
                    running[_started(member)] = member
                time.sleep(0.1)
                for process in [one for one in running if one.poll() is not None]:
                    member = running.pop(process)
                    record = member.write(None if stops else process.returncode)
                    loss = member.loss()
                    result = f", held-out {loss:.3f}" if math.isfinite(loss) else ""
                    place = f"[{time.monotonic() - began:5.1f}s] {member.place.name} {member.varied}"
                    click.echo(f"{place}: {state_of(record)}{result}")
    finally:
        for process in running:
            os.killpg(process.pid, signal.SIGKILL)
    if stops:
        raise KeyboardInterrupt


def _started(member: Member) -> subprocess.Popen[bytes]:
    member.place.mkdir(parents=True, exist_ok=True)
    member.write(None)
    with (member.place / "output.log").open("ab") as output:
        return subprocess.Popen(
            [*PROGRAM, *member.arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "WANDB_RUN_GROUP": member.place.parent.name},
            start_new_session=True,
        )
