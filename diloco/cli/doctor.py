"""`diloco doctor`: one line per check, with the remedy for what is wrong."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Collection
from dataclasses import asdict

import click
from rich.console import Console
from rich.text import Text

from diloco.config import Config
from diloco.config.address import Address
from diloco.errors import ConfigError, SwarmError

__all__ = ["run"]

_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


def run(config: Config, address: Address | None, as_json: bool, typed: Collection[str] = ()) -> int:
    """Check this machine, and the swarm at an address; returns the exit code: 2 for what fails here, 3 there."""
    console = Console()
    logging.basicConfig(level=logging.ERROR, format="diloco: %(message)s")
    waiting = contextlib.nullcontext() if as_json or not console.is_terminal else console.status("checking")
    with waiting:
        from diloco.fit.doctor import Doctor  # torch takes seconds
        from diloco.fit.volunteer import lock_peer_directory

        with lock_peer_directory(config.swarm.identity_path) as directory:
            doctor = Doctor(config, directory, () if address is None else address.peers, typed)
            checks = []
            for check in doctor.checks():
                checks.append(check)
                if not as_json:
                    verdict = (f"{check.verdict:<8}", _STYLES[check.verdict])
                    name, text = (f"{check.name:<12}", "bold"), (check.text, "default")
                    console.print(Text.assemble(verdict, name, text), soft_wrap=True)
                    if check.remedy:
                        console.print(Text(f"{'':<20}{check.remedy}"), soft_wrap=True)
    failed = [check for check in checks if check.verdict == "failed"]
    code = 0
    if failed:
        code = SwarmError.exit_code if all(check.swarm for check in failed) else ConfigError.exit_code
    elif address is not None and not as_json:
        console.print(Text("nothing stands in the way of diloco join", style="bold green"))
    if as_json:
        report = {"checks": [asdict(check) for check in checks], "figures": doctor.figures, "exit": code}
        click.echo(json.dumps(report, indent=2))
    return code
