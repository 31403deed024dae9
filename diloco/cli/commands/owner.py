"""Arguments of the commands for the owner of a closed run: `keygen`, `invite` and `revoke`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import click

from diloco.cli.commands.common import Function

__all__ = ["invite", "keygen", "revoke"]


@click.command()
@click.argument("file", required=False, default="run.key", type=click.Path(path_type=Path))
def keygen(**arguments: Any) -> int:
    """Make the key of a closed run, and print its public half.

    \b
    diloco keygen run.key
    diloco train run.id=mine swarm=network swarm.key_path=run.key

    FILE (run.key by default) is its private half, with which anybody can invite peers and revoke invitations. Peers of
    such a run admit nobody without an invitation.
    """
    return _keys("keygen", **arguments)


def _owner(function: Function) -> Function:
    """Adds what every command of a run's owner has."""
    key = click.option("--key", required=True, type=click.Path(path_type=Path), help="File with the run's private key.")
    return click.option("--run", required=True, metavar="RUN_ID", help="run.id of the run.")(key(function))


@click.command()
@_owner
@click.option("--expires", default="7d", show_default=True, metavar="TIME", help="30m, 12h, 7d, 2w.")
@click.option(
    "--role",
    type=click.Choice(["worker", "host", "observer"]),
    default="worker",
    show_default=True,
    help="worker: all; host: holds fragments, contributes nothing; observer: looks on.",
)
@click.option("--bind", metavar="PEER_ID", help="Only this peer can use it.  [default: the first that does]")
@click.argument("address", required=False)
def invite(**arguments: Any) -> int:
    """Print an invitation to a closed run.

    \b
    diloco invite --key run.key --run mine /ip4/203.0.113.7/tcp/4100/p2p/Qm...
    diloco invite --key run.key --run mine --role observer --expires 12h

    With ADDRESS it is a link, else a token for swarm.token=@FILE. Either is a secret; its id, on stderr, is what
    diloco revoke takes.
    """
    return _keys("invite", **arguments)


@click.command()
@_owner
@click.argument("address")
@click.argument("what", nargs=-1, required=True)
def revoke(**arguments: Any) -> int:
    """Put peers out of a closed run, at once and for good.

    \b
    diloco revoke --key run.key --run mine /ip4/203.0.113.7/tcp/4100/p2p/Qm... 7f3a90c2d41be865

    WHAT is the id of a token, a token, a link, or a peer id; ADDRESS any peer of the swarm, which tells the others.
    """
    return _keys("revoke", **arguments)


def _keys(command: str, **arguments: Any) -> int:
    done: int = getattr(import_module("diloco.cli.keys"), command)(**arguments)
    return done
