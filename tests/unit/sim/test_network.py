"""Links by hand: bandwidth, latency, fair shares; every way in which a stream ends;
`sim.events`."""

import asyncio
from asyncio import sleep
from typing import Any

import pytest
import torch

from diloco.errors import ConfigError
from diloco.sim.events import SimEvent, parse_events, starters
from diloco.sim.link import PIECE_BYTES, PeerLink
from diloco.sim.network import Network, SimTransport
from diloco.sim.virtual_time import VirtualLoop
from diloco.swarm.wire.streams import PeerStream, Traffic
from diloco.swarm.wire.transport import ByteReader, ByteWriter, Transport

MB = 1_000_000
AGES_S = 1e4  # until everything has arrived


async def ends_with(writer: ByteWriter, *data: bytes) -> None:
    """Write the last pieces of a stream."""
    for piece in data:
        writer.write(piece)
        await writer.drain()
    writer.close()


class Town:
    """A network, and peers that note when everything of a stream has arrived."""

    def __init__(self, loop: VirtualLoop, **settings: Any) -> None:
        self.loop, self.network = loop, Network(loop, **settings)
        self.heard: dict[str, list[tuple[bytes, float]]] = {}
        self.last_byte_at: dict[str, float] = {}

    async def peer(self, name: str, **link: Any) -> SimTransport:
        transport = self.network.join(name, [], PeerLink(**link))

        async def listen(peer: str, reader: ByteReader, writer: ByteWriter) -> None:
            told = b""
            while piece := await reader.read(1 << 20):
                told += piece
                self.last_byte_at[name] = self.loop.time()
            self.heard.setdefault(name, []).append((told, self.loop.time()))
            writer.close()

        await transport.handle("talk", listen)
        return transport

    async def peers(self, *names: str, **link: Any) -> list[SimTransport]:
        return [await self.peer(name, **link) for name in names]

    async def stream(self, source: Transport, target: str) -> ByteWriter:
        return (await source.open(target, "talk"))[1]

    async def tell(self, source: Transport, target: str, *data: bytes) -> float:
        """Open a stream, write, close; returns when the stream was open."""
        writer = await self.stream(source, target)
        opened_at = self.loop.time()
        await ends_with(writer, *data)
        return opened_at

    def told(self, name: str) -> list[bytes]:
        return [told for told, _ in self.heard.get(name, [])]


@pytest.fixture
def town(loop: VirtualLoop) -> Town:
    return Town(loop)


LINKS = [(None, None, 0.0), (1 * MB, None, 3.0), (None, 1 * MB, 3.0), (2 * MB, 0.5 * MB, 6.0)]


