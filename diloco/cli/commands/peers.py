"""Arguments of the commands that run peers: `local`, `train`, `join` and `host`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from diloco.cli.commands.common import (
    Command,
    admission,
    check,
    configured,
    implementation,
    is_override,
    run,
    sweepable,
)
from diloco.errors import ConfigError

__all__ = ["host", "join", "local", "train"]


@click.command(cls=Command)
@configured
@sweepable
def local(**arguments: Any) -> int:
    """Train with several peers on this machine.

    \b
    diloco local experiment=quickstart
    diloco local local.peers=2 model=tiny outer.sync_every=50 run.dir=runs/mine
    diloco local experiment=quickstart outer=data_parallel run.dir=runs/baseline
    diloco local data=text data.path=notes/ budget.tokens=5000000 budget.outer_steps=null

    The peers talk over the real network stack. Running it again with the same run.dir resumes the run.
    """
    return run("local", **arguments)


@click.command(cls=Command)
@configured
@sweepable
def train(**arguments: Any) -> int:
    """Train as one peer, in a new swarm or joining one.

    \b
    diloco train run.id=mine swarm=network
    diloco train run.id=mine 'swarm.initial_peers=[/ip4/203.0.113.7/tcp/4100/p2p/12D3Koo...]'
    torchrun --nproc-per-node=8 -m diloco.train run.id=mine model=150m data=hub

    Without swarm.initial_peers it starts a new swarm and prints the address for the others.
    """
    return run("train", **arguments)


@click.command(cls=Command)
@click.argument("address", required=False)
@configured
def join(address: str | None, overrides: tuple[str, ...], cfg: str | None, base: Path | None) -> int:
    """Join a swarm as a volunteer.

    \b
    diloco join /ip4/203.0.113.7/tcp/4100/p2p/12D3Koo...
    diloco join @runs/mine/address
    diloco join ADDRESS train.device=cpu train.threads=4 swarm.upload_limit=1e6

    Nothing but the ADDRESS is needed. The run's settings come from the swarm; device, precision, threads and how much
    of a batch is computed at a time from a look at this machine. Ctrl+C leaves cleanly at any time, and the same
    command comes back.
    """
    from diloco.config import compose, refuse_run_owned
    from diloco.config.address import Address

    if cfg is not None:
        return run("join", overrides, cfg, base)
    if address is None or is_override(address):
        raise ConfigError("join needs the ADDRESS of a peer, as it prints it")
    found = Address.parse(address)
    refuse_run_owned(overrides)
    config = compose([*overrides, *admission(found)], base=base)
    check("join", config, overrides)
    typed = frozenset(override.lstrip("+").partition("=")[0] for override in overrides)
    return implementation("join")(config, found, typed)


@click.command(cls=Command)
@click.option("--new", is_flag=True, help="Start a new swarm instead of joining one.")
@click.argument("address", required=False)
@configured
def host(new: bool, address: str | None, overrides: tuple[str, ...], **arguments: Any) -> int:
    """Hold fragments, without training.

    \b
    diloco host --new run.id=mine swarm=network 'swarm.listen=[/ip4/0.0.0.0/tcp/4100]'
    diloco host /ip4/203.0.113.7/tcp/4100/p2p/12D3Koo...

    For a machine without an accelerator that stays: it keeps the state of the swarm and others can start from it.
    """
    from diloco.config import refuse_run_owned
    from diloco.config.address import Address

    if address is not None and is_override(address):
        overrides, address = (address, *overrides), None  # the first argument was an override already
    if arguments["cfg"] is None and new == (address is not None):
        raise ConfigError("host needs either the ADDRESS of a peer, as it prints it, or --new")
    given: list[str] = []
    if address is not None:
        found = Address.parse(address)
        refuse_run_owned(overrides, {"run.id"})  # with swarm.key_path it is in the invitation
        given = [f"swarm.initial_peers=[{','.join(map(repr, found.peers))}]", *admission(found)]
    return run("host", overrides, given=given, **arguments)
