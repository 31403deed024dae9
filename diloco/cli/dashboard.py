"""`diloco dashboard`: a swarm in the browser."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import socket
from collections.abc import Sequence
from pathlib import Path

import click

from diloco.cli.status import address_here
from diloco.config.address import Address, scope
from diloco.errors import ConfigError
from diloco.protocol.snapshot import Snapshot
from diloco.rundir.compare import find_runs
from diloco.swarm.visit.visitor import Visitor, light_hivemind

__all__ = ["run"]

NEEDS = {"nicegui": "nicegui", "prometheus_client": "prometheus-client"}


def run(address: str | None, host: str, port: int, beside: Sequence[Path] = ()) -> int:
    """Serve the page until Ctrl+C, which ends in 0. Without an address it shows the one run of which a peer runs here.

    Raises ConfigError if the extra is missing, a place in `beside` holds no run or nobody can listen there, SwarmError
    if nobody answers at the address.
    """
    place = address_here() if address is None else Address.read(address)
    missing = [package for module, package in NEEDS.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigError(f"diloco dashboard needs {' and '.join(missing)}; pip install 'diloco[dashboard]'")
    runs = find_runs(beside)
    port = _free(host, port)
    light_hivemind()
    snapshot = asyncio.run(_first(place))
    if scope(f"/ip/{host}") != "loopback":
        click.echo(f"diloco: warning: --host={host} shows the swarm to everyone who reaches this machine", err=True)
    shown = f"[{host}]" if ":" in host else host
    click.echo(f"http://{shown}:{port}  shows {snapshot.run.run_id}; Ctrl+C ends it")

    from diloco.dashboard.server import serve

    with contextlib.suppress(KeyboardInterrupt):
        serve(Visitor(place.peers, place.token), host, port, f"diloco: {snapshot.run.run_id}", runs)
    return 0


async def _first(place: Address) -> Snapshot:
    """Asks the swarm once, so that a wrong address is an error before the page is served."""
    async with Visitor(place.peers, place.token) as visitor:
        return await visitor.ask()


def _free(host: str, port: int) -> int:
    """The port, or for 0 a free one; `ConfigError` when it cannot be listened on."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise ConfigError(
            f"--host={host} --port={port} cannot be listened on: {error.strerror}; choose another --port, or 0 for any"
        ) from None
