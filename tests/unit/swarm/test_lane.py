"""Direct connections: what is sealed arrives as it was or not at all; strangers cost little; and
where none can be made, the daemon is taken."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import pytest
import torch

from diloco.config import SwarmConfig
from diloco.config.peer_settings import PeerSwarmConfig
from diloco.errors import ConfigError, PayloadError, SwarmError
from diloco.messages.codec import decode
from diloco.sim.virtual_time import VirtualLoop
from diloco.swarm.limits import STRANGERS_OF_ONE_HOST
from diloco.swarm.rpc.contribution import Got
from diloco.swarm.wire.lane import AGAIN_S, HELLO_S, KNOCK_S, Door, Lanes, host_in, places
from diloco.swarm.wire.sealed import FRAME_BYTES, LINGER_S, SALT_BYTES, Sealed
from diloco.swarm.wire.streams import BROKEN, PeerStream, Traffic
from tests.support.stub_wire import Pipe, connected, framed
from tests.support.wires import Wire, sealed

PIECES = (b"one", bytes(range(256)) * 1200, b"three")  # the second makes two frames
SENT = b"".join(PIECES)
HELLO_BYTES = 64 + SALT_BYTES


# -- frames ----------------------------------------------------------------------------------------


async def frames_of(salts: bytes = bytes(2 * SALT_BYTES)) -> list[bytes]:
    """What an opener writes that sends the pieces, and ends."""
    stream, wire = sealed(salts)
    stream.prove()
    for piece in PIECES:
        stream.write(piece)
    stream.close()
    return wire.frames


async def read_all(frames: list[bytes]) -> tuple[bytes, str]:
    """What an acceptor reads of these frames, after which the connection ends, and its error."""
    stream, wire = sealed(opens=False)
    wire.feed(b"".join(frames))
    taken = b""
    try:
        await stream.check()
        asyncio.get_running_loop().call_soon(wire.close)
        while piece := await stream.read(100_000):
            taken += piece
    except ConnectionError as error:
        return taken, str(error)
    return taken, ""


async def test_what_is_written_is_read_in_any_pieces() -> None:
    frames = await frames_of()
    assert [len(one) - 20 for one in frames] == [0, 3, FRAME_BYTES, 1200 * 256 - FRAME_BYTES, 5, 0]
    assert await read_all(frames) == (SENT, "")
    assert not any(b"three" in frame for frame in frames)
    stream, wire = sealed(opens=False)
    reading = asyncio.create_task(stream.read(10))
    for byte in frames[0] + frames[1]:
        await asyncio.sleep(0)
        wire.feed(bytes([byte]))
        if stream.arriving == 20 and not reading.done():
            reading.cancel()  # loses nothing
            reading = asyncio.create_task(stream.read(10))
    assert await reading == b"" and not stream._rest, "frame 0 is empty"


def flipped(frames: list[bytes], others: list[bytes]) -> list[bytes]:
    return [*frames[:2], frames[2][:-1] + bytes([frames[2][-1] ^ 1]), *frames[3:]]


def longer(frames: list[bytes], others: list[bytes]) -> list[bytes]:
    return [*frames[:2], bytes([255]) + frames[2][1:], *frames[3:]]


def first_left_out(frames: list[bytes], others: list[bytes]) -> list[bytes]:
    return frames[1:]


@pytest.mark.parametrize(
    ("altered", "why"),
    [
        (flipped, "did not send"),
        (longer, "carries no frames"),
        (lambda frames, others: [*frames[:2], frames[1], *frames[2:]], "did not send"),
        (first_left_out, "carries no frames"),
        (lambda frames, others: [*frames[:2], *frames[3:]], "did not send"),
        (lambda frames, others: [*frames[:2], frames[3], frames[2], *frames[4:]], "did not send"),
        (lambda frames, others: [*frames[:2], others[2], *frames[3:]], "did not send"),
        (lambda frames, others: [*frames[:2], frames[0], *frames[2:]], "did not send"),
        (lambda frames, others: frames[:-1], "cut"),
        (lambda frames, others: [*frames[:-2], frames[-2][:-7]], "torn"),
    ],
    ids="flipped longer repeated headless left_out swapped other again cut torn".split(),
)
async def test_no_frame_is_believed_that_is_not_the_next_of_this_connection(
    altered: Callable[[list[bytes], list[bytes]], list[bytes]], why: str
) -> None:
    others = await frames_of(bytes(SALT_BYTES) + bytes([1]) * SALT_BYTES)
    taken, error = await read_all(altered(await frames_of(), others))
    assert {"torn": "cut"}.get(why, why) in error
    before = b"" if altered is first_left_out else b"one"
    assert taken == {"cut": SENT, "torn": SENT[:-5]}.get(why, before)


async def test_what_an_end_wrote_itself_is_nothing_that_it_reads() -> None:
    stream, wire = sealed()
    stream.prove()
    wire.feed(wire.frames[0])
    with pytest.raises(ConnectionError, match="did not send"):
        await stream.check()
    assert wire.closing


async def test_a_connection_that_nobody_takes_bytes_of_is_ended_late(loop: VirtualLoop) -> None:
    class Stuck(Wire):
        def close(self) -> None:
            self.closing = True

    stream = Sealed()
    wire = Stuck(stream)
    stream.use(bytes(32), bytes(2 * SALT_BYTES), opens=True)
    aborted = asyncio.Event()
    wire.abort = aborted.set  # type: ignore[method-assign]
    stream.pause_writing()
    draining = asyncio.create_task(stream.drain())
    reading = asyncio.create_task(stream.read(1))
    await asyncio.sleep(0)
    stream.close()
    for waiting in (draining, reading):
        with pytest.raises(ConnectionError, match="this end has closed"):
            await waiting
    assert loop.time() == 0.0
    await aborted.wait()
    assert loop.time() == LINGER_S


# -- messages and payloads -------------------------------------------------------------------------


async def test_a_thin_link_brings_a_sealed_payload_and_a_silent_one_is_given_up(
    loop: VirtualLoop,
) -> None:
    """A frame is opened when it is whole, which takes minutes; its bytes count as they come."""
    sender, sending = sealed()
    stream, wire = sealed(opens=False)
    there = PeerStream("p", sender, sender, Traffic(upload_limit=1e9))
    here = PeerStream("p", stream, stream, Traffic())
    payload, out = torch.arange(200_000).to(torch.uint8), torch.empty(200_000, dtype=torch.uint8)
    await there.send(Got(7))
    await there.send_payload(payload)
    assert there._traffic.bytes_sent == 200_000 + len(framed(Got(7))) and loop.time() > 0
    data, begun_at = b"".join(sending.frames), loop.time()

    async def drip() -> None:
        for at in range(0, len(data), 10_000):
            await asyncio.sleep(19)
            wire.feed(data[at : at + 10_000])

    dripping = asyncio.create_task(drip())
    assert await here.receive() == Got(7)
    receiving = asyncio.create_task(here.receive_payload(out))
    await asyncio.sleep(50)
    assert 10_000 < here.bytes_in < 50_000 and here.payload_in < here.bytes_in
    await receiving
    assert torch.equal(out, payload) and loop.time() - begun_at > 300
    assert here.payload_in == 200_000 and here._traffic.bytes_received == there._traffic.bytes_sent
    await dripping
    there.push(Got(8))
    wire.feed(sending.frames[-1][:-1])
    with pytest.raises(TimeoutError):
        await here.receive_payload(out[:1])
    wire.feed(sending.frames[-1][-1:])
    assert await here.receive() == Got(8)


# -- two peers -------------------------------------------------------------------------------------


class Asked:
    """How an opener reaches the peer `lanes`, as `me`: its question for a door goes through a pipe,
    the connections over loopback."""

    def __init__(self, lanes: Lanes, hosts: tuple[str, ...] = ("127.0.0.1",)) -> None:
        self.lanes, self.hosts, self.asked = lanes, hosts, 0
        self.mine = Lanes("me")
        self.may_call: Callable[[str], bool] = lambda address: True

    async def ask(self) -> Any:
        self.asked += 1
        here, there = connected()
        self.telling = asyncio.ensure_future(self.lanes.tell("me", self.hosts, there.reader, there))
        return here.reader, here

    async def observed(self, peer: str) -> str:
        return ""

    async def open(self) -> Sealed | None:
        return await self.mine.open("peer", self.ask, self.may_call, self.observed)


@asynccontextmanager
async def listening(
    listen: str = "/ip4/127.0.0.1/tcp/0", **settings: Any
) -> AsyncIterator[tuple[Lanes, list[str]]]:
    """A peer that answers everybody with what it read, and the peers that it served."""
    lanes, served = Lanes("peer"), list[str]()

    async def echo(peer: str, reader: Any, writer: Any) -> None:
        served.append(peer)
        try:
            while piece := await reader.read(1000):
                writer.write(piece)
        except BROKEN:
            pass
        writer.close()

    lanes.handler = echo
    await lanes.listen(SwarmConfig().model_copy(update={"listen": (listen,), **settings}))
    try:
        yield lanes, served
    finally:
        await lanes.close()
        while lanes._taken:
            await asyncio.wait([*lanes._taken])


@pytest.mark.parametrize(
    ("listen", "host"), [("/ip4/127.0.0.1/tcp/0", "127.0.0.1"), ("/ip6/::1/tcp/0", "::1")]
)
async def test_a_peer_is_reached_past_the_daemon_and_known_by_its_key(
    listen: str, host: str
) -> None:
    async with listening(listen) as (lanes, served):
        asked = Asked(lanes, ("192.0.2.1.example", host))
        for _ in range(2):
            stream = await asked.open()
            assert stream is not None
            stream.write(b"word")
            assert await stream.read(100) == b"word"
            stream.close()
        assert served == ["me"] * 2 and asked.asked == 1 and asked.mine.way("peer") == "direct"


async def test_another_key_another_name_or_a_record_of_a_connection_is_not_served() -> None:
    async with listening() as (lanes, served):
        asked = Asked(lanes)
        stream = await asked.open()
        assert stream is not None
        stream.close()
        door = asked.mine._ways["peer"].door
        with pytest.raises(BROKEN):
            await asked.mine._knock(Door(door.port, [], bytes(32)), "127.0.0.1")
        with pytest.raises(BROKEN):
            await Lanes("other")._knock(door, "127.0.0.1")
        sent = bytearray()

        async def tapped(factory: Callable[[], Sealed], *where: Any) -> Any:
            made = await type(loop).create_connection(loop, factory, *where)
            write = made[0].write
            made[0].write = lambda data: (sent.extend(data), write(data))  # type: ignore[attr-defined]
            return made

        loop = asyncio.get_running_loop()
        loop.create_connection = tapped  # type: ignore[method-assign, assignment]
        stream = await asked.open()
        assert stream is not None
        stream.write(b"word")
        assert await stream.read(100) == b"word"
        stream.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        writer.write(sent)
        with pytest.raises(BROKEN):
            await reader.readexactly(SALT_BYTES + 21)
        writer.close()
        assert served == ["me"] * 2


async def test_strangers_have_little_time_and_room_and_the_oldest_of_a_host_make_room(
    loop: VirtualLoop,
) -> None:
    lanes = Lanes("peer")

    def stranger(host: str, said: bytes = b"") -> Wire:
        wire = Wire(Sealed(lanes._take), host)
        wire.feed(said)
        return wire

    async def served(*_: Any) -> None:
        raise AssertionError

    lanes.handler = served
    silent = [stranger("192.0.2.1") for _ in range(STRANGERS_OF_ONE_HOST + 1)]
    other, half = stranger("192.0.2.2"), stranger("192.0.2.3", b"me")
    garbage = stranger("192.0.2.4", b"G" * 100_000)
    large = stranger("192.0.2.5", bytes(HELLO_BYTES) + FRAME_BYTES.to_bytes(4, "big") + b"x" * 9999)
    await asyncio.sleep(1)
    assert [wire.closing for wire in silent] == [True] + [False] * STRANGERS_OF_ONE_HOST
    assert garbage.closing and large.closing and not other.closing and not half.closing
    await asyncio.sleep(HELLO_S)
    assert all(wire.closing for wire in (*silent, other, half))
    everybody = (*silent, other, half, garbage, large)
    assert max(len(wire.stream._buffer) for wire in everybody) < 2048 and not lanes._taken
    [*_, newest] = [stranger(f"192.0.2.{n}") for n in range(200)]
    await asyncio.sleep(0)
    assert len(lanes._taken) <= 128 + 200 and not newest.closing
    await asyncio.sleep(1)
    assert len(lanes._taken) == 128
    await lanes.close()


async def test_what_a_peer_asks_too_often_for_is_not_answered() -> None:
    lanes, pipe = Lanes("peer"), Pipe()
    for _ in range(31):
        await lanes.tell("me", [], pipe.reader, pipe)
    assert pipe.messages() == [Door()] * 30 and pipe.closed
    for field in ({"port": 65536}, {"key": bytes(31)}, {"hosts": ["a"] * 5}, {"hosts": ["a" * 46]}):
        with pytest.raises(PayloadError, match="does not fit its schema"):
            decode(msgpack.packb({"kind": "door", **field}))


# -- where none can be made ------------------------------------------------------------------------


async def test_a_blocked_port_is_waited_for_once_a_minute_and_the_daemon_carries_the_rest(
    loop: VirtualLoop,
) -> None:
    lanes, tried = Lanes("peer", no_handler, 4101), list[Any]()
    asked = Asked(lanes, ("192.0.2.1", "192.0.2.2", "::1"))
    asked.may_call = lambda address: address != "/ip6/::1/tcp/4101"

    async def blocked(factory: Any, *where: Any) -> Any:
        tried.append(where)
        await asyncio.Event().wait()

    loop.create_connection = blocked  # type: ignore[method-assign, assignment]
    first = asyncio.create_task(asked.open())
    await asyncio.sleep(KNOCK_S / 2)
    assert await asked.open() is None and loop.time() == KNOCK_S / 2, "it does not wait as well"
    assert await first is None and loop.time() == KNOCK_S
    assert tried == [("192.0.2.1", 4101), ("192.0.2.2", 4101)] and asked.asked == 1
    assert asked.mine.way("peer") == "daemon"
    await asyncio.sleep(AGAIN_S - KNOCK_S - 0.01)
    assert await asked.open() is None and asked.asked == 1
    await asyncio.sleep(KNOCK_S + 0.01)

    async def connects(factory: Callable[[], Sealed], *where: Any) -> Any:
        return None, joined(factory(), Sealed(lanes._take))

    loop.create_connection = connects  # type: ignore[method-assign, assignment]
    assert await asked.open() is not None and asked.asked == 2
    assert asked.mine.way("peer") == "direct"


async def no_handler(*_: Any) -> None: ...


def joined(opener: Sealed, acceptor: Sealed) -> Sealed:
    """Two ends between which bytes move by themselves."""
    wires = [Wire(opener), Wire(acceptor)]
    for wire, other in (wires, wires[::-1]):
        wire.write = lambda data, to=other: to.feed(bytes(data))  # type: ignore[method-assign]
    return opener


@pytest.mark.parametrize("why", ["old", "no door", "no answer", "another peer"])
async def test_a_peer_without_a_lane_is_reached_by_the_daemon(why: str, loop: VirtualLoop) -> None:
    asked = Asked(Lanes("peer", no_handler))

    async def old() -> Any:
        asked.asked += 1
        raise ConnectionError("protocol not supported")

    async def silent() -> Any:
        asked.asked += 1
        here, _ = connected()
        return here.reader, here

    async def elsewhere(factory: Callable[[], Sealed], *where: Any) -> Any:
        stream = factory()
        Wire(stream).feed(b"SSH-2.0-OpenSSH_9.6 what is this" * 9)
        return None, stream

    loop.create_connection = elsewhere  # type: ignore[method-assign, assignment]
    asked.lanes.port = 4101 * (why == "another peer")
    if why in ("old", "no answer"):
        asked.ask = old if why == "old" else silent  # type: ignore[method-assign]
    assert await asked.open() is None and asked.mine.way("peer") == "daemon"
    assert loop.time() == (KNOCK_S if why == "no answer" else 0.0)
    assert await asked.open() is None and asked.asked == 1
    await asyncio.sleep(AGAIN_S)
    assert await asked.open() is None and asked.asked == 2


async def test_a_peer_that_has_restarted_is_asked_anew(loop: VirtualLoop) -> None:
    asked = Asked(Lanes("peer", no_handler, 4101))

    async def connects(factory: Callable[[], Sealed], *where: Any) -> Any:
        return None, joined(factory(), Sealed(asked.lanes._take))

    loop.create_connection = connects  # type: ignore[method-assign, assignment]
    assert await asked.open() is not None
    asked.lanes = Lanes("peer", no_handler, 4101)
    assert await asked.open() is None and asked.mine.way("peer") == "daemon"
    await asyncio.sleep(AGAIN_S)
    assert await asked.open() is not None and asked.asked == 2


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listen", "bulk_port", "expected"),
    [
        (("/ip4/127.0.0.1/tcp/0",), None, (["127.0.0.1"], 0)),
        (("/ip4/0.0.0.0/tcp/4100", "/ip6/::/tcp/4100"), None, (["0.0.0.0", "::"], 4101)),
        (("/ip4/0.0.0.0/tcp/4100",), 0, (["0.0.0.0"], 0)),
        (("/ip4/0.0.0.0/tcp/4100",), 9000, (["0.0.0.0"], 9000)),
        (("/ip4/0.0.0.0/tcp/65535",), None, (["0.0.0.0"], 0)),
        (("/dns4/localhost/tcp/4100",), None, ([], 4101)),
    ],
)
def test_the_port_is_the_one_that_is_set_or_the_next(
    listen: tuple[str, ...], bulk_port: int | None, expected: Any
) -> None:
    network = SwarmConfig().model_copy(update={"listen": listen, "bulk_port": bulk_port})
    assert places(network) == expected


async def test_a_taken_port_is_an_error_if_it_was_asked_for() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(SwarmError, match=f"swarm.bulk_port={port} cannot be .* 0 for any"):
            async with listening(bulk_port=port):
                raise AssertionError
        async with listening(f"/ip4/127.0.0.1/tcp/{port - 1}") as (lanes, _):
            assert lanes.port not in (0, port)


@pytest.mark.parametrize("key", ["listen", "announce"])
def test_quic_is_refused_by_name(key: str) -> None:
    tcp = "write /ip4/0.0.0.0/tcp/4100"
    with pytest.raises(ConfigError, match=f"swarm.{key}=/ip4.*quic-v1 is QUIC.*; {tcp}$"):
        PeerSwarmConfig.parse({key: ["/ip4/0.0.0.0/udp/4100/quic-v1"]})


def test_the_host_of_an_address_is_an_ip_and_no_relay() -> None:
    addresses = ["/ip4/192.0.2.1/tcp/1/p2p/Qm", "/ip6/::1/tcp/1", "/dns4/a.example/tcp/1", ""]
    addresses.append("/ip4/192.0.2.1/tcp/1/p2p/Qm/p2p-circuit")
    assert [host_in(address) for address in addresses] == ["192.0.2.1", "::1", "", "", ""]
