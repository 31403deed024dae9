"""Arguments of the commands that look at a swarm or at the way to it: `status`, `dashboard` and `doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from diloco.cli.commands.common import Command, admission, check, configured, implementation, is_override, run

__all__ = ["dashboard", "doctor", "status"]


@click.command(cls=Command)
@click.argument("address")
@click.option("--watch", is_flag=True, help="Refresh every second until Ctrl+C.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option(
    "--csv",
    "table",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the contributions of every peer to FILE.",
)
def status(**arguments: Any) -> int:
    """Show what a swarm is doing, without joining it.

    \b
    diloco status /ip4/203.0.113.7/tcp/4100/p2p/12D3Koo...
    diloco status @runs/mine/address --watch
    diloco status @runs/mine/address --json | jq .ledger

    Peers, fragments and their syncers, rounds, tokens, loss and events, as the peer at ADDRESS knows them.
    """
    return implementation("status")(**arguments)


@click.command(cls=Command)
@click.argument("address")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; anyone there may look.")
@click.option("--port", type=click.IntRange(0, 65535), default=8471, show_default=True, help="Port; 0 is any free one.")
def dashboard(**arguments: Any) -> int:
    """Show what a swarm is doing, live in a browser.

    \b
    diloco dashboard @runs/mine/address
    diloco dashboard /ip4/203.0.113.7/tcp/4100/p2p/12D3Koo... --port 9000

    The page is at /, the JSON of diloco status at /api/state, and figures for Prometheus are at /metrics.
    """
    return implementation("dashboard")(**arguments)


@click.command(cls=Command)
@click.argument("address", required=False)
@configured
@click.option("--json", "as_json", is_flag=True, help="Print JSON, which diloco plan --doctor reads.")
def doctor(address: str | None, overrides: tuple[str, ...], cfg: str | None, base: Path | None, as_json: bool) -> int:
    """Check this machine and the way to a swarm.

    \b
    diloco doctor
    diloco doctor /ip4/203.0.113.7/tcp/4100/p2p/12D3Koo... --json > doctor.json
    diloco doctor model=150m data.sequence_length=1024

    One line per check: ok, warning, or failed with the remedy. Exit code 2 says that something here has to change, 3
    that the swarm cannot be joined. Nothing takes part in the run. An ADDRESS brings the run's own settings.
    """
    from diloco.config import compose, refuse_run_owned
    from diloco.config.address import Address

    if address is not None and is_override(address):
        overrides, address = (address, *overrides), None
    if cfg is not None:
        return run("doctor", overrides, cfg, base)
    found = None if address is None else Address.parse(address)
    if found is not None:
        refuse_run_owned(overrides, {"run.id"})  # with swarm.key_path it is in the invitation
    config = compose([*overrides, *([] if found is None else admission(found))], base=base)
    check("doctor", config, overrides)
    typed = frozenset(override.lstrip("+").partition("=")[0] for override in overrides)
    return implementation("doctor")(config, found, as_json, typed)
