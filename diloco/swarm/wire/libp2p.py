"""The network of a peer: a libp2p daemon, which is a child of this process, and the DHT of the run.

`hivemind.DHT` would fork a process. A `DHTNode` on a `P2P` of our own event loop needs none.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.config import SwarmConfig
from diloco.config.address import addresses_in, peer_id_of, reachability, same_subnet
from diloco.errors import ConfigError, DilocoError, SwarmError
from diloco.swarm.wire.dialing import LOCAL, best_first, call_each, client_daemon, start_daemon
from diloco.swarm.wire.gate import GREETING, IN_USE, Gate
from diloco.swarm.wire.hivemind_names import (
    P2P,
    ControlFailure,
    Multiaddr,
    P2PDaemonError,
    PeerID,
    StreamInfo,
)
from diloco.swarm.wire.identity import WORD, SigningKey, verify
from diloco.swarm.wire.lane import LANE, Lanes, check_free
from diloco.swarm.wire.streams import BROKEN, BULK, CONTROL
from diloco.swarm.wire.transport import (
    ByteReader,
    ByteWriter,
    Handler,
    Refused,
    Transport,
    Untrusted,
)
from diloco.text import one_line

if TYPE_CHECKING:
    from diloco.swarm.wire.dht import AddressRecords

ADDRESS_WAIT_S = 120.0
VISIT_WAIT_S = 10.0
CLOSE_S = 5.0
# parts of libp2p's errors when it has no address of a peer
_LOST = ("routing: not found", "failed to find any peer in table")

Ask = Callable[[Transport], Awaitable[tuple[bool, str]]]
"""Asks other peers whether they can connect to this one, and what would help if not."""


async def read_addresses(entries: Sequence[str], timeout_s: float) -> list[str]:
    """Return addresses, with those in each `@FILE`; `SwarmError` if no file appears in time."""
    addresses: list[str] = []
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout_s
    for entry in entries:
        path = Path(entry[1:])
        # os.path.exists accepts any text; Path.exists raises for some
        while entry.startswith("@") and not os.path.exists(path):
            if loop.time() > until:
                why = f"no address in {path} after {timeout_s:.0f} s"
                raise SwarmError(f"swarm.initial_peers: {why}")
            await asyncio.sleep(0.05)
        listed = addresses_in(path) if entry.startswith("@") else [entry]
        if not listed:
            remedy = "put the address of a peer, or the link of an invitation, into it"
            raise ConfigError(f"{entry} is empty; {remedy}")
        addresses += listed
    for address in addresses:
        peer_id_of(address)
    return addresses


def in_vpn(announce: Sequence[str]) -> bool:
    """Return True for an address of a VPN or LAN: believed, as no seed elsewhere can test it."""
    return any(reachability(address) == "LAN" for address in announce)


def _broken(error: Exception, listen: Sequence[str] = ()) -> SwarmError:
    """Describe an error of libp2p on this machine."""
    if "failed to listen" in str(error):
        why = f"swarm.listen={','.join(listen)} cannot be listened on"
        return SwarmError(f"{why}; choose another address or port")
    remedy = "mend what it names, or reinstall hivemind"
    return SwarmError(f"libp2p failed on this machine: {one_line(error)}; {remedy}")


def _nobody(outcome: Mapping[str, str]) -> str:
    """Describe failed calls: which address failed for which reason, and a remedy."""
    by_reason: dict[str, list[str]] = {}
    for address, why in outcome.items():
        by_reason.setdefault(why, []).append(address)
    failures = [f"{','.join(addresses)}: {why}" for why, addresses in by_reason.items()]
    remedy = "check that a peer is running there and that its port is open"
    if by_reason.keys() <= LOCAL:
        remedy = "check the name and the network of this machine"
    text = ", nor ".join(failures).replace(": ", " cannot be reached: ", 1)
    return f"{text}; {remedy}"


class Libp2p:
    """The real `Transport`. Every stream and DHT call passes the gate."""

    def __init__(self, p2p: P2P, gate: Gate) -> None:
        self.me = gate.me = str(p2p.peer_id.to_base58())
        self.seeds: list[str] = []
        self.addresses: list[str] = []
        self.addresses_of: Callable[[str], Sequence[str]] = lambda peer: ()
        self.reachable, self.advice = True, ""
        self.store: Any = None
        self.silent: dict[str, str] = {}  # addresses without an answer, and the reasons
        self._scopes = {"public"}  # kinds of addresses that may be called on hearsay
        self._p2p, self._gate = p2p, gate
        self.direct = False  # True: open bulk streams past the daemon if possible
        self.lanes = Lanes(self)
        self.way = self.lanes.way
        self._members: AddressRecords | None = None
        self._identity: SigningKey | None = None

    @classmethod
    async def connect(
        cls,
        network: SwarmConfig,
        identity_path: Path,
        gate: Gate,
        run_id: str | None = None,
        ask: Ask | None = None,
    ) -> Libp2p:
        """Start listening (unless `reachable=no`), greet the initial peers, and join the DHT of a
        run.

        With `reachable=auto`, `ask` has a peer on another machine call back. `SwarmError`: no
        initial peer answers or admits this one, the port is in use, the only initial peer has this
        identity, or the daemon does not start; `ConfigError`: the identity's file cannot be written
        or holds no key, or an initial peer is no address.
        """
        given = await read_addresses(network.initial_peers, ADDRESS_WAIT_S)
        identity, kind = SigningKey.read(identity_path), P2P
        seeds = [address for address in given if peer_id_of(address) != identity.me]
        if given and not seeds:
            raise SwarmError(
                f"swarm.initial_peers={','.join(given)} has the identity of this peer; give the"
                " address of another one, or if a peer runs there, this one another file than"
                f" swarm.identity_path={identity_path}"
            )
        if run_id is not None:
            from diloco.swarm.wire import dht  # imports torch, which takes longer than a visit

            kind = dht.GuardedP2P
        listens = network.reachable != "no"
        if listens:
            check_free(network.listen)
        daemon = start_daemon(
            kind,
            host_maddrs=[*map(Multiaddr, network.listen)] or None,
            announce_maddrs=[*map(Multiaddr, network.announce)] or None,
            no_listen=not listens,
            dht_mode="server" if listens else "client",
            identity_path=str(identity_path),
        )
        self = await cls._of(daemon, gate, network.listen)
        self._identity, gate.instance = identity, secrets.token_hex(8)
        async with self._or_ended():
            await self._meet(seeds, "swarm.initial_peers=")
            if listens:
                visible = await self._p2p.get_visible_maddrs()
                self.addresses = best_first([str(address) for address in visible])
            self.reachable = bool(self.addresses)
            self._scopes |= {reachability(address) for address in network.announce}
            # Peers of one machine can call each other: check only with seeds on other machines, or
            # announced addresses.
            elsewhere = any(reachability(seed) != "loopback" for seed in seeds)
            in_doubt = seeds and (network.announce or elsewhere) and not in_vpn(network.announce)
            if ask is not None and network.reachable == "auto" and in_doubt:
                self.reachable, self.advice = await ask(self)
            if run_id is not None:
                if listens:
                    await self.lanes.listen(network)
                await self.handle(LANE, self.lanes.tell)
                self.direct = True
                self._p2p.gate, self._p2p.greet = gate, partial(self.greet, again=False)
                members = dht.AddressRecords(run_id, identity, gate)
                await members.join(self._p2p, self.seeds, self.reachable)
                self._members = members
        return self

    @classmethod
    async def client(
        cls,
        initial_peers: Sequence[str],
        gate: Gate | None = None,
        identity_path: Path | None = None,
    ) -> Libp2p:
        """Connect a peer that only makes requests, without the DHT and with a new identity.

        With `identity_path`, that is its identity. Its seeds are the peers that answered.
        `SwarmError` if no peer answers, or none admits it.
        """
        addresses = await read_addresses(initial_peers, VISIT_WAIT_S)
        if identity_path is not None:
            SigningKey.read(identity_path)  # makes the file
        key = None if identity_path is None else str(identity_path)
        self = await cls._of(client_daemon(key), gate or Gate())
        async with self._or_ended():
            await self._meet(addresses)
        return self

    @classmethod
    async def _of(cls, daemon: Awaitable[P2P], gate: Gate, listen: Sequence[str] = ()) -> Libp2p:
        try:
            return cls(await daemon, gate)
        except (P2PDaemonError, OSError, ValueError) as error:
            raise _broken(error, listen) from error

    @asynccontextmanager
    async def _or_ended(self) -> AsyncIterator[None]:
        """End the daemon after any error in the block."""
        try:
            yield
        except BaseException as error:
            await self.close()
            if isinstance(error, DilocoError) or not isinstance(error, Exception):
                raise
            raise _broken(error) from error

    async def _meet(self, addresses: Sequence[str], named: str = "") -> None:
        """Call and greet these addresses; `SwarmError` (`named ...`) if none answers."""
        outcome = await call_each(self._p2p, addresses)
        self.silent = {address: why for address, why in outcome.items() if why}
        self.seeds = list(dict.fromkeys(peer_id_of(at) for at, why in outcome.items() if not why))
        if outcome and not self.seeds:
            raise SwarmError(named + _nobody(outcome))
        self._scopes |= {reachability(address) for address in outcome}
        await self._p2p.add_binary_stream_handler(GREETING, self._welcome)
        greetings = (self.greet(seed, False) for seed in self.seeds)
        answers = await asyncio.gather(*greetings, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, Exception) and not isinstance(answer, BROKEN):
                raise answer
        in_use = any(isinstance(answer, Refused) and str(answer) == IN_USE for answer in answers)
        for answer in answers if in_use or None not in answers else ():
            if isinstance(answer, Refused):
                raise SwarmError(f"the swarm refused this peer: {answer}")
            if isinstance(answer, Untrusted):
                raise SwarmError(f"{answer}; check the address")

    async def _welcome(self, info: StreamInfo, reader: ByteReader, writer: ByteWriter) -> None:
        await self._gate.welcome(info.peer_id.to_base58(), reader, writer)

    async def handle(self, protocol: str, handler: Handler) -> None:
        async def serve(info: StreamInfo, reader: ByteReader, writer: ByteWriter) -> None:
            await self._gate.serve(info.peer_id.to_base58(), reader, writer, handler)

        await self._p2p.add_binary_stream_handler(protocol, serve)
        if protocol == BULK:
            self.lanes.handler = partial(self._gate.serve, handler=handler)

    async def open(self, peer: str, protocol: str) -> tuple[ByteReader, ByteWriter]:
        """As in `Transport`. A control stream greets again, as the peer may have restarted."""
        if self._gate.admission is not None:
            await self.greet(peer, again=protocol == CONTROL)
        if protocol == BULK and self.direct:
            if (stream := await self.lanes.open(peer)) is not None:
                return stream, stream
        return await self._open(peer, protocol)

    async def greet(self, peer: str, again: bool = True) -> None:
        """Exchange greetings and revocations with a peer, even `again`; raises as `open`."""
        await self._gate.greet(peer, partial(self._open, peer, GREETING), again)

    async def _open(self, peer: str, protocol: str) -> tuple[ByteReader, ByteWriter]:
        try:
            peer_id = PeerID.from_base58(peer)
        except ValueError:  # the id may be any text from a hello or the DHT
            raise ConnectionError(f"{peer[:64]!r} is no peer id") from None
        for called in (False, True):
            try:
                _, reader, writer = await self._p2p.call_binary_stream_handler(peer_id, protocol)
                return reader, writer
            except (ControlFailure, P2PDaemonError) as error:
                lost = not called and str(error).endswith(_LOST)
                # The peer may answer at an address that this one knows.
                known = self.addresses_of(peer) if lost else ()
                if "" not in (await call_each(self._p2p, known)).values():
                    raise ConnectionError(f"{peer} cannot be reached: {error}") from error
        raise AssertionError

    async def announce(self, life_s: float, met: Sequence[str]) -> None:
        assert self._members is not None
        await self._members.announce(self.addresses, life_s, met)

    async def announced(self) -> dict[str, list[str]]:
        assert self._members is not None
        return await self._members.announced()

    def sign(self, content: bytes) -> bytes:
        assert self._identity is not None, "a visitor signs nothing"
        return self._identity.sign(WORD, content)

    def verify(self, peer: str, content: bytes, signature: bytes) -> bool:
        return verify(WORD, peer, content, signature)

    async def observed(self, peer: str) -> str:
        for info in await self._p2p.list_peers():
            if info.peer_id.to_base58() == peer:
                return next((str(address) for address in info.addrs), "")
        return ""

    async def call_anew(self, peer: str, addresses: Sequence[str]) -> dict[str, str]:
        """As in `Transport`, by another daemon, as this one would reuse its open connection."""
        visitor = await client_daemon()
        try:
            outcome = {}
            for address in addresses:
                (outcome[address],) = (await call_each(visitor, [f"{address}/p2p/{peer}"])).values()
                await visitor._client.disconnect(PeerID.from_base58(peer))
            return outcome
        finally:
            await visitor.shutdown()

    async def hang_up(self, peer: str) -> None:
        with suppress(ControlFailure, P2PDaemonError):
            await self._p2p._client.disconnect(PeerID.from_base58(peer))

    def may_call(self, address: str) -> bool:
        """As in `Transport`: a LAN address if a seed is in a LAN, or in an own address's subnet."""
        near = any(same_subnet(address, own) for own in self.addresses)
        return reachability(address) in self._scopes or near

    async def failed(self) -> None:
        """As in `Transport`. Else a peer without its daemon would silently train on alone."""
        code = await self._p2p._child.wait()
        remedy = "run the same command again to go on from the checkpoint"
        raise SwarmError(f"this peer's libp2p daemon ended (code {code}); {remedy}")

    async def close(self) -> None:
        """End DHT and daemon in bounded time, as tasks that wait for a dead daemon never end."""
        await self.lanes.close()
        for part in filter(None, (self._members, self._p2p)):
            await asyncio.wait([asyncio.ensure_future(part.shutdown())], timeout=CLOSE_S)

    aclose = close  # for `contextlib.aclosing`
