"""Whom a peer calls that comes back to a run. The others may have gone on; the peer at which it joined may be gone."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from diloco.config import SwarmConfig
from diloco.config.manifest import hash_of
from diloco.errors import SwarmError
from diloco.swarm.visit.look import look
from diloco.swarm.wire.gate import watching

__all__ = ["seeds_again"]


def seeds_again(
    network: SwarmConfig, known: Sequence[str], identity: Path, run_id: str, manifest_hash: str
) -> tuple[str, ...]:
    """Addresses to join at, of which `known` are those of peers that were there when the checkpoint was written.

    Whoever was given addresses calls the known peers, too. Whoever founded the run was given none: it calls the known
    peers first, and joins at those that answer. If nobody does, or they train another run by now, it goes on alone.
    """
    if network.initial_peers or not known:
        return tuple(dict.fromkeys((*network.initial_peers, *known)))
    gate = watching(run_id, network.token, network.key_path)
    try:
        with ThreadPoolExecutor(1) as thread:  # a notebook has an event loop in this one
            found = thread.submit(look, known, identity, gate=gate).result()
    except SwarmError:
        return ()
    same = hash_of(found.manifest_text) == manifest_hash
    return tuple(found.addresses) if same else ()
