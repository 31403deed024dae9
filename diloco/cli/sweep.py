"""`diloco sweep`: a command with several values of some settings, by Hydra's own multirun.

1. Hydra's sweeper chooses the values: every combination, or what Optuna looks for, by the held-out loss.
2. Its basic launcher is ours here: it checks a batch of members, and runs each as `diloco COMMAND ... run.dir=DIR/N`.
   Other launchers, such as submitit's, call `Sweep` in a process of theirs, which does the same with one member.
3. Members that ended before are not run again. At the end there is `diloco compare`.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import click
import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Glob
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from omegaconf import OmegaConf

from diloco.cli import compare
from diloco.config import Start, choices, compose
from diloco.config.compose import KEYS, check_key, compose_tree
from diloco.config.explain import show
from diloco.config.files import BEGIN, VERSION_BASE, Request, hydra_for, hydra_overrides, said_by_hydra
from diloco.config.overrides import Typed, key_of, parse, quoted
from diloco.errors import ConfigError, DilocoError, DivergedError, on_signals
from diloco.rundir.compare import read_json
from diloco.rundir.files import exclusive, prepare_run_directory, write_atomic

__all__ = ["Members", "Sweep", "run"]

PROGRAM = (sys.executable, "-m", "diloco")
OF_HYDRA = ("hydra/sweeper", "hydra.sweeper.", "hydra/launcher", "hydra.launcher.")


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


@dataclass(frozen=True)
class Sweep:
    """What every member is made from: the command, the settings that all have, and where their directories go."""

    command: str
    fixed: tuple[str, ...]
    start: Start
    place: Path
    jobs: int = 1
    dry_run: bool = False

    def member(self, number: int, overrides: Sequence[str]) -> Member:
        """The member with these settings. Raises ConfigError if they are not valid."""
        keys = {key_of(one) for one in self.fixed}
        varied = [one for one in overrides if key_of(one) not in keys]
        settings, place = (*self.fixed, *varied), self.place / str(number)
        config = compose(settings, self.start)
        own = [] if "run.id" in map(key_of, varied) else [f"run.id={config.run.id[: 63 - len(str(number))]}-{number}"]
        if self.jobs > 1 and config.train.threads is None:
            processes = self.jobs * (config.local.peers if self.command == "local" else 1)
            own.append(f"train.threads={max(1, (os.cpu_count() or 1) // processes)}")
        arguments = (self.command, *self.start.arguments(), *settings, *own, f"run.dir={quoted(place)}")
        return Member(place, settings, " ".join(varied), arguments)

    def __call__(self, _: Any) -> float:
        """Runs one member where a launcher of Hydra calls this; returns the held-out loss."""
        job = HydraConfig.get()
        member = self.member(job.job.num, job.overrides.task)
        run_members([member], 1)
        return member.loss()


class Members(Launcher):
    """Hydra's launcher of members here, several at a time."""

    __module__ = "hydra_plugins.diloco"

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self._sweep: Sweep = task_function

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs a batch of members, once all have valid settings."""
        sweep = self._sweep
        if not job_overrides:
            raise ConfigError("there are no members; check the ends of each range")
        members = [sweep.member(initial_job_idx + number, one) for number, one in enumerate(job_overrides)]
        for one in members if sweep.dry_run else ():
            click.echo(f"{'ended' if has_ended(one) else 'to run':<7} diloco {' '.join(one.arguments)}")
        if not sweep.dry_run:
            run_members(members, sweep.jobs)
        return [JobReturn(_return_value=one.loss(), status=JobStatus.COMPLETED) for one in members]


def run(
    command: str, overrides: Sequence[str], start: Start, jobs: int = 1, directory: Path | None = None,
    dry_run: bool = False,
) -> int:  # fmt: skip
    """Checks, runs and compares the members; returns the exit code, which is 0 even when some diverged.

    Raises ConfigError before a member of a batch starts, if one is not valid, and DilocoError at the end if one failed.
    """
    fixed, lines, groups = list[str](), list[str](), choices(start)
    for one in overrides:
        if one.startswith(OF_HYDRA):
            lines.append(one)
            continue
        typed, override = parse(one, swept=True)
        check_key(typed.key, groups)
        swept = override.is_sweep_override()
        if typed.key == "run.dir" and swept:
            raise ConfigError(f"{show(one)}: each member has a directory of its own; set --dir")
        fixed += [] if swept else [one]
        lines += [_line(typed, override, groups)] if swept or typed.key not in groups else []
    composed = compose_tree(fixed, start)
    request = composed.request._replace(saved=None)  # of Hydra's tree only the keys count
    place = directory or Path(str(OmegaConf.select(composed.tree, "run.dir")))
    if directory is None and "run.dir" not in map(key_of, fixed):
        place = place.with_name(f"{place.name}-sweep")
    fixed = [one for one in fixed if key_of(one) != "run.dir"]
    sweep = Sweep(command, tuple(fixed), start, place.absolute(), jobs, dry_run)
    if dry_run:
        with tempfile.TemporaryDirectory() as scratch:
            _multirun(sweep, request, lines, Path(scratch))
        return 0
    prepare_run_directory(place)
    with exclusive(place):
        try:
            _multirun(sweep, request, lines, sweep.place)
        except KeyboardInterrupt:
            return _conclude(place, stopped=True)
    return _conclude(place)


def _line(typed: Typed, override: Any, groups: Mapping[str, Sequence[str]]) -> str:
    """An argument as Hydra takes it: keys of an open mapping are new to it, and a pattern is for all folders."""
    if isinstance(pattern := override.value(), Glob):
        names = pattern.filter(list(groups.get(typed.key, ())))
        if not names:
            raise ConfigError(f"{typed.key}={show(typed.text)} matches nothing; expected a pattern for a group")
        return f"{typed.key}={','.join(names)}"
    known = typed.key in groups or (typed.key in KEYS and "dict" not in str(KEYS[typed.key].annotation))
    return f"{'' if known else '++'}{override.input_line}"


def _multirun(sweep: Sweep, request: Request, arguments: Sequence[str], place: Path) -> None:
    """Lets Hydra choose and launch the members. Raises ConfigError for what it refuses."""
    os.environ.setdefault("SQLALCHEMY_SILENCE_UBER_WARNING", "1")  # Optuna 2 needs its version 1.4
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # or Hydra ends the process where there is one
    with hydra_for(request.places):
        chosen = hydra_overrides(request)
    # Hydra takes plugins from below hydra_plugins only. Where none is installed, there is no such package.
    sys.modules.setdefault("hydra_plugins", ModuleType("hydra_plugins"))
    sys.modules["hydra_plugins.diloco"] = sys.modules[__name__]
    Plugins.instance().register(Members)
    ConfigStore.instance().store("basic", {"_target_": "hydra_plugins.diloco.Members"}, group="hydra/launcher")
    own = ["hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.output_subdir=null"]
    own += [f"hydra.sweep.dir={quoted(place)}", "hydra.sweep.subdir=${hydra:job.num}"]
    before, sys.argv = sys.argv, ["diloco", "--multirun", *chosen, *arguments, *own]
    try:
        hydra.main(config_path=str(request.places[0]), config_name=BEGIN, version_base=VERSION_BASE)(sweep)()
    except HydraException as error:
        hint = "; list values, or add hydra/sweeper=optuna" if "support sweep type" in str(error) else ""
        raise ConfigError(f"{said_by_hydra(error)}{hint}") from None
    finally:
        sys.argv = before


def _conclude(place: Path, stopped: bool = False) -> int:
    """The table of all members, and how the command ends."""
    records = {file.parent: read_json(file) for file in place.glob("*/member.json")}
    if records:
        compare.run([place], None, None, None, False)
    if stopped:
        click.echo(f"stopped; the same command runs what is not done in {place}")
        return 0
    failed = sorted(one for one, record in records.items() if state_of(record).startswith("failed"))
    if failed:
        error = DilocoError(f"{len(failed)} of {len(records)} members failed; see {failed[0] / 'output.log'}")
        error.exit_code = max(1, records[failed[0]]["exit"])
        raise error
    return 0


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
