"""Ends of direct connections whose bytes a test moves, without a socket."""

import asyncio
from collections.abc import Callable
from typing import Any

from diloco.swarm.wire.sealed import SALT_BYTES, Sealed

SECRET = bytes(range(32))


class Wire:
    """Writer and transport of one end, whose reader is `reader`; `frames` are what it wrote, one
    for each write, of which `to` is told."""

    def __init__(self, host: str = "192.0.2.1") -> None:
        self.host, self.reader, self.transport = host, asyncio.StreamReader(), self
        self.frames, self.closing, self.aborted = list[bytes](), False, asyncio.Event()
        self.to: Callable[[bytes], object] = self.frames.append

    def feed(self, data: bytes) -> None:
        """These bytes have come here."""
        if not self.closing:
            self.reader.feed_data(data)

    def write(self, data: Any) -> None:
        self.to(bytes(data))

    async def drain(self) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> Any:
        return (self.host, 4100)

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = True
        self.aborted.set()
        self.reader.feed_eof()


def joined(host: str = "192.0.2.1") -> tuple[Wire, Wire]:
    """Both ends of a connection over which bytes move by themselves."""
    here, there = Wire(), Wire(host)
    here.to, there.to = there.feed, here.feed
    return here, there


def sealed(salts: bytes = bytes(2 * SALT_BYTES), opens: bool = True) -> tuple[Sealed, Any]:
    """One end of a connection that has its keys, before frame 0."""
    wire: Any = Wire()
    return Sealed((wire.reader, wire), SECRET, salts, opens), wire
