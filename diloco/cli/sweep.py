"""`diloco sweep`: a command with every combination of several values, each in a process and a directory of its own.

1. Every member is composed and validated before anything is written or started.
2. A member is `python -m diloco COMMAND ... run.dir=DIR/NUMBER-VALUES`. Its output goes to `output.log`, its exit code
   to `member.json`. The same command skips members that have ended, and so goes on with a sweep.
3. At the end: `sweep.json`, the table of `diloco compare`, and its curves.

The first Ctrl+C makes the members leave cleanly, the second kills them. A member that fails or diverges does not stop
the others. Hydra's own sweepers and launchers do what a grid on this machine cannot: continuous ranges, clusters.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import click

from diloco.cli.members import Member, Processes, ended_before
from diloco.cli.sweep_arguments import default_directory, given_directory, marked, member_of
from diloco.cli.sweep_display import Display, conclude
from diloco.cli.sweep_hydra import Sweep, run_with_hydra
from diloco.config import Start, compose
from diloco.config.compose import Composed
from diloco.config.explain import show as show_value
from diloco.config.overrides import key_of
from diloco.config.sweeps import Axis, grid, plan_sweep
from diloco.errors import ConfigError
from diloco.rundir.compare import read_json
from diloco.rundir.files import exclusive, prepare_run_directory

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
    directory = given_directory(directory, plan)
    if any(one.key == "hydra.run.dir" for one in plan.typed):  # in a file it is for whoever starts one run
        raise ConfigError(f"hydra.run.dir={plan.block.run_dir} has no effect in a sweep; set hydra.sweep.dir, or --dir")
    if plugins or plan.block.sweeper != "basic" or plan.block.launcher != "basic":
        return run_with_hydra(Sweep(command, tuple(parsed), start), plan, jobs, directory, dry_run)
    _refuse_for_plugins(overrides, plan)
    combinations = [(marked(arguments, plan), chosen) for arguments, chosen in grid(parsed)]
    composed = [(arguments, chosen, compose(arguments, start)) for arguments, chosen in combinations]
    first = composed[0][2]
    jobs = jobs or first.sweep.jobs
    directory = directory or default_directory(overrides, first)
    width = len(str(len(composed) - 1))
    members = [
        member_of(command, arguments, chosen, f"{number:0{width}}", config, jobs, plan.block.sweep_subdir, start)
        for number, (arguments, chosen, config) in enumerate(composed)
    ]
    names = [one.name for one in members]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"hydra.sweep.subdir calls two members {twice}; add ${{hydra:job.num}} to it")
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
        return conclude(command, overrides, ended, directory, first)


def _refuse_for_plugins(overrides: Sequence[str], plan: Composed) -> None:
    """Raises ConfigError for what only a sweeper or a launcher of Hydra reads, where there is none."""
    theirs = [f"hydra.{key}" for key in plan.block.settings if key.startswith(("sweeper.", "launcher."))]
    typed = [key_of(one) for one in overrides if key_of(one) == "sweep.objective"]
    for key in (*theirs, *typed):
        if key != "hydra.sweeper.params":
            raise ConfigError(f"{key} has no effect on every combination of values; drop it, or add --sweeper optuna")


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
