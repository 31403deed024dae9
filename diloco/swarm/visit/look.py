"""Asks a swarm what it is, before joining it. Nothing large is fetched.

1. All addresses are called at once. The peers that answer name others, which are called by their ids.
2. Each of a few peers says its clock, its wire version and its addresses; on demand the link to it is measured.
3. One of them sends the manifest; in a closed run its owner has signed it.
"""

from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from diloco.config import WIRE_VERSION, Manifest
from diloco.config.manifest import check_foreign, hash_of
from diloco.errors import PayloadError, SwarmError
from diloco.swarm.conversations.probe import Probed, probe
from diloco.swarm.conversations.watch import request_manifest
from diloco.swarm.wire.deadline import within
from diloco.swarm.wire.gate import Gate
from diloco.swarm.wire.libp2p import Libp2p
from diloco.swarm.wire.streams import BROKEN

__all__ = ["CLOCK_LIMIT_S", "Found", "check_clock", "look", "parse_manifest"]

CLOCK_LIMIT_S = 3.0  # hivemind's DHT refuses peers whose clocks differ by more
PEERS_ASKED = 4
UNSEALED = (
    "no peer there shows the settings of the run with the signature of its owner; the owner has to start a peer with "
    "swarm.key_path"
)
PATIENCE_S = 15.0  # for each of the peers that are asked at once


@dataclass(frozen=True)
class Found:
    """What a swarm said about itself."""

    manifest_text: str
    peers: list[Probed]  # that answered; those at the given addresses come first
    silent: dict[str, str] = field(default_factory=dict)  # addresses without an answer, and why

    @property
    def addresses(self) -> list[str]:
        """The best address of every peer that answered."""
        return [peer.reply.addresses[0] for peer in self.peers if peer.reply.addresses]

    @property
    def ahead_s(self) -> float | None:
        """By how much this machine's clock is ahead of the swarm's: the median over the peers."""
        return statistics.median(peer.ahead_s for peer in self.peers) if self.peers else None


def look(
    initial_peers: Sequence[str],
    identity_path: Path | None = None,
    measure_bytes: int = 0,
    on_connected: Callable[[int, dict[str, str]], None] = lambda answered, silent: None,
    gate: Gate | None = None,
) -> Found:
    """What the swarm at these addresses is. With `measure_bytes`, links to some peers are measured with so many.

    Args:
        identity_path: this peer's key, for a swarm that admits identities; None makes a new identity.
        on_connected: called with the number of addresses that answered, and what is wrong with the others.
        gate: shows the invitation to a closed run, and believes only peers of that run (`gate.watching`).

    Raises:
        SwarmError: nobody is there, no peer of a run is there, or none admits this peer.
        ConfigError: an entry is not an address.
    """
    return asyncio.run(_look(initial_peers, gate or Gate(), identity_path, measure_bytes, on_connected))


async def _look(
    initial_peers: Sequence[str],
    gate: Gate,
    identity_path: Path | None,
    measure_bytes: int,
    on_connected: Callable[[int, dict[str, str]], None],
) -> Found:
    visitor = await Libp2p.visit(initial_peers, gate, identity_path)
    on_connected(len(visitor.seeds), visitor.silent)
    refusals: list[str] = []
    try:
        peers = await _probe_all(visitor, visitor.seeds, 0, refusals)
        known = {peer.peer for peer in peers}
        more = [one for peer in peers for one in peer.reply.known if one not in known and one != visitor.me]
        if len(peers) < PEERS_ASKED:
            peers += await _probe_all(visitor, list(dict.fromkeys(more))[: PEERS_ASKED - len(peers)], 0, [])
        for peer in [one.peer for one in peers] or visitor.seeds:
            try:
                reply = await request_manifest(visitor, peer)
                if not gate.sealed(hash_of(reply.text), reply.seal):
                    raise PayloadError(UNSEALED)
            except (*BROKEN, PayloadError) as error:
                refusals.append(str(error))
                continue
            measured: list[Probed] = []
            for one in peers:  # after each other, so that they do not share this machine's link
                again = await _probe_all(visitor, [one.peer], measure_bytes, []) if measure_bytes else []
                measured += again or [one]
            return Found(reply.text, measured, visitor.silent)
    finally:
        await visitor.close()
    if UNSEALED in refusals:
        raise SwarmError(UNSEALED)
    refused = next((text.removeprefix("refused: ") for text in refusals if text.startswith("refused: ")), None)
    if refused is not None:
        raise SwarmError(f"the swarm refused this peer: {refused}")
    raise SwarmError(f"{','.join(initial_peers)} answers, but is no diloco peer; check the address")


async def _probe_all(visitor: Libp2p, peers: Sequence[str], nbytes: int, refusals: list[str]) -> list[Probed]:
    """Probes of the peers that answer, in their order."""

    async def one(peer: str) -> Probed | None:
        try:
            return await within(PATIENCE_S, probe(visitor, peer, nbytes))
        except (*BROKEN, PayloadError) as error:
            refusals.append(str(error))
            return None

    found = await asyncio.gather(*(one(peer) for peer in peers))
    return [probed for probed in found if probed is not None]


def parse_manifest(text: str) -> Manifest:
    """The manifest of a swarm that this machine may join or host.

    Raises `ConfigError` when it is not valid or asks for files of this machine (see `check_foreign`), and `SwarmError`
    when it is of another wire version.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None  # the parser of manifests explains it
    there = content.get("wire_version") if isinstance(content, dict) else None
    if isinstance(there, int) and there != WIRE_VERSION:
        older, where = ("older", "there") if there < WIRE_VERSION else ("newer", "here")
        raise SwarmError(
            f"the swarm speaks wire version {there}, which is {older} than this diloco's {WIRE_VERSION}; "
            f"install the newer diloco {where}"
        )
    manifest = Manifest.from_json(text)
    check_foreign(manifest)
    return manifest


def check_clock(found: Found) -> str | None:
    """One line when this clock is off by more than a second; `SwarmError` when the DHT would not take this peer."""
    ahead_s = found.ahead_s
    if ahead_s is None or abs(ahead_s) <= 1.0:
        return None
    side = "ahead of" if ahead_s > 0 else "behind"
    text = f"this machine's clock is {abs(ahead_s):.1f} s {side} the swarm's (median of {len(found.peers)})"
    if abs(ahead_s) > CLOCK_LIMIT_S:
        raise SwarmError(
            f"{text}, and {CLOCK_LIMIT_S:.0f} s is the limit; set it, for example by timedatectl set-ntp true"
        )
    return text
