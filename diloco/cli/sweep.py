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
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console

from diloco.cli.compare import show
from diloco.cli.members import Member, Processes, ended_before, read_members
from diloco.cli.sweep_display import Display
from diloco.config import Config, Start, compose, refuse_ignored
from diloco.config.compose import Composed, resolved
from diloco.config.explain import show as show_value
from diloco.config.multirun import RESULTS, check_storage, hydra_multirun, is_local
from diloco.config.overrides import key_of
from diloco.config.sweeps import Axis, grid, plan_sweep
from diloco.errors import ConfigError, DilocoError, UnsavedError
from diloco.rundir.compare import plot_runs, read_json, read_runs
from diloco.rundir.files import exclusive, prepare_run_directory, write_atomic

__all__ = ["run"]


def run(
    command: str,
    overrides: Sequence[str],
    start: Start,
    jobs: int | None = None,
    directory: Path | None = None,
    sweeper: str | None = None,
    launcher: str | None = None,
    dry_run: bool = False,
) -> int:
    """Checks, runs and compares the members; returns the exit code, which is 0 even when some diverged.

    Raises ConfigError before anything is written, if a member has invalid settings or a plugin is missing, and
    DilocoError at the end, with the exit code of the first member that failed.
    """
    plugins = [
        f"hydra/{kind}={name}"
        for kind, name in (("sweeper", sweeper), ("launcher", launcher))
        if name not in (None, "grid")
    ]
    parsed, plan = plan_sweep([*overrides, *plugins], start)
    for one in parsed:
        if isinstance(one, Axis) and one.key in ("run.dir", "run.name"):
            raise ConfigError(f"{one.key}={one.text}: each member has a directory of its own; set --dir")
        if isinstance(one, Axis) and one.key.startswith("sweep."):
            raise ConfigError(f"{one.key}={show_value(one.text)} is said once for all members; give one value")
    directory = _given_directory(directory, plan)
    if plugins or plan.block.sweeper != "basic" or plan.block.launcher != "basic":
        return _with_hydra(_Sweep(command, tuple(parsed), start), plan, jobs, directory, dry_run)
    combinations = [(_marked(arguments, plan), chosen) for arguments, chosen in grid(parsed)]
    composed = [(arguments, chosen, _checked(command, arguments, start)) for arguments, chosen in combinations]
    first = composed[0][2]
    jobs = jobs or first.sweep.jobs
    directory = directory or _directory(overrides, first)
    width = len(str(len(composed) - 1))
    members = [
        _member(command, arguments, chosen, f"{number:0{width}}", config, jobs)
        for number, (arguments, chosen, config) in enumerate(composed)
    ]
    ended = [ended_before(directory / one.name, one, start) for one in members]
    if dry_run:
        for member in ended:
            click.echo(f"{member.state:<8} diloco {' '.join(member.arguments(directory, start))}")
        return 0
    for doubt in dict.fromkeys(text for _, _, config in composed for text in config.warnings()):
        click.echo(f"diloco: warning: {doubt}", err=True)
    prepare_run_directory(directory)
    with exclusive(directory):
        ended = _run_all(ended, directory, start, jobs)
        return _conclude(command, overrides, ended, directory, first)


def _checked(command: str, arguments: Sequence[str], start: Start) -> Config:
    config = compose(arguments, start)
    refuse_ignored(config, command, _of_a_member(arguments), start)
    return config


def _of_a_member(overrides: Sequence[str]) -> list[str]:
    """The arguments without those that are for the sweep."""
    return [
        one for one in overrides if key_of(one) not in ("run.dir", "sweep") and not key_of(one).startswith("sweep.")
    ]


def _marked(arguments: tuple[str, ...], plan: Composed) -> tuple[str, ...]:
    """The arguments of a member. Where files describe a sweep, it says that it is one run of that."""
    return (*arguments, "hydra.mode=RUN") if plan.block.of_a_sweep or plan.block.multirun else arguments


def _given_directory(directory: Path | None, plan: Composed) -> Path | None:
    """`--dir` or hydra.sweep.dir."""
    if plan.block.sweep_dir is None:
        return directory
    theirs = Path(str(resolved(plan, "hydra.sweep.dir")))
    if directory not in (None, theirs):
        raise ConfigError(f"--dir={directory} and hydra.sweep.dir={theirs} are one setting; drop one of them")
    return theirs


def _directory(overrides: Sequence[str], config: Config) -> Path:
    typed = any(key_of(one) == "run.dir" for one in overrides)
    return config.run.dir if typed else Path("runs") / f"{config.run.id}-sweep"


def _member(
    command: str, arguments: tuple[str, ...], chosen: Sequence[tuple[str, str]], number: str, config: Config, jobs: int
) -> Member:
    """A member with its own name, run.id (for wandb) and share of the cores."""
    values = "_".join(f"{key.rpartition('.')[2]}{value}" for key, value in chosen)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{number}-{values}" if values else number)[:80].rstrip("-")
    mine = _of_a_member(arguments)
    if not any(key == "run.id" for key, _ in chosen):
        mine.append(f"run.id={config.run.id[: 63 - len(number)]}-{number}")
    if jobs > 1 and config.train.threads is None:
        processes = jobs * (config.local.peers if command == "local" else 1)
        mine.append(f"train.threads={max(1, (os.cpu_count() or 1) // processes)}")
    return Member(name, command, tuple(mine))


