"""Addresses of a run's members in hivemind's DHT, where a peer finds all members through any live
member.

Under the key `{run}/peers` each peer stores its addresses, signed by its libp2p identity. The peer
that stores a record can withhold it, or return an old one until it expires. So a record is only a
hint whom to call. DHT calls are between peers that have greeted each other. (hivemind's own
authorizer sees a request but not its sender, so any receiver could replay the request.)
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgpack
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p.p2p_daemon import P2P
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import get_dht_time

from diloco.messages.base import MEMBERS
from diloco.swarm.wire.gate import Gate
from diloco.swarm.wire.identity import SigningKey, verify

MAX_LIFE_S = 600.0  # ten times the life of an honest record, because clocks differ
MAX_ADDRESSES, MAX_RECORD_BYTES = 4, 4096
ASKED_IN = 8  # members to ask in per call; some can never be called
MAX_OWNERS = 4096  # records under a key; the first to expire is dropped
_CONTEXT = b"diloco record"


class AddressRecords(RecordValidatorBase):  # type: ignore[misc]
    """The addresses of a run's members. As hivemind's validator it signs and checks records."""

    def __init__(self, run_id: str, identity: SigningKey, gate: Gate) -> None:
        self._key, self._identity, self._gate = f"{run_id}/peers", identity, gate
        self._raw_key = DHTID.generate(source=self._key).to_bytes()

    async def join(self, p2p: P2P, seeds: Sequence[str], serves: bool) -> None:
        """Join the DHT through these peers; without `serves`, store nothing for others."""
        peers = [Multiaddr(f"/p2p/{seed}") for seed in seeds] or None
        self._node = await DHTNode.create(
            p2p=p2p, initial_peers=peers, record_validator=self, client_mode=not serves
        )
        self._node.protocol.storage, self._node.protocol.cache = BoundedStorage(), BoundedStorage()

    async def announce(self, addresses: Sequence[str], life_s: float, met: Sequence[str]) -> None:
        """Store this peer's addresses; `ConnectionError` if the daemon does not answer.

        Some members in `met` that the DHT node does not know are added to it, so that a split DHT
        becomes one again.
        """
        protocol, ends_at = self._node.protocol, get_dht_time() + life_s
        ids = map(PeerID.from_base58, met)
        unknown = [peer for peer in ids if peer not in protocol.routing_table]
        asked, mine = random.sample(unknown, min(len(unknown), ASKED_IN)), self._identity.me
        with _connected():
            await asyncio.gather(*map(protocol.call_ping, asked))
            places = list(addresses[:MAX_ADDRESSES])
            await self._node.store(self._key, places, ends_at, subkey=mine)

    async def announced(self) -> dict[str, list[str]]:
        """Return the stored addresses by peer, as untrusted text; raises as `announce`."""
        with _connected():
            stored = await self._node.get(self._key, latest=True)
        records = stored.value if stored is not None and isinstance(stored.value, dict) else {}
        return {peer: list(record.value) for peer, record in records.items()}

    async def shutdown(self) -> None:
        """Shut the DHT node down."""
        await self._node.shutdown()

    def sign_value(self, record: DHTRecord) -> bytes:
        """Return the value with this peer's signature, which contains its key."""
        signature = self._identity.sign(_CONTEXT, _content(record, record.value))
        return bytes(msgpack.packb([record.value, signature]))

    def strip_value(self, record: DHTRecord) -> bytes:
        """Return the value of a valid record without its signature."""
        return bytes(msgpack.unpackb(record.value)[0])

    def validate(self, record: DHTRecord) -> bool:
        """Return True if the record's owner has signed it, and it holds addresses."""
        owner = _unpack(record.subkey)
        reason = self._objection(record, owner)
        if reason is not None:
            self._gate.on_refused(str(owner)[:100], f"a record in the DHT under its name {reason}")
        return reason is None

    def _objection(self, record: DHTRecord, owner: object) -> str | None:
        if record.key != self._raw_key:
            return "has a key that nothing here uses"
        lasts = record.expiration_time > get_dht_time() + MAX_LIFE_S
        if len(record.value) > MAX_RECORD_BYTES or lasts:
            return "is too large or lasts too long"
        match _unpack(record.value):
            case [bytes(packed), bytes(signature)]:
                if not verify(_CONTEXT, str(owner), _content(record, packed), signature):
                    return "is signed by another peer, or was changed after it was signed"
            case _:
                return "is not signed"
        value = _unpack(packed)
        texts = isinstance(value, list) and all(isinstance(address, str) for address in value)
        return None if texts else "holds no addresses"

    def merge_with(self, other: Any) -> bool:
        """Refuse to merge: each node has one validator."""
        return False


class BoundedStorage(DHTLocalStorage):  # type: ignore[misc]
    """hivemind's storage for others, with at most `MAX_OWNERS` records under each key."""

    def store_subkey(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """As in hivemind; above the limit, drop the record that expires first."""
        stored = bool(super().store_subkey(key, subkey, value, expiration_time))
        records = self.data[key].value if key in self.data else None
        if isinstance(records, DictionaryDHTValue):
            records.maxsize = MAX_OWNERS
            records._remove_outdated()
        return stored


class _Unparsed:
    """Stands in for a request's protobuf type, so that hivemind passes requests on unparsed."""

    FromString = staticmethod(bytes)


class GuardedP2P(P2P):  # type: ignore[misc]
    """hivemind's P2P, with DHT calls only between peers that have greeted each other."""

    gate: Gate
    greet: Callable[[str], Awaitable[None]]

    async def add_protobuf_handler(
        self, name: str, handler: Any, input_protobuf_type: Any, **options: Any
    ) -> None:
        """As in `P2P`, but a stranger's call fails before parsing. (No DHT call is a stream.)"""

        async def guarded(request: bytes, context: Any) -> Any:
            peer = context.remote_id.to_base58()
            reason = self.gate.forbids(peer, "a DHT call", MEMBERS)
            if reason is not None:
                self.gate.on_refused(peer, reason)
                raise PermissionError(reason)
            return await handler(input_protobuf_type.FromString(request), context)

        await super().add_protobuf_handler(name, guarded, _Unparsed, **options)

    async def call_protobuf_handler(
        self, peer_id: PeerID, name: str, *arguments: Any, **options: Any
    ) -> Any:
        """As in `P2P`; raises `Refused` or `Untrusted` if one of the two is not in the run."""
        if self.gate.admission is not None:
            await self.greet(peer_id.to_base58())
        return await super().call_protobuf_handler(peer_id, name, *arguments, **options)


@contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except (ControlFailure, P2PDaemonError) as error:
        raise ConnectionError(str(error)) from error


def _unpack(raw: bytes) -> object:
    try:
        return msgpack.unpackb(raw, raw=False, strict_map_key=True)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError):
        return None


def _content(record: DHTRecord, value: bytes) -> bytes:
    return bytes(msgpack.packb([record.key, record.subkey, value, float(record.expiration_time)]))
