"""Small files of a run, which its manifest names by their SHA-256: the tokenizer's, and tensors that are not trained.

The asker knows the digest from the manifest, so it does not matter which peer answers. It takes no more bytes than it
expects, and believes none before the digest fits.
"""

from __future__ import annotations

import os
from hashlib import sha256

from diloco.errors import PayloadError
from diloco.protocol.limits import FILE_BYTES, FILE_BYTES_IN_ALL, FILE_BYTES_S, Bucket, Buckets
from diloco.protocol.messages.watching import MAX_FILE_PIECE_BYTES, FileReply, FileRequest
from diloco.swarm.conversations.context import Context
from diloco.swarm.conversations.tasks import in_thread
from diloco.swarm.conversations.watch import receive_pieces
from diloco.swarm.wire.streams import Stream, Traffic, open_bulk
from diloco.swarm.wire.transport import Transport

__all__ = ["FileDonor", "request_file"]


async def request_file(transport: Transport, peer: str, digest: str, most_bytes: int) -> bytes:
    """A file of the run; `PayloadError` when the peer does not have it, or sends another or a longer one."""
    async with open_bulk(transport, peer, Traffic()) as stream:
        await stream.send(FileRequest(digest=digest))
        too_long = f"file {digest[:12]} has more than {most_bytes} bytes"
        content = await receive_pieces(stream, FileReply, most_bytes, too_long)
    if sha256(content).hexdigest() != digest:
        raise PayloadError(f"file {digest[:12]} is another one than the manifest names")
    return content


class FileDonor:
    """The answering side. It gives each asker so many bytes, and all together so many: strangers may ask, too."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._given: Buckets[str] = Buckets(FILE_BYTES / FILE_BYTES_S, FILE_BYTES)
        self._given_in_all = Bucket(FILE_BYTES_IN_ALL / FILE_BYTES_S, FILE_BYTES_IN_ALL)

    async def answer(self, stream: Stream, request: FileRequest) -> None:
        """Send the file in pieces; `PayloadError` when it is none of the run's or not here, or enough was sent."""
        place = self._context.files.get(request.digest)
        if place is None:
            raise PayloadError("no file of this run has that digest")
        try:
            file = place.open("rb")
        except OSError as error:
            raise PayloadError("that file is not here; ask another peer") from error
        with file:
            left, now = os.fstat(file.fileno()).st_size, self._context.now()
            if self._given_in_all.left(now) < left or not self._given.take(stream.peer, now, left):
                raise PayloadError("enough files were sent for a while; ask another peer")
            self._given_in_all.take(now, left)
            more = True
            while more:
                piece = await in_thread(file.read, min(left, MAX_FILE_PIECE_BYTES))
                left -= len(piece)
                more = bool(left and piece)
                await self._context.traffic.throttle(len(piece))
                await stream.send(FileReply(data=piece, more=more))
