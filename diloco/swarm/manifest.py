"""Asks a swarm what its run is, before taking part in it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from diloco.errors import PayloadError, SwarmError
from diloco.swarm.bulk import request_manifest
from diloco.swarm.daemon import Libp2p
from diloco.swarm.gate import Gate
from diloco.swarm.streams import BROKEN

__all__ = ["fetch_manifest"]


def fetch_manifest(initial_peers: Sequence[str], gate: Gate | None = None) -> str:
    """The manifest of the run at these addresses, as untrusted JSON text; the first peer that answers is taken.

    With the gate that `watching` makes of an invitation, only a peer of that run is believed.

    Listens nowhere and leaves no trace in the DHT.

    Raises:
        SwarmError: nobody there, nobody that is a peer of a run, or this peer is not admitted.
        ConfigError: an entry is no address.
    """
    return asyncio.run(_fetch(initial_peers, gate or Gate()))


async def _fetch(initial_peers: Sequence[str], gate: Gate) -> str:
    visitor = await Libp2p.visit(initial_peers, gate)
    try:
        for peer in visitor.seeds:
            try:
                return await request_manifest(visitor, peer)
            except (*BROKEN, PayloadError):
                continue
    finally:
        await visitor.close()
    raise SwarmError(f"{','.join(initial_peers)} answers, but is no diloco peer; check the address")
