"""How far a sweep is: a bar on a terminal, and a line per ended member elsewhere."""

from __future__ import annotations

import time
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from diloco.cli.members import Member

__all__ = ["Display"]


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
