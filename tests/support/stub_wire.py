"""Streams and hosts that are not there, for what peers do to each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import torch

from diloco.errors import PayloadError
from diloco.outer.codecs import codec
from diloco.outer.digest import digest_of
from diloco.protocol.actions import Note
from diloco.protocol.messages import decode, encode
from diloco.protocol.messages.bulk import Contribution
from diloco.swarm.conversations.answer import BulkServer
from tests.support.certificates import MANIFEST
from tests.support.stub_host import OTHER, StubHost

NUMEL = 6


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


class Host(StubHost):
    """Holds the fragment; `other` is a member that trains."""

    def __init__(self, **outer: Any) -> None:
        super().__init__("me", NUMEL, **outer)
        self.join()
        self.clock = 0.0
        self.context.tasks.until = self.until  # type: ignore[method-assign]
        self.server = BulkServer(self.context, lambda: None)

    def now(self) -> float:
        return getattr(self, "clock", 0.0)

    def carry_out(self, actions: Sequence[Any]) -> None:
        super().carry_out(actions)
        self.notes += [action.kind for action in actions if isinstance(action, Note)]

    async def until(self, condition: Callable[[], bool]) -> None:
        if not condition():
            raise ConnectionError("this node is closed")

    async def serve(self, sent: bytes) -> list[object]:
        pipe = Pipe(sent)
        await self.server.serve(OTHER, pipe.reader, pipe)
        return pipe.messages()


def framed(message: Any) -> bytes:
    frame = encode(message)
    return len(frame).to_bytes(4, "big") + frame


def contribution(values: torch.Tensor, **claims: int) -> bytes:
    payload = torch.empty(codec("fp32").nbytes(NUMEL), dtype=torch.uint8)
    payload.view(torch.float32).copy_(values)
    header = Contribution(
        base_digest=digest_of(torch.arange(float(NUMEL))), manifest_hash=MANIFEST, fragment=0, term=1,
        **{"base_version": 0, "steps": 1, "tokens": 10, **claims},
    )  # fmt: skip
    return framed(header) + payload.numpy().tobytes()
