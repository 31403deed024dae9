"""Nodes over the simulated network: an anchor comes in parts, from all who have it, and only right
ones are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.config import OuterConfig, SwarmConfig
from diloco.core.events import AnchorPart
from diloco.errors import SwarmError
from diloco.messages.bulk import Get, No, PartHeader
from diloco.messages.codec import Message, Refusal
from diloco.outer.fragments import partition
from diloco.outer.replica import Replica
from diloco.sim.network import Network, PeerLink
from diloco.sim.virtual_time import VirtualLoop, virtual_time
from diloco.swarm.node.node import Node
from diloco.swarm.node.options import NodeOptions, RunSpec
from diloco.swarm.rpc import state
from diloco.swarm.wire.streams import Traffic, open_bulk
from diloco.swarm.wire.transport import Transport
from diloco.testing.fuzz.virtual import small_pieces

PART = 2**15  # elements: small parts, so that a small fragment has many
NUMEL = 10 * PART + 1000
# bytes per second of every donor, and half a round trip between any two peers
UP, LATENCY_S = 2e5, 0.01
MANIFEST = "0" * 64
PARTS, NBYTES, PART_NBYTES = 11, 4 * NUMEL, 4 * PART
CONTROL_NBYTES = 30_000  # of heartbeats and headers, at most


class Villager:
    """A node, its parameters, and what it said."""

    node: Node

    def __init__(self, replica: Replica, events: list[tuple[str, dict[str, object]]]) -> None:
        self.replica, self.events = replica, events

    @property
    def name(self) -> str:
        return self.node.core.facts.me

    @property
    def version(self) -> int:
        return self.node.core.facts.control.tip.head.number

    @property
    def is_author(self) -> bool:
        facts = self.node.core.facts
        return facts.author_of(facts.control) == facts.me

    def said(self, kind: str) -> list[dict[str, object]]:
        return [fields for one, fields in self.events if one == kind]

    async def round(self, step: Tensor | float) -> None:
        """One inner step, of ten tokens, and the exchange."""
        self.replica.local.tensors["w"].sub_(step)
        await self.node.stepped(10, 1.0)
        assert await self.node.exchange() is not None


class Village:
    """Peers of one fragment in virtual time; `asked` and `came` list the joiner's parts as (donor,
    part), and `at` when each came.
    """

    def __init__(self, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop, self.network = loop, Network(loop)
        self.peers: dict[str, Villager] = {}
        self.asked: list[tuple[str, int]] = []
        self.came: list[tuple[str, int]] = []
        self.at: list[float] = []
        self.broken = False  # as long as this is set, no part arrives
        ask = state.ask

        async def watched(stream: Any, get: Any, replica: Replica, *rest: Any) -> Any:
            joiner = self.peers.get("joiner")
            if joiner is None or replica is not joiner.replica:
                return await ask(stream, get, replica, *rest)
            self.asked.append((stream.peer, get.part))
            if self.broken:
                raise ConnectionResetError("broken")
            answer = await ask(stream, get, replica, *rest)
            if isinstance(answer, AnchorPart):
                self.came.append((stream.peer, answer.part))
                self.at.append(loop.time())
            return answer

        monkeypatch.setattr(state, "ask", watched)

    def peer(
        self, name: str, *seeds: str, values: Tensor, down: float | None = None, **options: Any
    ) -> Villager:
        """A started node."""
        exact = {"lr": 1.0, "momentum": 0.0, "codec_up": "fp32", "codec_down": "fp32"}
        settings = OuterConfig.parse({"method": "diloco", "sync_every": 1, "fragments": 1, **exact})
        events: list[tuple[str, dict[str, object]]] = []
        replica = Replica({"w": values.clone()}, partition({"w": NUMEL}, 1), settings)
        villager = self.peers[name] = Villager(replica, events)

        async def connect(options: NodeOptions) -> Transport:
            return self.network.join(name, list(seeds), PeerLink(down=down, latency_s=LATENCY_S))

        network = SwarmConfig(min_peers=options.pop("min_peers", 1))
        chosen = NodeOptions(
            RunSpec("run", MANIFEST, "{}"), network, Path(name), name, wall=1e9, **options
        )
        opening = Node.open(
            chosen, replica, lambda kind, fields: events.append((kind, fields)), connect
        )
        with self.loop.owned_by(name):
            villager.node = self.run(opening)
        return villager

    def donors(self, count: int) -> list[Villager]:
        """That many peers at version 1, the author first."""
        values = torch.arange(float(NUMEL))
        peers = [self.peer("d0", values=values, min_peers=count)]
        peers += [self.peer(f"d{i}", "d0", values=values, min_peers=count) for i in range(1, count)]
        self.run(self.all(peers, lambda peer: peer.node.begin()))
        self.round(peers, 1.0)
        for name in self.peers:
            self.network.uplinks[name]._bytes_per_s = UP
        return sorted(peers, key=lambda peer: not peer.is_author)

    def round(self, peers: list[Villager], step: Tensor | float) -> None:
        """All of them subtract `step` and exchange."""
        self.run(self.all(peers, lambda peer: peer.round(step)))

    async def all(self, peers: list[Villager], work: Any) -> None:
        await asyncio.gather(*map(work, peers))

    def joiner(self, down: float | None = None) -> Villager:
        """A peer that comes later, and does not train."""
        return self.peer("joiner", "d0", values=torch.zeros(NUMEL), down=down, trains=False)

    def joins(self) -> Villager:
        """A joiner that has got the donors' first version."""
        joiner = self.joiner()
        self.until(lambda: joiner.version == 1)
        return joiner

    def crash(self, name: str) -> None:
        self.network.crash(name)
        self.loop.kill(name)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 200))

    def until(self, condition: Any) -> None:
        """Let time pass until something holds."""

        async def wait() -> None:
            while not condition():
                await asyncio.sleep(0.01)

        self.run(wait())

    def parts(self) -> list[int]:
        """The parts that came, in their order."""
        return sorted(part for _, part in self.came)

    def served(self, donor: str) -> int:
        """How many parts came from a donor."""
        return sum(source == donor for source, _ in self.came)


