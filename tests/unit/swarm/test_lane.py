"""Direct connections: what is sealed arrives as it was or not at all; strangers cost little; and
where none can be made, the daemon is taken."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
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
from diloco.swarm.wire.lane import AGAIN_S, HELLO_S, KNOCK_S, LANE, Door, Lanes
from diloco.swarm.wire.sealed import FRAME_BYTES, LINGER_S, SALT_BYTES
from diloco.swarm.wire.streams import BROKEN, PeerStream, Traffic
from tests.support.stub_wire import Pipe, connected, framed
from tests.support.wires import Wire, joined, sealed

PIECES = (b"one", bytes(range(256)) * 1200, b"three")  # the second makes two frames
SENT = b"".join(PIECES)
HELLO_BYTES = 64 + SALT_BYTES
ANY = "/ip4/127.0.0.1/tcp/0"


# -- frames ----------------------------------------------------------------------------------------


async def frames_of(salts: bytes = bytes(2 * SALT_BYTES)) -> list[bytes]:
    """What an opener writes that sends the pieces, and ends."""
    stream, wire = sealed(salts)
    stream._seal(memoryview(b""))
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
        await stream.meet()
        asyncio.get_running_loop().call_soon(wire.reader.feed_eof)
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
        if 0 < stream.arriving < 10:
            reading.cancel()  # loses nothing
            reading = asyncio.create_task(stream.read(10))
    assert await reading == b"", "frame 0 is empty"


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
    wire.to = wire.feed
    with pytest.raises(ConnectionError, match="did not send"):
        await stream.meet()
    assert wire.aborted.is_set()


async def test_a_connection_that_nobody_takes_bytes_of_is_ended_late(loop: VirtualLoop) -> None:
    stream, wire = sealed()
    reading = asyncio.create_task(stream.read(1))
    await asyncio.sleep(0)
    stream.close()
    with pytest.raises(ConnectionError, match="cut"):
        await reading
    assert loop.time() == 0.0 and len(wire.frames) == 1
    assert not wire.aborted.is_set(), "what was written is lost then"
    await asyncio.sleep(LINGER_S)
    assert wire.aborted.is_set()


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
    sender._seal(memoryview(b""))
    await there.send(Got(7))
    await there.send_payload(payload)
    assert there._traffic.bytes_sent == 200_000 + len(framed(Got(7))) and loop.time() > 0
    data, begun_at = b"".join(sending.frames), loop.time()

    async def drip() -> None:
        for at in range(0, len(data), 10_000):
            await asyncio.sleep(19)
            wire.feed(data[at : at + 10_000])

    dripping = asyncio.create_task(drip())
    await stream.meet()
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


class Network:
    """A transport as lanes need it: their question for a door goes through a pipe to `there`."""

    def __init__(self, me: str, *addresses: str) -> None:
        self.me, self.addresses, self.reachable, self.asked = me, addresses, True, 0
        self.may_call: Callable[[str], bool] = lambda address: True
        self.there: Lanes | None = None
        self.connected_at = "/ip4/192.0.2.9/tcp/4100/p2p/relay/p2p-circuit"

    async def open(self, peer: str, protocol: str) -> Any:
        assert (peer, protocol) == ("peer", LANE)
        self.asked += 1
        here, there = connected()
        if self.there is not None:
            self.telling = asyncio.ensure_future(self.there.tell(self.me, there.reader, there))
        return here.reader, here

    async def observed(self, peer: str) -> str:
        return self.connected_at


def lanes_of(me: str, *addresses: str, port: int = 0) -> tuple[Lanes, Any]:
    """Lanes that take connections there, and their network."""
    network: Any = Network(me, *addresses)
    lanes = Lanes(network)
    lanes.port, lanes.handler = port, no_handler
    return lanes, network


async def no_handler(*_: Any) -> None: ...


@asynccontextmanager
async def listening(*listen: str, **settings: Any) -> AsyncIterator[tuple[Lanes, list[str]]]:
    """A peer that answers everybody with what it read, and the peers that it served."""
    (lanes, _), served = lanes_of("peer", "/dns4/a.example/tcp/1", *listen), list[str]()

    async def echo(peer: str, reader: Any, writer: Any) -> None:
        served.append(peer)
        with suppress(*BROKEN):
            while piece := await reader.read(1000):
                writer.write(piece)
        writer.close()

    lanes.handler = echo
    await lanes.listen(SwarmConfig().model_copy(update={"listen": listen, **settings}))
    try:
        yield lanes, served
    finally:
        await lanes.close()
        while lanes._taken:
            await asyncio.wait([*lanes._taken])


@pytest.mark.parametrize(("listen", "host"), [(ANY, "127.0.0.1"), ("/ip6/::1/tcp/0", "::1")])
async def test_a_peer_is_reached_past_the_daemon_and_known_by_its_key(
    listen: str, host: str
) -> None:
    async with listening(listen) as (lanes, served):
        mine, network = lanes_of("me")
        network.there = lanes
        for _ in range(2):
            stream = await mine.open("peer")
            assert stream is not None
            stream.write(b"word")
            assert await stream.read(100) == b"word"
            stream.close()
        assert served == ["me"] * 2 and network.asked == 1 and mine.way("peer") == "direct"
        assert mine._ways["peer"].host == host


async def test_another_key_another_name_or_a_record_of_a_connection_is_not_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with listening(ANY) as (lanes, served):
        mine, network = lanes_of("me")
        network.there = lanes
        stream = await mine.open("peer")
        assert stream is not None
        stream.close()
        door = mine._ways["peer"].door
        with pytest.raises(BROKEN):
            await mine._knock(Door(door.port, [], bytes(32)), "127.0.0.1")
        with pytest.raises(BROKEN):
            await lanes_of("other")[0]._knock(door, "127.0.0.1")
        sent, write = bytearray(), asyncio.StreamWriter.write

        def tapped(writer: asyncio.StreamWriter, data: Any) -> None:
            if writer.get_extra_info("peername")[1] == door.port:
                sent.extend(data)
            write(writer, data)

        with monkeypatch.context() as patched:
            patched.setattr(asyncio.StreamWriter, "write", tapped)
            stream = await mine.open("peer")
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
    lanes, _ = lanes_of("peer")

    def stranger(host: str, said: bytes = b"") -> Any:
        wire: Any = Wire(host)
        wire.feed(said)
        lanes._take(wire.reader, wire)
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
    assert not lanes._taken
    [*_, newest] = [stranger(f"192.0.2.{n}") for n in range(200)]
    await asyncio.sleep(1)
    assert len(lanes._taken) == 128 and not newest.closing
    await lanes.close()


async def test_what_a_peer_asks_too_often_for_is_not_answered() -> None:
    (lanes, _), pipe = lanes_of("peer"), Pipe()
    for _ in range(31):
        await lanes.tell("me", pipe.reader, pipe)
    assert pipe.messages() == [Door()] * 30 and pipe.closed
    for field in ({"port": 65536}, {"key": bytes(31)}, {"hosts": ["a"] * 5}, {"hosts": ["a" * 46]}):
        with pytest.raises(PayloadError, match="does not fit its schema"):
            decode(msgpack.packb({"kind": "door", **field}))


# -- where none can be made ------------------------------------------------------------------------


def reaching(monkeypatch: pytest.MonkeyPatch, there: Callable[[], Any]) -> None:
    """Connections get to these lanes without a socket."""

    async def connects(host: str, port: int) -> Any:
        mine, theirs = joined()
        there()._take(theirs.reader, theirs)
        return mine.reader, mine

    monkeypatch.setattr(asyncio, "open_connection", connects)


async def test_a_blocked_port_is_waited_for_once_a_minute_and_the_daemon_carries_the_rest(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = ("/ip4/192.0.2.1/tcp/1", "/ip4/192.0.2.2/tcp/1", "/ip6/::1/tcp/1")
    (lanes, _), (mine, network) = lanes_of("peer", *addresses, port=4101), lanes_of("me")
    tried, network.there = list[Any](), lanes
    # where the daemon is connected to that peer is no hearsay
    network.connected_at = "/ip4/192.0.2.7/tcp/33000"
    network.may_call = lambda address: address[:11] == "/ip4/192.0." and "2.7" not in address

    async def blocked(*where: Any) -> None:
        tried.append(where)
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_connection", blocked)
    first = asyncio.create_task(mine.open("peer"))
    await asyncio.sleep(KNOCK_S / 2)
    assert await mine.open("peer") is None and loop.time() == KNOCK_S / 2, "it waits for no other"
    assert await first is None and loop.time() == KNOCK_S
    hosts = ["192.0.2.7", "192.0.2.1", "192.0.2.2"]
    assert tried == [(host, 4101) for host in hosts] and network.asked == 1
    assert mine.way("peer") == "daemon"
    await asyncio.sleep(AGAIN_S - KNOCK_S - 0.01)
    assert await mine.open("peer") is None and network.asked == 1
    await asyncio.sleep(KNOCK_S + 0.01)
    reaching(monkeypatch, lambda: lanes)
    assert await mine.open("peer") is not None and network.asked == 2
    assert mine.way("peer") == "direct"


@pytest.mark.parametrize("why", ["old", "no door", "hidden", "no answer", "another peer"])
async def test_a_peer_without_a_lane_is_reached_by_the_daemon(
    why: str, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    (lanes, theirs), (mine, network) = lanes_of("peer", "/ip4/192.0.2.1/tcp/1"), lanes_of("me")
    called = 0

    async def old(peer: str, protocol: str) -> Any:
        network.asked += 1
        raise ConnectionError("protocol not supported")

    async def elsewhere(*where: Any) -> Any:
        nonlocal called
        called += 1
        wire = Wire()
        wire.feed(b"SSH-2.0-OpenSSH_9.6 what is this" * 9)
        return wire.reader, wire

    monkeypatch.setattr(asyncio, "open_connection", elsewhere)
    lanes.port, theirs.reachable = 4101 * (why in ("hidden", "another peer")), why != "hidden"
    network.there = None if why == "no answer" else lanes
    if why == "old":
        network.open = old
    assert await mine.open("peer") is None and mine.way("peer") == "daemon"
    assert loop.time() == (KNOCK_S if why == "no answer" else 0.0)
    assert await mine.open("peer") is None and network.asked == 1
    await asyncio.sleep(AGAIN_S)
    assert await mine.open("peer") is None and network.asked == 2
    assert called == 2 * (why == "another peer")


async def test_a_peer_that_has_restarted_is_asked_anew(
    loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, network = lanes_of("me")
    network.there, _ = lanes_of("peer", "/ip4/192.0.2.1/tcp/1", port=4101)
    reaching(monkeypatch, lambda: network.there)
    assert await mine.open("peer") is not None
    network.there, _ = lanes_of("peer", "/ip4/192.0.2.1/tcp/1", port=4101)
    assert await mine.open("peer") is None and mine.way("peer") == "daemon"
    await asyncio.sleep(AGAIN_S)
    assert await mine.open("peer") is not None and network.asked == 2


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listen", "bulk_port", "expected"),
    [
        ([ANY], None, [("127.0.0.1", 0)]),
        (["/ip4/0.0.0.0/tcp/4100", "/ip6/::/tcp/4100"], None, [("0.0.0.0", 4101), ("::", 4101)]),
        (["/ip4/0.0.0.0/tcp/4100"], 0, [("0.0.0.0", 0)]),
        (["/ip4/0.0.0.0/tcp/4100"], 9000, [("0.0.0.0", 9000)]),
        (["/ip4/0.0.0.0/tcp/65535"], None, [("0.0.0.0", 0)]),
        (["/dns4/localhost/tcp/4100"], None, []),
    ],
)
async def test_the_port_is_the_one_that_is_set_or_the_next(
    listen: list[str], bulk_port: int | None, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Any]()

    async def start(take: Any, host: str, port: int) -> Any:
        asked.append((host, port))
        name = SimpleNamespace(getsockname=lambda: (host, port))
        return SimpleNamespace(sockets=[name], close=lambda: None)

    monkeypatch.setattr(asyncio, "start_server", start)
    async with listening(*listen, bulk_port=bulk_port):
        assert asked == expected


async def test_a_taken_port_is_an_error_if_it_was_asked_for() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(SwarmError, match=f"swarm.bulk_port={port} cannot be .* 0 for any"):
            async with listening(ANY, bulk_port=port):
                raise AssertionError
        async with listening(f"/ip4/127.0.0.1/tcp/{port - 1}") as (lanes, _):
            assert lanes.port not in (0, port)


@pytest.mark.parametrize("key", ["listen", "announce"])
def test_quic_is_refused_by_name(key: str) -> None:
    tcp = "write /ip4/0.0.0.0/tcp/4100"
    with pytest.raises(ConfigError, match=f"swarm.{key}=/ip4.*quic-v1 is QUIC.*; {tcp}$"):
        PeerSwarmConfig.parse({key: ["/ip4/0.0.0.0/udp/4100/quic-v1"]})