def _run_all(members: Sequence[Member], directory: Path, start: Start, jobs: int) -> list[Member]:
    """Runs the members that have not ended, `jobs` at a time; returns all members with their results."""
    ended = {one.name: one for one in members}
    waiting = [one for one in members if one.exit is None]
    with (
        Processes() as processes,
        Display(len(members), len(members) - len(waiting)) as display,
        ThreadPoolExecutor(jobs) as pool,
    ):

        def work(member: Member) -> Member:
            if processes.stopped:
                return member
            display.began(member)
            return processes.run(member, directory, start)

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


def _conclude(
    command: str, overrides: Sequence[str], members: Sequence[Member], directory: Path, config: Config
) -> int:
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
        written = ["sweep.json", *(one.name for one in plot_runs(runs, directory, config.sweep.plot))]
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


class _Sweep(NamedTuple):
    """What every member of a sweep is made from."""

    command: str
    parsed: tuple[str | Axis, ...]
    start: Start

    @property
    def fixed(self) -> list[str]:
        return [one for one in self.parsed if isinstance(one, str)]

    @property
    def axes(self) -> list[Axis]:
        return [one for one in self.parsed if isinstance(one, Axis)]


def _with_hydra(sweep: _Sweep, plan: Composed, jobs: int | None, directory: Path | None, dry_run: bool) -> int:
    """Members whose values a sweeper of Hydra chooses, or that its launcher starts elsewhere."""
    command, axes, fixed = sweep.command, sweep.axes, _marked(tuple(sweep.fixed), plan)
    first = [f"{axis.key}={axis.values[0]}" for axis in axes]
    config = _checked(command, [*fixed, *first], sweep.start)
    for axis in axes:
        for value in axis.values:
            _checked(command, [*fixed, *first, f"{axis.key}={value}"], sweep.start)
    check_storage(plan)
    directions = _directions(plan, config)
    jobs = jobs or config.sweep.jobs
    settings: dict[str, Any] = {}
    if plan.block.sweeper == "optuna":
        settings = {"direction": directions if len(directions) > 1 else directions[0]}
        if "sweeper.n_jobs" not in plan.block.settings:
            settings["n_jobs"] = jobs
    place = (directory or _directory(fixed, config)).absolute()
    if dry_run:
        where = "here" if is_local(plan) else f"with {plan.block.launcher}"
        chosen = ", ".join(f"{axis.key}={axis.text}" for axis in axes)
        click.echo(f"{plan.block.sweeper} chooses {chosen} in {place}; members run {where}")
        return 0
    prepare_run_directory(place)
    worst = tuple(math.inf if direction == "minimize" else -math.inf for direction in directions)
    goal = _Goal(sweep.command, fixed, config, place, sweep.start, worst)
    with exclusive(place):
        if is_local(plan):
            with Processes() as processes:
                hydra_multirun(axes, partial(_measured, goal, processes), place, plan, jobs=jobs, settings=settings)
        else:
            hydra_multirun(axes, partial(_measured, goal, None), place, plan, settings=settings)
        typed = [one if isinstance(one, str) else f"{one.key}={one.text}" for one in sweep.parsed]
        code = _conclude(command, typed, read_members(place), place, config)
    best = place / RESULTS
    if best.is_file():
        click.echo(f"{best}: what {plan.block.sweeper} found best by {', '.join(config.sweep.objective)}")
    return code


def _directions(plan: Composed, config: Config) -> list[str]:
    """minimize or maximize, one per objective; those that are good when large are maximised if nothing is said."""
    objective = config.sweep.objective
    said = plan.block.settings.get("sweeper.direction")
    if said is None:
        return ["maximize" if name in ("tokens", "utilization") else "minimize" for name in objective]
    directions = [str(one) for one in said] if isinstance(said, list) else [str(said)]
    if len(directions) != len(objective):
        raise ConfigError(
            f"hydra.sweeper.direction={show_value(said)} is for {len(directions)} objectives, and "
            f"sweep.objective={show_value(list(objective))} are {len(objective)}; give one direction each"
        )
    return directions


class _Goal(NamedTuple):
    """What a member of a sweep of Hydra needs to be run, possibly on another machine, and to be measured."""

    command: str
    fixed: tuple[str, ...]
    config: Config
    place: Path
    start: Start
    worst: tuple[float, ...]


def _measured(
    goal: _Goal, processes: Processes | None, number: int, chosen: tuple[tuple[str, str], ...]
) -> float | tuple[float, ...]:
    """The objectives of a member; the worst values where it diverged, and no numbers where it failed."""
    if processes is None:  # in a process of the launcher
        with Processes() as own:
            return _measured(goal, own, number, chosen)
    arguments = (*goal.fixed, *(f"{key}={value}" for key, value in chosen))
    member = _member(goal.command, arguments, chosen, str(number), goal.config, 1)
    member = ended_before(goal.place / member.name, member, goal.start)
    if member.exit is None:
        member = processes.run(member, goal.place, goal.start)
        if processes.stopped:
            raise UnsavedError(f"stopped in {member.name}; what has ended is in {goal.place}")
    click.echo(f"{member.name} {member.state}")
    values = goal.worst
    if member.state != "diverged":
        [run] = read_runs([goal.place / member.name])
        found = (getattr(run, name) if member.state == "done" else None for name in goal.config.sweep.objective)
        values = tuple(math.nan if one is None else float(one) for one in found)
    return values if len(values) > 1 else values[0]
