"""The libp2p daemon of a peer: how it ends, and whom it finds at which address."""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from diloco.config import SwarmConfig
from diloco.swarm.client.watch import request_snapshot
from diloco.swarm.wire.dialing import client_daemon
from diloco.swarm.wire.gate import Gate
from diloco.swarm.wire.lane import LANE
from diloco.swarm.wire.libp2p import Libp2p
from diloco.swarm.wire.streams import BULK
from tests.support.peers import Crowd, command, dead_port
from tests.support.printing import printed_of

NOBODY = "QmUYK1bpVamMQVPfZMKwiSGxtHt8YKFTrtGbAovwGvQuGU"


def test_a_visit_that_is_given_up_while_it_calls_leaves_no_daemon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    daemons: list[Any] = []

    async def kept(*arguments: Any) -> Any:
        daemons.append(await client_daemon(*arguments))
        return daemons[-1]

    monkeypatch.setattr("diloco.swarm.wire.libp2p.client_daemon", kept)

    async def scene() -> None:
        called = asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            called.set()
            with suppress(ConnectionError):
                await reader.read()
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        visiting = asyncio.ensure_future(Libp2p.client([f"/ip4/127.0.0.1/tcp/{port}/p2p/{NOBODY}"]))
        await called.wait()
        visiting.cancel()
        await asyncio.wait([visiting])
        assert visiting.cancelled() and daemons[0]._child.returncode is not None
        server.close()

    assert printed_of(scene) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "typed", ["diloco doctor ", "diloco.train experiment=smoke swarm.initial_peers="]
)
def test_whom_nobody_answers_reads_one_line_of_ours(typed: str, tmp_path: Path) -> None:
    address = f"/ip4/127.0.0.1/tcp/{dead_port()}/p2p/{NOBODY}"
    with command("-m", typed + address, directory=tmp_path) as started:
        started.done(3)
    assert (started.stderr + started.stdout).count("cannot be reached") == 1
    assert "Loop" not in started.stderr and "asyncio" not in started.stderr
    lines = [one for one in started.stderr.splitlines() if not one.startswith("diloco: [")]
    assert len(lines) <= 1, "and of progress, which a slow machine shows"


@pytest.mark.slow
def test_a_peer_that_libp2p_cannot_find_is_called_where_it_said_that_it_is(tmp_path: Path) -> None:
    crowds = [Crowd(tmp_path / name, {"w": (8, 8)}, fragments=2) for name in ("one", "two")]
    try:
        # neither has ever heard of the other
        [known], [other] = (crowd.start(1) for crowd in crowds)

        async def call() -> str:
            visitor = await Libp2p.client([known.address], Gate())
            try:
                with pytest.raises(ConnectionError, match="cannot be reached"):
                    await visitor.open(other.peer_id, BULK)
                visitor.addresses_of = {other.peer_id: [other.address]}.__getitem__
                return (await request_snapshot(visitor, other.peer_id)).run.answered_by
            finally:
                await visitor.close()

        assert asyncio.run(call()) == other.peer_id
    finally:
        for crowd in crowds:
            crowd.close()


def test_members_find_each_other_through_any_one_that_lives(tmp_path: Path) -> None:
    """Also those of two halves that have lost each other, once two peers have met."""

    async def scene() -> None:
        peers = list[Libp2p]()
        try:
            for name, through in (("first", None), ("second", 0), ("third", None), ("fourth", 2)):
                seeds = () if through is None else tuple(peers[through].addresses[:1])
                network = SwarmConfig().model_copy(update={"initial_peers": seeds})
                peers.append(await Libp2p.connect(network, tmp_path / name, Gate(), "run"))
            first, second, third, fourth = peers
            await first.announce(60.0, [])
            assert await second.announced() == {first.me: first.addresses[:4]}
            assert await fourth.announced() == {}
            second.addresses_of = {third.me: third.addresses[:1]}.__getitem__
            with pytest.raises(ConnectionError, match="not supported"):
                await second.open(third.me, BULK)
            for one, met in ((second, [third.me]), (third, [second.me]), (first, [second.me])):
                await one.announce(60.0, met)
            three = {one.me: one.addresses[:4] for one in (first, second, third)}
            assert await fourth.announced() == three
        finally:
            for peer in peers:
                await peer.close()

    asyncio.run(scene())


@pytest.mark.parametrize("way", ["direct", "daemon", "blocked"])
def test_bulk_streams_go_past_the_daemon_where_both_peers_and_the_port_allow_it(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """daemon: the other peer is of a version that knows of no lane."""

    async def scene() -> None:
        first = await Libp2p.connect(SwarmConfig(), tmp_path / "first", Gate(), "run")
        seeds = {"initial_peers": tuple(first.addresses[:1])}
        network = SwarmConfig().model_copy(update=seeds)
        second = await Libp2p.connect(network, tmp_path / "second", Gate(), "run")
        served = list[tuple[str, str]]()

        async def echo(peer: str, reader: Any, writer: Any) -> None:
            served.append((peer, type(reader).__name__))
            writer.write(await reader.read(100))
            await reader.read(1)
            writer.close()

        try:
            if way == "daemon":
                await first._p2p.remove_binary_stream_handler(LANE)
            if way == "blocked":
                for server in first.lanes._servers:
                    server.close()
            await first.handle(BULK, echo)
            for _ in range(2):
                reader, writer = await second.open(first.me, BULK)
                writer.write(b"word")
                assert await reader.read(100) == b"word"
                writer.close()
            kind = "Sealed" if way == "direct" else "StreamReader"
            assert served == [(second.me, kind)] * 2
            assert second.way(first.me) == ("direct" if way == "direct" else "daemon")
        finally:
            for peer in (second, first):
                await peer.close()

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("announced", "is_believed"),
    [("/ip4/100.64.0.9/tcp/4100", True), ("/ip4/1.1.1.1/tcp/4100", False)],
)
def test_an_address_in_a_vpn_is_believed_as_nobody_elsewhere_can_test_it(
    tmp_path: Path, announced: str, is_believed: bool
) -> None:
    async def cannot(transport: Any) -> tuple[bool, str]:
        return False, "no answer"

    async def scene() -> None:
        first = await Libp2p.connect(SwarmConfig(), tmp_path / "first", Gate())
        places = {"initial_peers": first.addresses[:1], "announce": [announced]}
        try:
            second = await Libp2p.connect(
                SwarmConfig(**places), tmp_path / "second", Gate(), ask=cannot
            )
            try:
                assert second.addresses == [f"{announced}/p2p/{second.me}"]
                assert second.reachable == is_believed
                assert second.may_call("/ip4/100.101.1.1/tcp/4100") == is_believed
            finally:
                await second.close()
        finally:
            await first.close()

    asyncio.run(scene())
