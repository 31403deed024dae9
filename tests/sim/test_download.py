"""Nodes over the simulated network: an anchor comes in parts, from all who have it, and only right ones are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch

from diloco.errors import SwarmError
from diloco.messages.bulk import Get, No, PartHeader
from diloco.messages.codec import Message, Refusal
from diloco.swarm.wire.streams import Traffic, open_bulk
from tests.support.village import NUMEL, PART, UP, Village, village_of

PARTS, NBYTES, PART_NBYTES = 11, 4 * NUMEL, 4 * PART
CONTROL_NBYTES = 30_000  # of heartbeats and headers, at most


@pytest.fixture
def village(monkeypatch: pytest.MonkeyPatch) -> Iterator[Village]:
    with village_of(monkeypatch) as village:
        yield village


@pytest.mark.parametrize("count", [1, 3, 6])
def test_an_anchor_comes_from_all_donors_at_once(village: Village, count: int) -> None:
    """And each part once."""
    donors, began_at = village.donors(count), village.loop.time()
    joiner = village.joins()
    assert {source for source, _ in village.came} == {donor.name for donor in donors}
    assert len(village.asked) == PARTS and village.parts() == list(range(PARTS))
    took_s = village.at[-1] - began_at
    first_s = PART_NBYTES / UP  # then the donor of the first part, which has told what there is, is one of many
    assert took_s < first_s + NBYTES / UP / count + 2 * first_s + 1.0
    assert NBYTES < joiner.node.traffic.bytes_received < NBYTES + CONTROL_NBYTES
    assert torch.equal(joiner.replica.anchors[0], donors[0].replica.anchors[0])
    assert not joiner.said("fetch_failed")


@pytest.mark.parametrize("victim", ["author", "other"])
def test_when_a_donor_crashes_only_its_parts_are_fetched_again(village: Village, victim: str) -> None:
    donors = village.donors(3)
    dying = donors[0 if victim == "author" else 1].name
    joiner = village.joiner()
    village.until(lambda: village.served(dying) >= 1 and len(village.asked) >= 6)
    village.crash(dying)
    village.until(lambda: joiner.version == 1)
    assert village.parts() == list(range(PARTS)) and PARTS < len(village.asked) <= PARTS + 2
    assert all(village.served(name) > 0 for name in ("d0", "d1", "d2"))
    assert joiner.node.traffic.bytes_received < NBYTES + 2 * PART_NBYTES + CONTROL_NBYTES


@pytest.mark.parametrize("liar", ["author", "other"])
def test_wrong_bytes_of_a_donor_come_from_another_one(village: Village, liar: str) -> None:
    donors = village.donors(3)
    right = donors[0].replica.anchors[0].clone()
    lying = donors[0 if liar == "author" else 1]
    lying.replica.anchors[0][::1000] += 1.0
    joiner = village.joins()
    assert torch.equal(joiner.replica.anchors[0], right)
    told = joiner.said("fetch_failed")
    assert told and all("is not what its digest says" in str(one["why"]) for one in told)
    assert {one["donor"] for one in told} == {lying.name} and village.served(lying.name) == 0


def test_donors_finish_the_version_they_began_with(village: Village) -> None:
    """The record brings the next."""
    donors = village.donors(3)
    for peer in donors:
        village.network.uplinks[peer.name]._bytes_per_s = None
    joiner = village.joiner(down=UP)
    village.until(lambda: len(village.came) >= 2)
    village.round(donors, 1.0)
    assert len(village.came) < PARTS, "the download is still under way"
    village.until(lambda: joiner.version == 2)
    assert set(village.parts()) == set(range(PARTS)) and len(village.came) <= PARTS + 1
    assert torch.equal(joiner.replica.anchors[0], torch.arange(float(NUMEL)) - 2.0)


@pytest.mark.parametrize("count", [1, 2])
def test_a_broken_download_goes_on_with_what_is_missing(village: Village, count: int) -> None:
    village.donors(count)
    joiner = village.joiner()
    village.until(lambda: len(village.came) >= 6)
    village.broken = True
    village.run(asyncio.sleep(12.0))
    assert joiner.version == 0 and 6 <= len(village.came) < PARTS
    village.broken = False
    village.until(lambda: joiner.version == 1)
    assert set(village.parts()) == set(range(PARTS)) and len(village.came) <= PARTS + count, "one was under way"


def test_what_is_not_here_is_answered_with_no(village: Village) -> None:
    [donor], joiner = village.donors(1), village.joins()

    async def answer(get: Get) -> Message:
        async with open_bulk(joiner.node.context.transport, "d0", Traffic()) as stream:
            await stream.send(get)
            return await stream.receive()

    nothing, head = (0, ""), donor.node.core.facts.control.tip.head.id
    for get in (Get(0, nothing, head, PARTS), Get(0, nothing, "1" * 64), Get(0, (2**50, ""))):
        assert isinstance(village.run(answer(get)), No)
    refusal = village.run(answer(Get(1, nothing)))
    assert isinstance(refusal, Refusal) and refusal.reason == "fragment 1 does not exist"
    assert isinstance(village.run(answer(Get(0, nothing))), PartHeader)


def test_a_node_that_cannot_join_leaves_nothing_open(village: Village, monkeypatch: pytest.MonkeyPatch) -> None:
    village.donors(1)

    async def nobody(mesh: object) -> list[str]:
        return []

    monkeypatch.setattr("diloco.swarm.node.mesh.ControlMesh.start", nobody)
    with pytest.raises(SwarmError, match=r"answer, but no diloco peer of run\.id=run is there"):
        village.joiner()
    assert "joiner" not in village.network._transports and not village.loop.tasks_of("joiner")
    del village.peers["joiner"]
