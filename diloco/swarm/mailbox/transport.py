"""The network of a peer that opens no connection: it only has an identity."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from diloco.swarm.mailbox.store import Store
from diloco.swarm.wire.gate import Gate
from diloco.swarm.wire.identity import WORD, SigningKey, verify
from diloco.swarm.wire.transport import ByteReader, ByteWriter, Handler


class NoStreams:
    """A `Transport` without streams. Opening one fails as if nobody answered."""

    def __init__(self, identity_path: Path, gate: Gate, store: Store, authors: bool) -> None:
        self._identity = SigningKey.read(identity_path)
        self.me, gate.instance = self._identity.me, secrets.token_hex(8)
        gate.me = self.me
        self.store: Store | None = store
        self.seeds: list[str] = []
        self.addresses = [store.url]
        self.reachable, self.advice = authors, ""
        self.addresses_of: Callable[[str], Sequence[str]] = lambda peer: ()

    async def handle(self, protocol: str, handler: Handler) -> None:
        """Nobody opens a stream."""

    async def open(self, peer: str, protocol: str) -> tuple[ByteReader, ByteWriter]:
        raise ConnectionError("this peer has a mailbox, and opens no streams")

    async def announce(self, life_s: float, met: Sequence[str]) -> None:
        """There is nothing to announce."""

    async def announced(self) -> dict[str, list[str]]:
        return {}

    def way(self, peer: str) -> str:
        return "mailbox"

    def sign(self, content: bytes) -> bytes:
        return self._identity.sign(WORD, content)

    def verify(self, peer: str, content: bytes, signature: bytes) -> bool:
        return verify(WORD, peer, content, signature)

    async def observed(self, peer: str) -> str:
        return ""

    async def call_anew(self, peer: str, addresses: Sequence[str]) -> dict[str, str]:
        return {}

    async def hang_up(self, peer: str) -> None: ...

    def may_call(self, address: str) -> bool:
        return False

    async def failed(self) -> None:
        await asyncio.Future()

    async def close(self) -> None:
        """There is nothing to end."""
