"""What outsiders ask a node for: the run's manifest, and in pieces a snapshot of what the node knows of the swarm."""

from __future__ import annotations

from collections.abc import Sequence

from diloco.config import WIRE_VERSION
from diloco.errors import PayloadError
from diloco.protocol.messages import expect
from diloco.protocol.messages.watching import (
    FileReply,
    ManifestReply,
    ManifestRequest,
    SnapshotReply,
    SnapshotRequest,
)
from diloco.protocol.snapshot import MAX_PACKED_BYTES, Snapshot, unpack
from diloco.swarm.wire.streams import Stream, Traffic, open_bulk
from diloco.swarm.wire.transport import Transport

__all__ = ["receive_pieces", "request_manifest", "request_snapshot", "send_snapshot"]


async def request_manifest(transport: Transport, peer: str) -> ManifestReply:
    """The manifest of a peer's run as untrusted JSON text, and its seal; `PayloadError` when the peer refuses."""
    async with open_bulk(transport, peer, Traffic()) as stream:
        await stream.send(ManifestRequest())
        return expect(await stream.receive(), ManifestReply)


async def request_snapshot(transport: Transport, peer: str) -> Snapshot:
    """What a peer knows of the swarm; `PayloadError` when it refuses, or answers nonsense or in another version."""
    async with open_bulk(transport, peer, Traffic()) as stream:
        await stream.send(SnapshotRequest())
        too_long = f"a snapshot of more than {MAX_PACKED_BYTES} bytes"
        return unpack(await receive_pieces(stream, SnapshotReply, MAX_PACKED_BYTES, too_long))


async def receive_pieces(
    stream: Stream, kind: type[SnapshotReply] | type[FileReply], most_bytes: int, too_long: str
) -> bytes:
    """The data of all replies up to the one after which no more come; `PayloadError(too_long)` above so many bytes."""
    content = bytearray()
    while True:
        reply = expect(await stream.receive(), kind)
        content += reply.data
        if len(content) > most_bytes:
            raise PayloadError(too_long)
        if not reply.more:
            return bytes(content)


async def send_snapshot(stream: Stream, pieces: Sequence[bytes]) -> None:
    """Send the pieces of a snapshot (see `Recorder.packed`)."""
    for index, piece in enumerate(pieces):
        await stream.send(SnapshotReply(wire_version=WIRE_VERSION, data=piece, more=index + 1 < len(pieces)))
