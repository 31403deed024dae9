"""Payload goes from a real socket into its tensor, whatever comes before, after, or not at all."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from diloco.swarm.rpc.contribution import Got
from diloco.swarm.wire.filling import Filling
from diloco.swarm.wire.streams import PeerStream, Traffic


@asynccontextmanager
async def two_ends() -> AsyncIterator[tuple[PeerStream, asyncio.StreamWriter]]:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    _, other = await asyncio.open_connection(sock=theirs)
    yield PeerStream("peer", reader, writer, Traffic()), other
    for one in (writer, other):
        one.close()


@pytest.mark.parametrize("seed", range(5))
async def test_payloads_and_messages_in_any_pieces(seed: int) -> None:
    rng, noise = random.Random(seed), torch.Generator().manual_seed(seed)
    sizes = [rng.choice([0, 1, 1000, 300_000, 3_000_000]) for _ in range(6)]
    payloads = [torch.randint(256, (size,), dtype=torch.uint8, generator=noise) for size in sizes]
    async with two_ends() as (stream, other):
        sender = PeerStream("peer", asyncio.StreamReader(), other, Traffic())

        async def send() -> None:
            for payload in payloads:
                at = rng.randint(0, payload.numel())
                await sender.send_payload(payload[:at])
                if rng.random() < 0.5:
                    await asyncio.sleep(0)
                await sender.send_payload(payload[at:])
                await sender.send(Got())

        sending = asyncio.create_task(send())
        for payload in payloads:
            out = torch.empty_like(payload)
            await stream.receive_payload(out)
            assert torch.equal(out, payload)
            assert isinstance(await stream.receive(), Got)
        await sending


@pytest.mark.parametrize("sent", [0, 1, 500_000])
async def test_a_stream_that_ends_too_early(sent: int) -> None:
    async with two_ends() as (stream, other):
        other.write(bytes(sent))
        other.write_eof()
        with pytest.raises(asyncio.IncompleteReadError):
            await stream.receive_payload(torch.empty(1_000_000, dtype=torch.uint8))


async def test_filling_goes_on_after_a_deadline() -> None:
    async with two_ends() as (stream, other):
        out = bytearray(5)
        filling = Filling(stream._reader, stream._writer, memoryview(out))
        for n in range(4):
            waiting = asyncio.create_task(filling.wait())
            other.write(bytes([n + 1]))
            while filling.filled == n:
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
        other.write(b"\x05")
        await filling.wait()
        assert out == bytes([1, 2, 3, 4, 5])
