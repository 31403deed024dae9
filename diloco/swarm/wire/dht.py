"""Where the members of a run are: hivemind's DHT, by which one finds all through any one that
lives.

Under the key `{run}/peers` each peer stores its addresses, signed by its libp2p identity. Who
stores a record can withhold it, or return an old one until it ends. So it is a hint whom to call.
Calls of the DHT are between peers that have greeted each other. (hivemind's own authorizer sees a
request but not its sender, so any receiver could repeat the request.)
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
ASKED_IN = 8  # at a time; a peer that nobody can call never comes in
MAX_OWNERS = 4096  # of records; those that end first make room
_CONTEXT = b"diloco record"


class AddressRecords(RecordValidatorBase):  # type: ignore[misc]
    """The addresses of one run. As hivemind's validator it signs and checks records."""

    def __init__(self, run_id: str, identity: SigningKey, gate: Gate) -> None:
        self._key, self._identity, self._gate = f"{run_id}/peers", identity, gate
        self._raw_key = DHTID.generate(source=self._key).to_bytes()

    async def join(self, p2p: P2P, seeds: Sequence[str], serves: bool) -> None:
        """Join through these peers; a node that does not serve stores nothing for others."""
        peers = [Multiaddr(f"/p2p/{seed}") for seed in seeds] or None
        self._node = await DHTNode.create(
            p2p=p2p, initial_peers=peers, record_validator=self, client_mode=not serves
        )
        self._node.protocol.storage, self._node.protocol.cache = BoundedStorage(), BoundedStorage()

    async def announce(self, addresses: Sequence[str], life_s: float, met: Sequence[str]) -> None:
        """Store where this peer is; `ConnectionError` when the daemon does not answer.

        Some members that the DHT does not know are asked in, so that it becomes one again after a
        split.
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
        """Addresses, which may be any text, by peer; raises as `announce`."""
        with _connected():
            stored = await self._node.get(self._key, latest=True)
        records = stored.value if stored is not None and isinstance(stored.value, dict) else {}
        return {peer: list(record.value) for peer, record in records.items()}

    async def shutdown(self) -> None:
        """End the node."""
        await self._node.shutdown()

    def sign_value(self, record: DHTRecord) -> bytes:
        """The value with this peer's signature, which carries its key."""
        signature = self._identity.sign(_CONTEXT, _content(record, record.value))
        return bytes(msgpack.packb([record.value, signature]))

    def strip_value(self, record: DHTRecord) -> bytes:
        """The value as its owner gave it; `record` is valid."""
        return bytes(msgpack.unpackb(record.value)[0])

    def validate(self, record: DHTRecord) -> bool:
        """Whether these are addresses of the peer that the record names, as it has signed them."""
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
        """There is one per node."""
        return False


class BoundedStorage(DHTLocalStorage):  # type: ignore[misc]
    """hivemind's storage for others, with at most `MAX_OWNERS` records under each key."""

    def store_subkey(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """As in hivemind. Above the limit the record that ends first goes."""
        stored = bool(super().store_subkey(key, subkey, value, expiration_time))
        records = self.data[key].value if key in self.data else None
        if isinstance(records, DictionaryDHTValue):
            records.maxsize = MAX_OWNERS
            records._remove_outdated()
        return stored


class _Unparsed:
    """In place of a type of requests: hivemind then hands requests on unparsed."""

    FromString = staticmethod(bytes)


class GuardedP2P(P2P):  # type: ignore[misc]
    """hivemind's P2P. Its DHT calls, in and out, are between peers that know each other."""

    gate: Gate
    greet: Callable[[str], Awaitable[None]]

    async def add_protobuf_handler(
        self, name: str, handler: Any, input_protobuf_type: Any, **options: Any
    ) -> None:
        """As in `P2P`, but a stranger's call fails before it is parsed. (The DHT streams none.)"""

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
        """As in `P2P`; `Refused` or `Untrusted` when one of the two is not in the run."""
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
