"""Nodes over the simulated network: an anchor comes in parts, from all who have it, and only right
ones are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.core.events import AnchorPart
from diloco.core.history import Tip
from diloco.messages.bulk import Get, No, PartHeader
from diloco.messages.codec import Message, Refusal
from diloco.outer.replica import Replica
from diloco.sim.network import PeerLink
from diloco.sim.virtual_time import VirtualLoop
from diloco.swarm.node.node import Node
from diloco.swarm.rpc import state
from diloco.swarm.wire.streams import Traffic, open_bulk
from diloco.testing.fuzz.crowd import Crowd
from diloco.testing.fuzz.lives import Life, PeerSpec
from diloco.testing.fuzz.virtual import virtual_swarm

PART = 2**15  # elements: small parts, so that a small fragment has many
NUMEL = 10 * PART + 1000
UP = 2e5  # bytes per second of every donor
PARTS, NBYTES, PART_NBYTES = 11, 4 * NUMEL, 4 * PART
CONTROL_NBYTES = 30_000  # of heartbeats and headers, at most


class Village(Crowd):
    """Donors that have trained and rest, and a joiner.

    `asked` and `came` list the joiner's parts as (donor, part), and `at` when each came. As long as
    `broken` is set, no part arrives.
    """

    def __init__(self, loop: VirtualLoop, monkeypatch: pytest.MonkeyPatch) -> None:
        exact = {"sync_every": 1, "fragments": 1, "codec_up": "fp32", "codec_down": "fp32"}
        super().__init__(loop, 0, exact)
        self.asked, self.came = list[tuple[str, int]](), list[tuple[str, int]]()
        self.at, self.broken, self.start_values = list[float](), False, torch.arange(float(NUMEL))
        ask = state.ask

        async def watched(stream: Any, get: Any, replica: Replica, *rest: Any) -> Any:
            if not (loop.owner or "").startswith("joiner"):
                return await ask(stream, get, replica, *rest)
            self.asked.append((stream.peer, get.part))
            if self.broken:
                raise ConnectionResetError("broken")
            answer = await ask(stream, get, replica, *rest)
            if isinstance(answer, AnchorPart):
                self.came.append((stream.peer, answer.part))
                self.at.append(loop.seconds)
            return answer

        monkeypatch.setattr(state, "ask", watched)

    def _parameters(self) -> Tensor:
        return self.start_values.clone()

    def gradient(self, life: Life, w: Tensor, r: Any) -> Tensor:
        return torch.ones(NUMEL)

    def donors(self, count: int) -> list[Node]:
        """That many peers with one version, the author first."""
        for number in range(count):
            self.start(PeerSpec(f"d{number}", latency_s=0.01), min_peers=count)
            self.wait(self.all_ready)
        self.wait(lambda: all(self.tip(name).head.number for name in self.lives))
        self.rests = True
        self.wait(lambda: all(life.at_rest for life in self.living()))
        self.wait(lambda: len({self.tip(name).key for name in self.lives}) == 1)
        self.pass_s(3.0)
        for life in self.living():
            self.network.uplinks[life.name]._bytes_per_s = UP
        author = self.facts("d0").author_of(self.facts("d0").control)
        return [self.node(name) for name in sorted(self.lives, key=lambda name: name != author)]

    def joiner(self, down: float | None = None) -> Node:
        """A peer that comes later with other values, and does not train."""
        self.start_values = torch.zeros(NUMEL)
        self.start(PeerSpec("joiner", trains=False, latency_s=0.01))
        self.wait(lambda: self.lives["joiner"].node)
        self.network._links["joiner"] = PeerLink(down=down, latency_s=0.01)
        self.network._downlinks["joiner"]._bytes_per_s = down
        return self.node("joiner")

    def joins(self) -> Node:
        """A joiner that has got the donors' version."""
        joiner = self.joiner()
        self.wait(self.arrived)
        return joiner

    def arrived(self) -> bool:
        return self.tip("joiner").key == self.tip("d1" if "d1" in self.lives else "d0").key

    def node(self, name: str) -> Node:
        node = self.lives[name].node
        assert node is not None
        return node

    def facts(self, name: str) -> Any:
        return self.node(name).core.facts

    def tip(self, name: str) -> Tip:
        tip: Tip = self.facts(name).control.tip
        return tip

    def said(self, name: str, kind: str) -> list[str]:
        return [line for line in self.story if line.split()[1:3] == [name, kind]]

    def wait(self, condition: Callable[[], object]) -> None:
        self.loop.run_until_complete(self.until(condition, 200.0, "something", 0.01))

    def pass_s(self, seconds: float) -> None:
        end = self.loop.seconds + seconds
        self.wait(lambda: self.loop.seconds >= end)

    def parts(self) -> list[int]:
        """The parts that came, in their order."""
        return sorted(part for _, part in self.came)

    def served(self, donor: str) -> int:
        """How many parts came from a donor."""
        return sum(source == donor for source, _ in self.came)


