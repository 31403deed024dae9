"""`diloco keygen`, `invite`, `revoke`: the owner of a closed run decides which peers may take part."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from pathlib import Path

import click

from diloco.admission import Revoked, Role, RunKey, Token, issue
from diloco.admission.keys import write_private
from diloco.config.address import Address
from diloco.config.explain import show
from diloco.errors import ConfigError, SwarmError
from diloco.text import counted

__all__ = ["invite", "keygen", "revoke"]

UNITS_S = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
LONGEST_S = 10 * 366 * 86400


def keygen(file: Path) -> int:
    """Make a run key, and print its public half on stdout."""
    key = RunKey.create(file)
    click.echo(key.public.hex())
    click.echo(
        f"{file}: keep it; whoever has it can invite and revoke. It starts a closed run with swarm.key_path={file}",
        err=True,
    )
    return 0


def invite(
    key: Path, run: str, expires: str, role: Role, bind: str | None, address: str | None, out: Path | None
) -> int:
    """Prints a token on stdout, or writes it to `out`, or with an address the whole link; on stderr its id, role and
    end. Raises ConfigError if `out` is there or cannot be written.
    """
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
    click.echo(f"token {token.grant.token_id}: {role} of {run} until {until}, for {bind or whom}", err=True)
    joins = "diloco join ADDRESS swarm.token=" if address is None else "diloco join "
    file = "FILE" if out is None else str(out)
    typed = f"{joins}@{file} (chmod 600 {file}), or {joins}- and paste it"
    click.echo(f"it is a secret, and other users see what is typed: {typed}", err=True)
    return 0


def revoke(key: Path, run: str, address: str | None, what: Sequence[str]) -> int:
    """Revokes token ids, peer ids, tokens and links; returns when a peer has taken the list.

    The list is beside the key before anybody is called. Without an address nobody is: the owner's next peer has it.
    Raises SwarmError if nobody answers there.
    """
    owner = RunKey.read(key, "--key")
    peers = () if address is None else Address.read(address).peers
    token_ids = {found for one in what if (found := _token_id(one)) is not None}
    peer_ids = {one for one in what if _token_id(one) is None}
    before = Revoked.remembered(owner, key, run)
    revoked = before.extended(owner, run, token_ids, peer_ids)
    revoked.remember(key, run)
    if peers:
        from diloco.swarm.client.ask import revoke as spread
        from diloco.swarm.wire.gate import observer_gate  # here, because it takes seconds

        try:
            revoked = asyncio.run(spread(peers, observer_gate(run, None, str(key)), owner, revoked))
        except SwarmError as error:
            raise SwarmError(
                f"{error}; list {revoked.number} is kept beside {key}, and peers that start with that key have it"
            ) from None
        revoked.remember(key, run)
    listed = f"{counted(len(revoked.token_ids), 'token')} and {counted(len(revoked.peer_ids), 'peer')} revoked in {run}"
    click.echo(f"{listed} (list {revoked.number})" + ("" if peers else f"; peers that start with {key} have it"))
    return 0


def seconds_of(duration: str) -> int:
    """`7d`, `12h`, `30m` or `2w` in seconds; `ConfigError` for anything else, or for more than ten years."""
    match = re.fullmatch(r"(\d{1,6})([mhdw])", duration)
    seconds = 0 if match is None else int(match[1]) * UNITS_S[match[2]]
    if not 0 < seconds <= LONGEST_S:
        raise ConfigError(f"--expires={duration} is no duration; expected one such as 30m, 12h, 7d or 2w")
    return seconds


def _token_id(what: str) -> str | None:
    """The id of a token that is given as id, as token or as link; None for a peer id."""
    if re.fullmatch(r"[0-9a-f]{16}", what):
        return what
    if re.fullmatch(r"[1-9A-HJ-NP-Za-km-z]{40,60}", what):
        return None
    try:
        return Token.read(what.rpartition("?token=")[2]).grant.token_id
    except ConfigError:
        raise ConfigError(
            f"{show(what)} is neither a token id (16 hexadecimal digits, as diloco invite prints it) nor a peer id"
        ) from None
