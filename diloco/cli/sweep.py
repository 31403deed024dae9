"""`diloco sweep`: a command with every combination of several values of some settings, in Hydra's
grammar.

A member is `diloco COMMAND ... run.dir=DIR/N`; its member.json has its settings and how it ended.
Members that ended before are not run again. At the end there is `diloco compare`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from diloco.cli.options import PATH, Command, Function, Options, configured
from diloco.errors import ConfigError, DilocoError, DivergedError, on_signals

if TYPE_CHECKING:
    from diloco.config import Config, ConfigSource

PROGRAM = (sys.executable, "-m", "diloco")


@click.command(cls=Command)
@configured
@click.option(
    "--jobs", type=click.IntRange(1, 1024), default=1, show_default=True, help="Members at a time."
)
@click.option(
    "--dir", "directory", type=PATH, help="Where the members go.  [default: runs/RUN_ID-sweep]"
)
@click.option("--dry-run", is_flag=True, help="Check and list the members, and stop.")
def sweep(options: Options, jobs: int, directory: Path | None, dry_run: bool) -> int:
    """Run every combination of several values.

    \b
    diloco sweep simulate experiment=smoke outer.lr=0.5,0.7,1.0 outer.sync_every=10,20
    diloco sweep local experiment=quickstart 'run.seed=range(0,3)' --jobs 2 --dir runs/seeds
    diloco sweep simulate experiment=lr-sweep

    The first argument is the command of a member: local (the default), train or simulate. What
    varies is in Hydra's grammar, and may also be in a file, as hydra.sweeper.params. Each member
    has its own run directory. The same command again runs the members that are not done. A member
    that fails does not stop the others. At the end there are the table of diloco compare and its
    curves.
    """
    overrides = options.overrides
    command, *rest = overrides if overrides and "=" not in overrides[0] else ("local", *overrides)
    if command not in ("local", "train", "simulate"):
        raise ConfigError(f"diloco sweep {command}: a member is one of local, train, simulate")
    if options.cfg:
        raise ConfigError(
            f"--cfg={options.cfg} shows one configuration; use --dry-run to see the members of a"
            " sweep"
        )
    return run(command, rest, options.start, jobs, directory, dry_run)


def sweepable(function: Function) -> Function:
    """Adds -m to a command, which is the same as `diloco sweep COMMAND` with it."""

    @click.option(
        "--multirun", "-m", is_flag=True, help="Sweep over KEY=V1,V2 as diloco sweep does."
    )
    @wraps(function)
    def sweeping(options: Options, multirun: bool) -> int:
        if not multirun:
            return cast(int, function(options))
        if options.cfg:
            raise ConfigError(f"--cfg={options.cfg} shows one configuration; drop --multirun")
        return run(function.__name__, options.overrides, options.start)

    return cast(Function, sweeping)


def run(
    command: str,
    overrides: Sequence[str],
    start: ConfigSource,
    jobs: int = 1,
    place: Path | None = None,
    dry: bool = False,
) -> int:
    """Checks, runs and compares the members; returns the exit code, which is 0 even when some
    diverged.

    Raises ConfigError before a member starts, if one is not valid, and DilocoError at the end if
    one failed.
    """
    from diloco.rundir.files import exclusive, prepare_run_directory

    place, members = _members(command, overrides, start, jobs, place)
    if dry:
        for one in members:
            click.echo(
                f"{'ended' if one.has_ended() else 'to run':<7} diloco {' '.join(one.arguments)}"
            )
        return 0
    prepare_run_directory(place)
    with exclusive(place):
        try:
            _run(members, jobs)
        except KeyboardInterrupt:
            return _conclude(members, place, stopped=True)
    return _conclude(members, place)


@dataclass(frozen=True)
class Member:
    """One run of a sweep."""

    place: Path
    settings: tuple[str, ...]  # by which it is known again
    varied: str  # what of them no other member has, for people
    arguments: tuple[str, ...]  # of its process
    config: Config

    def record(self) -> dict[str, Any]:
        """Its member.json; `exit` is None until it has ended by itself."""
        from diloco.rundir.compare import read_json

        return read_json(self.place / "member.json")

    def write(self, exit: int | None) -> None:
        from diloco.rundir.files import write_atomic

        write_atomic(
            self.place / "member.json",
            json.dumps({"overrides": self.settings, "exit": exit}, indent=2),
        )

    def state(self) -> str:
        """How it ended, in words."""
        code = self.record().get("exit")
        said = {None: "unfinished", 0: "done", DivergedError.exit_code: "diverged"}
        return said.get(code, f"failed with exit code {code}")

    def has_ended(self) -> bool:
        """Whether an earlier sweep ran it to its end. Raises ConfigError if its directory holds
        something else."""
        if (record := self.record()) and record.get("overrides") != list(self.settings):
            raise ConfigError(f"{self.place} holds a run with other settings; choose another --dir")
        return self.state() in ("done", "diverged")

    def start(self) -> subprocess.Popen[bytes]:
        from diloco.rundir.files import write_atomic

        self.place.mkdir(parents=True, exist_ok=True)
        # a table has it, even if it fails at once
        write_atomic(self.place / "config.yaml", self.config.to_yaml())
        self.write(None)
        with (self.place / "output.log").open("ab") as output:
            return subprocess.Popen(
                [*PROGRAM, *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "WANDB_RUN_GROUP": self.place.parent.name},
                start_new_session=True,  # a Ctrl+C in the terminal reaches each once, from `_run`
            )


def _members(
    command: str, overrides: Sequence[str], start: ConfigSource, jobs: int, directory: Path | None
) -> tuple[Path, list[Member]]:
    """Their directory, and all members. Raises ConfigError if one has no valid settings."""
    from diloco.config import compose
    from diloco.config.compose import compose_tree, key_of, quoted
    from diloco.config.files import sweep_params

    fixed, swept = list[str](), list[list[str]]()
    for one in overrides:
        values = _values(one, start)
        swept += [values] if values != [one] else []
        fixed += [one] if values == [one] else []
    composed = compose_tree(fixed, start)
    typed = set(map(key_of, overrides))
    in_files = [
        f"{key}={text}" for key, text in sweep_params(composed.request).items() if key not in typed
    ]
    place = directory or Path(str(composed.tree.run.dir))
    if directory is None and "run.dir" not in typed:
        place = place.with_name(f"{place.name}-sweep")
    fixed = [one for one in fixed if key_of(one) != "run.dir"]
    members = []
    for number, varied in enumerate(product(*(_values(one, start) for one in in_files), *swept)):
        settings, directory = (*fixed, *varied), place.absolute() / str(number)
        config = compose(settings, start)
        own = (
            []
            if "run.id" in map(key_of, varied)
            else [f"run.id={config.run.id[: 63 - len(str(number))]}-{number}"]
        )
        if jobs > 1 and config.train.threads is None:
            processes = jobs * (config.local.peers if command == "local" else 1)
            own.append(f"train.threads={max(1, (os.cpu_count() or 1) // processes)}")
        arguments = (command, *start.arguments(), *settings, *own, f"run.dir={quoted(directory)}")
        members.append(Member(directory, settings, " ".join(varied), arguments, config))
    if not members:
        raise ConfigError("there are no members; check the ends of each range")
    return place.absolute(), members


def _values(argument: str, start: ConfigSource) -> list[str]:
    """The overrides that an argument stands for: itself, unless it has several values."""
    from hydra.core.override_parser.types import Glob
    from hydra.errors import HydraException

    from diloco.config import choices
    from diloco.config.compose import check_key, parse
    from diloco.config.explain import show

    groups = choices(start)
    key, _, override = parse(argument, swept=True)
    check_key(key, groups)
    if not override.is_sweep_override():
        return [argument]
    if key == "run.dir":
        raise ConfigError(f"{show(argument)}: each member has a directory of its own; set --dir")
    if isinstance(pattern := override.value(), Glob):
        values = pattern.filter(list(groups.get(key, ())))
        if not values:
            raise ConfigError(f"{show(argument)} matches nothing; expected a pattern for a group")
    else:
        try:
            values = list(override.sweep_string_iterator())
        except HydraException:  # an interval
            raise ConfigError(
                f"{show(argument)} has no end of values; list them, such as {key}=A,B"
            ) from None
    return [f"{key}={value}" for value in values]


def _run(members: Sequence[Member], jobs: int) -> None:
    """Runs the members that have not ended, `jobs` at a time; none outlives the call.

    Ctrl+C lets those that run leave cleanly, a second one kills them; then KeyboardInterrupt is
    raised.
    """
    from diloco.rundir.compare import read_run

    waiting = [one for one in members if not one.has_ended()]
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
                    running[member.start()] = member
                time.sleep(0.1)
                for process in [one for one in running if one.poll() is not None]:
                    member = running.pop(process)
                    member.write(None if stops else process.returncode)
                    run = read_run(member.place)
                    result = (
                        f", held-out {run.loss:.3f}"
                        if run.exit == 0 and run.loss is not None
                        else ""
                    )
                    place = (
                        f"[{time.monotonic() - began:5.1f}s] {member.place.name} {member.varied}"
                    )
                    click.echo(f"{place}: {member.state()}{result}")
    finally:
        for process in running:
            os.killpg(process.pid, signal.SIGKILL)
    if stops:
        raise KeyboardInterrupt


def _conclude(members: Sequence[Member], place: Path, stopped: bool = False) -> int:
    """The table of all members, and how the command ends."""
    from diloco.cli import compare

    if any(one.record() for one in members):
        compare.run([place])
    if stopped:
        click.echo(f"stopped; the same command runs what is not done in {place}")
        return 0
    failed = [one for one in members if one.state().startswith("failed")]
    if failed:
        error = DilocoError(
            f"{len(failed)} of {len(members)} members failed; see {failed[0].place / 'output.log'}"
        )
        error.exit_code = max(1, failed[0].record()["exit"])
        raise error
    return 0
