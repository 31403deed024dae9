"""The tasks of a node: what outlives its caller, what must not, and who is late when the node
closes. Payload goes from a real socket into its tensor, whatever comes before or after."""

import asyncio
import random
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from diloco.swarm.rpc.contribution import Got
from diloco.swarm.wire.streams import PeerStream, Traffic
from diloco.swarm.wire.tasks import FragmentLock, Tasks, in_thread
from tests.support.coroutines import PATIENCE_S, Slow, turns, until


@asynccontextmanager
async def closing() -> AsyncIterator[Tasks]:
    """The tasks of a node that closes in the end, and leaves nothing behind."""
    tasks = Tasks()
    yield tasks
    await tasks.close(PATIENCE_S)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_thread_given_up_has_ended_before_its_lock_is_free() -> None:
    lock, written = asyncio.Lock(), list[str]()
    write = Slow(lambda: written.append("by the thread"))

    async def holder() -> None:
        async with lock:
            await in_thread(write)

    task = asyncio.ensure_future(holder())
    await until(write.began.is_set)
    for _ in range(2):
        task.cancel()
        await turns()
    assert lock.locked() and not written
    write.go_on.set()
    async with lock:
        assert written == ["by the thread"]
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_failed_condition_or_task_is_raised_in_who_waits() -> None:
    broken = False

    async def fail() -> None:
        raise ValueError("a task of the node")

    async with closing() as tasks:
        waiting = asyncio.ensure_future(tasks.until(lambda: broken and 1 // 0 == 1))
        await turns()
        broken = True
        tasks.notify()
        with pytest.raises(ZeroDivisionError):
            await waiting
        waiting = asyncio.ensure_future(tasks.until(lambda: False))
        tasks.spawn(fail())
        for work in (waiting, tasks.until(lambda: True)):
            with pytest.raises(ValueError, match="a task of the node"):
                await work


async def test_a_closed_node_starts_nothing_and_names_the_late() -> None:
    go_on = threading.Event()

    async def hash_everything() -> None:
        await in_thread(go_on.wait, PATIENCE_S)

    async with closing() as tasks:
        tasks.spawn(hash_everything())
        waiting = asyncio.ensure_future(tasks.until(lambda: False))
        await turns()
        [late] = await tasks.close(0.01)
        assert late.endswith("hash_everything")
        with pytest.raises(ConnectionError, match="this node is closed"):
            await waiting
        with pytest.raises(ConnectionError, match="this node is closed"):
            tasks.start(hash_everything())
        tasks.spawn(hash_everything())
        go_on.set()


async def test_readers_share_a_fragment_and_a_writer_has_it_alone() -> None:
    lock, order = FragmentLock(), list[str]()

    async def write() -> None:
        async with lock.writing():
            order.append("written")

    await lock.start_reading()
    writing = asyncio.ensure_future(write())
    await turns()
    async with lock.reading():  # does not wait for the writer, who waits for the first reader
        order.append("read")
    await turns()
    assert order == ["read"]
    lock.stop_reading()
    await writing
    assert order == ["read", "written"]


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
