"""`diloco status` and `dashboard`: a swarm seen from outside, in a terminal or a browser."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from diloco.cli import PATH, Command
from diloco.errors import ConfigError, SwarmError

if TYPE_CHECKING:
    from diloco.config.address import Address
    from diloco.dashboard.server import Dashboard
    from diloco.messages.snapshot import Snapshot
    from diloco.swarm.client.watch import SwarmWatcher

EVERY_S = 1.0
OTHER_LINES = 26  # of `render`, beside the rows of peers, fragments and contributions


@click.command(cls=Command)
@click.argument("address", required=False)
@click.option("--watch", is_flag=True, help="Refresh every second until Ctrl+C.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--csv", "table", type=PATH, metavar="FILE", help="Write the contributions to FILE.")
def status(address: str | None, watch: bool, as_json: bool, table: Path | None) -> int:
    """Show a swarm without joining it.

    \b
    diloco status
    diloco status /ip4/203.0.113.7/tcp/4100/p2p/12D3Koo...
    diloco status @runs/mine/address --watch
    diloco status @runs/mine/address --json | jq .ledger

    Peers, fragments and their authors, rounds, tokens, loss and events, as the peer at ADDRESS
    knows them. Without ADDRESS the one run is meant, in ./runs or joined, of which a peer runs on
    this machine, or whose worker waits to.
    """
    import asyncio

    if watch and as_json:
        raise ConfigError("--watch and --json exclude each other; call it once a second instead")
    swarm = _place(address)
    try:
        return asyncio.run(_status(swarm, watch, as_json, table))
    except KeyboardInterrupt:
        if watch:
            return 0
        raise


def _place(address: str | None) -> Address:
    """Parse the address, or take that of the only run of which a peer runs here, or is about to;
    `ConfigError`."""
    from dataclasses import replace

    from diloco.config.address import Address
    from diloco.rundir.files import data_home, in_use

    if address is not None:
        return Address.read(address)
    folders, names = [Path("runs")], "./runs"
    with suppress(ConfigError):  # a user without a home has joined no run
        names += f" or {data_home()}"
        folders += data_home().glob("**/peer-*/runs")  # of workers, too
    files = [file for folder in folders for file in folder.glob("*/address")]
    living = [file for file in files if any(map(in_use, file.parent.glob("checkpoints/*")))]
    if len({file.parent.name for file in living}) == 1:
        swarm = Address.read(f"@{living[0]}")
        # the machine's own address may have changed, and its peer still listens on all
        here = (_on_loopback(peer) for peer in swarm.resolved().peers)
        return replace(swarm, peers=(*swarm.peers, *dict.fromkeys(filter(None, here))))
    if not living and (joins := _worker_joins()) is not None:
        return Address.read(joins)
    runs = ", ".join(f"@{file}" for file in living) or f"of no run in {names} a peer runs here"
    raise ConfigError(f"give the ADDRESS of a peer, as it prints it: {runs}")


def _worker_joins() -> str | None:
    """Return whom a worker that waits joins, and say why its peer does not run."""
    from diloco.volunteer.worker import Worker

    try:
        worker = Worker.read()
    except ConfigError:  # there is none
        return None
    if worker.is_stopped:
        return None
    click.echo(str(worker), err=True)
    return worker.address


def _on_loopback(address: str) -> str | None:
    """Return an address by which only this machine calls its peer; None if it is, or has a name."""
    _, family, host, *rest = address.split("/")
    loopback = {"ip4": "127.0.0.1", "ip6": "::1"}.get(family, host)
    return None if loopback == host else "/".join(["", family, loopback, *rest])


async def _status(swarm: Address, watch: bool, as_json: bool, table: Path | None) -> int:
    from rich.console import Console

    from diloco.dashboard.tables import render
    from diloco.rundir.summary import write_contributions
    from diloco.swarm.client.watch import SwarmWatcher

    async with SwarmWatcher(swarm.peers, swarm.token) as watcher:
        snapshot = await watcher.ask()
        if table is not None:
            write_contributions(table, snapshot.ledger.contributions)
        if watch:
            await _watch(watcher, snapshot)
        elif as_json:
            click.echo(snapshot.json(indent=2))
        else:
            console = Console()
            console.print(render(snapshot, console))
    return 0


async def _watch(watcher: SwarmWatcher, snapshot: Snapshot) -> None:
    """Redraw, or print again without a terminal; while no peer answers the last state stays."""
    import asyncio

    from rich.console import Console
    from rich.live import Live

    from diloco.dashboard.live import is_screen
    from diloco.dashboard.tables import render

    console, task = Console(), asyncio.current_task()
    lost, seen_at = None, time.monotonic()
    live = Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop")
    screen = is_screen(console)
    with live if screen else nullcontext():
        # Ctrl+C cancels this task, and a wait_for of Python 3.11 may swallow that
        while task is not None and not task.cancelling():
            if screen:
                rows = max(3, (console.height - OTHER_LINES) // 3)
                live.update(render(snapshot, console, rows, lost), refresh=True)
            else:
                console.print(render(snapshot, console, lost=lost))
            asked_at = time.monotonic()
            await asyncio.sleep(EVERY_S)
            try:
                snapshot = await watcher.ask()
                lost, seen_at = None, time.monotonic()
            except SwarmError as error:
                lost = f"lost, last seen {asked_at - seen_at:.0f} s ago: {error}"


@click.command(cls=Command)
@click.argument("address", required=False)
@click.option("--host", default="127.0.0.1", help="Address to listen on; anyone there may look.")
@click.option("--port", type=click.IntRange(0, 65535), default=8471, help="0 is any free one.")
def dashboard(address: str | None, host: str, port: int) -> int:
    """Show what a swarm is doing, live in a browser.

    \b
    diloco dashboard @runs/mine/address
    diloco dashboard /ip4/203.0.113.7/tcp/4100/p2p/12D3Koo... --port 9000

    The page is at /, the JSON of diloco status at /api/state, and figures for Prometheus are at
    /metrics. Without ADDRESS it shows the one run of which a peer runs on this machine.
    """
    import asyncio

    from diloco.dashboard.server import Dashboard

    swarm = _place(address)
    try:
        page = Dashboard(host, port)
    except OSError as error:
        failed = f"--host={host} --port={port} cannot be listened on: {error.strerror}"
        raise ConfigError(f"{failed}; choose another --port, or 0 for any") from None
    with page, suppress(KeyboardInterrupt):
        asyncio.run(_serve(page, swarm, host))
    return 0


async def _serve(page: Dashboard, swarm: Address, host: str) -> None:
    from diloco.config.address import reachability
    from diloco.swarm.client.watch import SwarmWatcher

    async with SwarmWatcher(swarm.peers, swarm.token) as watcher:
        snapshot = await watcher.ask()  # a wrong address is an error before the page is served
        if reachability(f"/ip/{host}") != "loopback":
            public = f"--host={host} shows the swarm to everyone who reaches this machine"
            click.echo(f"diloco: warning: {public}", err=True)
        url = f"http://{f'[{host}]' if ':' in host else host}:{page.server_address[1]}"
        click.echo(f"{url}  shows {snapshot.run.run_id}; Ctrl+C ends it")
        await page.watch(watcher)
