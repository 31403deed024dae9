"""`diloco status` and `diloco dashboard`: what a swarm is doing, seen from outside, in a terminal or a browser."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext, suppress
from pathlib import Path

import click
from rich.console import Console
from rich.live import Live

from diloco.cli.panels import render
from diloco.config.address import Address, scope
from diloco.dashboard.server import Dashboard
from diloco.errors import ConfigError, SwarmError
from diloco.messages.snapshot import Snapshot
from diloco.rundir.files import data_home, in_use
from diloco.rundir.summary import write_contributions
from diloco.swarm.client.watch import SwarmWatcher, stub_hivemind_packages

__all__ = ["dashboard", "run"]

EVERY_S = 1.0
AROUND = 26  # lines of `render` beside the rows of peers, fragments and contributions


def run(address: str | None, watch: bool, as_json: bool, table: Path | None) -> int:
    """Print the tables or one JSON object; with `watch` every second until Ctrl+C, which ends in 0.

    Without an address the one run is meant of which a peer runs on this machine.
    """
    if watch and as_json:
        raise ConfigError("--watch and --json exclude each other; call diloco status --json once a second instead")
    place = _place(address)
    stub_hivemind_packages()
    try:
        return asyncio.run(_status(place, watch, as_json, table))
    except KeyboardInterrupt:
        if watch:
            return 0
        raise


def _place(address: str | None) -> Address:
    """The address, or that of the one run in ./runs, or joined by this user, of which a peer runs on this machine.

    Raises `ConfigError` if there is none, or if there are several.
    """
    if address is not None:
        return Address.read(address)
    places, names = [Path("runs")], "./runs"
    with suppress(ConfigError):  # nobody without a home has joined a run
        names += f" or {data_home()}"
        places += data_home().glob("peer-*/runs")
    files = [file for place in places for file in place.glob("*/address")]
    living = [file for file in files if any(map(in_use, file.parent.glob("checkpoints/*")))]
    if len({file.parent.name for file in living}) == 1:
        return Address.read(f"@{living[0]}")
    found = ", ".join(f"@{file}" for file in living) or f"of no run in {names} a peer runs here"
    raise ConfigError(f"give the ADDRESS of a peer, as it prints it: {found}")


async def _status(place: Address, watch: bool, as_json: bool, table: Path | None) -> int:
    async with SwarmWatcher(place.peers, place.token) as visitor:
        snapshot = await visitor.ask()
        if table is not None:
            write_contributions(table, snapshot.ledger.contributions)
        if watch:
            await _watch(visitor, snapshot)
        elif as_json:
            click.echo(snapshot.json(indent=2))
        else:
            console = Console()
            console.print(render(snapshot, console))
    return 0


async def _watch(visitor: SwarmWatcher, snapshot: Snapshot) -> None:
    """Redraws in place, or prints again where there is no terminal. While nobody answers the last state stays."""
    console = Console()
    task = asyncio.current_task()
    assert task is not None
    lost, seen_at = None, time.monotonic()
    live = Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop")
    with live if console.is_terminal else nullcontext():
        while not task.cancelling():  # by Ctrl+C, which a wait_for of Python 3.11 swallows if it has just finished
            if console.is_terminal:
                rows = max(3, (console.height - AROUND) // 3)
                live.update(render(snapshot, console, rows, lost), refresh=True)
            else:
                console.print(render(snapshot, console, lost=lost))
            began = time.monotonic()
            await asyncio.sleep(EVERY_S)
            try:
                snapshot = await visitor.ask()
                lost, seen_at = None, time.monotonic()
            except SwarmError as error:
                lost = f"lost, last seen {began - seen_at:.0f} s ago: {error}"


def dashboard(address: str | None, host: str, port: int) -> int:
    """Serve the page until Ctrl+C, which ends in 0. Without an address it shows the one run of which a peer runs here.

    Raises ConfigError if nobody can listen there, SwarmError if nobody answers at the address.
    """
    place = _place(address)
    try:
        page = Dashboard(host, port)
    except OSError as error:
        raise ConfigError(
            f"--host={host} --port={port} cannot be listened on: {error.strerror}; choose another --port, or 0 for any"
        ) from None
    stub_hivemind_packages()
    with page, suppress(KeyboardInterrupt):
        asyncio.run(_serve(page, place, host))
    return 0


async def _serve(page: Dashboard, place: Address, host: str) -> None:
    async with SwarmWatcher(place.peers, place.token) as visitor:
        snapshot = await visitor.ask()  # a wrong address is an error before the page is served
        if scope(f"/ip/{host}") != "loopback":
            click.echo(f"diloco: warning: --host={host} shows the swarm to everyone who reaches this machine", err=True)
        shown = f"[{host}]" if ":" in host else host
        click.echo(f"http://{shown}:{page.server_address[1]}  shows {snapshot.run.run_id}; Ctrl+C ends it")
        await page.watch(visitor)
