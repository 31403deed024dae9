"""Sweeps whose values a sweeper of Hydra chooses, such as Optuna, or whose members its launcher starts elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click

from diloco.cli.members import Processes, ended_before, read_members
from diloco.cli.sweep_arguments import default_directory, listed, marked, member_of
from diloco.cli.sweep_display import conclude
from diloco.config import Config, Start, compose
from diloco.config.compose import Composed
from diloco.config.explain import show as show_value
from diloco.config.multirun import RESULTS, check_storage, hydra_multirun, is_local
from diloco.config.sweeps import Axis
from diloco.errors import ConfigError, UnsavedError
from diloco.rundir.compare import read_runs
from diloco.rundir.files import exclusive, prepare_run_directory

__all__ = ["Sweep", "run_with_hydra"]


class Sweep(NamedTuple):
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


def run_with_hydra(sweep: Sweep, plan: Composed, jobs: int | None, directory: Path | None, dry_run: bool) -> int:
    """Members whose values a sweeper of Hydra chooses, or that its launcher starts elsewhere."""
    command, axes, fixed = sweep.command, sweep.axes, marked(tuple(sweep.fixed), plan)
    first = [f"{axis.key}={axis.values[0]}" for axis in axes]
    config = compose([*fixed, *first], sweep.start)
    for axis in axes:
        for value in axis.values:
            compose([*fixed, *first, f"{axis.key}={value}"], sweep.start)
    check_storage(plan)
    directions = _directions(plan, config)
    jobs = jobs or config.sweep.jobs
    settings = _sweeper_settings(plan, directions, jobs)
    place = (directory or default_directory(fixed, config)).absolute()
    if dry_run:
        where = "here" if is_local(plan) else f"with {plan.block.launcher}"
        chosen = ", ".join(f"{axis.key}={axis.text}" for axis in axes)
        click.echo(f"{plan.block.sweeper} chooses {chosen} in {place}; members run {where}")
        return 0
    prepare_run_directory(place)
    worst = tuple(math.inf if direction == "minimize" else -math.inf for direction in directions)
    goal = _Goal(sweep.command, fixed, config, place, sweep.start, worst, plan.block.sweep_subdir)
    with exclusive(place):
        if is_local(plan):
            with Processes() as processes:
                hydra_multirun(axes, partial(_measured, goal, processes), place, plan, jobs=jobs, settings=settings)
        else:
            hydra_multirun(axes, partial(_measured, goal, None), place, plan, settings=settings)
        typed = [one if isinstance(one, str) else f"{one.key}={one.text}" for one in sweep.parsed]
        code = conclude(command, typed, read_members(place), place, config)
    best = place / RESULTS
    if best.is_file():
        click.echo(f"{best}: what {plan.block.sweeper} found best by {', '.join(config.sweep.objective)}")
    return code


def _sweeper_settings(plan: Composed, directions: Sequence[str], jobs: int) -> dict[str, Any]:
    """What a sweeper is told beside its own settings: which way is good, and how many members there are at a time."""
    settings: dict[str, Any] = {}
    if plan.block.sweeper == "optuna":
        settings["direction"] = list(directions) if len(directions) > 1 else directions[0]
    if jobs > 1 or is_local(plan):
        key = {"optuna": "n_jobs", "basic": "max_batch_size"}.get(plan.block.sweeper)
        if key is not None and f"sweeper.{key}" not in plan.block.settings:
            settings[key] = jobs
    return settings


def _directions(plan: Composed, config: Config) -> list[str]:
    """minimize or maximize, one per objective; those that are good when large are maximised if nothing is said."""
    objective = config.sweep.objective
    typed = any(one.key == "hydra.sweeper.direction" for one in plan.typed)
    said = plan.block.settings.get("sweeper.direction", "minimize" if typed else None)  # minimize is the default
    if said is None:
        return ["maximize" if name in ("tokens", "utilization") else "minimize" for name in objective]
    directions = [str(one) for one in listed(said)]
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
    subdir: str | None


def _measured(
    goal: _Goal, processes: Processes | None, number: int, chosen: tuple[tuple[str, str], ...]
) -> float | tuple[float, ...] | None:
    """The objectives of a member; the worst values where it diverged, and None where it failed or does not have one."""
    if processes is None:  # in a process of the launcher
        with Processes() as own:
            return _measured(goal, own, number, chosen)
    arguments = (*goal.fixed, *(f"{key}={value}" for key, value in chosen))
    member = member_of(goal.command, arguments, chosen, str(number), goal.config, 1, goal.subdir, goal.start)
    member = ended_before(goal.place / member.name, member, goal.start)
    if member.exit is None:
        member = processes.run(member, goal.place, goal.start)
        if processes.stopped:
            raise UnsavedError(f"stopped in {member.name}; what has ended is in {goal.place}")
    click.echo(f"{member.name} {member.state}")
    values = goal.worst
    if member.state != "diverged":
        [run] = read_runs([goal.place / member.name])
        found = [getattr(run, name) for name in goal.config.sweep.objective]
        if member.state != "done" or None in found:
            return None
        values = tuple(map(float, found))
    return values if len(values) > 1 else values[0]
