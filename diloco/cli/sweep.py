"""`diloco sweep` runs every combination of settings; `diloco compare` shows runs side by side.

A member of a sweep is `diloco COMMAND ... run.dir=DIR/N`; its member.json has its settings and how
it ended. Members that ended before are not run again.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import wraps
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from diloco.cli import PATH, Command, Function, Options, configured
from diloco.errors import ConfigError, DilocoError, DivergedError
from diloco.signals import on_signals
from diloco.text import human_bytes, human_count, human_seconds

if TYPE_CHECKING:
    from diloco.config import Config, ConfigSource
    from diloco.rundir.compare import Arm, RunComparison

PROGRAM = (sys.executable, "-m", "diloco")


@click.command(cls=Command)
@configured
@click.option("--jobs", type=click.IntRange(1, 1024), default=1, help="Members at a time.")
@click.option("--dir", "path", type=PATH, help="Of the members.  [default: runs/RUN_ID-sweep]")
@click.option("--dry-run", is_flag=True, help="Check and list the members, and stop.")
def sweep(options: Options, jobs: int, path: Path | None, dry_run: bool) -> int:
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
    command, *rest = options.overrides or ("local",)
    if "=" in command:
        command, rest = "local", [command, *rest]
    if command not in ("local", "train", "simulate"):
        raise ConfigError(f"diloco sweep {command}: a member is one of local, train, simulate")
    return _sweep(command, replace(options, overrides=tuple(rest)), jobs, path, dry_run)


def sweepable(function: Function) -> Function:
    """Add -m to a command, which then does the same as `diloco sweep COMMAND`."""

    @click.option("--multirun", "-m", is_flag=True, help="The same as diloco sweep.")
    @wraps(function)
    def sweeping(options: Options, multirun: bool) -> int:
        return _sweep(function.__name__, options) if multirun else cast(int, function(options))

    return cast(Function, sweeping)


def _sweep(
    command: str, options: Options, jobs: int = 1, path: Path | None = None, dry_run: bool = False
) -> int:
    """Check, run and compare the members; raise DilocoError at the end if one failed."""
    from diloco.rundir.files import exclusive, prepare_run_directory

    if options.cfg:
        raise ConfigError(
            f"--cfg={options.cfg} shows one configuration; diloco sweep has --dry-run"
        )
    start = replace(options.start, together=command != "train")
    path, members = _members(command, options.overrides, start, jobs, path)
    ended = [member for member in members if member.has_ended()]
    if dry_run:
        for member in members:
            state = "ended" if member in ended else "to run"
            click.echo(f"{state:<7} diloco {' '.join(member.arguments)}")
        return 0
    prepare_run_directory(path)
    with exclusive(path):
        if ended:
            click.echo(f"{len(ended)} of {len(members)} members have ended before")
        is_stopped = _run([member for member in members if member not in ended], jobs)
        if any(member.record() for member in members):
            _compare([path], None, path, None, False)
    if is_stopped:
        click.echo(f"stopped; the same command runs what is not done in {path}")
        return 0
    if failed := [member for member in members if member.state().startswith("failed")]:
        log = failed[0].path / "output.log"
        error = DilocoError(f"{len(failed)} of {len(members)} members failed; see {log}")
        error.exit_code = max(1, failed[0].record()["exit"])
        raise error
    return 0


@dataclass(frozen=True)
class SweepRun:
    """One member of a sweep."""

    path: Path
    settings: tuple[str, ...]  # identify the member when the sweep runs again
    varied: str  # the settings that vary, for people
    arguments: tuple[str, ...]  # of its command line
    config: Config

    def record(self) -> dict[str, Any]:
        """Read its member.json; `exit` is None until the process has ended by itself."""
        from diloco.rundir.compare import read_json

        return read_json(self.path / "member.json")

    def write(self, exit: int | None) -> None:
        from diloco.rundir.files import write_atomic

        text = json.dumps({"overrides": self.settings, "exit": exit}, indent=2)
        write_atomic(self.path / "member.json", text)

    def state(self) -> str:
        """Describe in words how the process ended."""
        code = self.record().get("exit")
        words = {None: "unfinished", 0: "done", DivergedError.exit_code: "diverged"}
        return words.get(code, f"failed with exit code {code}")

    def has_ended(self) -> bool:
        """Return True if it ran to its end; ConfigError if its directory has another run."""
        if (record := self.record()) and record.get("overrides") != list(self.settings):
            raise ConfigError(f"{self.path} holds a run with other settings; choose another --dir")
        return self.state() in ("done", "diverged")

    def start(self) -> subprocess.Popen[bytes]:
        from diloco.rundir.files import write_atomic

        self.path.mkdir(parents=True, exist_ok=True)
        # so that tables show its settings, even if it fails at once
        write_atomic(self.path / "config.yaml", self.config.to_yaml())
        self.write(None)
        with (self.path / "output.log").open("ab") as output:
            return subprocess.Popen(
                [*PROGRAM, *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "WANDB_RUN_GROUP": self.path.parent.name},
                start_new_session=True,  # a Ctrl+C in the terminal reaches each once, from `_run`
            )


def _members(
    command: str, overrides: Sequence[str], start: ConfigSource, jobs: int, path: Path | None
) -> tuple[Path, list[SweepRun]]:
    """Return the sweep's directory and members; ConfigError if one has no valid settings."""
    from diloco.config import compose
    from diloco.config.compose import compose_tree, key_of, quoted
    from diloco.config.files import sweep_params

    expanded = {override: _values(override, start) for override in overrides}
    fixed = [override for override in overrides if expanded[override] == [override]]
    varying = [values for override, values in expanded.items() if values != [override]]
    composed, typed = compose_tree(fixed, start), set(map(key_of, overrides))
    in_files = sweep_params(composed.request).items()
    axes = [_values(f"{key}={text}", start) for key, text in in_files if key not in typed]
    if path is None:
        path = Path(str(composed.tree.run.dir))
        path = path if "run.dir" in typed else path.with_name(f"{path.name}-sweep")
    path = path.absolute()
    fixed = [override for override in fixed if key_of(override) != "run.dir"]
    members = []
    for number, varied in enumerate(product(*axes, *varying)):
        settings = (*fixed, *varied)
        config = compose(settings, start)
        own = [f"run.dir={quoted(path / str(number))}"]
        if "run.id" not in map(key_of, varied):
            own.insert(0, f"run.id={config.run.id[: 63 - len(str(number))]}-{number}")
        if jobs > 1 and config.train.threads is None:
            processes = jobs * (config.local.peers if command == "local" else 1)
            own.append(f"train.threads={max(1, (os.cpu_count() or 1) // processes)}")
        arguments = (command, *start.arguments(), *settings, *own)
        members.append(SweepRun(path / str(number), settings, " ".join(varied), arguments, config))
    if not members:
        raise ConfigError("there are no members; check the ends of each range")
    return path, members


