"""What a newcomer or a watcher learns from a peer: addresses, and the small files of a run."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from diloco.core.events import Connected
from diloco.core.members import AddressBook
from diloco.errors import PayloadError, SwarmError
from diloco.swarm.client import ask as visiting
from diloco.swarm.client.watch import _places
from tests.support.core import core
from tests.support.fake_swarm import snapshot

A, B, C = (f"Qm{letter * 44}" for letter in "ABC")


def at(peer: str, host: str = "192.0.2.7") -> str:
    return f"/ip4/{host}/tcp/4100/p2p/{peer}"


def test_a_newcomer_learns_from_one_peer_where_the_others_are() -> None:
    first, second, third = map(core, (A, B, C))
    for one in (first, second, third):
        one.addresses.hear(one.facts.me, {one.facts.me: [at(one.facts.me)]})
    first.receive(Connected(B, second.hello()), 0.0)
    second.receive(Connected(A, first.hello()), 0.0)
    assert first.hello().addresses == {A: [at(A)], B: [at(B)]}
    third.receive(Connected(A, first.hello()), 1.0)
    assert third.addresses.of(B) == (at(B),)


def test_what_a_peer_says_of_itself_counts_more_than_hearsay() -> None:
    places, hearsay = AddressBook(), at(B, "198.51.100.1")
    for teller, place, believed in ((A, hearsay, hearsay), (B, at(B), at(B)), (A, hearsay, at(B))):
        places.hear(teller, {B: [place]})
        assert places.of(B) == (believed,)


def test_a_watcher_calls_no_file_that_a_peer_names() -> None:
    seen = snapshot(2)
    rows = [replace(row, addresses=["@secret", f"@secret/p2p/{row.peer_id}"]) for row in seen.peers]
    places = _places(replace(seen, peers=rows))
    assert len(places) == 2 and not any(places.values())


DIGEST = sha256(b"content").hexdigest()


@pytest.mark.parametrize("wrong", [False, True])
def test_a_file_is_written_whole_or_not_at_all(
    wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Visitor:
        seeds = ("liar", "donor")

        async def aclose(self) -> None: ...

    async def visit(*where: Any) -> Visitor:
        return Visitor()

    async def request(visitor: Visitor, peer: str, digest: str, most_bytes: int) -> bytes:
        assert most_bytes == 7
        if peer == "liar" or wrong:
            raise PayloadError("that file is not here")
        return b"content"

    monkeypatch.setattr(visiting.Libp2p, "client", visit)
    monkeypatch.setattr(visiting, "request_file", request)
    place = tmp_path / "origin" / "tokenizer" / "vocab.json"
    why = r"^no peer there gives vocab\.json, which the run needs \(that file"
    with pytest.raises(SwarmError, match=why) if wrong else nullcontext():
        asyncio.run(visiting.fetch_files(["@x"], {DIGEST: (place, 9)}, 7, None, None))
    assert [file.read_bytes() for file in place.parent.glob("*")] == ([] if wrong else [b"content"])
    assert place.parent.exists() != wrong
