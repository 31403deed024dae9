"""An encrypted and authenticated TCP connection: AES-256-GCM, with a secret known to both ends.

    opener                                        acceptor
    name, 32 random bytes        ---------->
                                 <----------      32 random bytes
    frame 0 (empty)              <--------->      frame 0 (empty): proves the secret
    frames, the last one empty   <--------->      frames, the last one empty

A frame is its length in 4 bytes, then at most `FRAME_BYTES` and a tag of 16 bytes. It is safe as
long as the secret is, because:

1. Each connection has two keys, one for each direction: HKDF-SHA256 of the secret and of the random
   bytes of both ends. Neither end alone can reproduce the keys of an earlier connection.
2. The nonce is the number of the frame under its key, so none is used twice, and a frame that is
   repeated, left out, out of order, or from another connection fails its check.
3. No byte is passed on, and no stream served, before the tag of its frame is checked.
4. The last frame is empty. A connection that ends without it was cut, which raises an error.
"""

from __future__ import annotations

import asyncio
from typing import NoReturn

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

FRAME_BYTES = 1 << 18
SALT_BYTES, SECRET_BYTES = 32, 32
LINGER_S = 30.0
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_LENGTH_BYTES, _TAG_BYTES, _NONCE_BYTES = 4, 16, 12


def derived(secret: bytes, salt: bytes, purpose: bytes, nbytes: int = SECRET_BYTES) -> bytes:
    """Derive key material from a secret."""
    return HKDF(SHA256(), nbytes, salt, purpose).derive(secret)


class Sealed:
    """Both halves of one connection: a `ByteReader`, and a `ByteWriter`.

    salts: the random bytes of the opener, and of the acceptor. `ConnectionError` if the other end
    is gone, has cut the connection, or sends a frame with a wrong tag; that ends the connection.
    """

    def __init__(self, ends: Ends, secret: bytes, salts: bytes, opens: bool) -> None:
        self._reader, self._writer = ends
        self.drain = self._writer.drain
        pair = derived(secret, salts, b"diloco lane", 2 * SECRET_BYTES)
        there, back = AESGCM(pair[:SECRET_BYTES]), AESGCM(pair[SECRET_BYTES:])
        self._key_in, self._key_out = (back, there) if opens else (there, back)
        self._frame = bytearray()  # received bytes of the next frame
        self._spare = bytearray()  # buffer of the next frame to send
        self._rest = memoryview(b"")  # opened bytes that nobody has read yet
        self._received = self._sent = 0
        self._ended = False

    @property
    def arriving(self) -> int:
        """Bytes received of an incomplete frame."""
        return len(self._frame)

    async def meet(self) -> None:
        """Exchange frames 0, so that each end proves to the other that it has the secret."""
        self._seal(memoryview(b""))
        await self._open(memoryview(bytearray()), most=0)

    async def read(self, n: int) -> bytes:
        """Read at most `n` bytes; none once the other side has ended the stream."""
        out = memoryview(bytearray(min(n, FRAME_BYTES)))
        return bytes(out[: await self.read_into(out)])

    async def read_into(self, out: memoryview) -> int:
        """Read some bytes into `out`; return their number. Cancelling it loses none."""
        if not self._rest and not self._ended:
            nbytes = await self._open(out)
            self._ended = nbytes == 0
            if not self._rest:
                return nbytes
        nbytes = min(len(out), len(self._rest))
        out[:nbytes], self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return nbytes

    async def _open(self, out: memoryview, most: int = FRAME_BYTES) -> int:
        """Open a frame into `out`, or into `_rest` if it does not fit; return its size."""
        await self._arrived(_LENGTH_BYTES)
        size = int.from_bytes(self._frame[:_LENGTH_BYTES], "big")
        if not _TAG_BYTES <= size <= most + _TAG_BYTES:
            self._fail("a lane carries no frames")
        await self._arrived(_LENGTH_BYTES + size)
        sealed, self._frame = memoryview(self._frame)[_LENGTH_BYTES:], bytearray()
        nbytes = size - _TAG_BYTES
        fits = nbytes <= len(out)
        plain = out[:nbytes] if fits else memoryview(bytearray(nbytes))
        nonce, self._received = self._received.to_bytes(_NONCE_BYTES, "big"), self._received + 1
        try:
            self._key_in.decrypt_into(nonce, sealed, None, plain)
        except InvalidTag:
            self._fail("a lane carries what its other end did not send")
        self._rest = self._rest if fits else plain
        return nbytes

    async def _arrived(self, nbytes: int) -> None:
        """Wait until so many bytes of the next frame have arrived."""
        while len(self._frame) < nbytes:
            piece = await self._reader.read(nbytes - len(self._frame))
            if not piece:
                raise ConnectionResetError("a lane was cut")
            self._frame += piece

    def _fail(self, why: str) -> NoReturn:
        self._writer.transport.abort()
        raise ConnectionResetError(why)

    def write(self, data: bytes | memoryview) -> None:
        """Seal the bytes, and pass them to the system, or to the buffer that `drain` waits for."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), FRAME_BYTES):
            self._seal(view[start : start + FRAME_BYTES])

    def _seal(self, data: memoryview) -> None:
        size = len(data) + _TAG_BYTES
        if len(self._spare) < _LENGTH_BYTES + size:
            self._spare = bytearray(_LENGTH_BYTES + size)
        frame = memoryview(self._spare)[: _LENGTH_BYTES + size]
        frame[:_LENGTH_BYTES] = size.to_bytes(_LENGTH_BYTES, "big")
        nonce, self._sent = self._sent.to_bytes(_NONCE_BYTES, "big"), self._sent + 1
        self._key_out.encrypt_into(nonce, data, None, frame[_LENGTH_BYTES:])
        self._writer.write(frame)
        if self._writer.transport.get_write_buffer_size():
            self._spare = bytearray()  # since Python 3.12 the transport keeps the buffer to send it

    def close(self) -> None:
        """End both directions; written bytes are still sent if the other end reads them in time."""
        if self._writer.is_closing():
            return
        self._seal(memoryview(b""))
        self._writer.close()
        self._reader.feed_eof()  # wakes a reader
        asyncio.get_running_loop().call_later(LINGER_S, self._writer.transport.abort)
