"""Stores over fsspec: a directory and memory, as a mailbox uses them."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.config import SwarmConfig
from diloco.config.address import Address
from diloco.errors import ConfigError, PayloadError, SwarmError
from diloco.swarm.client.watch import SwarmWatcher
from diloco.swarm.mailbox import store as stores
from diloco.swarm.mailbox.store import Away, FileStore


@pytest.fixture(params=["file", "memory"])
def store(request: Any, tmp_path: Path) -> FileStore:
    return FileStore(f"{request.param}://{tmp_path}/box/")


def test_objects_are_written_listed_read_and_deleted(store: FileStore) -> None:
    async def story() -> None:
        assert await store.tags("peers") == {}
        with pytest.raises(FileNotFoundError):
            await store.read("peers/a", 10)
        await store.write("peers/a", [b"one", memoryview(b"two")])
        await store.write("peers/b/c", [b"x"])
        first = await store.tags("peers")
        assert [*first] == ["peers/a", "peers/b/c"]
        told: list[int] = []
        assert bytes(await store.read("peers/a", 6, told.append)) == b"onetwo"
        await asyncio.sleep(0)
        assert told == [6]
        await store.write("peers/a", [b"other"])
        assert (await store.tags("peers"))["peers/a"] != first["peers/a"]
        with pytest.raises(PayloadError, match="peers/a has more than 4 bytes"):
            await store.read("peers/a", 4)
        await store.delete(["peers/a", "peers/gone"])
        assert [*await store.tags("peers")] == ["peers/b/c"]
        await store.delete(["peers/b/c"])
        if store.url.startswith("file:"):
            assert not [*Path(store.url.removeprefix("file://"), "peers").glob("*")]
        await store.write("peers/b/c", [b"x"])

    asyncio.run(story())
    assert store.requests > 8


@pytest.mark.parametrize("nbytes", [1, 7, 8, 9, 16, 17])
def test_a_large_object_is_read_by_ranges(store: FileStore, nbytes: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(stores, "READ_BYTES", 8)
    content = bytes(range(nbytes))

    async def story() -> memoryview:
        await store.write("x", [content])
        return await store.read("x", nbytes)

    assert bytes(asyncio.run(story())) == content


def test_nobody_sees_half_of_an_object_in_a_directory(tmp_path: Path, monkeypatch: Any) -> None:
    store = FileStore(f"file://{tmp_path}")

    def never(*_: object) -> None:
        raise OSError("power is lost")

    async def story() -> None:
        await store.write("peers/a", [b"old"])
        monkeypatch.setattr(store._files, "mv", never)
        with pytest.raises(Away, match="peers/a: power is lost"):
            await store.write("peers/a", [b"new"])
        assert bytes(await store.read("peers/a", 9)) == b"old"
        assert [*await store.tags("peers")] == ["peers/a"]

    asyncio.run(story())


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (
            PermissionError("Access Denied"),
            SwarmError,
            "refuses this peer: .*/x: Access Denied; ch",
        ),
        (RuntimeError("503 Slow Down"), Away, "x: 503 Slow Down"),
        (TimeoutError(), Away, "x: TimeoutError"),
        (TypeError("a bug"), TypeError, "a bug"),
    ],
)
def test_what_a_store_refuses_for_good_is_told_from_what_fails_for_a_while(
    store: FileStore, monkeypatch: Any, error: Exception, kind: type[Exception], text: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(store._files, "cat_file", fail)
    with pytest.raises(kind, match=text):
        asyncio.run(store.read("x", 9))


@pytest.mark.parametrize(
    ("response", "seconds"),
    [
        (SimpleNamespace(headers={"Retry-After": "7"}), 7.0),
        ({"ResponseMetadata": {"HTTPHeaders": {"retry-after": "2.5"}}}, 2.5),
        (SimpleNamespace(headers={"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}), 0.0),
        (SimpleNamespace(headers={"Retry-After": "999999"}), 3600.0),
        (None, 0.0),
    ],
)
def test_how_long_a_store_asks_to_wait(response: Any, seconds: float) -> None:
    error = RuntimeError("slow down")
    error.response = response  # type: ignore[attr-defined]
    assert stores._retry_s(error) == seconds


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("bucket/run", "is not the URL of a store; one looks like s3://"),
        ("https://example.com/x", "is not the URL of a store"),
        ("s3://key:secret@bucket/run", "has a key in it, which logs show"),
    ],
)
def test_a_url_that_is_none_is_refused_with_the_right_form(url: str, text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        SwarmConfig(mailbox=url)
    assert "secret@" not in str(caught.value.args)


def test_a_store_without_its_library_names_the_extra(monkeypatch: Any) -> None:
    monkeypatch.setitem(stores.EXTRAS, "s3", ("s3", "no_such_library"))
    with pytest.raises(ConfigError, match=r"no_such_library.*; pip install 'diloco.s3.'"):
        FileStore("s3://bucket/run")
    with pytest.raises(ConfigError, match=r"nothing://x cannot be opened: .*; install what it n"):
        FileStore("nothing://x")


def test_an_address_may_be_a_url() -> None:
    address = Address.parse("'hf://buckets/org/name'")
    assert address.mailbox == "hf://buckets/org/name" and address.callable == ()
    assert address.overrides == ["swarm.mailbox='hf://buckets/org/name'"]
    peer = Address.parse("/ip4/1.2.3.4/tcp/4100/p2p/Qm" + "a" * 44)
    assert peer.mailbox is None and peer.overrides[0].startswith("swarm.initial_peers=['/ip4")


def test_a_file_with_a_url_is_that_url(tmp_path: Path) -> None:
    (tmp_path / "address").write_text("file:///shared/box\n")
    assert Address.read(f"@{tmp_path}/address").mailbox == "file:///shared/box"


def test_who_watches_a_bucket_is_told_what_does() -> None:
    with pytest.raises(ConfigError, match="answer no questions; diloco doctor looks into it"):
        SwarmWatcher(["file:///shared/box"])
