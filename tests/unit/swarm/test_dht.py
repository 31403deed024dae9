"""Addresses in the DHT without a network: whose are kept, how large, and how many."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.utils.timed_storage import get_dht_time

from diloco.errors import ConfigError
from diloco.swarm.wire import dht
from diloco.swarm.wire.dht import AddressRecords, BoundedStorage
from diloco.swarm.wire.gate import Gate
from diloco.swarm.wire.identity import SigningKey, own_id


def test_a_record_counts_only_as_its_owner_wrote_it(tmp_path: Path) -> None:
    why: list[str] = []
    gate = Gate()
    gate.on_refused = lambda peer, reason: why.append(reason)
    keys = [SigningKey.read(tmp_path / name) for name in ("keeper", "owner", "liar")]
    keeper, owner, liar = (AddressRecords("run", key, gate) for key in keys)
    here, elsewhere = (DHTID.generate(source=key).to_bytes() for key in ("run/peers", "run/x"))

    def record(by: AddressRecords, said: Any, **fields: Any) -> DHTRecord:
        unsigned = DHTRecord(here, msgpack.packb(owner._identity.me), msgpack.packb(said), ends)
        return dataclasses.replace(unsigned, **{"value": by.sign_value(unsigned), **fields})

    ends, places = get_dht_time() + 60, ["/ip4/192.0.2.7/tcp/4100/p2p/Qm"]
    good = record(owner, places)
    assert keeper.validate(good) and not why and msgpack.unpackb(keeper.strip_value(good)) == places
    value, signature = msgpack.unpackb(good.value)
    changed = msgpack.packb([value.replace(b"7", b"8"), signature])
    another = "is signed by another peer, or was changed after it was signed"
    for wrong, reason in (
        (record(liar, places), another),
        (record(owner, places, value=changed), another),
        (record(owner, places, expiration_time=ends + 1), another),
        (record(owner, places, value=value), "is not signed"),
        (record(owner, places, key=elsewhere), "has a key that nothing here uses"),
        (record(owner, places, expiration_time=ends + 1e6), "is too large or lasts too long"),
        (record(owner, ["x" * 20_000]), "is too large or lasts too long"),
        (record(owner, [[0, 1]]), "holds no addresses"),
    ):
        assert not keeper.validate(wrong) and why.pop().endswith(reason)


def test_a_file_that_holds_no_private_key_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o600)
    why = f"^swarm.identity_path={tmp_path}/file holds no private key"
    with pytest.raises(ConfigError, match=why):
        own_id(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b""


def test_what_a_node_keeps_for_others_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht, "MAX_OWNERS", 10)
    storage, key, ends = BoundedStorage(), DHTID.generate(source="run/peers"), get_dht_time() + 60
    for number in range(1000):
        storage.store_subkey(key, f"Qm{number}", b"record", ends + number / 1000)
    kept = storage.get(key)
    assert [name for name, _ in kept.value.items()] == [f"Qm{one}" for one in range(990, 1000)]
