"""What a newcomer learns from a peer: addresses, the files of a run, the sequences it trains on."""

import asyncio
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from diloco.attach.node_thread import NodeThread, RankLeases
from diloco.attach.ranks import RankGroup
from diloco.config.address import address_error
from diloco.core.members import AddressBook
from diloco.errors import PayloadError, SwarmError
from diloco.messages.fields import Units
from diloco.ranges import NONE, count, difference, first, overlaps, union
from diloco.swarm.client import ask as visiting
from diloco.swarm.client.watch import _places
from diloco.swarm.context import FilePart
from diloco.swarm.node.leases import LeasedData
from tests.support.fake_swarm import snapshot

A, B = (f"Qm{letter * 44}" for letter in "AB")


def at(peer: str, host: str = "192.0.2.7") -> str:
    return f"/ip4/{host}/tcp/4100/p2p/{peer}"


def test_what_a_peer_says_of_itself_counts_more_than_hearsay() -> None:
    places, hearsay = AddressBook(), at(B, "198.51.100.1")
    places.is_sound = lambda address: address_error(address) is None
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

    monkeypatch.setattr("diloco.swarm.wire.libp2p.Libp2p.client", visit)
    monkeypatch.setattr(visiting, "request_file", request)
    place = tmp_path / "origin" / "tokenizer" / "vocab.json"
    why = r"^no peer there gives vocab\.json, which the run needs \(that file"
    with pytest.raises(SwarmError, match=why) if wrong else nullcontext():
        asyncio.run(visiting.fetch_files(["@x"], {DIGEST: ([FilePart(place)], 9)}, 7, None, None))
    assert [file.read_bytes() for file in place.parent.glob("*")] == ([] if wrong else [b"content"])
    assert place.parent.exists() != wrong


STEPS = st.sampled_from(["lease", "take", "train", "lose"])


@given(st.lists(st.tuples(STEPS, st.integers(1, 9)), max_size=60))
def test_every_sequence_is_taken_once(steps: list[tuple[str, int]]) -> None:
    data, queue, dealt, taken, open_ = LeasedData(), NONE, 0, NONE, NONE
    data.plan_round(8)
    assert data.wanted == 16, "a round more than it trains on"
    for what, number in steps:
        match what:
            case "lease":
                queue, dealt = union(queue, ((dealt, dealt + number),)), dealt + number
                data.set_queue(queue)
            case "take":
                coming, units = data.ahead(number), data.take(number)
                if units is not None:
                    assert coming == units and count(units) == number and not overlaps(units, taken)
                    taken, open_ = union(taken, units), union(open_, units)
            case "train":
                assert data.trained() == open_
                queue, open_ = difference(queue, open_), NONE  # as the core hears of it
                data.set_queue(queue)
            case "lose":
                queue = difference(queue, first(queue, number))  # another peer has trained on it
                data.set_queue(queue)
                open_ = difference(open_, difference(open_, queue))
        assert difference(open_, queue) == NONE


def test_too_few_are_not_taken() -> None:
    data = LeasedData()
    data.set_queue(((3, 5), (9, 10)))
    assert data.take(4) is None and data.ahead(9) == ((3, 5), (9, 10))
    assert data.take(3) == ((3, 5), (9, 10)) and data.take(1) is None


class Link:
    """Of one of the ranks of a peer, which are called one after the other."""

    def __init__(self, data: LeasedData | None, said: list[Any]) -> None:
        node: Any = SimpleNamespace(leased=data)
        self.node = None if data is None else NodeThread(node, node)
        self.said = said

    def broadcast(self, value: Any) -> Any:
        if self.node is not None:
            self.said.append(value)
        return self.said[-1]

    def leases(self) -> RankLeases:
        return RankLeases(cast(RankGroup, self), lambda: self.node, 3)


@given(st.lists(st.tuples(st.sampled_from(["lease", "take"]), st.integers(1, 6)), max_size=40))
def test_all_ranks_take_the_units_of_rank_0(steps: list[tuple[str, int]]) -> None:
    data, alone, said = LeasedData(), LeasedData(), list[Any]()
    leads, follows = (Link(units, said).leases() for units in (data, None))
    queue: Units = NONE
    for at, (what, size) in enumerate(steps):
        if what == "lease":
            queue = union(queue, ((10 * at, 10 * at + size),))
            for units in (data, alone):
                units.set_queue(queue)
            continue
        expected = alone.take(size)
        assert leads.take(size) == expected == follows.take(size)
        # After a refusal nothing is known of what comes, as it is not enough.
        coming = NONE if expected is None else alone.ahead(3 * size)
        assert leads.ahead(3 * size) == coming == follows.ahead(3 * size)
        assert count(follows.ahead(size)) <= size
    assert data.trained() == alone.trained()