@pytest.fixture
def village(monkeypatch: pytest.MonkeyPatch) -> Iterator[Village]:
    with virtual_time() as loop, small_pieces(PART // 4, PART):
        village = Village(loop, monkeypatch)
        yield village
        village.run(village.all(list(village.peers.values()), lambda peer: peer.node.close()))


@pytest.mark.parametrize("count", [1, 3, 6])
def test_an_anchor_comes_from_all_donors_at_once(village: Village, count: int) -> None:
    """And each part once."""
    donors, began_at = village.donors(count), village.loop.time()
    joiner = village.joins()
    assert {source for source, _ in village.came} == {donor.name for donor in donors}
    assert len(village.asked) == PARTS and village.parts() == list(range(PARTS))
    took_s = village.at[-1] - began_at
    # then the donor of the first part, which has told what there is, is one of many
    first_s = PART_NBYTES / UP
    assert took_s < first_s + NBYTES / UP / count + 2 * first_s + 1.0
    assert NBYTES < joiner.node.traffic.bytes_received < NBYTES + CONTROL_NBYTES
    assert torch.equal(joiner.replica.anchors[0], donors[0].replica.anchors[0])
    assert not joiner.said("fetch_failed")


@pytest.mark.parametrize("victim", ["author", "other"])
def test_when_a_donor_crashes_only_its_parts_are_fetched_again(
    village: Village, victim: str
) -> None:
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
    assert set(village.parts()) == set(range(PARTS)) and len(village.came) <= PARTS + count, (
        "one was under way"
    )


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


def test_a_node_that_cannot_join_leaves_nothing_open(
    village: Village, monkeypatch: pytest.MonkeyPatch
) -> None:
    village.donors(1)

    async def nobody(mesh: object) -> list[str]:
        return []

    monkeypatch.setattr("diloco.swarm.node.mesh.ControlMesh.start", nobody)
    with pytest.raises(SwarmError, match=r"answer, but no diloco peer of run\.id=run is there"):
        village.joiner()
    assert "joiner" not in village.network._transports and not village.loop.tasks_of("joiner")
    del village.peers["joiner"]
