"""How far a sweep is, and what came out of it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from diloco.cli.compare import show
from diloco.cli.members import Member
from diloco.config import Config
from diloco.errors import DilocoError, UnsavedError
from diloco.rundir.compare import read_json, read_runs
from diloco.rundir.comparison import comparison_of
from diloco.rundir.files import write_atomic

__all__ = ["Display", "conclude"]


class Display:
    """A bar on a terminal; elsewhere a line per ended member, such as `[ 12.3s] 3/12 02-lr0.7 done, held-out 2.310`."""

    def __init__(self, total: int, done: int) -> None:
        console = Console()
        self._total, self._done = total, done
        self._began_at = time.monotonic()
        self._names: list[str] = []
        columns = (TextColumn("members"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        description = TextColumn("{task.description}")
        self._progress = Progress(*columns, description, console=console) if console.is_terminal else None
        self._task = TaskID(0)

    def __enter__(self) -> Display:
        if self._progress is not None:
            self._progress.start()
            self._task = self._progress.add_task("", total=self._total, completed=self._done)
        elif self._done:
            click.echo(f"{self._done} of {self._total} members have ended before")
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def began(self, member: Member) -> None:
        self._names.append(member.name)
        self._show()

    def ended(self, member: Member, summary: dict[str, Any]) -> None:
        self._done += 1
        self._names.remove(member.name)
        loss = (summary.get("eval") or {}).get("loss")
        result = f", held-out {loss:.3f}" if isinstance(loss, float) else ""
        exit = f" with exit code {member.exit}" if member.state == "failed" else ""
        elapsed = time.monotonic() - self._began_at
        line = f"[{elapsed:5.1f}s] {self._done}/{self._total} {member.name} {member.state}{exit}{result}"
        if self._progress is None:
            click.echo(line)
        else:
            self._progress.console.print(line, highlight=False, markup=False)
            self._show()

    def _show(self) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=self._done, description=", ".join(self._names))


def conclude(command: str, overrides: Sequence[str], members: Sequence[Member], directory: Path, config: Config) -> int:
    records = [
        {
            "name": one.name,
            "overrides": list(one.overrides),
            "state": one.state,
            "exit": one.exit,
            "result": _result(directory / one.name),
        }
        for one in members
    ]
    content = {"command": command, "overrides": list(overrides), "members": records}
    write_atomic(directory / "sweep.json", json.dumps(content, indent=2) + "\n")
    started = [directory / one.name for one in members if one.state != "pending"]
    if started:
        found = comparison_of(read_runs(started))
        show(found, Console())
        written = ["sweep.json", *(one.name for one in found.plot(directory, config.sweep.plot))]
        click.echo(f"{directory}: {', '.join(written)}")
    failed = [one for one in members if one.state == "failed"]
    unfinished = [one for one in members if one.state in ("interrupted", "pending")]
    if unfinished:
        click.echo(f"stopped with {len(unfinished)} of {len(members)} members to go; the same command goes on")
        return 0 if all(one.exit in (0, None) for one in unfinished) else UnsavedError.exit_code
    if failed:
        first = failed[0]
        error = DilocoError(
            f"{len(failed)} of {len(members)} members failed, the first with exit code {first.exit}; "
            f"see {directory / first.name / 'output.log'}"
        )
        error.exit_code = max(1, first.exit or 1)
        raise error
    return 0


def _result(place: Path) -> dict[str, Any] | None:
    wanted = {"eval", "tokens", "outer_steps", "wall_s", "virtual_s"}
    return {name: value for name, value in read_json(place / "summary.json").items() if name in wanted} or None
