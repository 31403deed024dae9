"""Ends of direct connections whose bytes a test moves, without a socket."""

import asyncio
from typing import Any

from diloco.swarm.wire.sealed import SALT_BYTES, Sealed

SECRET = bytes(range(32))


class Wire:
    """The transport of one end: `frames` are what it wrote, one for each write."""

    def __init__(self, stream: Sealed, host: str = "192.0.2.1") -> None:
        self.stream, self.host = stream, host
        self.frames = list[bytes]()
        self.waiting, self.reads, self.closing = bytearray(), True, False
        stream.connection_made(self)  # type: ignore[arg-type]

    def feed(self, data: bytes) -> None:
        """These bytes have come here; they are read when somebody waits for them."""
        self.waiting += data
        self._read()

    def _read(self) -> None:
        while self.reads and self.waiting and not self.closing:
            view = self.stream.get_buffer(-1)
            nbytes = min(len(view), len(self.waiting))
            view[:nbytes] = self.waiting[:nbytes]
            del self.waiting[:nbytes]
            self.stream.buffer_updated(nbytes)

    def resume_reading(self) -> None:
        self.reads = True
        self._read()

    def pause_reading(self) -> None:
        self.reads = False

    def write(self, data: Any) -> None:
        self.frames.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (self.host, 4100) if name == "peername" else default

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            asyncio.get_running_loop().call_soon(self.stream.connection_lost, None)

    abort = close


def sealed(salts: bytes = bytes(2 * SALT_BYTES), opens: bool = True) -> tuple[Sealed, Wire]:
    """One end of a connection that has its keys, before frame 0."""
    stream = Sealed()
    wire = Wire(stream)
    stream.use(SECRET, salts, opens)
    return stream, wire
