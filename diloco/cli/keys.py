"""`diloco keygen`, `invite`, `revoke`: the owner of a closed run decides which peers take part."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from diloco.cli import PATH, Function
from diloco.errors import ConfigError, SwarmError
from diloco.text import counted

if TYPE_CHECKING:
    from diloco.protocol import Role

UNITS_S = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
LONGEST_S = 10 * 366 * 86400
ROLES = click.Choice(["worker", "host", "observer"])
ROLE = "worker: all; host: makes versions, contributes nothing; observer: looks on."
BIND = "Only this peer can use it.  [default: the first that does]"
OUT = "Write it to this new file, which only you can read."


@click.command()
@click.argument("file", required=False, default="run.key", type=PATH)
def keygen(file: Path) -> int:
    """Make the key of a closed run, and print its public half.

    \b
    diloco keygen run.key
    diloco train run.id=mine swarm=network swarm.key_path=run.key

    FILE (run.key by default) is its private half, with which anybody can invite peers and revoke
    invitations. Peers of such a run admit nobody without an invitation.
    """
    from diloco.admission import RunKey

    click.echo(RunKey.create(file).public.hex())
    secret = f"{file}: keep it; whoever has it can invite and revoke"
    click.echo(f"{secret}. It starts a closed run with swarm.key_path={file}", err=True)
    return 0


def _owner(function: Function) -> Function:
    """Add the options that every command of a run's owner has."""
    key = click.option("--key", required=True, type=PATH, help="File with the run's private key.")
    run = click.option("--run", required=True, metavar="RUN_ID", help="run.id of the run.")
    return run(key(function))


@click.command()
@_owner
@click.option("--expires", default="7d", metavar="TIME", help="30m, 12h, 7d, 2w.")
@click.option("--role", type=ROLES, default="worker", help=ROLE)
@click.option("--bind", metavar="PEER_ID", help=BIND)
@click.option("--out", type=PATH, metavar="FILE", help=OUT)
@click.argument("address", required=False)
def invite(
    key: Path,
    run: str,
    expires: str,
    role: Role,
    bind: str | None,
    address: str | None,
    out: Path | None,
) -> int:
    """Print an invitation to a closed run.

    \b
    diloco invite --key run.key --run mine /ip4/203.0.113.7/tcp/4100/p2p/Qm...
    diloco invite --key run.key --run mine @runs/mine/address --out link.txt
    diloco invite --key run.key --run mine --role observer --expires 12h

    With ADDRESS it is a link, for diloco join @FILE, else a token for swarm.token=@FILE. Either is
    a secret; its id, on stderr, is what diloco revoke takes.
    """
    from diloco.admission import RunKey, issue
    from diloco.admission.keys import write_private
    from diloco.config.address import Address

    expires_at = int(time.time()) + seconds_of(expires)
    token = issue(RunKey.read(key, "--key"), run, role, expires_at, bind or "")
    text, joins = token.to_text(), "diloco join ADDRESS swarm.token="
    if address is not None:
        text, joins = str(Address(Address.read(address).resolved().peers, text)), "diloco join "
    if out is None:
        click.echo(text)
    else:
        write_private(out, f"{text}\n".encode(), f"--out={out}")
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(expires_at))
    whom = bind or ("whoever has it" if role == "observer" else "the first peer that uses it")
    click.echo(f"token {token.grant.token_id}: {role} of {run} until {until}, for {whom}", err=True)
    file = out or "FILE"
    typed = f"{joins}@{file} (chmod 600 {file}), or {joins}- and paste it"
    click.echo(f"it is a secret, and other users see what is typed: {typed}", err=True)
    return 0


@click.command()
@_owner
@click.argument("what", nargs=-1, required=True, metavar="[ADDRESS] WHAT...")
def revoke(key: Path, run: str, what: tuple[str, ...]) -> int:
    """Put peers out of a closed run, at once and for good.

    \b
    diloco revoke --key run.key --run mine /ip4/203.0.113.7/tcp/4100/p2p/Qm... 7f3a90c2d41be865

    WHAT is the id of a token, a token, a link, or a peer id; ADDRESS any peer of the swarm, which
    tells the others. Without ADDRESS, if no peer is left, the list is kept beside the key for the
    owner's next peer.
    """
    from diloco.admission import Revoked, RunKey
    from diloco.config.address import Address

    peers: tuple[str, ...] = ()
    owner = RunKey.read(key, "--key")
    if len(what) > 1 and what[0].startswith(("/", "@", "diloco:", "-")):
        peers, what = Address.read(what[0]).peers, what[1:]
    token_ids = {text: _token_id(text) for text in what}
    revoked = Revoked.remembered(owner, key, run).extended(
        owner,
        run,
        {token_id for token_id in token_ids.values() if token_id is not None},
        {text for text, token_id in token_ids.items() if token_id is None},
    )
    revoked.remember(key, run)  # before any peer is called
    if peers:
        import asyncio

        from diloco.swarm.client.ask import spread_revocations
        from diloco.swarm.wire.gate import observer_gate

        try:
            gate = observer_gate(run, None, str(key))
            revoked = asyncio.run(spread_revocations(peers, gate, owner, revoked))
        except SwarmError as error:
            kept = f"list {revoked.number} is kept beside {key}, and peers that start with it"
            raise SwarmError(f"{error}; {kept} have it") from None
        revoked.remember(key, run)
    tokens = counted(len(revoked.token_ids), "token")
    listed = f"{tokens} and {counted(len(revoked.peer_ids), 'peer')} revoked in {run}"
    later = "" if peers else f"; peers that start with {key} have it"
    click.echo(f"{listed} (list {revoked.number}){later}")
    return 0


def seconds_of(duration: str) -> int:
    """Convert `7d`, `12h`, `30m` or `2w` to seconds; `ConfigError` else or over ten years."""
    match = re.fullmatch(r"(\d{1,6})([mhdw])", duration)
    seconds = 0 if match is None else int(match[1]) * UNITS_S[match[2]]
    if not 0 < seconds <= LONGEST_S:
        example = "expected one such as 30m, 12h, 7d or 2w"
        raise ConfigError(f"--expires={duration} is no duration; {example}")
    return seconds


def _token_id(text: str) -> str | None:
    """Return the id of a token that is given as id, as token or as link; None for a peer id."""
    from diloco.admission import Token
    from diloco.config.explain import show

    if re.fullmatch(r"[0-9a-f]{16}", text):
        return text
    if re.fullmatch(r"[1-9A-HJ-NP-Za-km-z]{40,60}", text):
        return None
    try:
        return Token.read(text.rpartition("?token=")[2]).grant.token_id
    except ConfigError:
        token_id = "a token id (16 hexadecimal digits, as diloco invite prints it)"
        raise ConfigError(f"{show(text)} is neither {token_id} nor a peer id") from None
