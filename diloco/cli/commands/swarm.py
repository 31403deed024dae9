"""Arguments of the commands for a swarm: to run its peers, to look at it, and to close it to strangers."""

from __future__ import annotations

from typing import Any

import click

from diloco.cli.commands import common
from diloco.cli.commands.common import PATH, Asked, Command, configured, implementation, run, sweepable
from diloco.errors import ConfigError

__all__ = ["dashboard", "doctor", "host", "invite", "join", "keygen", "local", "revoke", "status", "train"]


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
@click.option("--yes", is_flag=True, help="Join also if the run needs more than this package; for scripts.")
@configured
def join(address: str | None, yes: bool, overrides: tuple[str, ...], asked: Asked) -> int:
    """Join a swarm as a volunteer.

    \b
    diloco join /ip4/203.0.113.7/tcp/4100/p2p/12D3Koo...
    diloco join @link.txt
    diloco join -
    diloco join ADDRESS train.device=cpu train.threads=4 swarm.upload_limit=1e6

    Nothing but the ADDRESS is needed; - reads it from stdin. The run's settings come from the swarm; device, precision,
    threads and how much of a batch is computed at a time from a look at this machine. A run that fetches a model or
    text from elsewhere is shown first, and joined if you agree. Ctrl+C leaves cleanly at any time, and the same command
    comes back.
    """
    if asked.shows:
        return run("join", overrides, asked)
    if address is None or common.split_address(address, overrides)[0] is None:
        raise ConfigError("join needs the ADDRESS of a peer, as it prints it")
    found, given = common.guest(address, overrides)
    return run("join", overrides, asked, given, address=found, typed=_typed(overrides), yes=yes)


@click.command(cls=Command)
@click.option("--new", is_flag=True, help="Start a new swarm instead of joining one.")
@click.option("--until-done", is_flag=True, help="End when the budget is used up and the peers that train have left.")
@click.argument("address", required=False)
@configured
def host(new: bool, until_done: bool, address: str | None, overrides: tuple[str, ...], asked: Asked) -> int:
    """Hold fragments, without training.

    \b
    diloco host --new run.id=mine swarm=network 'swarm.listen=[/ip4/0.0.0.0/tcp/4100]'
    diloco host /ip4/203.0.113.7/tcp/4100/p2p/12D3Koo...

    For a machine without an accelerator that stays: it keeps the state of the swarm and others can start from it.
    """
    address, overrides = common.split_address(address, overrides)
    if not asked.shows and new == (address is not None):
        raise ConfigError("host needs either the ADDRESS of a peer, as it prints it, or --new")
    given: list[str] = []
    if address is not None:
        found, given = common.guest(address, overrides, ["run.id"])  # with swarm.key_path it is in the invitation
        given = [f"swarm.initial_peers=[{','.join(map(repr, found.peers))}]", *given]
    return run("host", overrides, asked, given, until_done=until_done)


@click.command(cls=Command)
@click.argument("address", required=False)
@click.option("--watch", is_flag=True, help="Refresh every second until Ctrl+C.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--csv", "table", type=PATH, metavar="FILE", help="Write the contributions of every peer to FILE.")
def status(**arguments: Any) -> int:
    """Show a swarm without joining it.

    \b
    diloco status
    diloco status /ip4/203.0.113.7/tcp/4100/p2p/12D3Koo...
    diloco status @runs/mine/address --watch
    diloco status @runs/mine/address --json | jq .ledger

    Peers, fragments and their authors, rounds, tokens, loss and events, as the peer at ADDRESS knows them. Without
    ADDRESS the one run is meant, in ./runs or joined, of which a peer runs on this machine.
    """
    return implementation("status")(**arguments)


@click.command(cls=Command)
@click.argument("address", required=False)
@click.option("--host", default="127.0.0.1", help="Address to listen on; anyone there may look.")
@click.option("--port", type=click.IntRange(0, 65535), default=8471, help="Port; 0 is any free one.")
def dashboard(**arguments: Any) -> int:
    """Show what a swarm is doing, live in a browser.

    \b
    diloco dashboard @runs/mine/address
    diloco dashboard /ip4/203.0.113.7/tcp/4100/p2p/12D3Koo... --port 9000

    The page is at /, the JSON of diloco status at /api/state, and figures for Prometheus are at /metrics. Without
    ADDRESS it shows the one run of which a peer runs on this machine.
    """
    return implementation("dashboard")(**arguments)


