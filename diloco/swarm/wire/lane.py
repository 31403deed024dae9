"""Direct connections for bulk streams, as a byte through the daemon takes several times the work.

1. The opener asks for a `Door` over a stream of the daemons, where both sides are authenticated and
   the gate has admitted the opener.
2. It connects to the port of the door, and proves its identity with the door's key (`sealed`).
3. The acceptor serves the connection like a bulk stream of the daemon: gate, limits, penalties.

If no such connection can be made within `KNOCK_S`, the daemon carries the streams to that peer, and
the first stream after `AGAIN_S` tries again. Other streams do not wait for this attempt.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from diloco.config import SwarmConfig
from diloco.core.members import MAX_PEERS
from diloco.errors import PayloadError, SwarmError
from diloco.messages.base import Message
from diloco.messages.codec import expect
from diloco.messages.fields import forget_oldest
from diloco.swarm.limits import CONTROL_STREAMS, STRANGERS_OF_ONE_HOST, Limiter, Newest
from diloco.swarm.wire.sealed import SALT_BYTES, SECRET_BYTES, Sealed, derived
from diloco.swarm.wire.streams import BROKEN, PeerStream, Traffic
from diloco.swarm.wire.transport import ByteReader, ByteWriter, Handler, Transport

LANE = "diloco/1/lane"
KNOCK_S = 2.0  # for the request and the connections to all hosts
AGAIN_S = 60.0
HELLO_S = 10.0  # for the handshake of a stranger
HOSTS, _NAME_BYTES = 4, 64  # a name is a peer id, padded with zeros

Hosts = Annotated[list[Annotated[str, Meta(max_length=45)]], Meta(max_length=HOSTS)]


def check_free(listen: Sequence[str]) -> None:
    """Raise `SwarmError` if one of these ports is in use: libp2p would silently share it."""
    for address in listen:
        _, family, host, _, port, *_ = address.split("/")
        if family not in ("ip4", "ip6") or port == "0":
            continue
        version = socket.AF_INET if family == "ip4" else socket.AF_INET6
        try:
            with socket.socket(version, socket.SOCK_STREAM) as probe:
                # a port with ended connections only counts as free
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, int(port)))
        except OSError as error:
            why = f"swarm.listen={address} cannot be listened on: {error.strerror}"
            raise SwarmError(f"{why}; choose another port, or 0 for any") from None


class Door(Message, frozen=True, tag="door"):
    """Hosts, port and key for bulk connections of the asker; port 0 if there are none."""

    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    hosts: Hosts = msgspec.field(default_factory=list)
    key: Annotated[bytes, Meta(min_length=32, max_length=32)] = bytes(SECRET_BYTES)


@dataclass
class _Way:
    """Route to one peer: its door, and the host at which a connection was made."""

    door: Door
    host: str = ""
    again_at: float = 0.0  # time until which the daemon is used


class Lanes:
    """The direct connections of one peer, outgoing and incoming.

    A connection that fails is a broken stream like any other; `open` returns None if none can be
    made.
    """

    def __init__(self, network: Transport) -> None:
        self.handler: Handler | None = None  # of bulk streams
        self.port = 0  # the port listened on; 0 if none
        self._network, self._secret = network, secrets.token_bytes(SECRET_BYTES)
        self._ways: dict[str, _Way] = {}
        self._servers: list[asyncio.Server] = []
        self._taken: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._strangers: Newest[asyncio.StreamWriter] = Newest(STRANGERS_OF_ONE_HOST)
        self._asked = Limiter(*CONTROL_STREAMS)

    def way(self, peer: str) -> str:
        """As in `Transport`."""
        way = self._ways.get(peer)
        return "" if way is None else "direct" if way.host else "daemon"

    def _key(self, peer: str) -> bytes:
        return derived(self._secret, b"", peer.encode())

    async def listen(self, settings: SwarmConfig) -> None:
        """Accept connections on the hosts of `swarm.listen`. `SwarmError` if `swarm.bulk_port` is
        in use; if the default port, next to libp2p's, is in use, any free port is taken."""
        parts = [[*address.split("/"), "0", "0", "0"] for address in settings.listen]
        hosts = [part[2] for part in parts if part[1] in ("ip4", "ip6")]
        fixed = next((int(part[4]) for part in parts if part[4] != "0"), 65535)
        port = (fixed + 1) % 65536 if settings.bulk_port is None else settings.bulk_port
        try:
            await self._listen(hosts, port)
        except OSError as error:
            await self.close()
            if settings.bulk_port:
                why = f"swarm.bulk_port={port} cannot be listened on: {error.strerror}"
                raise SwarmError(f"{why}; choose another port, or 0 for any") from None
            with suppress(OSError):  # without a port, the daemon carries all streams
                await self._listen(hosts, 0)

    async def _listen(self, hosts: Sequence[str], port: int) -> None:
        for host in hosts:
            self._servers.append(await asyncio.start_server(self._take, host, port))
            port = self._servers[-1].sockets[0].getsockname()[1]
        self.port = port

    async def tell(self, peer: str, reader: ByteReader, writer: ByteWriter) -> None:
        """Answer a request for the door, as a `Handler`."""
        with closing(PeerStream(peer, reader, writer, Traffic())) as stream:
            if self._asked.opened(peer, asyncio.get_running_loop().time()) is not None:
                return
            hosts, door = [*filter(None, map(_host_in, self._network.addresses))], Door()
            if self.port and self._network.reachable and self.handler is not None:
                door = Door(self.port, hosts[:HOSTS], self._key(peer))
            with suppress(*BROKEN, PayloadError):
                await stream.send(door)
                await stream.drained()
            self._asked.closed(peer)

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host = str((writer.get_extra_info("peername") or [""])[0])
        for older in self._strangers.add(host, writer):
            older.transport.abort()
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._taken[task] = writer
        task.add_done_callback(self._taken.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HELLO_S):
                hello = await reader.readexactly(_NAME_BYTES + SALT_BYTES)
                peer = hello[:_NAME_BYTES].rstrip(b"\0").decode("ascii", "replace")
                salt = secrets.token_bytes(SALT_BYTES)
                writer.write(salt)
                salts = hello[_NAME_BYTES:] + salt
                stream = Sealed((reader, writer), self._key(peer), salts, opens=False)
                await stream.meet()
        except BROKEN:
            return writer.transport.abort()
        finally:
            self._strangers.remove(writer)
        assert self.handler is not None, "there was no door"
        await self.handler(peer, stream, stream)

    async def close(self) -> None:
        """End all incoming connections; outgoing ones end with their streams."""
        while self._servers:
            self._servers.pop().close()
        for writer in self._taken.values():
            writer.transport.abort()

    async def open(self, peer: str) -> Sealed | None:
        """Open a connection to a peer; None if the daemon has to be used."""
        now = asyncio.get_running_loop().time()
        way = self._ways.setdefault(peer, _Way(Door()))
        forget_oldest(self._ways, MAX_PEERS)
        if now < way.again_at:
            return None
        hosts, way.again_at = [way.host], 0.0 if way.host else now + AGAIN_S
        try:
            async with asyncio.timeout(KNOCK_S):
                if not way.host:
                    ends = await self._network.open(peer, LANE)
                    with closing(PeerStream(peer, *ends, Traffic())) as stream:
                        way.door = expect(await stream.receive(), Door)
                    near = _host_in(await self._network.observed(peer))  # not from the peer itself
                    named = [host for host in way.door.hosts if self._may(way.door, host)]
                    hosts = [*dict.fromkeys([near] * bool(near) + named)] * (way.door.port > 0)
                way.host, made = await self._first(way.door, hosts)
        except (*BROKEN, PayloadError):
            way.host, way.again_at = "", now + AGAIN_S
            return None
        way.again_at = 0.0
        return made

    def _may(self, door: Door, host: str) -> bool:
        """Return True if the peer may make us connect there; never for a name, but for an IP."""
        with suppress(ValueError):
            version = ipaddress.ip_address(host).version
            return self._network.may_call(f"/ip{version}/{host}/tcp/{door.port}")
        return False

    async def _first(self, door: Door, hosts: Sequence[str]) -> tuple[str, Sealed]:
        """Return the first host that proves its identity, and its connection; close the others."""
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
                    made[1].close()

    async def _knock(self, door: Door, host: str) -> tuple[str, Sealed]:
        reader, writer = await asyncio.open_connection(host, door.port)
        try:
            salt = secrets.token_bytes(SALT_BYTES)
            writer.write(self._network.me.encode().ljust(_NAME_BYTES, b"\0") + salt)
            salts = salt + await reader.readexactly(SALT_BYTES)
            stream = Sealed((reader, writer), door.key, salts, opens=True)
            await stream.meet()
        except BaseException:
            writer.transport.abort()
            raise
        return host, stream


def _host_in(address: str) -> str:
    """Return the IP of a multiaddr; empty for the address of a relay, and without an IP."""
    _, family, host, *_ = [*address.split("/"), "", "", ""]
    return host if family in ("ip4", "ip6") and "/p2p-circuit" not in address else ""