def _values(argument: str, start: ConfigSource) -> list[str]:
    """Expand an argument with several values into overrides; else return it alone."""
    from hydra.core.override_parser.types import Glob
    from hydra.errors import HydraException

    from diloco.config import choices
    from diloco.config.compose import check_key, parse_argument
    from diloco.config.explain import show

    groups = choices(start)
    key, _, override = parse_argument(argument, swept=True)
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
            endless = f"{show(argument)} has no end of values"
            raise ConfigError(f"{endless}; list them, such as {key}=A,B") from None
    return [f"{key}={value}" for value in values]


def _run(waiting: list[SweepRun], jobs: int) -> bool:
    """Run members, `jobs` at a time; return True if Ctrl+C ended it. A second one kills them."""
    from diloco.rundir.compare import read_run

    running: dict[subprocess.Popen[bytes], SweepRun] = {}
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
                for process in [process for process in running if process.poll() is not None]:
                    member = running.pop(process)
                    member.write(None if stops else process.returncode)
                    run = read_run(member.path)
                    result = member.state()
                    if run.exit == 0 and run.loss is not None:
                        result += f", held-out {run.loss:.3f}"
                    at = f"[{time.monotonic() - began:5.1f}s]"
                    click.echo(f"{at} {member.path.name} {member.varied}: {result}")
    finally:
        for process in running:
            os.killpg(process.pid, signal.SIGKILL)
    return bool(stops)


@click.command(cls=Command)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=PATH)
@click.option("--loss", type=float, help="Held-out loss to reach.  [default: the worst final one]")
@click.option("--out", type=PATH, help="Directory of the curves.  [default: that of a sweep]")
@click.option("--csv", "table", type=PATH, metavar="FILE", help="Write a line per run to FILE.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def compare(
    runs: Sequence[Path], loss: float | None, out: Path | None, table: Path | None, as_json: bool
) -> int:
    """Compare runs: a table, and curves by tokens, time and bytes.

    \b
    diloco compare runs/quickstart runs/baseline
    diloco compare runs/seeds --loss 2.1 --csv seeds.csv

    RUN is a run directory or the directory of a sweep. Runs that differ in their seed only are one
    row: mean +- their deviation. The lowest loss comes first. Without --out, several RUNs leave no
    curves.
    """
    if loss is not None and not math.isfinite(loss):
        raise ConfigError(f"--loss={loss} is no loss; give nats per token, such as 2.5")
    if out is None and len(runs) == 1:
        out = runs[0]
    _compare(runs, loss, out, table, as_json)
    return 0


