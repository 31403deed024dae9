"""How a libp2p daemon begins and ends, and whose addresses are kept in the DHT."""

import asyncio
import dataclasses
from asyncio.subprocess import Process
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p.p2p_daemon import P2P
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError
from hivemind.utils.timed_storage import get_dht_time

from diloco.config import SwarmConfig
from diloco.errors import ConfigError, SwarmError
from diloco.swarm.wire import dht, libp2p
from diloco.swarm.wire.dht import AddressRecords, BoundedStorage
from diloco.swarm.wire.dialing import start_daemon
from diloco.swarm.wire.gate import Gate
from diloco.swarm.wire.identity import SigningKey, own_id
from tests.support.errors import error_text
from tests.support.printing import printed_of


def daemon_of(ends: Callable[[Process], Coroutine[Any, Any, Any]]) -> Any:
    """Stands for hivemind's P2P; `create` ends as the test wants."""

    class Daemon:
        child: Process

        @classmethod
        async def create(cls, **options: Any) -> Any:
            Daemon.child = await asyncio.create_subprocess_exec("sleep", "1000")
            return await ends(Daemon.child)

    return Daemon


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_daemon_that_does_not_start_has_ended(
    cancelled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = asyncio.Event()

    async def ends(child: Process) -> None:
        waiting.set()
        if not cancelled:
            raise P2PDaemonError("Daemon failed to start")
        await asyncio.Event().wait()

    async def scene() -> None:
        daemon = daemon_of(ends)
        starting = asyncio.ensure_future(start_daemon(daemon))
        await waiting.wait()
        if cancelled:
            starting.cancel()
        [outcome] = await asyncio.gather(starting, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError if cancelled else P2PDaemonError)
        assert daemon.child.returncode == -15

    assert printed_of(scene) == [] and caplog.records == []


def test_a_broken_connection_with_a_daemon_is_no_unheard_error() -> None:
    async def breaks() -> None:
        raise ConnectionResetError("Connection lost")

    async def starts(child: Process) -> Any:
        child.kill()
        tasks = {name: asyncio.ensure_future(breaks()) for name in ("_read_task", "_write_task")}
        return SimpleNamespace(_client=SimpleNamespace(control=SimpleNamespace(**tasks)))

    async def scene() -> None:
        p2p = await start_daemon(daemon_of(starts))
        await asyncio.wait([p2p._client.control._read_task, p2p._client.control._write_task])

    assert printed_of(scene) == []


@pytest.mark.parametrize(
    ("fails", "outcome", "said"),
    [
        (None, "nobody listens there", "_peers=A cannot be reached: nobody listens there; check"),
        (None, "that host name is unknown", "unknown; check the name and the network"),
        ("[Errno 13] denied: '/x/p2pd'", "", "libp2p failed on this machine: [Errno 13] denied: "),
        ("failed to listen on any", "", "listen=/ip4/127.0.0.1/tcp/0 cannot be listened on"),
    ],
)
def test_others_are_blamed_only_when_nobody_answers_a_daemon_that_runs(
    fails: str | None, outcome: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    address = "/ip4/203.0.113.7/tcp/4100/p2p/QmczQ58j3TwhWbL1MZkbdSCjM5LQFxyJ85RP1WecJwrcCV"

    class Daemon:
        peer_id = SimpleNamespace(to_base58=lambda: "me")

        async def shutdown(self) -> None: ...

    async def start(*_: Any, **options: Any) -> Any:
        if fails is not None:
            raise P2PDaemonError(fails)
        return Daemon()

    async def call(p2p: Daemon, addresses: Any) -> dict[str, str]:
        return dict.fromkeys(addresses, outcome)

    monkeypatch.setattr(libp2p, "start_daemon", start)
    monkeypatch.setattr(libp2p, "call_each", call)
    network = SwarmConfig(initial_peers=(address,))
    connecting = libp2p.Libp2p.connect(network, tmp_path / "key", Gate())
    text = error_text(SwarmError, asyncio.run, connecting)
    assert said in text.replace(address, "A")


def test_sockets_are_where_temporary_files_can_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """/tmp may be read-only or full."""

    class Sockets(P2P):  # type: ignore[misc]
        @classmethod
        async def create(cls, **options: Any) -> Any:
            raise P2PDaemonError(cls._UNIX_SOCKET_PREFIX)

    for place, used in (("/var/tmp", "/var/tmp"), (f"/{'deep/' * 20}", "/tmp")):
        monkeypatch.setattr("tempfile.tempdir", place)
        starting = start_daemon(Sockets)
        text = error_text(P2PDaemonError, asyncio.run, starting)
        assert text == f"/unix{used}/hivemind-"


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