@pytest.mark.parametrize(("up", "down", "seconds"), LINKS)
async def test_bytes_take_their_number_over_the_bandwidth_and_latency(
    town: Town, up: float | None, down: float | None, seconds: float
) -> None:
    one = await town.peer("one", up=up, latency_s=0.2)
    await town.peer("two", down=down, latency_s=0.4)
    data = (bytes(range(256)) * (3 * MB // 256 + 1))[: 3 * MB]
    opened_at = await town.tell(one, "two", data)
    assert opened_at == pytest.approx(2 * 0.3)  # a round trip
    await sleep(AGES_S)
    [(told, at)] = town.heard["two"]
    assert told == data and at - opened_at == pytest.approx(seconds + 0.3)
    assert town.last_byte_at["two"] == pytest.approx(at)


async def test_streams_share_an_uplink_fairly(town: Town) -> None:
    one = await town.peer("one", up=1 * MB)
    sizes = {"two": 4 * MB, "three": 2 * MB, "four": 1000}
    await town.peers(*sizes)
    await asyncio.gather(*(town.tell(one, name, bytes(size)) for name, size in sizes.items()))
    await sleep(AGES_S)
    arrival = {name: heard[0][1] for name, heard in town.heard.items()}
    # its byte and its end each wait for 64 KiB of the others, not for their megabytes
    assert arrival["four"] < 0.4
    turns_s = 3 * PIECE_BYTES / MB
    assert arrival["three"] == pytest.approx(4.0, abs=turns_s)  # half of the link, until it is done
    assert arrival["two"] == pytest.approx(6.0, abs=turns_s)


async def test_nobody_there_is_a_connection_error_after_a_round_trip(town: Town) -> None:
    one, _ = await town.peers("one", "two", latency_s=0.1)
    town.network.crash("two")
    with pytest.raises(ConnectionError, match="two cannot be reached"):
        await one.open("two", "talk")
    assert town.loop.time() == pytest.approx(0.2)
    with pytest.raises(ConnectionError, match="nobody cannot be reached"):
        await one.open("nobody", "talk")


async def test_a_crash_ends_streams_and_what_was_queued_is_lost(town: Town) -> None:
    one = await town.peer("one", up=1 * MB, latency_s=0.5)
    await town.peer("two", latency_s=0.5)
    talk = asyncio.ensure_future(town.tell(one, "two", bytes(5 * MB)))
    await sleep(2.0)  # the stream is open since second 1
    town.network.crash("one")
    await sleep(AGES_S)
    with pytest.raises(ConnectionResetError):
        await talk
    [(told, at)] = town.heard["two"]
    assert at == pytest.approx(2.5) and len(told) == pytest.approx(1 * MB, abs=70_000)


async def test_a_cut_is_silence_and_what_waited_goes_on_when_mended(town: Town) -> None:
    one, _ = await town.peers("one", "two")
    writer = await town.stream(one, "two")
    town.network.cut("one", "two")
    await ends_with(writer, b"hello")
    await sleep(10)
    assert "two" not in town.heard
    with pytest.raises(TimeoutError):
        await one.open("two", "talk")
    await sleep(5)
    town.network.mend("one", "two")
    await sleep(1)
    assert town.heard["two"] == [(b"hello", pytest.approx(10 + 30 + 5))]


class Trickle:
    """A reader that brings a little every 13 seconds, and nothing any more after a while."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes

    async def read(self, n: int = -1) -> bytes:
        await sleep(13.0 - asyncio.get_running_loop().time() % 13.0 if self.left else 1e6)
        taken = min(n, 100, self.left)
        self.left -= taken
        return bytes(taken)


async def test_a_payload_may_take_long_but_not_stand_still(loop: VirtualLoop) -> None:
    slow, stuck = (PeerStream("a", Trickle(nbytes), None, Traffic()) for nbytes in (1000, 500))  # type: ignore[arg-type]
    payload = torch.empty(1000, dtype=torch.uint8)
    await slow.receive_payload(payload)
    assert loop.time() == pytest.approx(130.0)
    with pytest.raises(asyncio.TimeoutError):
        await stuck.receive_payload(payload)
    assert 130.0 + 65.0 + 20.0 <= loop.time() <= 130.0 + 65.0 + 40.0


def test_events_are_sorted_and_say_who_is_there_at_the_start() -> None:
    planned = parse_events(["crash:1@20", "join:2@5.5", "join:1@30", "join:7@1"], peers=3)
    expected = [("join", 7, 1.0), ("join", 2, 5.5), ("crash", 1, 20.0), ("join", 1, 30.0)]
    assert planned == [SimEvent(*one) for one in expected]
    assert starters(planned, peers=3) == [0, 1]


@pytest.mark.parametrize(
    ("texts", "complaint"),
    [
        (["crash:5@1"], "sim.events: crash:5@1, but peer 5 is not there"),
        (["crash:1@1", "leave:1@2"], "sim.events: leave:1@2, but peer 1 is not there"),
        (
            ["leave:1@2", "join:1@3", "join:1@4"],
            "sim.events: join:1@4, but peer 1 is there already",
        ),
    ],
)
def test_what_cannot_happen_is_refused(texts: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_events(texts, peers=4)
