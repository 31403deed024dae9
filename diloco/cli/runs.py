"""The runs of this machine: `diloco status` lists them, `diloco pause` and `resume` have them pause and go on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from diloco.cli.table import STATE_STYLES, fitting
from diloco.config.address import Address
from diloco.errors import ConfigError
from diloco.rundir.files import write_atomic
from diloco.rundir.here import RunHere, read_run, runs_here
from diloco.rundir.presence import data_home, pause_file
from diloco.text import human_seconds, plain

__all__ = ["address_here", "listed", "only_address", "pause", "resume"]

LONGEST_STATE = 40  # characters
DISPENSABLE = ("loss", "version", "since")  # columns; the first goes first


def pause(run_dir: Path | None) -> int:
    """Has the peers of a run directory pause; returns the exit code.

    Raises `ConfigError` if no peer of it runs here, if it pauses already, or cannot pause.
    """
    for run in _chosen(run_dir, lambda run: not run.paused_by_hand and not run.unpausable, "none can pause"):
        if run.paused_by_hand:
            raise ConfigError(f"RUN_DIR={run.where} pauses already; diloco resume {run.where} has it go on")
        if run.unpausable:
            why = f"{run.unpausable}; end it with Ctrl+C, and start it again later"
            raise ConfigError(f"RUN_DIR={run.where} cannot pause: {why}")
        write_atomic(pause_file(run.where), "")
        click.echo(f"{run.where}: {run.run_id} pauses: it leaves the swarm and keeps its state; diloco resume goes on")
    return 0


def resume(run_dir: Path | None) -> int:
    """Has the peers of a run directory go on that `diloco pause` has paused; returns the exit code.

    Raises `ConfigError` if no peer of it runs here, or it was not paused so.
    """
    for run in _chosen(run_dir, lambda run: run.paused_by_hand, "none was paused by diloco pause"):
        if not run.paused_by_hand:
            why = "it pauses by its own settings, " if run.state == "paused" else "its peer is "
            raise ConfigError(f"RUN_DIR={run.where} was not paused by diloco pause; {why}{_state_of(run)}")
        pause_file(run.where).unlink(missing_ok=True)
        click.echo(f"{run.where}: {run.run_id} goes on")
    return 0


def _chosen(run_dir: Path | None, meant: Callable[[RunHere], bool], none: str) -> list[RunHere]:
    """The run in a directory, or without one the living run that is meant.

    A machine with several accelerators joins a run as several peers, each with a directory of its own; they are one.
    """
    if run_dir is not None:
        run = read_run(run_dir) if run_dir.is_dir() else None
        if run is None or not (run.peers or (run_dir / "config.yaml").is_file()):
            raise ConfigError(f"RUN_DIR={run_dir} holds no run; diloco status lists those of this machine")
        if not run.lives:
            raise ConfigError(f"RUN_DIR={run_dir}: no peer of it runs on this machine ({_state_of(run)})")
        return [run]
    living = [run for run in runs_here() if run.lives]
    if not living:
        raise ConfigError(f"no run lives in ./runs or {data_home()}; name its RUN_DIR, as diloco status shows it")
    found = [run for run in living if meant(run)]
    if not found:
        raise ConfigError(f"of the runs that live on this machine {none}: {_places(living)}")
    joined = all(run.where.is_relative_to(data_home()) for run in found)
    if len(found) > 1 and not (joined and len({run.run_id for run in found}) == 1):
        raise ConfigError(f"{len(found)} runs live on this machine; name the RUN_DIR of one: {_places(found)}")
    return found


def _places(runs: Sequence[RunHere]) -> str:
    return ", ".join(str(run.where) for run in runs)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_STATE else text[: LONGEST_STATE - 1] + "…"


def _state_of(run: RunHere) -> str:
    return plain(f"{run.state}: {run.why}" if run.why else run.state)


def address_here() -> Address | None:
    """Where the swarm of this machine's living run is; None if no run lives here, or several do."""
    found = [run for run in runs_here() if run.lives and run.addresses]
    return Address(found[0].addresses, found[0].token) if len({run.run_id for run in found}) == 1 else None


def only_address() -> Address:
    """The same; `ConfigError` says which runs there are if there is not one."""
    found = address_here()
    if found is not None:
        return found
    living = [run for run in runs_here() if run.lives]
    if living:
        named = ", ".join(f"{run.run_id} in {run.where}" for run in living)
        raise ConfigError(
            f"give the ADDRESS of a peer, such as @RUN_DIR/address; {len(living)} runs live here: {named}"
        )
    raise ConfigError(f"no run lives in ./runs or {data_home()}; give the ADDRESS of a peer, as it prints it")


def listed(as_json: bool) -> int:
    """Prints the runs of this machine; returns the exit code."""
    runs = runs_here()
    if as_json:
        click.echo(json.dumps({"runs": [run.to_json() for run in runs]}, indent=2))
    elif not runs:
        click.echo(f"no runs in ./runs or {data_home()}; with an ADDRESS, diloco status shows a swarm")
    else:
        console = Console()
        console.print(fitting(console, [_table(runs, DISPENSABLE[:count]) for count in range(len(DISPENSABLE) + 1)]))
        for run in runs:
            if run.lives and run.addresses:
                console.print(
                    f"{plain(run.run_id)}: {plain(run.addresses[0])}", style="dim", highlight=False, soft_wrap=True
                )
    return 0


def _table(runs: Sequence[RunHere], without: Sequence[str]) -> Table:
    table = Table(title="runs of this machine", title_justify="left", box=None, padding=(0, 1), pad_edge=False)
    columns = [name for name in ("run", "state", "since", "version", "loss", "where") if name not in without]
    for name in columns:
        table.add_column(name, justify="right" if name in ("since", "version", "loss") else "left", header_style="dim")
    for run in runs:
        cells = {
            "run": Text(plain(run.run_id)),
            "state": Text(_short(_state_of(run)), style=STATE_STYLES.get(run.state, "")),
            "since": Text("-" if run.since is None else f"{human_seconds(max(0.0, time.time() - run.since))}"),
            "version": Text("-" if run.version is None else str(run.version)),
            "loss": Text("-" if run.loss is None else f"{run.loss:.3f}"),
            "where": Text(str(run.where)),
        }
        table.add_row(*[cells[name] for name in columns])
    return table
