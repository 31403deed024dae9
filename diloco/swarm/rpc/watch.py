"""Ask: the manifest, a snapshot of the swarm, or a small file that the manifest names by its
SHA-256, in pieces."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.config import WIRE_VERSION
from diloco.core.limits import FILE_BYTES, FILE_BYTES_IN_ALL, FILE_BYTES_S, Allowance
from diloco.errors import PayloadError
from diloco.messages.codec import expect
from diloco.messages.snapshot import MAX_PACKED_BYTES, Snapshot, unpack
from diloco.messages.watching import MAX_PIECE_BYTES, Ask, Piece
from diloco.swarm.wire.streams import Stream, Traffic, open_bulk
from diloco.swarm.wire.tasks import in_thread
from diloco.swarm.wire.transport import Transport

if TYPE_CHECKING:  # a process that only watches does not load torch
    from diloco.swarm.context import Context


async def request_manifest(transport: Transport, peer: str) -> tuple[str, str]:
    """The manifest of a peer's run as untrusted JSON text, and its seal; `PayloadError` when the
    peer refuses."""
    content, seal = await _request(transport, peer, "manifest", MAX_PIECE_BYTES)
    return content.decode(errors="replace"), seal


async def request_snapshot(transport: Transport, peer: str) -> Snapshot:
    """What a peer knows of the swarm; `PayloadError` when it refuses, or answers nonsense or in
    another version."""
    return unpack((await _request(transport, peer, "snapshot", MAX_PACKED_BYTES))[0])


async def request_file(transport: Transport, peer: str, digest: str, most_bytes: int) -> bytes:
    """A file of the run; `PayloadError` when the peer does not have it, or sends another or a
    longer one."""
    content = (await _request(transport, peer, digest, most_bytes))[0]
    if sha256(content).hexdigest() != digest:
        raise PayloadError(f"file {digest[:12]} is another one than the manifest names")
    return content


async def _request(
    transport: Transport, peer: str, what: str, most_bytes: int
) -> tuple[bytes, str]:
    content = bytearray()
    async with open_bulk(transport, peer, Traffic()) as stream:
        await stream.send(Ask(what))
        while True:
            piece = expect(await stream.receive(), Piece)
            content += piece.data
            if len(content) > most_bytes:
                raise PayloadError(f"{what[:12]} has more than {most_bytes} bytes")
            if not piece.more:
                return bytes(content), piece.seal


class InfoServer:
    """The answering side. `snapshot` makes the pieces of one at a time; `files` are those that the
    manifest names."""

    def __init__(
        self,
        context: Context,
        manifest: str,
        files: Mapping[str, Path],
        snapshot: Callable[[float], list[bytes]],
    ) -> None:
        self._context, self._manifest, self._files, self._snapshot = (
            context,
            manifest,
            files,
            snapshot,
        )
        self._allowance = Allowance(FILE_BYTES, FILE_BYTES_IN_ALL, FILE_BYTES_S)

    async def answer(self, stream: Stream, request: Ask) -> None:
        """Send what is asked for; `PayloadError` when it is not here, or enough was sent."""
        if request.what in ("manifest", "snapshot"):
            snapshot = request.what == "snapshot"
            for piece in (
                self._snapshot(self._context.now()) if snapshot else [self._manifest.encode()]
            ):
                await stream.send(Piece(WIRE_VERSION, piece, more=True))
        else:
            await self._send_file(stream, request.what)
        await stream.send(Piece(WIRE_VERSION, b"", seal=self._context.gate.memory.seal))

    async def _send_file(self, stream: Stream, digest: str) -> None:
        try:
            file = self._files[digest].open("rb")
        except (KeyError, OSError) as error:
            raise PayloadError("no file with that digest is here; ask another peer") from error
        with file:
            nbytes = os.fstat(file.fileno()).st_size
            if not self._allowance.take(stream.peer, nbytes, self._context.now()):
                raise PayloadError("enough files were sent for a while; ask another peer")
            for _ in range(0, nbytes, MAX_PIECE_BYTES):
                piece = await in_thread(file.read, MAX_PIECE_BYTES)
                await self._context.traffic.throttle(len(piece))
                await stream.send(Piece(WIRE_VERSION, piece, more=True))