@pytest.fixture
def village(monkeypatch: pytest.MonkeyPatch) -> Iterator[Village]:
    with virtual_swarm(PART // 4, PART) as loop:
        yield Village(loop, monkeypatch)


def name_of(node: Node) -> str:
    return node.core.facts.me


@pytest.mark.parametrize("count", [1, 3, 6])
def test_an_anchor_comes_from_all_donors_at_once(village: Village, count: int) -> None:
    """And each part once."""
    donors, began_at = village.donors(count), village.loop.seconds
    joiner = village.joins()
    assert {source for source, _ in village.came} == {name_of(donor) for donor in donors}
    assert len(village.asked) == PARTS and village.parts() == [*range(PARTS)]
    took_s = village.at[-1] - began_at
    # then the donor of the first part, which has told what there is, is one of many
    first_s = PART_NBYTES / UP
    assert took_s < first_s + NBYTES / UP / count + 2 * first_s + 1.0
    assert NBYTES < joiner.traffic.bytes_received < NBYTES + CONTROL_NBYTES
    assert torch.equal(joiner.replica.anchors[0], donors[0].replica.anchors[0])
    assert not village.said("joiner", "fetch_failed")


@pytest.mark.parametrize("victim", [0, 1], ids=["author", "other"])
def test_when_a_donor_crashes_only_its_parts_are_fetched_again(
    village: Village, victim: int
) -> None:
    donors = village.donors(3)
    dying = name_of(donors[victim])
    joiner = village.joiner()
    village.wait(lambda: village.served(dying) >= 1 and len(village.asked) >= 6)
    village.crash(dying)
    village.wait(village.arrived)
    assert village.parts() == [*range(PARTS)] and PARTS < len(village.asked) <= PARTS + 2
    assert all(village.served(name) > 0 for name in ("d0", "d1", "d2"))
    assert joiner.traffic.bytes_received < NBYTES + 2 * PART_NBYTES + CONTROL_NBYTES


@pytest.mark.parametrize("liar", [0, 1], ids=["author", "other"])
def test_wrong_bytes_of_a_donor_come_from_another_one(village: Village, liar: int) -> None:
    donors = village.donors(3)
    right, lying = donors[0].replica.anchors[0].clone(), donors[liar]
    lying.replica.anchors[0][::1000] += 1.0
    joiner = village.joins()
    assert torch.equal(joiner.replica.anchors[0], right)
    told = village.said("joiner", "fetch_failed")
    assert told and all("is not what its digest says" in line for line in told)
    assert all(f"'donor': '{name_of(lying)}'" in line for line in told)
    assert village.served(name_of(lying)) == 0


def test_donors_finish_the_version_they_began_with(village: Village) -> None:
    """The record brings the next."""
    donors = village.donors(3)
    for donor in donors:
        village.network.uplinks[name_of(donor)]._bytes_per_s = None
    joiner = village.joiner(down=UP)
    village.wait(lambda: len(village.came) >= 2)
    before = village.tip("d0").head.number
    village.rests = False
    village.pass_s(1.05)  # who rests looks once a second, and makes one step now
    village.rests = True
    village.wait(lambda: village.tip("d0").head.number > before)
    assert len(village.came) < PARTS, "the download is still under way"
    village.wait(village.arrived)
    assert {*village.parts()} == {*range(PARTS)} and len(village.came) <= PARTS + 1
    assert torch.equal(joiner.replica.anchors[0], donors[0].replica.anchors[0])


@pytest.mark.parametrize("count", [1, 2])
def test_a_broken_download_goes_on_with_what_is_missing(village: Village, count: int) -> None:
    village.donors(count)
    village.joiner()
    village.wait(lambda: len(village.came) >= 6)
    village.broken = True
    village.pass_s(12.0)
    assert not village.arrived() and 6 <= len(village.came) < PARTS
    village.broken = False
    village.wait(village.arrived)
    assert {*village.parts()} == {*range(PARTS)}
    assert len(village.came) <= PARTS + count, "one was under way"


def test_what_is_not_here_is_answered_with_no(village: Village) -> None:
    village.donors(1)
    joiner = village.joins()

    async def answer(get: Get) -> Message:
        async with open_bulk(joiner.context.transport, "d0", Traffic()) as stream:
            await stream.send(get)
            return await stream.receive()

    def answered(get: Get) -> Message:
        message: Message = village.loop.run_until_complete(answer(get))
        return message

    nothing, head = (0, ""), village.tip("d0").head.id
    for get in (Get(0, nothing, head, PARTS), Get(0, nothing, "1" * 64), Get(0, (2**50, ""))):
        assert isinstance(answered(get), No)
    refusal = answered(Get(1, nothing))
    assert isinstance(refusal, Refusal) and refusal.reason == "fragment 1 does not exist"
    assert isinstance(answered(Get(0, nothing)), PartHeader)


def test_a_node_that_cannot_join_leaves_nothing_open(
    village: Village, monkeypatch: pytest.MonkeyPatch
) -> None:
    village.donors(1)

    async def nobody(mesh: object) -> list[str]:
        return []

    monkeypatch.setattr("diloco.swarm.node.mesh.ControlMesh.start", nobody)
    life = village.start(PeerSpec("joiner", trains=False))
    village.wait(lambda: life.ended)
    assert "answer, but no diloco peer of run.id=run is there" in life.ended
    assert "joiner" not in village.network._transports and not village.loop.tasks_of(life.owner)
