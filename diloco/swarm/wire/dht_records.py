"""The records that peers put into the DHT, each under its own name, in a known form, signed by its libp2p identity.

    {run}/peers    peer id -> [name] or [name, credential]    who is there, and which invitation it uses
    {run}/leases   peer id -> [[fragment, term], ...]         a claim after a restart has to be above all earlier ones
    {run}/revoked  peer id -> the owner's list, which the run key has signed too

Protected: nobody can write, replace or change another peer's record. A record belongs to one run and key, and ends when
its owner said. Both the peer that stores a record and the peer that reads it refuse any other form. A peer id is the
hash of a public key, which a record carries. In a closed run it carries the credential of its owner, too, so nobody can
fill the DHT with records of identities that were never invited. That the credential has expired or was revoked since
does not matter here, because a dictionary with one wrong record is refused whole, and peers hear of revocations at
different times. What a peer stores has a limit (`BoundedStorage`).

Not protected: a peer that stores records can withhold them, or return an old one until it ends (a minute). Therefore
the DHT only gives hints whom to dial; the peers themselves agree on terms and versions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils.timed_storage import get_dht_time

from diloco.admission.invitation import MAX_CHARACTERS
from diloco.errors import PayloadError
from diloco.protocol.messages import Message, decode
from diloco.protocol.messages.base import MAX_FRAME_BYTES
from diloco.protocol.messages.control import Revocations
from diloco.protocol.numbers import MAX_COUNT
from diloco.swarm.wire.gate import Gate, revoked_of
from diloco.swarm.wire.identity import MAX_KEY_BYTES, Identity, verify

__all__ = ["LEASES", "MAX_LEASES", "PEERS", "REVOKED", "BoundedStorage", "OwnedRecords", "leases_in", "revoked_in"]

PEERS, LEASES, REVOKED = "peers", "leases", "revoked"
MAX_LIFE_S = 600.0  # ten times the life of an honest record, because clocks differ
MAX_LEASES = 1024  # of a record; a peer that holds more says nothing of the others
MAX_VALUE_BYTES = {PEERS: 4096, LEASES: 32 * MAX_LEASES, REVOKED: MAX_FRAME_BYTES // 2}
MAX_OWNERS = 4096  # of records of a kind; those that end first make room
MAX_FRAGMENTS = 65536
_CONTEXT = b"diloco record"


class OwnedRecords(RecordValidatorBase):  # type: ignore[misc]
    """Signs this peer's records and checks those of others. `on_refused` is called for each that is wrong."""

    def __init__(self, run_id: str, identity: bytes, gate: Gate) -> None:
        self.on_refused: Callable[[str, str], None] = gate.refused
        self._gate = gate
        self._identity = Identity(identity)
        self.me = self._identity.me
        forms: dict[str, Callable[[object], object]] = {PEERS: _is_peer, LEASES: _is_leases, REVOKED: self._is_revoked}
        self._forms = {
            DHTID.generate(source=f"{run_id}/{kind}").to_bytes(): (form, MAX_VALUE_BYTES[kind])
            for kind, form in forms.items()
        }

    def sign_value(self, record: DHTRecord) -> bytes:
        """The value with this peer's signature, which carries its key, and its credential."""
        credential = "".join(self._gate.evidence()).encode()
        signature = self._identity.sign(_CONTEXT, _content(record, record.value))
        return bytes(msgpack.packb([record.value, signature, credential]))

    def strip_value(self, record: DHTRecord) -> bytes:
        """The value as its owner gave it; `record` is valid."""
        return bytes(msgpack.unpackb(record.value)[0])

    def validate(self, record: DHTRecord) -> bool:
        """Whether the record has a known form, and the owner that it names has written it."""
        owner = _unpack(record.subkey)
        reason = self._objection(record, owner)
        if reason is not None:
            self.on_refused(str(owner)[:100], f"a record in the DHT under its name {reason}")
        return reason is None

    def _objection(self, record: DHTRecord, owner: object) -> str | None:
        form, most_bytes = self._forms.get(record.key, (None, 0))
        if form is None:
            return "has a key that nothing here uses"
        if (
            len(record.value) > most_bytes + 2 * MAX_KEY_BYTES + MAX_CHARACTERS
            or record.expiration_time > get_dht_time() + MAX_LIFE_S
        ):
            return "is too large or lasts too long"
        signed = _unpack(record.value)
        if not isinstance(signed, list) or len(signed) != 3 or not all(isinstance(part, bytes) for part in signed):
            return "is not signed"
        value, signature, credential = signed
        if not verify(_CONTEXT, str(owner), _content(record, value), signature):
            return "is signed by another peer, or was changed after it was signed"
        vouched = self._gate.vouches(str(owner), credential.decode("latin-1"))
        if not vouched or (form is _is_leases and not credential and self._gate.run_key is not None):
            return "is of a peer that was not invited"
        return None if form(_unpack(value)) else "does not have the form of one"

    def _is_revoked(self, value: object) -> bool:
        said, admission = revoked_in(value), self._gate.admission
        return (
            said is not None
            and admission is not None
            and revoked_of(said).signed_by(admission.run_key, admission.run_id)
        )

    def merge_with(self, other: Any) -> bool:
        """There is one per node."""
        return False


class BoundedStorage(DHTLocalStorage):  # type: ignore[misc]
    """What a node keeps for the others: hivemind's storage, with at most `MAX_OWNERS` records under each key."""

    def store_subkey(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """As in hivemind. Above the limit the record that ends first goes."""
        stored = bool(super().store_subkey(key, subkey, value, expiration_time))
        records = self.data[key].value if key in self.data else None
        if isinstance(records, DictionaryDHTValue):
            records.maxsize = MAX_OWNERS
            records._remove_outdated()
        return stored


def leases_in(value: object) -> list[tuple[int, int]]:
    """Fragments and terms of a record of leases; none in one of another form."""
    return [(fragment, term) for fragment, term in value] if _is_leases(value) else []  # type: ignore[attr-defined]


def revoked_in(value: object) -> Revocations | None:
    """The list in a record, whose signature by the run key is not verified yet."""
    try:
        message: Message | None = decode(value) if isinstance(value, bytes) else None
    except PayloadError:
        return None
    return message if isinstance(message, Revocations) else None


def _is_peer(value: object) -> bool:
    return (
        isinstance(value, list) and len(value) in (1, 2) and all(isinstance(x, str) and len(x) <= 1024 for x in value)
    )


def _is_leases(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) <= MAX_LEASES and all(map(_is_lease, value))


def _is_lease(value: object) -> bool:
    if not isinstance(value, list | tuple) or len(value) != 2 or any(type(number) is not int for number in value):
        return False
    return bool(0 <= value[0] < MAX_FRAGMENTS and 0 < value[1] <= MAX_COUNT)


def _unpack(raw: bytes) -> object:
    try:
        return msgpack.unpackb(raw, raw=False, strict_map_key=True)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError):
        return None


def _content(record: DHTRecord, value: bytes) -> bytes:
    return bytes(msgpack.packb([record.key, record.subkey, value, float(record.expiration_time)]))
