"""Listens for a moment, to find out whether others could connect to this peer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco.config import SwarmConfig
from diloco.swarm.conversations.probe import ask_to_be_called
from diloco.swarm.wire.gate import Gate
from diloco.swarm.wire.libp2p import Libp2p

__all__ = ["Rehearsal", "try_to_listen"]


@dataclass(frozen=True)
class Rehearsal:
    """How a peer that listens with these settings would be reached. `advice` says what would help if it would not."""

    addresses: list[str]
    reachable: bool
    advice: str


def try_to_listen(
    seeds: Sequence[str], listen: Sequence[str], announce: Sequence[str], gate: Gate, identity_path: Path
) -> Rehearsal:
    """Listen for a moment, and have a peer at `seeds` call back. Raises as `Libp2p.connect`."""
    network = SwarmConfig().model_copy(
        update={"initial_peers": tuple(seeds), "listen": tuple(listen), "announce": tuple(announce), "reachable": "yes"}
    )

    async def listen_and_ask() -> Rehearsal:
        peer = await Libp2p.connect(network, identity_path, gate)
        try:
            reachable, advice = (await ask_to_be_called(peer)) if seeds else (peer.reachable, "")
            return Rehearsal(peer.addresses, reachable, advice)
        finally:
            await peer.close()

    return asyncio.run(listen_and_ask())
