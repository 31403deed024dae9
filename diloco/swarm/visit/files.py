"""Fetches the small files that a manifest names by digests, before this peer joins the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from diloco.atomic import replace_file
from diloco.errors import ConfigError, PayloadError, SwarmError
from diloco.swarm.conversations.files import request_file
from diloco.swarm.wire.gate import Gate
from diloco.swarm.wire.libp2p import Libp2p
from diloco.swarm.wire.streams import BROKEN

__all__ = ["Wanted", "fetch_files"]

Wanted = Mapping[str, tuple[Path, int]]
"""By digest: where the file goes, and how many bytes it has at most."""


async def fetch_files(
    initial_peers: Sequence[str], wanted: Wanted, most_bytes: int, identity_path: Path | None, gate: Gate | None
) -> None:
    """Fetch files from the peers at these addresses, `most_bytes` in all. A file appears whole or not at all.

    Raises `SwarmError`: nobody answers there, or no peer has one of the files; `ConfigError`: no space or permission.
    """
    visitor = await Libp2p.visit(initial_peers, gate, identity_path)
    try:
        for digest, (place, limit) in wanted.items():
            content = await _from_any(visitor, digest, min(limit, most_bytes), place.name)
            most_bytes -= len(content)
            _write(place, content)
    finally:
        await visitor.close()


def _write(place: Path, content: bytes) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        replace_file(place, content)
    except OSError as error:
        raise ConfigError(f"run.dir: {place} cannot be written ({error.strerror}); choose another") from error


async def _from_any(visitor: Libp2p, digest: str, most_bytes: int, name: str) -> bytes:
    refusals = []
    for peer in visitor.seeds:
        try:
            return await request_file(visitor, peer, digest, most_bytes)
        except (*BROKEN, PayloadError) as error:
            refusals.append(str(error) or type(error).__name__)
    raise SwarmError(
        f"no peer there gives {name}, which the run needs ({refusals[-1]}); try another address of the run"
    )
