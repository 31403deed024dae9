"""Gives a newer list of what is revoked to some peers of a swarm, as its owner. They tell all others and the DHT."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from diloco.admission import Revoked, RunKey
from diloco.errors import SwarmError
from diloco.swarm.wire.gate import Gate
from diloco.swarm.wire.libp2p import Libp2p

__all__ = ["revoke"]


async def revoke(initial_peers: Sequence[str], gate: Gate, key: RunKey, revoked: Revoked) -> Revoked:
    """Give a list to the swarm; returns the list that peers have taken, with what the swarm's own list had before.

    The gate is that of a visitor that has the owner's key. Raises `SwarmError` when nobody answers there, or nobody
    takes the list.
    """
    assert gate.admission is not None
    visitor = await Libp2p.visit(initial_peers, gate)  # the greeting brings the swarm's list
    try:
        there = gate.admission.revoked
        newest = revoked
        covered = {*there.token_ids} <= {*revoked.token_ids} and {*there.peer_ids} <= {*revoked.peer_ids}
        if there.number >= revoked.number or not covered:
            newest = revoked.extended(key, gate.admission.run_id, there.token_ids, there.peer_ids, there.number)
        gate.admission.revoke(newest)
        tell = (visitor.greet(seed) for seed in visitor.seeds)
        answers = await asyncio.gather(*tell, return_exceptions=True)
        if all(isinstance(answer, Exception) for answer in answers):
            raise SwarmError(f"nobody there took the list: {answers[0]}; try another address of the swarm")
        return newest
    finally:
        await visitor.close()