def _compare(
    runs: Sequence[Path], loss: float | None, out: Path | None, table: Path | None, as_json: bool
) -> None:
    """Print the table or its JSON; write curves and table where there is a place for them."""
    from diloco.rundir import compare as comparison
    from diloco.rundir.files import finite, prepare_run_directory

    result = comparison.compare(*runs)
    reached = result.worst_loss() if loss is None else loss
    if out is not None:
        prepare_run_directory(out)
    if table is not None:
        result.to_csv(table, loss)
    if as_json:
        click.echo(json.dumps(finite(_content(result, loss, reached)), indent=2))
    else:
        _show(result, reached)
    if out is not None:
        pictures = result.plot(out)
        if not as_json:
            click.echo(f"{out}: {', '.join(picture.name for picture in pictures)}")


def _content(result: RunComparison, loss: float | None, reached: float | None) -> dict[str, Any]:
    """Return the object that --json prints."""
    rows = result.rows(loss)
    arms = [
        {
            "name": arm.name,
            "loss": arm.mean("loss"),
            "spread": arm.spread("loss"),
            "seeds": [run.seed for run in arm.runs],
            "runs": [row["name"] for row in rows if row["arm"] == arm.name],
        }
        for arm in result.arms
    ]
    gaps = [asdict(gap) | {"mean": gap.mean, "spread": gap.spread} for gap in result.gaps]
    return {"loss": reached, "arms": arms, "runs": rows, "gaps": gaps}


def _show(result: RunComparison, reached: float | None) -> None:
    """Print a row per arm; without a terminal the table is as wide as it needs to be."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    from diloco.dashboard.live import is_screen

    console, table = Console(), Table(box=None, padding=(0, 1), pad_edge=False)
    rows = [_cells(arm, reached) for arm in result.arms]
    if all(len(arm.runs) == 1 for arm in result.arms):
        for row in rows:
            del row["seeds"]
    for name in rows[0]:
        justify: Any = "left" if name in ("run", "exit") else "right"
        table.add_column(name, justify=justify, no_wrap=name != "run")
    for row in rows:
        table.add_row(*map(Text, row.values()))
    if not is_screen(console):
        wide = console.options.update(width=10_000)
        console = Console(file=console.file, width=Measurement.get(console, wide, table).maximum)
    console.print(table)
    for gap in result.gaps:
        console.print(Text(str(gap)), soft_wrap=True)


def _cells(arm: Arm, reached: float | None) -> dict[str, str]:
    """Return a row of the table, by column."""
    busy = arm.mean("utilization")
    times = [None if reached is None else run.time_to_loss(reached) for run in arm.counted]
    known = [time for time in times if time is not None]
    time_s = sum(known) / len(known) if known and len(known) == len(times) else None
    return {
        "run": arm.name,
        "seeds": str(len(arm.runs)),
        "held-out": _spread(arm, "loss", 4),
        "perplexity": _spread(arm, "perplexity", 2),
        "tokens": human_count(arm.mean("tokens")),
        "virtual": _time(arm.mean("virtual_s")),
        "wall": _time(arm.mean("wall_s")),
        "sent": human_bytes(arm.mean("bytes_sent")),
        "busy": "-" if busy is None else f"{busy:.1%}",
        "to loss" if reached is None else f"to {reached:.4f}": _time(time_s),
        "exit": _exits(arm),
    }


def _exits(arm: Arm) -> str:
    """Describe how an arm's runs ended; of several seeds, count those that did not end well."""
    words = [{None: "unfinished", 4: "4 diverged"}.get(run.exit, str(run.exit)) for run in arm.runs]
    ill = Counter(word for word in words if word != "0")
    if not ill or len(words) == 1:
        return words[0]
    return ", ".join(f"{count} of {len(words)}: {word}" for word, count in ill.items())


def _spread(arm: Arm, of: str, digits: int) -> str:
    mean, spread = arm.mean(of), arm.spread(of)
    text = "-" if mean is None else f"{mean:.{digits}f}"
    return text if spread is None else f"{text} ± {spread:.{digits}f}"


def _time(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f} s" if value < 100 else human_seconds(value)
