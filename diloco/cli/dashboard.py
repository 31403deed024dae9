"""`diloco dashboard`: a swarm in the browser."""

from __future__ import annotations

import asyncio
import contextlib

import click

from diloco.cli.status import address_here
from diloco.config.address import Address, scope
from diloco.dashboard.server import Dashboard
from diloco.errors import ConfigError
from diloco.swarm.visit.visitor import Visitor, light_hivemind

__all__ = ["run"]


def run(address: str | None, host: str, port: int) -> int:
    """Serve the page until Ctrl+C, which ends in 0. Without an address it shows the one run of which a peer runs here.

    Raises ConfigError if nobody can listen there, SwarmError if nobody answers at the address.
    """
    place = address_here() if address is None else Address.read(address)
    try:
        dashboard = Dashboard(host, port)
    except OSError as error:
        raise ConfigError(
            f"--host={host} --port={port} cannot be listened on: {error.strerror}; choose another --port, or 0 for any"
        ) from None
    light_hivemind()
    with dashboard, contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(dashboard, place, host))
    return 0


async def _serve(dashboard: Dashboard, place: Address, host: str) -> None:
    async with Visitor(place.peers, place.token) as visitor:
        snapshot = await visitor.ask()  # a wrong address is an error before the page is served
        if scope(f"/ip/{host}") != "loopback":
            click.echo(f"diloco: warning: --host={host} shows the swarm to everyone who reaches this machine", err=True)
        shown = f"[{host}]" if ":" in host else host
        click.echo(f"http://{shown}:{dashboard.server_address[1]}  shows {snapshot.run.run_id}; Ctrl+C ends it")
        await dashboard.watch(visitor)
