"""A peer that comes back to a run, in the same process or another: whom it calls, and where it listens.

What it knew is in a file beside its key. The others may have gone on; the peer at which it joined may be gone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from diloco.config import SwarmConfig
from diloco.config.address import problem
from diloco.config.manifest import hash_of
from diloco.errors import SwarmError
from diloco.swarm.client.ask import inspect_swarm
from diloco.swarm.wire.gate import observer_gate
from diloco.swarm.wire.libp2p import check_free

__all__ = ["Known", "known_by", "ports_again", "remember", "seeds_again"]

NAMED = 16  # addresses of other peers that are remembered


class Known(NamedTuple):
    """Addresses of this peer itself, and of others in its run."""

    own: Sequence[str] = ()
    others: Sequence[str] = ()


def known_by(identity: Path, run: str) -> Known:
    """What the peer with this key knew when it was in that run last."""
    try:
        found = json.loads(_file(identity).read_text())
        own, others = ([one for one in found[key] if problem(one) is None] for key in Known._fields)
        return Known(own, others) if found["run"] == run else Known()
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or half of one
        return Known()


def remember(identity: Path, run: str, own: Sequence[str], others: Sequence[str]) -> None:
    """Keep that for the next time; those that were known before, too."""
    others = list(dict.fromkeys((*others, *known_by(identity, run).others)))[:NAMED]
    with suppress(OSError):  # no run ends for it
        _file(identity).write_text(json.dumps({"run": run, "own": list(own), "others": others}))


def _file(identity: Path) -> Path:
    return identity.with_name(f"{identity.name}.peers")


def ports_again(listen: Sequence[str], own: Sequence[str]) -> tuple[str, ...]:
    """The multiaddrs to listen on, with the ports of last time where any would do and these are free."""
    return tuple(next(filter(_is_free, _with_ports(one, own)), one) for one in listen)


def _with_ports(listen: str, own: Sequence[str]) -> list[str]:
    parts = listen.split("/")
    if len(parts) < 5 or parts[4] != "0":
        return []
    ports = [one.split("/")[4] for one in own if one.split("/")[3:4] == parts[3:4]]
    return ["/".join([*parts[:4], port, *parts[5:]]) for port in ports]


def _is_free(listen: str) -> bool:
    try:
        check_free([listen])
    except SwarmError:
        return False
    return True


def seeds_again(
    network: SwarmConfig, known: Sequence[str], identity: Path, run_id: str, manifest_hash: str
) -> tuple[str, ...]:
    """Addresses to join at, of which `known` are those of peers that were there last time.

    Whoever was given addresses calls the known peers, too. Whoever founded the run was given none: it calls the known
    peers first, and joins at those that answer. If nobody does, or they train another run by now, it goes on alone.
    """
    if network.initial_peers or not known:
        return tuple(dict.fromkeys((*network.initial_peers, *known)))
    gate = observer_gate(run_id, network.token, network.key_path)
    try:
        with ThreadPoolExecutor(1) as thread:  # a notebook has an event loop in this one
            found = thread.submit(inspect_swarm, known, identity, gate=gate).result()
    except SwarmError:
        return ()
    return tuple(found.addresses) if hash_of(found.manifest_text) == manifest_hash else ()
