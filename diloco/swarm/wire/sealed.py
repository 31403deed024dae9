"""A TCP connection whose bytes are sealed: AES-256-GCM, with keys that both ends have already.

    opener                                        acceptor
    name, 32 random bytes        ---------->
                                 <----------      32 random bytes, frame 0 (empty)
    frame 0 (empty), frames      ---------->      serves it, once that frame is checked
    frames                       <--------->      frames
    an empty frame               <--------->      an empty frame

A frame is the length of what follows in 4 bytes, and at most `FRAME_BYTES` with a tag of 16. Why it
is safe, if the secret of the two is:

1. Each connection has two keys, one for each direction: HKDF-SHA256 of the secret and of the random
   bytes of both ends. Neither end alone can bring back the keys of an earlier connection.
2. The nonce is the number of the frame under its key, so none is used twice, and a frame that is
   repeated, left out, out of order, or from another connection fails its check.
3. No byte is handed on, and no message begun, before the tag of its frame is checked.
4. The last frame is empty. A connection that ends without it was cut, and says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn, cast

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

FRAME_BYTES = 1 << 18
SALT_BYTES, SECRET_BYTES = 32, 32
LINGER_S = 30.0
_LENGTH_BYTES, _TAG_BYTES, _NONCE_BYTES = 4, 16, 12
_SMALL_BYTES = 1 << 10  # of a buffer, until a frame needs more


def derived(secret: bytes, salt: bytes, purpose: bytes, nbytes: int = SECRET_BYTES) -> bytes:
    """Key material from a secret."""
    return HKDF(SHA256(), nbytes, salt, purpose).derive(secret)


class Sealed(asyncio.BufferedProtocol):
    """Both halves of one connection: a `ByteReader`, and a `ByteWriter`.

    Until `use` it reads and writes in the clear. `ConnectionError` when the other end is gone, has
    cut the connection, or sends a frame that is not its own; the connection is aborted then.
    """

    transport: asyncio.Transport

    def __init__(self, made: Callable[[Sealed], None] = lambda stream: None) -> None:
        self._made = made  # called when the connection is there
        # What has come of the frame that is waited for, and the length of the next one: so a frame
        # costs no system call for its length.
        self._buffer = memoryview(bytearray(_SMALL_BYTES))
        self._here, self._needed = 0, 1
        self._woken: asyncio.Future[None] | None = None
        self._rest = memoryview(b"")  # of an opened frame, not asked for yet
        self._ended = False
        self._error: Exception | None = None
        self._spare = bytearray()  # for the next frame that is sent
        self._writable = asyncio.Event()
        self._linger: asyncio.TimerHandle | None = None
        self._keys: tuple[AESGCM, AESGCM] | None = None  # of what comes, and of what goes
        self._received = self._sent = 0  # frames

    @property
    def arriving(self) -> int:
        """Bytes that have come of a frame that is not whole, or is not opened yet."""
        return self._here

    def use(self, secret: bytes, salts: bytes, opens: bool) -> None:
        """Seal everything from here on; `salts`: the opener's random bytes, and the acceptor's."""
        pair = derived(secret, salts, b"diloco lane", 2 * SECRET_BYTES)
        there, back = AESGCM(pair[:SECRET_BYTES]), AESGCM(pair[SECRET_BYTES:])
        self._keys = (back, there) if opens else (there, back)

    def prove(self) -> None:
        """Write frame 0: it shows that this end has the secret."""
        self._seal(memoryview(b""))

    async def check(self) -> None:
        """Read frame 0 of the other end; it may not be longer, so a stranger's buffer is small."""
        await self._open(memoryview(bytearray()), most=0)

    # -- reading -----------------------------------------------------------------------------------

    async def clear(self, nbytes: int) -> bytes:
        """So many bytes in the clear."""
        await self._arrived(nbytes)
        return self._taken(nbytes)

    async def read(self, n: int) -> bytes:
        """At most `n` bytes; none when the other side has ended the stream."""
        out = bytearray(min(n, FRAME_BYTES))
        return bytes(memoryview(out)[: await self.read_into(memoryview(out))])

    async def read_into(self, out: memoryview) -> int:
        """Put some bytes into `out`, as `read`; returns how many. Cancelling it loses none."""
        if not self._rest and not self._ended:
            nbytes = await self._open(out)
            self._ended = nbytes == 0
            if not self._rest:
                return nbytes
        nbytes = min(len(out), len(self._rest))
        out[:nbytes], self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return nbytes

    async def _open(self, out: memoryview, most: int = FRAME_BYTES) -> int:
        """Open a frame into `out`, or where it does not fit into `_rest`; returns its bytes."""
        assert self._keys is not None
        await self._arrived(_LENGTH_BYTES)
        size = int.from_bytes(self._buffer[:_LENGTH_BYTES], "big")
        if not _TAG_BYTES <= size <= most + _TAG_BYTES:
            self._fail("a lane carries no frames")
        await self._arrived(_LENGTH_BYTES + size)
        nbytes = size - _TAG_BYTES
        fits = nbytes <= len(out)
        plain = out[:nbytes] if fits else memoryview(bytearray(nbytes))
        frame = self._buffer[_LENGTH_BYTES : _LENGTH_BYTES + size]
        nonce = self._received.to_bytes(_NONCE_BYTES, "big")
        try:
            self._keys[0].decrypt_into(nonce, frame, None, plain)
        except InvalidTag:
            self._fail("a lane carries what its other end did not send")
        self._received += 1
        self._taken(_LENGTH_BYTES + size, copied=False)
        if not fits:
            self._rest = plain
        return nbytes

    async def _arrived(self, nbytes: int) -> None:
        """Wait until so many bytes are in the buffer."""
        self._needed = nbytes
        if len(self._buffer) < nbytes + _LENGTH_BYTES:
            larger = memoryview(bytearray(2 * _LENGTH_BYTES + FRAME_BYTES + _TAG_BYTES))
            larger[: self._here] = self._buffer[: self._here]
            self._buffer = larger
        while self._here < nbytes:
            if self._error is not None:
                raise self._error
            self._woken = asyncio.get_running_loop().create_future()
            self.transport.resume_reading()
            await self._woken

    def _taken(self, nbytes: int, copied: bool = True) -> bytes:
        """Drop what is in front of the buffer; a few bytes of the next frame may be behind it."""
        taken = bytes(self._buffer[:nbytes]) if copied else b""
        behind = bytes(self._buffer[nbytes : self._here])
        self._here = len(behind)
        self._buffer[: self._here] = behind
        return taken

    def _fail(self, why: str) -> NoReturn:
        self._error = ConnectionError(why)
        self.abort()
        raise self._error

    # -- writing -----------------------------------------------------------------------------------

    def write(self, data: bytes | memoryview) -> None:
        """Seal it, and hand it to the system, or to the buffer that `drain` waits for."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), FRAME_BYTES):
            self._seal(view[start : start + FRAME_BYTES])

    def write_clear(self, data: bytes) -> None:
        """Write it in the clear."""
        self.transport.write(data)

    def _seal(self, data: memoryview) -> None:
        assert self._keys is not None
        if self.transport.is_closing():
            return
        size = len(data) + _TAG_BYTES
        if len(self._spare) < _LENGTH_BYTES + size:
            self._spare = bytearray(_LENGTH_BYTES + size)
        frame = memoryview(self._spare)[: _LENGTH_BYTES + size]
        frame[:_LENGTH_BYTES] = size.to_bytes(_LENGTH_BYTES, "big")
        nonce = self._sent.to_bytes(_NONCE_BYTES, "big")
        self._sent += 1  # also if this fails: no nonce twice
        self._keys[1].encrypt_into(nonce, data, None, frame[_LENGTH_BYTES:])
        self.transport.write(frame)
        if self.transport.get_write_buffer_size():
            self._spare = bytearray()  # since Python 3.12 it is sent from there later

    async def drain(self) -> None:
        """Wait until little of what was written is left in the buffer."""
        await self._writable.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End both directions; what was written is still sent, to whoever takes it in time."""
        if self.transport.is_closing():
            return
        if self._keys is not None:
            self._seal(memoryview(b""))
        self.transport.close()
        self._error = ConnectionResetError("this end has closed the lane")
        self._linger = asyncio.get_running_loop().call_later(LINGER_S, self.abort)
        self._wake()

    def abort(self) -> None:
        """End it without a word."""
        self.transport.abort()

    def _wake(self) -> None:
        self._writable.set()
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    # -- what the transport calls ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._writable.set()
        self._made(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[self._here : self._needed + _LENGTH_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        self._here += nbytes
        if self._here >= self._needed:
            self.transport.pause_reading()
            if self._woken is not None and not self._woken.done():
                self._woken.set_result(None)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        if self._linger is not None:
            self._linger.cancel()
        self._error = self._error or error or ConnectionResetError("a lane was cut")
        self._wake()
