"""Nodes over the simulated network: an anchor comes in parts, from all who have it, and only right ones are kept."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from diloco.errors import PayloadError
from diloco.protocol.heads import sign_head
from diloco.protocol.messages import Message, Refusal, expect
from diloco.protocol.messages.bulk import PartList, PartRequest, StateHeader, StateRequest
from diloco.swarm.conversations.anchor import AnchorFetcher
from diloco.swarm.wire.streams import Stream, Traffic, open_bulk
from tests.support.village import MANIFEST, NUMEL, PART, UP, Village, Villager, village_of

PARTS, NBYTES, PART_NBYTES = 11, 4 * NUMEL, 4 * PART
CONTROL_NBYTES = 30_000  # of heartbeats and headers, at most


@pytest.fixture
def village(monkeypatch: pytest.MonkeyPatch) -> Iterator[Village]:
    with village_of(monkeypatch) as village:
        yield village


@pytest.mark.parametrize("count", [1, 3, 6])
def test_an_anchor_comes_from_up_to_four_donors_at_once(village: Village, count: int) -> None:
    """And each part once."""
    donors, joiner = village.donors(count), village.joiner()
    took_s = village.until(lambda: joiner.has(1))
    sources = {source for source, _ in village.came}
    assert len(sources) == min(count, 4) and sources <= set(village.peers)
    assert len(village.asked) == PARTS and village.parts() == list(range(PARTS))
    assert Counter(joiner.opened) == Counter(sources), "one stream each"
    shared_s = NBYTES / UP / min(count, 4)
    assert shared_s < took_s < shared_s + PART_NBYTES / UP + 1.0
    assert NBYTES < joiner.node.traffic.bytes_received < NBYTES + CONTROL_NBYTES
    assert torch.equal(joiner.replica.anchors[0], donors[0].replica.anchors[0])
    assert not joiner.said("fetch_failed") and not joiner.node._anchors.fetcher.unfinished


@pytest.mark.parametrize("victim", ["syncer", "other"])
def test_when_a_donor_crashes_only_its_part_is_fetched_again(village: Village, victim: str) -> None:
    donors = village.donors(3)
    dying = donors[0 if victim == "syncer" else 1].node.protocol.me
    joiner = village.joiner()
    village.until(lambda: village.served(dying) >= 1 and len(village.asked) >= 6)
    village.crash(dying)
    village.until(lambda: joiner.has(1))
    assert village.parts() == list(range(PARTS)) and len(village.asked) == PARTS + 1
    assert all(village.served(name) > 0 for name in ("d0", "d1", "d2"))
    assert joiner.node.traffic.bytes_received < NBYTES + PART_NBYTES + CONTROL_NBYTES
    assert [event["donor"] for event in joiner.said("fetch_failed")][:1] == [dying]


@pytest.mark.parametrize("liar", ["syncer", "other"])
def test_a_donor_that_serves_wrong_bytes_is_left_alone(
    village: Village, monkeypatch: pytest.MonkeyPatch, liar: str
) -> None:
    liars: list[set[str]] = []

    async def watched(*arguments: Any) -> Any:
        liars.append(arguments[-1])
        return await fetch(*arguments)

    fetch = AnchorFetcher.fetch
    monkeypatch.setattr(AnchorFetcher, "fetch", watched)
    donors = village.donors(3)
    right = donors[0].replica.anchors[0].clone()
    lying = donors[0 if liar == "syncer" else 1]
    lying.replica.anchors[0][::1000] += 1.0
    joiner = village.joins()
    assert torch.equal(joiner.replica.anchors[0], right)
    name = lying.node.protocol.me
    [told] = joiner.said("lying_donor")
    assert told["peer"] == name and told["fragment"] == 0 and liars[-1] == {name}
    if liar == "other":
        assert [(name, told["part"])] == [(source, part) for source, part in village.asked if source == name]
    else:
        assert "part" not in told, "the list itself is wrong"
    assert len(village.came) == PARTS + (liar == "other") and village.served(name) == (liar == "other")


def forge(villager: Villager, digest: str = "") -> None:
    """A donor has an anchor of its own, under a certificate that it has signed itself."""
    protocol = villager.node.protocol
    here = protocol.fragments[0]
    assert here.record is not None
    here.digest = digest or villager.replica.digest(0)
    head = here.record.head.model_copy(update={"author": protocol.me, "digest": here.digest})
    here.record = here.record.model_copy(update={"head": sign_head(protocol.signer, protocol.run_id, head)})


def test_a_list_that_the_syncer_never_published_is_not_believed(village: Village) -> None:
    syncer, other = village.donors(2)
    other.replica.anchors[0][5] += 1.0  # an anchor of its own, with a digest that fits
    forge(other)

    async def busy(stream: Stream, request: object) -> None:
        raise PayloadError("busy")

    syncer.node._server._answers[StateRequest] = busy
    joiner = village.joiner()
    village.run(asyncio.sleep(5))
    assert joiner.node.protocol.versions == [0] and not village.came
    why = [str(event["why"]) for event in joiner.said("unbelieved") if event["donor"] == other.node.protocol.me]
    assert why and f"is by {other.node.protocol.me} under term 1, which it did not hold" in why[0]


def test_donors_finish_the_version_they_began_with(village: Village) -> None:
    """The record brings the next."""
    donors = village.donors(3)
    for peer in donors:
        village.network.uplinks[peer.node.protocol.me]._bytes_per_s = None
    joiner = village.joiner(down=UP)
    village.until(lambda: len(village.came) >= 2)
    village.round(donors, torch.ones(NUMEL))
    assert len(village.came) < PARTS, "the download is still under way"
    village.until(lambda: joiner.has(2))
    assert village.parts() == list(range(PARTS)) and len(village.asked) == PARTS
    assert torch.equal(joiner.replica.anchors[0], torch.arange(float(NUMEL)) - 2.0)


def test_a_broken_download_goes_on_with_what_did_not_change(village: Village) -> None:
    donors = village.donors(2)
    joiner = village.joiner()
    village.until(lambda: len(village.came) == 6)
    village.broken = True
    village.until(lambda: bool(joiner.node._anchors.fetcher.unfinished))
    early = village.parts()
    assert 6 <= len(early) < PARTS and 2 in early
    step = torch.zeros(NUMEL)
    step[2 * PART] = 1.0  # changes the third part only
    village.round(donors, step)
    village.round(donors, step)  # so that no donor has the record that follows the version here
    village.broken = False
    village.until(lambda: joiner.has(3))
    assert village.parts() == sorted([*range(PARTS), 2]) and not joiner.node._anchors.fetcher.unfinished


# -- what does not fit ------------------------------------------------------------------------------------------------


def answers(village: Village, *requests: Message) -> list[Message]:
    """What d0 says to each of these, on one stream; a part that follows a header is dropped."""
    said = village.peers["joiner"].node.context.transport
    assert said is not None

    async def talk() -> list[Message]:
        heard = []
        async with open_bulk(said, "d0", Traffic()) as stream:
            for request in requests:
                await stream.send(request)
                heard.append(await stream.receive())
        return heard

    return list(village.run(talk()))


def test_a_part_that_does_not_exist_is_refused(village: Village) -> None:
    """And of another version its digest is named."""
    [donor], _ = village.donors(1), village.joins()
    right = {"manifest_hash": MANIFEST, "fragment": 0, "digest": donor.node.protocol.digests[0], "part": 0}
    for field, value, why in (
        ("part", PARTS, f"part {PARTS} of fragment 0 is not in this conversation"),
        ("fragment", 1, "fragment 1 does not exist"),
        ("manifest_hash", "1" * 64, "the manifest 111111111111 is not the one here"),
    ):
        [refusal] = answers(village, PartRequest(**{**right, field: value}))
        assert isinstance(refusal, Refusal) and refusal.reason == why
        assert donor.said("refused")[-1] == {"peer": "joiner", "why": why}
    other = PartRequest(**{**right, "digest": "0" * 64})
    listed, *headers = answers(village, StateRequest(manifest_hash=MANIFEST, fragment=0, in_parts=True), other, other)
    assert len(expect(listed, PartList).parts) == PARTS
    assert [expect(header, StateHeader).digest for header in headers] == [right["digest"]] * 2, "and nothing after it"
