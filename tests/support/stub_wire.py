"""Streams that are not there, for what peers say to each other."""

from __future__ import annotations

import asyncio
from typing import Any

from diloco.errors import PayloadError
from diloco.messages.codec import decode, encode


class Pipe:
    """What a peer writes to us, and what we wrote back."""

    def __init__(self, sent: bytes) -> None:
        self.reader = asyncio.StreamReader()
        self.reader.feed_data(sent)
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


def framed(message: Any) -> bytes:
    frame = encode(message)
    return len(frame).to_bytes(4, "big") + frame
