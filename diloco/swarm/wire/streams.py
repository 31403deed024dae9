"""Messages and payload over a libp2p stream. Lengths are checked before anything is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.errors import PayloadError
from diloco.messages.base import MAX_FRAME_BYTES, Message, Refusal
from diloco.messages.codec import decode, encode
from diloco.swarm.wire.sealed import FRAME_BYTES, Sealed
from diloco.swarm.wire.transport import ByteReader, ByteWriter, Transport

if TYPE_CHECKING:  # a process that only watches has no tensors, and does not load torch
    from torch import Tensor

CONTROL = "diloco/1/control"
BULK = "diloco/1/bulk"
OPEN_TIMEOUT_S = 10.0

# errors of reading from or writing to a peer that vanished, or is too slow
BROKEN = (EOFError, OSError)

_LENGTH_BYTES = 4
_DISCARD_BYTES = 1 << 16
# bytes discarded from a refused peer that still sends, so that it reads the reason afterwards
REFUSED_BYTES = 1 << 24
FRAME_TIMEOUT_S = 30.0
FLUSH_BYTES = 1 << 14  # of messages, after which the sender waits for the peer
STALL_FLOOR_S = 20.0
STALL_FACTOR = 20.0
SENDING_FACTOR = 10.0  # a slow link takes bytes late; heartbeats show that it takes some
SLOWEST_BYTES_PER_S = 64.0  # a slower stranger's stream is ended


@dataclass
class Traffic:
    """Bytes that a node has written and read, and its limit on writing payload."""

    bytes_sent: int = 0
    bytes_received: int = 0
    upload_limit: float | None = None  # bytes per second
    _free_at: float = 0.0

    async def throttle(self, nbytes: int) -> None:
        """Wait until the upload limit allows so many bytes more."""
        if self.upload_limit is None:
            return
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + nbytes / self.upload_limit
        await asyncio.sleep(self._free_at - now)


def framed(message: Message) -> bytes:
    """A message as it goes over a stream, after its length."""
    frame = encode(message)
    assert len(frame) <= MAX_FRAME_BYTES, type(message)
    return len(frame).to_bytes(_LENGTH_BYTES, "big") + frame


class PeerStream:
    """A stream to or from one authenticated peer.

    Every read has a deadline: a fixed one for a frame, and for payload one derived from the
    measured speed of this stream. After it `asyncio.TimeoutError` is raised, which is in `BROKEN`
    like any other broken connection.
    """

    def __init__(self, peer: str, reader: ByteReader, writer: ByteWriter, traffic: Traffic) -> None:
        self.peer = peer
        self._reader, self._writer, self._traffic = reader, writer, traffic
        self.received = 0  # messages received
        self.instance = ""  # of the process at the other end, by its own statement
        self._chunk_s = 0.0
        self._payload_in = self._frames_in = 0

    @property
    def payload_in(self) -> int:
        """Bytes of payload received."""
        return self._payload_in + self._arriving

    @property
    def _arriving(self) -> int:  # bytes of an incomplete frame
        return self._reader.arriving if isinstance(self._reader, Sealed) else 0

    @property
    def bytes_in(self) -> int:
        """Bytes received, of messages and payload."""
        return self._frames_in + self.payload_in

    def push(self, message: Message) -> None:
        """Write one message without waiting."""
        self.write(framed(message))

    def write(self, frame: bytes) -> None:
        """Write a message that is `framed`, without waiting."""
        self._writer.write(frame)
        self._traffic.bytes_sent += len(frame)

    async def flush(self) -> None:
        """Wait until most written bytes are sent."""
        await self._writer.drain()

    async def send(self, message: Message) -> None:
        """Write one message, and `flush`."""
        self.push(message)
        await self.flush()

    async def receive(
        self, timeout_s: float | None = FRAME_TIMEOUT_S, limit: int = MAX_FRAME_BYTES
    ) -> Message:
        """Read one message; `PayloadError` if it is invalid, or longer than `limit` bytes."""
        try:
            header = await self._read(_LENGTH_BYTES, timeout_s)
        except TimeoutError:
            if not self._arriving:
                raise
            header = await self._read(_LENGTH_BYTES, FRAME_BYTES / SLOWEST_BYTES_PER_S)
        length = int.from_bytes(header, "big")
        if length > limit:
            raise PayloadError(f"a frame of {length} bytes is over the limit of {limit}")
        slowest_s = length / SLOWEST_BYTES_PER_S
        frame = await self._read(length, None if timeout_s is None else timeout_s + slowest_s)
        self._traffic.bytes_received += _LENGTH_BYTES + length
        self.received += 1
        return decode(frame)

    async def _read(self, nbytes: int, timeout_s: float | None) -> bytes:
        if timeout_s is None:
            return await self._read_all(nbytes)
        async with asyncio.timeout(timeout_s):
            return await self._read_all(nbytes)

    async def _read_all(self, nbytes: int) -> bytes:
        pieces, missing = list[bytes](), nbytes
        while missing:
            piece = await self._reader.read(missing)
            if not piece:
                raise asyncio.IncompleteReadError(b"".join(pieces), nbytes)
            pieces.append(piece)
            missing -= len(piece)
            self._frames_in += len(piece)
        return b"".join(pieces)

    async def send_payload(self, payload: Tensor) -> None:
        """Write a uint8 tensor, which must not change afterwards: it may still be read."""
        await self._traffic.throttle(payload.numel())
        self._writer.write(payload.numpy().data)
        self._traffic.bytes_sent += payload.numel()
        slowest_s = payload.numel() / SLOWEST_BYTES_PER_S
        async with asyncio.timeout(SENDING_FACTOR * self._patience_s() + slowest_s):
            await self._writer.drain()

    async def receive_payload(self, out: Tensor) -> None:
        """Fill a uint8 tensor. A slow link is no error as long as bytes arrive."""
        loop, view = asyncio.get_running_loop(), out.numpy().data
        begun_at = loop.time()
        while view:
            before = self._arriving
            try:
                async with asyncio.timeout(self._patience_s()):
                    nbytes = await self._read_into(view)
            except TimeoutError:
                if self._arriving == before:
                    raise
                continue
            if not nbytes:
                raise asyncio.IncompleteReadError(b"", len(view))
            self._payload_in += nbytes
            view = view[nbytes:]
        pace_s = loop.time() - begun_at
        self._chunk_s = pace_s if self._chunk_s == 0.0 else 0.8 * self._chunk_s + 0.2 * pace_s
        self._traffic.bytes_received += out.numel()

    async def _read_into(self, out: memoryview) -> int:
        if isinstance(self._reader, Sealed):
            return await self._reader.read_into(out)
        piece = await self._reader.read(len(out))
        out[: len(piece)] = piece
        return len(piece)

    async def ended(self) -> None:
        """Wait until the other side ends a stream on which it sends nothing."""
        with suppress(*BROKEN, PayloadError):
            await self.receive(None)

    async def refuse(self, reason: str, discard: int = REFUSED_BYTES) -> None:
        """Refuse the stream, with the reason for the other side."""
        await self.send(Refusal(reason[:2000]))
        await self.drained(discard)

    async def drained(self, discard: int = 0) -> None:
        """Wait until the other side has read everything and ends the stream; drop up to `discard`
        bytes that it sends.

        The daemon resets a stream whose sender closes first, and loses bytes under way.
        """
        async with asyncio.timeout(FRAME_TIMEOUT_S):
            while leftover := await self._reader.read(min(discard + 1, _DISCARD_BYTES)):
                discard -= len(leftover)
                if discard < 0:
                    raise PayloadError("bytes after the end of a conversation")

    def _patience_s(self) -> float:
        return max(STALL_FLOOR_S, STALL_FACTOR * self._chunk_s)

    def close(self) -> None:
        """End the stream in both directions."""
        self._writer.close()


class Outgoing:
    """The outgoing control stream to a peer. Messages are written at once.

    Once `FLUSH_BYTES` are written the sender is `awake`, and waits until the peer has taken them,
    with a deadline.
    """

    def __init__(self, stream: PeerStream) -> None:
        self.stream, self.over = stream, False
        self.awake = asyncio.Event()
        self._nbytes = 0

    def say(self, frame: bytes) -> None:
        """Write a message that is `framed`."""
        self.stream.write(frame)
        self._nbytes += len(frame)
        if self._nbytes > FLUSH_BYTES:
            self.awake.set()

    def end(self) -> None:
        """End the stream; no message may follow."""
        self.over = True
        self.awake.set()

    async def flush(self) -> None:
        self._nbytes = 0
        self.awake.clear()
        await self.stream.flush()


@asynccontextmanager
async def open_bulk(transport: Transport, peer: str, traffic: Traffic) -> AsyncIterator[PeerStream]:
    """Open a bulk stream to a peer for an `async with` block."""
    async with asyncio.timeout(OPEN_TIMEOUT_S):
        reader, writer = await transport.open(peer, BULK)
    stream = PeerStream(peer, reader, writer, traffic)
    try:
        yield stream
    finally:
        stream.close()
