"""Streams that are not there, for what peers say to each other."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from diloco.errors import PayloadError
from diloco.messages.codec import Message, Refusal, decode, encode
from diloco.swarm.wire.streams import PeerStream, Traffic


def framed(message: Any) -> bytes:
    frame = encode(message)
    return len(frame).to_bytes(4, "big") + frame


class Pipe:
    """What a peer writes to us, and what we wrote back."""

    def __init__(self, *sent: bytes | Message) -> None:
        self.reader = asyncio.StreamReader()
        for one in sent:
            self.reader.feed_data(one if isinstance(one, bytes) else framed(one))
        self.reader.feed_eof()
        self.written, self.closed = bytearray(), False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    async def drain(self) -> None: ...

    def close(self) -> None:
        self.closed = True

    def messages(self) -> list[object]:
        found, at = [], 0
        while at < len(self.written):
            length = int.from_bytes(self.written[at : at + 4], "big")
            try:
                found.append(decode(bytes(self.written[at + 4 : at + 4 + length])))
            except PayloadError:  # a payload lies in between
                return found
            at += 4 + length
        return found


class End(Pipe):
    """One end of a stream whose other end somebody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.reader, self.other = asyncio.StreamReader(), self

    def write(self, data: Any) -> None:
        super().write(data)
        self.other.reader.feed_data(bytes(data))

    def close(self) -> None:
        for reader in (self.reader, self.other.reader):
            if not reader.at_eof():
                reader.feed_eof()


def connected() -> tuple[End, End]:
    here, there = End(), End()
    here.other, there.other = there, here
    return here, there


class NoNetwork:
    """A transport by which nobody can be reached; says who was called."""

    def __init__(self, me: str = "me") -> None:
        self.me, self.seeds, self.called = me, list[str](), list[str]()
        self.hung_up = list[str]()

    async def hang_up(self, peer: str) -> None:
        self.hung_up.append(peer)

    async def open(self, peer: str, protocol: str) -> Any:
        self.called.append(peer)
        raise ConnectionError(f"{peer} cannot be reached")


class Transport:
    """Each stream that it opens is answered by `answer`; `PayloadError` is told as a refusal, as a
    server does."""

    seeds: tuple[str, ...] = ("donor",)
    addresses: tuple[str, ...] = ()
    store = None

    def __init__(
        self, answer: Callable[[PeerStream, Any], Awaitable[None]], asker: str = "asker"
    ) -> None:
        self._answer, self._asker = answer, asker
        self._serving: dict[asyncio.Task[None], None] = {}

    async def open(self, peer: str, protocol: str) -> tuple[asyncio.StreamReader, Any]:
        here, there = connected()
        stream: Any = PeerStream(self._asker, there.reader, there, Traffic())
        self._serving[asyncio.create_task(self._serve(stream))] = None
        return here.reader, here

    async def _serve(self, stream: PeerStream) -> None:
        try:
            await self._answer(stream, await stream.receive())
        except PayloadError as error:
            await stream.send(Refusal(str(error)))
