"""Nodes over the simulated network: an anchor comes in parts, from all who have it, and only right
ones are kept."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from diloco.core.events import AnchorPart
from diloco.core.history import Tip
from diloco.messages.bulk import Get, No, PartHeader
from diloco.messages.codec import Message, Refusal
from diloco.sim.link import PeerLink
from diloco.sim.virtual_time import VirtualLoop
from diloco.swarm.node.node import Node
from diloco.swarm.rpc import state
from diloco.swarm.wire.streams import Traffic, open_bulk
from tests.harness.fuzz.lives import Life, PeerSpec
from tests.harness.fuzz.virtual import virtual_swarm
from tests.support.stories import DrivenCrowd

PART = 2**15  # elements: small parts, so that a small fragment has many
NUMEL = 10 * PART + 1000
UP = 2e5  # bytes per second of every donor
PARTS, NBYTES, PART_NBYTES = 11, 4 * NUMEL, 4 * PART
CONTROL_NBYTES = 30_000  # of heartbeats and headers, at most


class Village(DrivenCrowd):
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

        async def watched(context: Any, stream: Any, get: Any) -> Any:
            if not (loop.owner or "").startswith("joiner"):
                return await ask(context, stream, get)
            self.asked.append((stream.peer, get.part))
            if self.broken:
                raise ConnectionResetError("broken")
            answer = await ask(context, stream, get)
            if isinstance(answer, AnchorPart):
                self.came.append((stream.peer, answer.part))
                self.at.append(loop.seconds)
            return answer

        monkeypatch.setattr(state, "ask", watched)

    def _parameters(self) -> Tensor:
        return self.start_values.clone()

    def gradient(self, life: Life, w: Tensor, r: Any) -> Tensor:
        return torch.ones(NUMEL)

    def donors(self, count: int, up: float | None = UP) -> list[Node]:
        """That many peers with one version, the author first, that send so many bytes a second."""
        for number in range(count):
            self.start(PeerSpec(f"d{number}", latency_s=0.01), min_peers=count)
            self.run_until(self.all_ready)
        self.run_until(lambda: all(self.tip(name).head.number for name in self.lives))
        self.rests = True
        self.run_until(lambda: all(life.at_rest for life in self.living()))
        self.run_until(lambda: len({self.tip(name).key for name in self.lives}) == 1)
        self.run_for(3.0)
        for name in self.lives:
            self.network.uplinks[name]._bytes_per_s = up
        author = self.facts("d0").author_of(self.facts("d0").control)
        return [self.node(name) for name in sorted(self.lives, key=lambda name: name != author)]

    def joiner(self, down: float | None = None) -> Node:
        """A peer that comes later with other values, and does not train."""
        self.start_values = torch.zeros(NUMEL)
        self.start(PeerSpec("joiner", trains=False, latency_s=0.01))
        self.run_until(lambda: self.lives["joiner"].node)
        self.network.links["joiner"] = PeerLink(down=down, latency_s=0.01)
        self.network._downlinks["joiner"]._bytes_per_s = down
        return self.node("joiner")

    def joins(self) -> Node:
        """A joiner that has got the donors' version."""
        joiner = self.joiner()
        self.run_until(self.arrived)
        return joiner

    def tip(self, name: str) -> Tip:
        return self.facts(name).control.tip

    def arrived(self) -> bool:
        return self.tip("joiner").key == self.tip("d1" if "d1" in self.lives else "d0").key

    def failed(self) -> list[str]:
        """What the joiner told of fetches that failed."""
        return [line for line in self.story if line.split()[1:3] == ["joiner", "fetch_failed"]]

    def parts(self) -> list[int]:
        """The parts that came, by their number."""
        return sorted(part for _, part in self.came)

    def served(self, donor: Node) -> int:
        """How many parts came from a donor."""
        return sum(source == donor.core.facts.me for source, _ in self.came)


@pytest.fixture
def village(monkeypatch: pytest.MonkeyPatch) -> Iterator[Village]:
    with virtual_swarm(PART // 4, PART) as loop:
        yield Village(loop, monkeypatch)


@pytest.mark.parametrize("count", [1, 3, 6])
def test_an_anchor_comes_from_all_donors_at_once(village: Village, count: int) -> None:
    """And each part once."""
    donors, began_at = village.donors(count), village.loop.seconds
    joiner = village.joins()
    assert all(village.served(donor) for donor in donors)
    assert len(village.asked) == PARTS and village.parts() == [*range(PARTS)]
    took_s = village.at[-1] - began_at
    # then the donor of the first part, which has told what there is, is one of many
    first_s = PART_NBYTES / UP
    assert took_s < first_s + NBYTES / UP / count + 2 * first_s + 1.0
    assert NBYTES < joiner.traffic.bytes_received < NBYTES + CONTROL_NBYTES
    assert torch.equal(joiner.replica.anchors[0], donors[0].replica.anchors[0])
    assert not village.failed()


@pytest.mark.parametrize("victim", [0, 1], ids=["author", "other"])
def test_when_a_donor_crashes_only_its_parts_are_fetched_again(
    village: Village, victim: int
) -> None:
    donors = village.donors(3)
    dying, joiner = donors[victim], village.joiner()
    village.run_until(lambda: village.served(dying) >= 1 and len(village.asked) >= 6)
    village.crash(dying.core.facts.me)
    village.run_until(village.arrived)
    assert village.parts() == [*range(PARTS)] and PARTS < len(village.asked) <= PARTS + 2
    assert all(map(village.served, donors))
    assert joiner.traffic.bytes_received < NBYTES + 2 * PART_NBYTES + CONTROL_NBYTES


@pytest.mark.parametrize("liar", [0, 1], ids=["author", "other"])
def test_wrong_bytes_of_a_donor_come_from_another_one(village: Village, liar: int) -> None:
    donors = village.donors(3)
    right, lying = donors[0].replica.anchors[0].clone(), donors[liar]
    lying.replica.anchors[0][::1000] += 1.0
    joiner = village.joins()
    assert torch.equal(joiner.replica.anchors[0], right)
    told = village.failed()
    assert told and all("is not what its digest says" in line for line in told)
    assert all(f"'donor': '{lying.core.facts.me}'" in line for line in told)
    assert village.served(lying) == 0


def test_donors_finish_the_version_they_began_with(village: Village) -> None:
    """The record brings the next."""
    donors = village.donors(3, up=None)
    joiner = village.joiner(down=UP)
    village.run_until(lambda: len(village.came) >= 2)
    before = village.tip("d0").head.number
    village.rests = False
    village.run_for(1.05)  # who rests looks once a second, and makes one step now
    village.rests = True
    village.run_until(lambda: village.tip("d0").head.number > before)
    assert len(village.came) < PARTS, "the download is still under way"
    village.run_until(village.arrived)
    assert {*village.parts()} == {*range(PARTS)} and len(village.came) <= PARTS + 1
    assert torch.equal(joiner.replica.anchors[0], donors[0].replica.anchors[0])


@pytest.mark.parametrize("count", [1, 2])
def test_a_broken_download_goes_on_with_what_is_missing(village: Village, count: int) -> None:
    village.donors(count)
    village.joiner()
    village.run_until(lambda: len(village.came) >= 6)
    village.broken = True
    village.run_for(12.0)
    assert not village.arrived() and 6 <= len(village.came) < PARTS
    village.broken = False
    village.run_until(village.arrived)
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
    village.run_until(lambda: life.ended)
    assert "answer, but no diloco peer of run.id=run is there" in life.ended
    assert "joiner" not in village.network._transports and not village.loop.tasks_of(life.owner)
