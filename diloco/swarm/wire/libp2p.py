"""Starts the two halves of hivemind in this process's own event loop: the libp2p daemon and the DHT node.

`hivemind.DHT` would fork a process of its own. A `DHTNode` on a `P2P` of our loop needs none and leaves nothing behind:
the daemon ends with the process that started it, however that ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hivemind.p2p.p2p_daemon import P2P
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID, StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import get_dht_time

from diloco.config import SwarmConfig
from diloco.config.address import addresses_in, problem, same_subnet, scope
from diloco.errors import ConfigError, SwarmError
from diloco.swarm.wire.deadline import within
from diloco.swarm.wire.dialing import LOCAL, best_first, call_apart, call_each, mute, start_daemon
from diloco.swarm.wire.gate import GREETING, IN_USE, Gate, GuardedP2P
from diloco.swarm.wire.identity import Identity, read_key, verify
from diloco.swarm.wire.streams import BROKEN, CONTROL
from diloco.swarm.wire.transport import Disbelieved, Handler, Reader, Refused, Transport, Writer
from diloco.text import one_line

if TYPE_CHECKING:
    from hivemind.dht.node import DHTNode

__all__ = ["Ask", "Libp2p", "check_free", "identity_number", "own_id", "peer_id_of", "read_addresses"]

logger = logging.getLogger(__name__)

ADDRESS_WAIT_S = 120.0
VISIT_WAIT_S = 10.0
CLOSE_S = 5.0
_WORD = b"diloco word"  # what peers sign for each other, unlike records of the DHT
Ask = Callable[[Transport], Awaitable[tuple[bool, str]]]
"""Asks other peers whether they can connect to this one, and what would help if not."""

_LOST = ("routing: not found", "failed to find any peer in table")  # libp2p has no address of the peer


def peer_id_of(address: str) -> str:
    """The peer id at the end of a multiaddr; `ConfigError` says what a correct address looks like."""
    wrong = problem(address)
    if wrong is not None:
        raise ConfigError(f"swarm.initial_peers: {address!r} is not a peer address: {wrong}")
    return address.rsplit("/", 1)[1]


async def read_addresses(entries: Sequence[str], timeout_s: float) -> list[str]:
    """Replace each `@FILE` by the addresses in that file, waiting until somebody has written it.

    Raises `SwarmError` when a file did not appear in time, and `ConfigError` when an entry is no address.
    """
    addresses: list[str] = []
    for entry in entries:
        if entry.startswith("@"):
            path = Path(entry[1:])
            try:
                await within(timeout_s, _appears(path))
            except TimeoutError:
                raise SwarmError(f"swarm.initial_peers: no address in {path} after {timeout_s:.0f} s") from None
            found = addresses_in(path)
            if not found:
                raise ConfigError(f"{entry} is empty; put the address of a peer, or the link of an invitation, into it")
            addresses += found
        else:
            peer_id_of(entry)
            addresses.append(entry)
    return addresses


async def _appears(path: Path) -> None:
    while not os.path.exists(path):  # unlike `Path.exists`, it takes any name
        await asyncio.sleep(0.05)


def own_id(path: Path) -> str:
    """The peer id of the key in this file, which is made when it is missing; `ConfigError` when it holds no key."""
    key = read_key(path)
    try:
        return str(PeerID.from_identity(key).to_base58())
    except Exception:  # protobuf or the library for keys raises it
        raise ConfigError(f"swarm.identity_path={path} holds no private key; name another file, or a new one") from None


def identity_number(path: Path) -> int:
    """A number below 2**48 that belongs to the key in this file, which is made when it is missing."""
    return int.from_bytes(hashlib.sha256(own_id(path).encode()).digest()[:6], "big")


async def _explain(error: Exception, seeds: Sequence[str], listen: Sequence[str]) -> SwarmError:
    """What failed when a peer joined: its address, the others, the network, or something else of this machine."""
    text = one_line(error)
    if "failed to listen" in text:
        return SwarmError(f"swarm.listen={','.join(listen)} cannot be listened on; choose another address or port")
    outcome = dict[str, str]()
    with suppress(P2PDaemonError, OSError):  # if it cannot call either, the others are not to blame
        outcome = await call_apart(seeds) if seeds else outcome
    if not outcome or "" in outcome.values():
        return SwarmError(f"libp2p failed on this machine: {text}; mend what it names, or reinstall hivemind")
    why = f": {', '.join(set(outcome.values()))}" if set(outcome.values()) <= LOCAL else ""
    return SwarmError(f"swarm.initial_peers={','.join(seeds)} cannot be reached{why}; {_remedy(outcome)}")


def _remedy(outcome: Mapping[str, str]) -> str:
    """What to do when nobody can be reached, given the reason by address."""
    if set(outcome.values()) <= LOCAL:
        return "check the name and the network of this machine"
    return "check that a peer is running there and that its port is open"


def check_free(listen: Sequence[str]) -> None:
    """`SwarmError` when another program has one of these ports. The daemon would share it: libp2p reuses ports."""
    for address in listen:
        _, family, host, transport, port, *_ = address.split("/")
        if family not in ("ip4", "ip6") or port == "0":
            continue
        kind = socket.SOCK_STREAM if transport == "tcp" else socket.SOCK_DGRAM
        try:
            with socket.socket(socket.AF_INET if family == "ip4" else socket.AF_INET6, kind) as probe:
                if transport == "tcp":
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ended connections do not keep it
                probe.bind((host, int(port)))
        except OSError as error:
            raise SwarmError(
                f"swarm.listen={address} cannot be listened on: {error.strerror}; choose another port, or 0 for any"
            ) from None


async def _start_daemon(seeds: Sequence[str], network: SwarmConfig, identity_path: Path) -> P2P:
    """A daemon that knows the seeds; raises as `Libp2p.connect`."""
    listens = network.reachable != "no"
    if listens:
        check_free(network.listen)
    try:
        return await start_daemon(
            GuardedP2P,
            initial_peers=_multiaddrs(seeds),
            host_maddrs=_multiaddrs(network.listen),
            announce_maddrs=_multiaddrs(network.announce),
            no_listen=not listens,
            dht_mode="server" if listens else "client",
            identity_path=str(identity_path),
        )
    except (P2PDaemonError, OSError, ValueError) as error:
        raise await _explain(error, seeds, network.listen) from error


def _multiaddrs(addresses: Sequence[str]) -> list[Multiaddr] | None:
    return [*map(Multiaddr, addresses)] or None


def _nobody(outcome: Mapping[str, str]) -> str:
    if len(outcome) == 1:
        [(address, why)] = outcome.items()
        return f"{address} cannot be reached: {why}; {_remedy(outcome)}"
    reasons = "; ".join(f"{address}: {why}" for address, why in outcome.items())
    return f"none of {len(outcome)} addresses can be reached ({reasons}); ask for one of a peer that is running"


class Libp2p:
    """The real `Transport`: a libp2p daemon, and hivemind's DHT on it. Everything passes the gate."""

    def __init__(self, p2p: GuardedP2P, seeds: list[str], gate: Gate) -> None:
        self.me = gate.me = str(p2p.peer_id.to_base58())
        self.seeds = seeds
        self.addresses: list[str] = []
        self.where: Callable[[str], Sequence[str]] = lambda peer: ()
        self.reachable = True
        self.advice = ""  # what would make this peer reachable
        self.silent: dict[str, str] = {}  # addresses at which nobody answered, and why
        self._ranges = {"public"}  # scopes of addresses that anybody may name
        self._p2p = p2p
        self._dht: DHTNode | None = None
        self._identity: Identity | None = None
        self._gate = p2p.gate = gate
        p2p.open_greeting = partial(self._open, protocol=GREETING)

    @classmethod
    async def connect(
        cls, network: SwarmConfig, identity_path: Path, gate: Gate, run_id: str | None = None, ask: Ask | None = None
    ) -> Libp2p:
        """Start listening (nowhere with `reachable=no`) and join the DHT.

        Args:
            identity_path: private key of this peer; it is made when it is missing.
            run_id: the run whose DHT records this node takes in; None takes no part in the DHT.
            ask: with `reachable=auto`, asks a peer on another machine to call back; None believes that it can.

        Raises:
            SwarmError: nobody answers at the initial peers, they do not admit this one, the port is taken, this
                identity is that of an initial peer, or the daemon does not start.
            ConfigError: the identity cannot be written, or is none; an initial peer is no address.
        """
        seeds = await read_addresses(network.initial_peers, ADDRESS_WAIT_S)
        own = own_id(identity_path)
        mine = [address for address in seeds if peer_id_of(address) == own]
        if mine and "" in (await call_apart(mine)).values():
            raise SwarmError(
                f"swarm.identity_path={identity_path} is in use by a running peer; give this one another file"
            )
        if mine and not (seeds := [address for address in seeds if address not in mine]):
            raise SwarmError(
                f"swarm.initial_peers={','.join(mine)} is this peer itself; give an address of another one"
            )
        p2p = await _start_daemon(seeds, network, identity_path)
        self = cls(p2p, [peer_id_of(seed) for seed in seeds], gate)
        self._identity, gate.instance = Identity(read_key(identity_path)), secrets.token_hex(8)
        self._ranges |= {scope(seed) for seed in seeds}
        try:
            await p2p.add_binary_stream_handler(GREETING, self._welcome)
            await self._greet_seeds()
            if network.reachable != "no":
                self.addresses = best_first([str(one) for one in await p2p.get_visible_maddrs()])
            self.reachable = bool(self.addresses)
            # Within one machine nobody doubts that others can call this peer, unless it names an address.
            in_doubt = seeds and (network.announce or any(scope(seed) != "loopback" for seed in seeds))
            if ask is not None and network.reachable == "auto" and in_doubt:
                self.reachable, self.advice = await ask(self)
            if run_id is not None:
                await self._join_dht(run_id, seeds, identity_path)
        except BaseException as error:
            await p2p.shutdown()
            if isinstance(error, SwarmError) or not isinstance(error, Exception):
                raise
            token = None if gate.admission is None else gate.admission.token
            if token is not None and token.grant.role == "observer":
                raise SwarmError(
                    "the swarm refused this peer: its invitation allows to watch only; ask for another one"
                ) from error
            raise await _explain(error, seeds, network.listen) from error
        logger.debug("daemon of %s started by process %d", own, os.getpid())
        return self

    async def _join_dht(self, run_id: str, seeds: Sequence[str], identity_path: Path) -> None:
        # Both import torch or all of hivemind, which takes longer than a visit.
        from hivemind.dht.node import DHTNode

        from diloco.swarm.wire.dht_records import BoundedStorage, OwnedRecords

        records = OwnedRecords(run_id, read_key(identity_path), self._gate)
        self._dht = await DHTNode.create(
            p2p=self._p2p, initial_peers=_multiaddrs(seeds), record_validator=records, client_mode=not self.reachable
        )
        self._dht.protocol.storage, self._dht.protocol.cache = BoundedStorage(), BoundedStorage()

    @classmethod
    async def visit(
        cls, initial_peers: Sequence[str], gate: Gate | None = None, identity_path: Path | None = None
    ) -> Libp2p:
        """A peer that only asks: it listens nowhere and takes no part in the DHT. Without a file its identity is new.

        Its seeds are the peers that answered; `silent` has the other addresses. Raises `SwarmError` when nobody
        answers there, or they do not admit this peer, and `ConfigError` when an initial peer is no address.
        """
        seeds = await read_addresses(initial_peers, VISIT_WAIT_S)
        if identity_path is not None:
            own_id(identity_path)
        try:
            p2p = await mute(None if identity_path is None else str(identity_path), GuardedP2P)
        except (P2PDaemonError, OSError) as error:
            raise await _explain(error, (), ()) from error
        try:
            outcome = await call_each(p2p, seeds)
            answered = list(dict.fromkeys(peer_id_of(address) for address, why in outcome.items() if not why))
            if not answered:
                raise SwarmError(_nobody(outcome))
            self = cls(p2p, answered, gate or Gate())
            self.silent = {address: why for address, why in outcome.items() if why}
            await p2p.add_binary_stream_handler(GREETING, self._welcome)
            await self._greet_seeds()
        except BaseException:
            await p2p.shutdown()
            raise
        return self

    async def _greet_seeds(self) -> None:
        """Comes first. `SwarmError` when all seeds refuse this peer, or it believes none of them."""
        greetings = (self._gate.greet(seed, partial(self._open, seed, GREETING)) for seed in self.seeds)
        answers = await asyncio.gather(*greetings, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, Exception) and not isinstance(answer, BROKEN):
                raise answer
        in_use = any(isinstance(answer, Refused) and str(answer) == IN_USE for answer in answers)
        if any(answer is None for answer in answers) and not in_use:
            return
        for answer in answers:
            if isinstance(answer, Refused):
                raise SwarmError(f"the swarm refused this peer: {answer}")
            if isinstance(answer, Disbelieved):
                raise SwarmError(f"{answer}; check the address")

    async def _welcome(self, info: StreamInfo, reader: Reader, writer: Writer) -> None:
        await self._gate.welcome(info.peer_id.to_base58(), reader, writer)

    async def handle(self, protocol: str, handler: Handler) -> None:
        async def serve(info: StreamInfo, reader: Reader, writer: Writer) -> None:
            await self._gate.serve(info.peer_id.to_base58(), reader, writer, handler)

        await self._p2p.add_binary_stream_handler(protocol, serve)

    async def open(self, peer: str, protocol: str) -> tuple[Reader, Writer]:
        """As in `Transport`. A peer that restarted does not know us, so each control stream begins with a greeting."""
        if self._gate.admission is not None:
            await self._gate.greet(peer, partial(self._open, peer, GREETING), again=protocol == CONTROL)
        return await self._open(peer, protocol)

    async def greet(self, peer: str) -> None:
        """Tell a peer again who is here, and what is revoked; raises as `open`."""
        await self._gate.greet(peer, partial(self._open, peer, GREETING), again=True)

    async def _open(self, peer: str, protocol: str) -> tuple[Reader, Writer]:
        try:
            peer_id = PeerID.from_base58(peer)
        except ValueError:  # the id comes from a hello or the DHT, where anybody may write it
            raise ConnectionError(f"{peer[:64]!r} is no peer id") from None
        for called in (False, True):
            try:
                _, reader, writer = await self._p2p.call_binary_stream_handler(peer_id, protocol)
                return reader, writer
            except (ControlFailure, P2PDaemonError) as error:
                lost = not called and str(error).endswith(_LOST)
                # It may answer at an address that we know.
                if not lost or "" not in (await call_each(self._p2p, self.where(peer))).values():
                    raise ConnectionError(f"{peer} cannot be reached: {error}") from error
        raise AssertionError

    async def store(self, key: str, subkey: str, value: object, life_s: float) -> None:
        assert self._dht is not None
        try:
            await self._dht.store(key, value, get_dht_time() + life_s, subkey=subkey)
        except (ControlFailure, P2PDaemonError) as error:
            raise ConnectionError(str(error)) from error

    async def get(self, key: str) -> dict[str, object]:
        assert self._dht is not None
        try:
            found = await self._dht.get(key, latest=True)
        except (ControlFailure, P2PDaemonError) as error:
            raise ConnectionError(str(error)) from error
        if found is None or not isinstance(found.value, dict):
            return {}
        return {key: record.value for key, record in found.value.items() if isinstance(key, str)}

    def sign(self, content: bytes) -> bytes:
        assert self._identity is not None, "a visitor signs nothing"
        return self._identity.sign(_WORD, content)

    def verify(self, peer: str, content: bytes, signature: bytes) -> bool:
        return verify(_WORD, peer, content, signature)

    async def observed(self, peer: str) -> str:
        for info in await self._p2p.list_peers():
            if info.peer_id.to_base58() == peer:
                return next((str(address) for address in info.addrs), "")
        return ""

    async def call_anew(self, peer: str, addresses: Sequence[str]) -> dict[str, str]:
        """As in `Transport`, with another daemon, because this one would use its open connection."""
        visitor = await mute()
        try:
            outcome = {}
            for address in addresses:
                (outcome[address],) = (await call_each(visitor, [f"{address}/p2p/{peer}"])).values()
                await visitor._client.disconnect(PeerID.from_base58(peer))
            return outcome
        finally:
            await visitor.shutdown()

    def may_call(self, address: str) -> bool:
        """As in `Transport`. Without a seed in a LAN, this is the subnet of an address of this peer itself."""
        if scope(address) in self._ranges:
            return True
        return any(same_subnet(address, own) for own in self.addresses)

    async def failed(self) -> None:
        """As in `Transport`. Without its daemon a peer would train on alone and not know it."""
        code = await self._p2p._child.wait()
        remedy = "run the same command again to go on from the checkpoint"
        raise SwarmError(f"this peer's libp2p daemon ended (code {code}); {remedy}")

    async def close(self) -> None:
        """End DHT and daemon. The wait is bounded, because tasks that wait for a dead daemon ignore cancellation."""
        for part in (self._dht, self._p2p):
            if part is not None:
                await asyncio.wait([asyncio.ensure_future(part.shutdown())], timeout=CLOSE_S)