@click.command(cls=Command)
@click.argument("address", required=False)
@configured
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(address: str | None, overrides: tuple[str, ...], asked: Asked, as_json: bool) -> int:
    """Check this machine and the way to a swarm.

    \b
    diloco doctor
    diloco doctor /ip4/203.0.113.7/tcp/4100/p2p/12D3Koo... --json > doctor.json
    diloco doctor model=150m data.sequence_length=1024

    One line per check: ok, warning, or failed with the remedy. Exit code 2 says that something here has to change, 3
    that the swarm cannot be joined. Nothing takes part in the run. An ADDRESS brings the run's own settings.
    """
    address, overrides = common.split_address(address, overrides)
    if asked.shows:
        return run("doctor", overrides, asked)
    found, given = None, list[str]()
    if address is not None:
        found, given = common.guest(address, overrides, ["run.id"])  # with swarm.key_path it is in the invitation
    return run("doctor", overrides, asked, given, address=found, as_json=as_json, typed=_typed(overrides))


def _typed(overrides: tuple[str, ...]) -> frozenset[str]:
    from diloco.config.overrides import key_of

    return frozenset(map(key_of, overrides))


@click.command()
@click.argument("file", required=False, default="run.key", type=PATH)
def keygen(**arguments: Any) -> int:
    """Make the key of a closed run, and print its public half.

    \b
    diloco keygen run.key
    diloco train run.id=mine swarm=network swarm.key_path=run.key

    FILE (run.key by default) is its private half, with which anybody can invite peers and revoke invitations. Peers of
    such a run admit nobody without an invitation.
    """
    return implementation("keygen")(**arguments)


def _owner(function: common.Function) -> common.Function:
    """Adds what every command of a run's owner has."""
    key = click.option("--key", required=True, type=PATH, help="File with the run's private key.")
    return click.option("--run", required=True, metavar="RUN_ID", help="run.id of the run.")(key(function))


@click.command()
@_owner
@click.option("--expires", default="7d", metavar="TIME", help="30m, 12h, 7d, 2w.")
@click.option(
    "--role", type=click.Choice(["worker", "host", "observer"]), default="worker",
    help="worker: all; host: makes versions, contributes nothing; observer: looks on.",
)  # fmt: skip
@click.option("--bind", metavar="PEER_ID", help="Only this peer can use it.  [default: the first that does]")
@click.option("--out", type=PATH, metavar="FILE", help="Write it to this new file, which only you can read.")
@click.argument("address", required=False)
def invite(**arguments: Any) -> int:
    """Print an invitation to a closed run.

    \b
    diloco invite --key run.key --run mine /ip4/203.0.113.7/tcp/4100/p2p/Qm...
    diloco invite --key run.key --run mine @runs/mine/address --out link.txt
    diloco invite --key run.key --run mine --role observer --expires 12h

    With ADDRESS it is a link, for diloco join @FILE, else a token for swarm.token=@FILE. Either is a secret; its id, on
    stderr, is what diloco revoke takes.
    """
    return implementation("invite")(**arguments)


@click.command()
@_owner
@click.argument("what", nargs=-1, required=True, metavar="[ADDRESS] WHAT...")
def revoke(what: tuple[str, ...], **arguments: Any) -> int:
    """Put peers out of a closed run, at once and for good.

    \b
    diloco revoke --key run.key --run mine /ip4/203.0.113.7/tcp/4100/p2p/Qm... 7f3a90c2d41be865

    WHAT is the id of a token, a token, a link, or a peer id; ADDRESS any peer of the swarm, which tells the others.
    Without ADDRESS, if no peer is left, the list is kept beside the key for the owner's next peer.
    """
    address = what[0] if len(what) > 1 and what[0].startswith(("/", "@", "diloco:", "-")) else None
    return implementation("revoke")(address=address, what=what if address is None else what[1:], **arguments)
