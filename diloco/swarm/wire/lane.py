"""Bulk streams past the daemon, through which a byte costs seven times as much.

1. The opener asks for a `Door` over a stream of the daemons, once per peer: both know who the other
   is, and the gate has let the opener in.
2. It connects to the port there, and proves with the key of the door who it is (`sealed`).
3. The acceptor serves the connection like a bulk stream of the daemon: gate, limits, penalties.

Where no such connection can be made within `KNOCK_S`, the daemon carries the streams to that peer,
and after `AGAIN_S` the next one tries again. Nobody waits for another stream that tries.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta
from msgspec import field as struct_field

from diloco.config import SwarmConfig
from diloco.core.members import MAX_PEERS
from diloco.errors import PayloadError, SwarmError
from diloco.messages.base import Message
from diloco.messages.codec import expect
from diloco.messages.fields import forget_oldest
from diloco.swarm.limits import CONTROL_STREAMS, STRANGERS_OF_ONE_HOST, Limiter, Newest
from diloco.swarm.wire.sealed import SALT_BYTES, SECRET_BYTES, Sealed, derived
from diloco.swarm.wire.streams import BROKEN, PeerStream, Traffic
from diloco.swarm.wire.transport import ByteReader, ByteWriter, Handler

LANE = "diloco/1/lane"
DIRECT, DAEMON = "direct", "daemon"
KNOCK_S = 2.0  # for the question and the connections to all hosts
AGAIN_S = 60.0
HELLO_S = 10.0  # of a stranger
HOSTS = 4
_NAME_BYTES = 64  # a peer id, and zeros

Host = Annotated[str, Meta(max_length=45)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Secret = Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]


class Door(Message, frozen=True, tag="door"):
    """Where and with which key a peer takes bulk connections of the one that asks; port 0: it takes
    none."""

    port: Port = 0
    hosts: Annotated[list[Host], Meta(max_length=HOSTS)] = struct_field(default_factory=list)
    key: Secret = bytes(SECRET_BYTES)


@dataclass
class _Way:
    """To one peer: the door and its host, once a connection was made there."""

    door: Door = field(default_factory=Door)
    host: str = ""
    again_at: float = 0.0  # until then the daemon is taken


def places(network: SwarmConfig) -> tuple[list[str], int]:
    """The hosts to listen on, and the port: `swarm.bulk_port`, the one next to that of
    `swarm.listen`, or 0 for any."""
    parts = [address.split("/") for address in network.listen]
    hosts = [part[2] for part in parts if part[1] in ("ip4", "ip6")]
    fixed = next((int(part[4]) for part in parts if len(part) > 4 and part[4] != "0"), 65535)
    port = network.bulk_port
    return hosts, (fixed + 1 if fixed < 65535 else 0) if port is None else port


@dataclass
class Lanes:
    """The direct connections of one peer, those that it opens and those that it takes.

    A connection that fails is a broken stream, like any other; one that cannot be made is None.
    """

    me: str
    handler: Handler | None = None
    port: int = 0  # where it listens; 0: nowhere
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES))
    _ways: dict[str, _Way] = field(default_factory=dict)
    _servers: list[asyncio.Server] = field(default_factory=list)
    _taken: dict[asyncio.Task[None], Sealed] = field(default_factory=dict)
    _strangers: Newest[Sealed] = field(default_factory=lambda: Newest(STRANGERS_OF_ONE_HOST))
    _asked: Limiter = field(default_factory=lambda: Limiter(*CONTROL_STREAMS))

    def way(self, peer: str) -> str:
        """How the last stream to a peer went: `DIRECT`, `DAEMON`, or "" if there was none."""
        way = self._ways.get(peer)
        return "" if way is None else DIRECT if way.host else DAEMON

    def _key(self, peer: str) -> bytes:
        return derived(self._secret, b"", peer.encode())

    # -- taking ------------------------------------------------------------------------------------

    async def listen(self, network: SwarmConfig) -> None:
        """Take connections on each host of `swarm.listen`. `SwarmError` if `swarm.bulk_port` is
        taken by another program; any free port does instead of the one next to the other."""
        hosts, port = places(network)
        try:
            await self._listen(hosts, port)
        except OSError as error:
            await self.close()
            if network.bulk_port:
                why = f"swarm.bulk_port={port} cannot be listened on: {error.strerror}"
                raise SwarmError(f"{why}; choose another port, or 0 for any") from None
            with suppress(OSError):  # then the daemon carries it all
                await self._listen(hosts, 0)

    async def _listen(self, hosts: Sequence[str], port: int) -> None:
        loop = asyncio.get_running_loop()
        for host in hosts:
            server = await loop.create_server(lambda: Sealed(self._take), host, port)
            self._servers.append(server)
            port = server.sockets[0].getsockname()[1]
        self.port = port

    async def tell(
        self, peer: str, hosts: Sequence[str], reader: ByteReader, writer: ByteWriter
    ) -> None:
        """Answer the question for the door; a `Handler` but for the hosts."""
        stream = PeerStream(peer, reader, writer, Traffic())
        if self._asked.opened(peer, asyncio.get_running_loop().time()) is not None:
            return stream.close()
        try:
            door = Door()
            if self.port and hosts and self.handler is not None:
                door = Door(self.port, [*hosts[:HOSTS]], self._key(peer))
            await stream.send(door)
            await stream.drained()
        except (*BROKEN, PayloadError):
            pass
        finally:
            self._asked.closed(peer)
            stream.close()

    def _take(self, stream: Sealed) -> None:
        host = str(stream.transport.get_extra_info("peername", [""])[0])
        for older in self._strangers.add(host, stream):
            older.abort()
        task = asyncio.get_running_loop().create_task(self._serve(stream))
        self._taken[task] = stream
        task.add_done_callback(self._taken.pop)

    async def _serve(self, stream: Sealed) -> None:
        try:
            async with asyncio.timeout(HELLO_S):
                hello = await stream.clear(_NAME_BYTES + SALT_BYTES)
                peer = hello[:_NAME_BYTES].rstrip(b"\0").decode("ascii", "replace")
                salt = secrets.token_bytes(SALT_BYTES)
                stream.write_clear(salt)
                stream.use(self._key(peer), hello[_NAME_BYTES:] + salt, opens=False)
                stream.prove()
                await stream.check()
        except BROKEN:
            return stream.abort()
        finally:
            self._strangers.remove(stream)
        assert self.handler is not None, "there was no door"
        await self.handler(peer, stream, stream)

    # -- opening -----------------------------------------------------------------------------------

    async def open(
        self,
        peer: str,
        ask: Callable[[], Awaitable[tuple[ByteReader, ByteWriter]]],
        may_call: Callable[[str], bool],
        observed: Callable[[str], Awaitable[str]],
    ) -> Sealed | None:
        """A connection to a peer, or None: take the daemon. `ask` opens a `LANE` stream there;
        `observed` is where the daemon is connected to it."""
        now = asyncio.get_running_loop().time()
        way = self._ways.setdefault(peer, _Way())
        forget_oldest(self._ways, MAX_PEERS)
        if now < way.again_at:
            return None
        hosts = [way.host]
        if not way.host:
            way.again_at = now + AGAIN_S  # meanwhile others take the daemon
        try:
            async with asyncio.timeout(KNOCK_S):
                if not way.host:
                    way.door = await _door(peer, ask)
                    named = dict.fromkeys([host_in(await observed(peer)), *way.door.hosts])
                    hosts = [host for host in named if _may(way.door, host, may_call)]
                way.host, stream = await self._first(way.door, hosts)
        except (*BROKEN, PayloadError):
            way.host, way.again_at = "", now + AGAIN_S
            return None
        way.again_at = 0.0
        return stream

    async def _first(self, door: Door, hosts: Sequence[str]) -> tuple[str, Sealed]:
        """The first host that proves itself; the others are given up."""
        calls = [asyncio.ensure_future(self._knock(door, host)) for host in hosts]
        chosen: tuple[str, Sealed] | None = None
        try:
            for call in asyncio.as_completed(calls):
                with suppress(*BROKEN):
                    chosen = await call
                    return chosen
            raise ConnectionError("no host of a peer takes a direct connection")
        finally:
            for task in calls:
                task.cancel()
            for made in await asyncio.gather(*calls, return_exceptions=True):
                if isinstance(made, tuple) and made is not chosen:
                    made[1].abort()

    async def _knock(self, door: Door, host: str) -> tuple[str, Sealed]:
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_connection(Sealed, host, door.port)
        try:
            salt = secrets.token_bytes(SALT_BYTES)
            stream.write_clear(self.me.encode().ljust(_NAME_BYTES, b"\0") + salt)
            stream.use(door.key, salt + await stream.clear(SALT_BYTES), opens=True)
            await stream.check()
            stream.prove()
        except BaseException:
            stream.abort()
            raise
        return host, stream

    async def close(self) -> None:
        """End all connections that were taken; those that were opened end with their streams."""
        for server in self._servers:
            server.close()
        self._servers.clear()
        for stream in self._taken.values():
            stream.abort()


async def _door(peer: str, ask: Callable[[], Awaitable[tuple[ByteReader, ByteWriter]]]) -> Door:
    stream = PeerStream(peer, *await ask(), Traffic())
    try:
        return expect(await stream.receive(KNOCK_S), Door)
    finally:
        stream.close()


def host_in(address: str) -> str:
    """The IP of a multiaddr; empty for the address of a relay, and where there is none."""
    _, family, host, *_ = [*address.split("/"), "", "", ""]
    return host if family in ("ip4", "ip6") and "/p2p-circuit" not in address else ""


def _may(door: Door, host: str, may_call: Callable[[str], bool]) -> bool:
    """Whether to connect to a host on hearsay; never to a name, which may become any host."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return False
    return door.port > 0 and may_call(f"/ip{version}/{host}/tcp/{door.port}")
