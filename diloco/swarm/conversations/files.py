"""Small files of a run, which its manifest names by their SHA-256: the tokenizer's, and tensors that are not trained.

The asker knows the digest from the manifest, so it does not matter which peer answers. It takes no more bytes than it
expects, and believes none before the digest fits.
"""

from __future__ import annotations

from hashlib import sha256

from diloco.errors import PayloadError
from diloco.protocol.messages import expect
from diloco.protocol.messages.watching import MAX_FILE_PIECE_BYTES, FileReply, FileRequest
from diloco.swarm.conversations.context import Context
from diloco.swarm.conversations.tasks import in_thread
from diloco.swarm.wire.streams import Stream, Traffic, open_bulk
from diloco.swarm.wire.transport import Transport

__all__ = ["request_file", "send_file"]


async def request_file(transport: Transport, peer: str, digest: str, most_bytes: int) -> bytes:
    """A file of the run; `PayloadError` when the peer does not have it, or sends another or a longer one."""
    content = bytearray()
    async with open_bulk(transport, peer, Traffic()) as stream:
        await stream.send(FileRequest(digest=digest))
        while True:
            reply = expect(await stream.receive(), FileReply)
            content += reply.data
            if len(content) > most_bytes:
                raise PayloadError(f"file {digest[:12]} has more than {most_bytes} bytes")
            if not reply.more:
                break
    if sha256(content).hexdigest() != digest:
        raise PayloadError(f"file {digest[:12]} is another one than the manifest names")
    return bytes(content)


async def send_file(context: Context, stream: Stream, request: FileRequest) -> None:
    """Answer a request with the file, in pieces; `PayloadError` when it is none of the run's, or not here."""
    place = context.files.get(request.digest)
    if place is None:
        raise PayloadError("no file of this run has that digest")
    try:
        content = await in_thread(place.read_bytes)
    except OSError as error:
        raise PayloadError("that file is not here; ask another peer") from error
    for start in range(0, max(len(content), 1), MAX_FILE_PIECE_BYTES):
        stop = start + MAX_FILE_PIECE_BYTES
        await context.traffic.throttle(min(stop, len(content)) - start)
        await stream.send(FileReply(data=content[start:stop], more=stop < len(content)))
