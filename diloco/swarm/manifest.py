"""Asks a swarm what its run is, before taking part in it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.utils.multiaddr import Multiaddr

from diloco.errors import PayloadError, SwarmError
from diloco.swarm.bulk import request_manifest
from diloco.swarm.control import UNREACHABLE
from diloco.swarm.daemon import START_TIMEOUT_S, peer_id_of, read_addresses, sheltered

__all__ = ["fetch_manifest"]

ADDRESS_WAIT_S = 10.0


def fetch_manifest(initial_peers: Sequence[str]) -> str:
    """The manifest of the run at these addresses, as untrusted JSON text; the first peer that answers is taken.

    Listens nowhere and leaves no trace in the DHT.

    Raises:
        SwarmError: nobody there, or nobody that is a peer of a run.
        ConfigError: an entry is no address.
    """
    return asyncio.run(_fetch(initial_peers))


async def _fetch(initial_peers: Sequence[str]) -> str:
    addresses = await read_addresses(initial_peers, ADDRESS_WAIT_S)
    try:
        with sheltered():
            p2p = await P2P.create(
                initial_peers=[Multiaddr(address) for address in addresses],
                dht_mode="client",
                no_listen=True,
                startup_timeout=START_TIMEOUT_S,
            )
    except (P2PDaemonError, OSError, ValueError) as error:
        raise SwarmError(
            f"{','.join(addresses)} cannot be reached; check that a peer is running there and that its port is open"
        ) from error
    try:
        for address in addresses:
            try:
                return await request_manifest(p2p, peer_id_of(address))
            except (*UNREACHABLE, PayloadError):
                continue
    finally:
        await p2p.shutdown()
    raise SwarmError(f"{','.join(addresses)} answers, but is no diloco peer; check the address")
