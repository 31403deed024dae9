"""`diloco keygen`, `invite`, `revoke`: the owner of a closed run decides which peers may take
part."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from diloco.cli.options import PATH, Function
from diloco.errors import ConfigError, SwarmError
from diloco.text import counted

if TYPE_CHECKING:
    from diloco.admission import Role

UNITS_S = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
LONGEST_S = 10 * 366 * 86400


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
    click.echo(
        f"{file}: keep it; whoever has it can invite and revoke. It starts a closed run with"
        f" swarm.key_path={file}",
        err=True,
    )
    return 0


def _owner(function: Function) -> Function:
    """Adds what every command of a run's owner has."""
    key = click.option("--key", required=True, type=PATH, help="File with the run's private key.")
    return click.option("--run", required=True, metavar="RUN_ID", help="run.id of the run.")(
        key(function)
    )


@click.command()
@_owner
@click.option("--expires", default="7d", metavar="TIME", help="30m, 12h, 7d, 2w.")
@click.option(
    "--role",
    type=click.Choice(["worker", "host", "observer"]),
    default="worker",
    help="worker: all; host: makes versions, contributes nothing; observer: looks on.",
)
@click.option(
    "--bind", metavar="PEER_ID", help="Only this peer can use it.  [default: the first that does]"
)
@click.option(
    "--out", type=PATH, metavar="FILE", help="Write it to this new file, which only you can read."
)
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
    text = token.to_text()
    link = text if address is None else str(Address(Address.read(address).resolved().peers, text))
    if out is None:
        click.echo(link)
    else:
        write_private(out, f"{link}\n".encode(), f"--out={out}")
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(expires_at))
    whom = "the first peer that uses it" if role != "observer" else "whoever has it"
    click.echo(
        f"token {token.grant.token_id}: {role} of {run} until {until}, for {bind or whom}", err=True
    )
    joins = "diloco join ADDRESS swarm.token=" if address is None else "diloco join "
    file = "FILE" if out is None else str(out)
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

    address = what[0] if len(what) > 1 and what[0].startswith(("/", "@", "diloco:", "-")) else None
    what = what if address is None else what[1:]
    owner = RunKey.read(key, "--key")
    peers = () if address is None else Address.read(address).peers
    token_ids = {found for one in what if (found := _token_id(one)) is not None}
    peer_ids = {one for one in what if _token_id(one) is None}
    revoked = Revoked.remembered(owner, key, run).extended(owner, run, token_ids, peer_ids)
    revoked.remember(key, run)  # before anybody is called
    if peers:
        import asyncio

        from diloco.swarm.client.ask import revoke as spread
        from diloco.swarm.wire.gate import observer_gate

        try:
            revoked = asyncio.run(spread(peers, observer_gate(run, None, str(key)), owner, revoked))
        except SwarmError as error:
            raise SwarmError(
                f"{error}; list {revoked.number} is kept beside {key}, and peers that start with"
                " that key have it"
            ) from None
        revoked.remember(key, run)
    listed = (
        f"{counted(len(revoked.token_ids), 'token')} and {counted(len(revoked.peer_ids), 'peer')}"
        f" revoked in {run}"
    )
    click.echo(
        f"{listed} (list {revoked.number})"
        + ("" if peers else f"; peers that start with {key} have it")
    )
    return 0


def seconds_of(duration: str) -> int:
    """`7d`, `12h`, `30m` or `2w` in seconds; `ConfigError` for anything else, or for more than ten
    years."""
    match = re.fullmatch(r"(\d{1,6})([mhdw])", duration)
    seconds = 0 if match is None else int(match[1]) * UNITS_S[match[2]]
    if not 0 < seconds <= LONGEST_S:
        raise ConfigError(
            f"--expires={duration} is no duration; expected one such as 30m, 12h, 7d or 2w"
        )
    return seconds


def _token_id(what: str) -> str | None:
    """The id of a token that is given as id, as token or as link; None for a peer id."""
    from diloco.admission import Token
    from diloco.config.explain import show

    if re.fullmatch(r"[0-9a-f]{16}", what):
        return what
    if re.fullmatch(r"[1-9A-HJ-NP-Za-km-z]{40,60}", what):
        return None
    try:
        return Token.read(what.rpartition("?token=")[2]).grant.token_id
    except ConfigError:
        raise ConfigError(
            f"{show(what)} is neither a token id (16 hexadecimal digits, as diloco invite prints"
            " it) nor a peer id"
        ) from None
