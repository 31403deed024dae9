"""Records in the DHT without a network: whose are kept, how large, how many, and how many of their names are called."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.utils.timed_storage import get_dht_time

from diloco.admission import Admission, Revoked, RunKey, issue
from diloco.admission.keys import new_key
from diloco.errors import ConfigError
from diloco.protocol.messages import encode
from diloco.protocol.messages.control import Revocations
from diloco.swarm.wire import dht_records
from diloco.swarm.wire.dht_records import LEASES, MAX_LEASES, PEERS, REVOKED, BoundedStorage, OwnedRecords
from diloco.swarm.wire.gate import Gate
from diloco.swarm.wire.identity import read_key
from diloco.swarm.wire.libp2p import own_id

KEY = RunKey(new_key())
SOON = int(time.time()) + 3600


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of identities, which take long to make."""
    return tmp_path_factory.mktemp("identities")


def node(places: Path, name: str, key: RunKey | None = KEY, role: Any = "worker") -> OwnedRecords:
    """The records of a peer; without a key its run is open."""
    gate = Gate() if key is None else Gate(Admission(issue(key, "run", role, SOON)))
    gate.me = own_id(places / name)
    return OwnedRecords("run", read_key(places / name), gate)


def record(owner: OwnedRecords, kind: str, value: Any) -> DHTRecord:
    """A record as its owner stores it."""
    key, subkey = DHTID.generate(source=f"run/{kind}").to_bytes(), msgpack.packb(owner.me)
    unsigned = DHTRecord(key, subkey, msgpack.packb(value), get_dht_time() + 60)
    return DHTRecord(key, subkey, owner.sign_value(unsigned), unsigned.expiration_time)


def refusal(one: OwnedRecords, said: DHTRecord) -> str:
    """Why a peer does not keep a record; empty if it does."""
    why: list[str] = []
    one.on_refused = lambda peer, reason: why.append(reason)
    assert one.validate(said) is not bool(why)
    return "".join(why)


def test_only_records_of_invited_peers_are_kept_in_a_closed_run(places: Path) -> None:
    keeper, member = node(places, "keeper"), node(places, "member")
    strangers = [node(places, "a", None), node(places, "b", RunKey(new_key())), node(places, "c", role="observer")]
    strangers.append(node(places, "a"))
    strangers[-1]._gate = member._gate  # with a credential that it has overheard
    for kind, value in ((PEERS, ["name"]), (LEASES, [[0, 1]])):
        assert refusal(keeper, record(member, kind, value)) == ""
        for stranger in strangers:
            assert "is of a peer that was not invited" in refusal(keeper, record(stranger, kind, value))


def test_records_have_sizes_and_lists_the_owner_s_signature(places: Path) -> None:
    keeper, member = node(places, "keeper"), node(places, "member")
    assert refusal(keeper, record(member, LEASES, [[65535, 2**40]] * MAX_LEASES)) == ""
    assert "does not have the form" in refusal(keeper, record(member, LEASES, [[0, 1]] * (MAX_LEASES + 1)))
    assert "is too large" in refusal(keeper, record(member, PEERS, ["x" * 20_000]))

    def listed(key: RunKey) -> bytes:
        signature = Revoked.sign(key, "run", 1, ["0" * 16], []).signature.hex()
        return encode(Revocations(number=1, token_ids=["0" * 16], peer_ids=[], signature=signature))

    assert refusal(keeper, record(member, REVOKED, listed(KEY))) == ""
    assert "does not have the form" in refusal(keeper, record(member, REVOKED, listed(RunKey(new_key()))))
    keeper, member = (node(places, name, None) for name in ("keeper", "member"))
    assert refusal(keeper, record(member, LEASES, [[0, 1]])) == ""
    assert "does not have the form" in refusal(keeper, record(member, REVOKED, listed(KEY)))  # nobody owns an open run


def test_a_record_counts_only_as_its_owner_wrote_it(places: Path) -> None:
    keeper, owner, liar = (node(places, name) for name in ("keeper", "member", "liar"))
    good = record(owner, LEASES, [[0, 1]])

    def changed(**fields: Any) -> DHTRecord:
        return dataclasses.replace(good, **fields)

    value, *rest = msgpack.unpackb(good.value)
    another, signer = "is signed by another peer, or was changed after it was signed", record(liar, LEASES, [[0, 1]])
    for wrong, why in (
        (changed(value=signer.value), another),
        (changed(value=msgpack.packb([value.replace(b"\x01", b"\x02"), *rest])), another),
        (changed(value=value), "is not signed"),
        (changed(key=DHTID.generate(source="run/anything").to_bytes()), "has a key that nothing here uses"),
        (changed(expiration_time=good.expiration_time + 1e6), "is too large or lasts too long"),
        (changed(value=msgpack.packb([value, rest[0], b""])), "is of a peer that was not invited"),
    ):
        assert refusal(keeper, wrong).endswith(why)


def test_a_file_that_holds_no_private_key_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o600)
    with pytest.raises(ConfigError, match=f"^swarm.identity_path={tmp_path}/file holds no private key"):
        own_id(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b""


def test_what_a_node_keeps_for_others_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_records, "MAX_OWNERS", 10)
    storage, key, ends = BoundedStorage(), DHTID.generate(source="run/peers"), get_dht_time() + 60
    for number in range(1000):
        storage.store_subkey(key, f"Qm{number}", b"record", ends + number / 1000)
    kept = storage.get(key)
    assert kept is not None and [name for name, _ in kept.value.items()] == [f"Qm{one}" for one in range(990, 1000)]
