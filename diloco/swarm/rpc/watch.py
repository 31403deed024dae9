"""Requests for the manifest, a snapshot of the swarm, or a file by its SHA-256, in pieces."""

from __future__ import annotations

import os
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from diloco.errors import PayloadError
from diloco.messages.base import EVERYBODY, Message, Place
from diloco.messages.codec import expect
from diloco.messages.fields import Count, Seal
from diloco.messages.snapshot import MAX_PACKED_BYTES, MAX_PIECE_BYTES, Snapshot, unpack_snapshot
from diloco.protocol import WIRE_VERSION
from diloco.swarm.limits import FILE_BYTES, FILE_BYTES_IN_ALL, FILE_BYTES_S, Allowance
from diloco.swarm.rpc.registry import answers
from diloco.swarm.wire.streams import PeerStream, Traffic, open_bulk
from diloco.swarm.wire.tasks import in_thread
from diloco.swarm.wire.transport import Transport

if TYPE_CHECKING:  # a process that only watches does not load torch
    from diloco.swarm.context import Context


class InfoRequest(Message, frozen=True, tag="ask"):
    """Request for the manifest, a snapshot of the swarm, or a file or part with that digest."""

    place, roles = Place.REQUEST, EVERYBODY
    what: Annotated[str, Meta(pattern=r"^(manifest|snapshot|[0-9a-f]{64})\Z")]


class Piece(Message, frozen=True, tag="piece"):
    """A piece of JSON, a packed `Snapshot`, or a file; another follows if there is `more`."""

    opens_with_version = True
    wire_version: Count
    data: Annotated[bytes, Meta(max_length=MAX_PIECE_BYTES)]
    more: bool = False
    seal: Seal = ""


# -- asking (`PayloadError`: refused, or invalid; also the errors of a stream) ---------------------


async def request_manifest(transport: Transport, peer: str) -> tuple[str, str]:
    """Fetch the manifest of a peer's run as untrusted JSON text, and its seal."""
    content, seal = await _request(transport, peer, "manifest", MAX_PIECE_BYTES)
    return content.decode(errors="replace"), seal


async def request_snapshot(transport: Transport, peer: str) -> Snapshot:
    """Fetch a peer's snapshot of the swarm."""
    return unpack_snapshot((await _request(transport, peer, "snapshot", MAX_PACKED_BYTES))[0])


async def request_file(transport: Transport, peer: str, digest: str, most_bytes: int) -> bytes:
    """Fetch a file of the run with this digest, and at most so many bytes."""
    content = (await _request(transport, peer, digest, most_bytes))[0]
    if sha256(content).hexdigest() != digest:
        raise PayloadError(f"file {digest[:12]} is another one than the manifest names")
    return content


async def _request(
    transport: Transport, peer: str, what: str, most_bytes: int
) -> tuple[bytes, str]:
    content = bytearray()
    async with open_bulk(transport, peer, Traffic()) as stream:
        await stream.send(InfoRequest(what))
        while True:
            piece = expect(await stream.receive(), Piece)
            content += piece.data
            if len(content) > most_bytes:
                raise PayloadError(f"{what[:12]} has more than {most_bytes} bytes")
            if not piece.more:
                return bytes(content), piece.seal


# -- answering -------------------------------------------------------------------------------------


@answers(InfoRequest)
class InfoServer:
    """Sends manifest, snapshots and files."""

    def __init__(self, context: Context) -> None:
        self._context = context
        base = sum(part.nbytes or 0 for part in context.files.values())
        each, together = FILE_BYTES + 2 * base, FILE_BYTES_IN_ALL + 8 * base
        self._allowance = Allowance(each, together, FILE_BYTES_S)

    async def answer(self, stream: PeerStream, request: InfoRequest) -> None:
        """Send what is requested; `PayloadError` if it is not here, or over a limit."""
        context = self._context
        if request.what == "manifest":
            await stream.send(Piece(WIRE_VERSION, context.manifest.encode(), more=True))
        elif request.what == "snapshot":
            for piece in context.packed_snapshot(context.now()):
                await stream.send(Piece(WIRE_VERSION, piece, more=True))
        else:
            await self._send_file(stream, request.what)
        await stream.send(Piece(WIRE_VERSION, b"", seal=context.gate.memory.seal))

    async def _send_file(self, stream: PeerStream, digest: str) -> None:
        context = self._context
        try:
            path, offset, length = context.files[digest]
            file = path.open("rb")
        except (KeyError, OSError) as error:
            raise PayloadError("no file with that digest is here; ask another peer") from error
        with file:
            nbytes = os.fstat(file.fileno()).st_size if length is None else length
            if not self._allowance.take(stream.peer, nbytes, context.now()):
                raise PayloadError("enough files were sent for a while; ask another peer")
            file.seek(offset)
            for sent in range(0, nbytes, MAX_PIECE_BYTES):
                piece = await in_thread(file.read, min(MAX_PIECE_BYTES, nbytes - sent))
                await context.traffic.throttle(len(piece))
                await stream.send(Piece(WIRE_VERSION, piece, more=True))
