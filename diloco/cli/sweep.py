"""`diloco sweep`: a command with every combination of several values, each in a process and a directory of its own.

1. Every member is composed and validated before anything is written or started.
2. A member is `python -m diloco COMMAND ... run.dir=DIR/NUMBER-VALUES`. Its output goes to `output.log`, its exit code
   to `member.json`. The same command skips members that have ended, and so goes on with a sweep.
3. At the end: `sweep.json`, the table of `diloco compare`, and its curves.

The first Ctrl+C makes the members leave cleanly, the second kills them. A member that fails or diverges does not stop
the others. Hydra's own sweepers and launchers do what a grid on this machine cannot: continuous ranges, clusters.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from diloco.cli.compare import show
from diloco.cli.members import Member, Processes, ended_before, read_members
from diloco.config import Config, compose, refuse_ignored
from diloco.config.sweeps import Axis, grid, hydra_multirun, parse_axes, require_plugin
from diloco.errors import ConfigError, DilocoError, UnsavedError
from diloco.rundir.compare import plot_runs, read_json, read_runs
from diloco.rundir.files import exclusive, prepare_run_directory, write_atomic

__all__ = ["run"]


def run(
    command: str,
    overrides: Sequence[str],
    base: Path | None = None,
    jobs: int = 1,
    directory: Path | None = None,
    sweeper: str = "grid",
    launcher: str | None = None,
    dry_run: bool = False,
) -> int:
    """Checks, runs and compares the members; returns the exit code, which is 0 even when some diverged.

    Raises ConfigError before anything is written, if a member has invalid settings or a plugin is missing, and
    DilocoError at the end, with the exit code of the first member that failed.
    """
    parsed = parse_axes(overrides)
    for one in parsed:
        if isinstance(one, Axis) and one.key in ("run.dir", "run.name"):
            raise ConfigError(f"{one.key}={one.text}: each member has a directory of its own; set --dir")
    if launcher is not None or sweeper != "grid":
        return _with_hydra(command, parsed, base, directory, sweeper, launcher, dry_run)
    composed = [(arguments, chosen, _checked(command, arguments, base)) for arguments, chosen in grid(parsed)]
    directory = directory or _directory(overrides, composed[0][2])
    width = len(str(len(composed) - 1))
    members = [
        _member(command, arguments, chosen, f"{number:0{width}}", config, jobs)
        for number, (arguments, chosen, config) in enumerate(composed)
    ]
    ended = [ended_before(directory / one.name, one, base) for one in members]
    if dry_run:
        for member in ended:
            click.echo(f"{member.state:<8} diloco {' '.join(member.arguments(directory, base))}")
        return 0
    for doubt in dict.fromkeys(text for _, _, config in composed for text in config.warnings()):
        click.echo(f"diloco: warning: {doubt}", err=True)
    prepare_run_directory(directory)
    with exclusive(directory):
        ended = _run_all(ended, directory, base, jobs)
        return _conclude(command, overrides, ended, directory)


def _checked(command: str, arguments: Sequence[str], base: Path | None) -> Config:
    config = compose(arguments, base=base)
    refuse_ignored(config, command, _without_place(arguments))
    return config


def _without_place(overrides: Sequence[str]) -> list[str]:
    return [one for one in overrides if not one.lstrip("+").startswith("run.dir=")]


def _directory(overrides: Sequence[str], config: Config) -> Path:
    typed = len(_without_place(overrides)) < len(overrides)
    return config.run.dir if typed else Path("runs") / f"{config.run.id}-sweep"


def _member(
    command: str, arguments: tuple[str, ...], chosen: Sequence[tuple[str, str]], number: str, config: Config, jobs: int
) -> Member:
    """A member with its own name, run.id (for wandb) and share of the cores."""
    values = "_".join(f"{key.rpartition('.')[2]}{value}" for key, value in chosen)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{number}-{values}" if values else number)[:80].rstrip("-")
    mine = _without_place(arguments)
    if not any(key == "run.id" for key, _ in chosen):
        mine.append(f"run.id={config.run.id[: 63 - len(number)]}-{number}")
    if jobs > 1 and config.train.threads is None:
        processes = jobs * (config.local.peers if command == "local" else 1)
        mine.append(f"train.threads={max(1, (os.cpu_count() or 1) // processes)}")
    return Member(name, command, tuple(mine))


def _run_all(members: Sequence[Member], directory: Path, base: Path | None, jobs: int) -> list[Member]:
    """Runs the members that have not ended, `jobs` at a time; returns all members with their results."""
    ended = {one.name: one for one in members}
    waiting = [one for one in members if one.exit is None]
    with (
        Processes() as processes,
        _Display(len(members), len(members) - len(waiting)) as display,
        ThreadPoolExecutor(jobs) as pool,
    ):

        def work(member: Member) -> Member:
            if processes.stopped:
                return member
            display.began(member)
            return processes.run(member, directory, base)

        try:
            pending = {pool.submit(work, one) for one in waiting}
            while pending:
                # A signal that arrives just before a wait is handled after it. Waits are therefore short.
                done, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
                for future in done:
                    one = future.result()
                    ended[one.name] = one
                    if one.state != "pending":
                        display.ended(one, read_json(directory / one.name / "summary.json"))
        except BaseException:
            processes.stop(signal.SIGTERM)
            raise
    return [ended[one.name] for one in members]


class _Display:
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

    def __enter__(self) -> _Display:
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


def _conclude(command: str, overrides: Sequence[str], members: Sequence[Member], directory: Path) -> int:
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
        runs = read_runs(started)
        show(runs, Console())
        pictures = plot_runs(runs, directory)
        click.echo(f"{directory}: sweep.json, {', '.join(picture.name for picture in pictures)}")
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


def _with_hydra(
    command: str,
    parsed: Sequence[str | Axis],
    base: Path | None,
    directory: Path | None,
    sweeper: str,
    launcher: str | None,
    dry_run: bool,
) -> int:
    """Members whose values a sweeper of Hydra chooses, or that its launcher starts elsewhere."""
    for name in (sweeper, launcher or ""):
        require_plugin(name)
    options = [one for one in parsed if isinstance(one, str) and one.startswith(("hydra.", "hydra/"))]
    fixed = [one for one in parsed if isinstance(one, str) and one not in options]
    axes = [one for one in parsed if isinstance(one, Axis)]
    first = [f"{axis.key}={axis.values[0]}" for axis in axes]
    config = _checked(command, [*fixed, *first], base)
    for axis in axes:
        for value in axis.values:
            _checked(command, [*fixed, *first, f"{axis.key}={value}"], base)
    place = (directory or _directory(fixed, config)).absolute()
    if dry_run:
        click.echo(f"{sweeper} chooses {', '.join(f'{axis.key}={axis.text}' for axis in axes)} in {place}")
        return 0
    prepare_run_directory(place)

    def task(number: int, chosen: tuple[tuple[str, str], ...]) -> float:
        """The held-out loss; infinite where it diverged, and no number where it failed."""
        arguments = (*fixed, *(f"{key}={value}" for key, value in chosen))
        return _measured(_member(command, arguments, chosen, str(number), config, 1), place, base)

    with exclusive(place):
        hydra_multirun(axes, task, place, sweeper=sweeper, launcher=launcher, options=options)
        typed = [one if isinstance(one, str) else f"{one.key}={one.text}" for one in parsed]
        return _conclude(command, typed, read_members(place), place)


def _measured(member: Member, place: Path, base: Path | None) -> float:
    member = ended_before(place / member.name, member, base)
    if member.exit is None:
        with Processes() as processes:
            member = processes.run(member, place, base)
            if processes.stopped:
                raise UnsavedError(f"stopped in {member.name}; what has ended is in {place}")
    if member.state == "diverged":
        return math.inf
    loss = (read_json(place / member.name / "summary.json").get("eval") or {}).get("loss")
    return float(loss) if member.state == "done" and loss is not None else math.nan
