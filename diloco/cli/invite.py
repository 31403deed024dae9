"""How others join: the command that they copy, and from where it works."""

from __future__ import annotations

from collections.abc import Sequence

from diloco.config.address import scope

__all__ = ["invitation"]

_FROM = {
    "loopback": "on this machine only; swarm=network lets others in",
    "LAN": "in this network; for elsewhere forward the port and set swarm.announce=[/ip4/PUBLIC_IP/tcp/PORT]",
    "public": "from anywhere",
}


def invitation(addresses: Sequence[str], command: str = "diloco join") -> list[str]:
    """Lines to print for a swarm that has begun: the best address as a whole command, then the others by interface.

    `command` is `diloco invite ...` for a closed run: its owner makes a link for each volunteer.
    """
    if not addresses:
        return ["nobody can join through this peer, which listens nowhere"]
    best, *others = addresses
    what = "others join with this" if command == "diloco join" else "this makes a link by which one volunteer joins"
    lines = [f"{what} ({scope(best)}: {_FROM[scope(best)]}):", f"{command} {best}"]
    return lines + [f"or, {scope(other)}: {command} {other}" for other in others[:4]]
