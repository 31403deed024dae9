"""Fault schedules: the fast part of `scripts/fuzz_protocol`, and scenarios of what it found."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from diloco.config import OuterConfig
from diloco.protocol.actions import Merge
from diloco.protocol.messages.bulk import Contribution
from diloco.sim.virtual_time import VirtualLoop, virtual_time
from diloco.testing.fuzz.crowd import Crowd, Member
from diloco.testing.fuzz.faults import scenario
from diloco.testing.fuzz.invariants import Violation, Watch, check_end
from diloco.testing.fuzz.lineage import Contributed
from diloco.testing.fuzz.splits import split_scenario
from diloco.testing.fuzz.stage import play
from tests.support.certificates import MANIFEST, digest_of
from tests.support.core import hello_of, make, of_type, status_of

# -- schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(0, 16, 4))
def test_no_fault_schedule_breaks_an_invariant(first: int) -> None:
    failed = {seed: why for seed in range(first, first + 4) if (why := play(scenario(seed)).violation) is not None}
    assert failed == {}


def test_the_same_seed_is_the_same_run_line_by_line() -> None:
    """With a trace, which changes nothing, and without."""
    traced: list[str] = []
    outcome = play(scenario(3), traced.append)
    assert outcome.violation is None and len(traced) > 30
    assert play(scenario(3)) == outcome and tuple(traced) == outcome.story != play(scenario(4)).story


# -- splits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_no_split_breaks_an_invariant(seed: int) -> None:
    assert play(split_scenario(seed)).violation is None


# -- the invariants see what is wrong ---------------------------------------------------------------------------------


def crowd_of_two(loop: VirtualLoop, units: bool = False, **settings: Any) -> tuple[Crowd, Watch]:
    """Two peers that have trained for a while."""
    crowd = Crowd(loop, 0, {"sync_every": 2, "fragments": 2, "lr": 0.7, "momentum": 0.9, **settings}, units=units)
    watch = Watch(crowd)

    async def begin() -> None:
        for name in "ab":
            crowd.start(Member(name), min_peers=2)
            await asyncio.sleep(0.1)
        await asyncio.sleep(10.0)

    loop.run_until_complete(begin())
    return crowd, watch


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda fragment: setattr(fragment, "digest", digest_of("other")), "is not what its digest says"),
        (lambda fragment: setattr(fragment, "syncer", None), "holds .* is syncer of"),
    ],
)
def test_what_is_wrong_with_a_node_is_found(spoil: Callable[[Any], object], says: str) -> None:
    with virtual_time() as loop:
        crowd, _ = crowd_of_two(loop)
        nodes = [life.node for life in crowd.members() if life.node is not None]
        spoil(next(node.protocol.fragments[0] for node in nodes if 0 in node.protocol.syncers))
        with pytest.raises(Violation, match=says):
            loop.run_until_complete(asyncio.sleep(10.0))


def test_what_is_merged_twice_is_found() -> None:
    """Sequences, and bytes under another name."""
    with virtual_time() as loop:
        crowd, watch = crowd_of_two(loop, units=True)
        crowd.goal = 5
        loop.run_until_complete(asyncio.sleep(30.0))
        check_end(crowd, watch.lineage)
        learned = watch.lineage.learned_from
        assert len(learned) == 2 * 5 and all(learned.values())
        learned[Contributed("a", 3)] = learned[Contributed("b", 2)]
        with pytest.raises(Violation, match="4 sequences are merged more than once, and 0 are counted so"):
            check_end(crowd, watch.lineage)
        made = [digest for digest, each in watch.lineage.made.items() if each.fragment == 0]
        first, second = (watch.lineage.payloads[digest] for digest in made[:2])
        assert len(first) == len(second) == 2
        second[0] = first[0]
        with pytest.raises(Violation, match="in fragment 0 1 payloads are merged more than once"):
            check_end(crowd, watch.lineage)


# -- what was found ---------------------------------------------------------------------------------------------------


def test_waiting_for_different_fragments_is_not_for_ever() -> None:
    """1. Of a, b and c two make the quorum. In fragment 0 c comes too late, in fragment 1 b does.
    2. c waits for the next version of fragment 0, b for that of fragment 1: neither trains, so neither gets a second.
    """
    outer = OuterConfig(method="diloco", sync_every=2, fragments=2, quorum=2, staleness_limit=1)
    a = make("a", trains=False, outer=outer)
    a.tick(0.0)
    for name in "bc":
        a.connected(name, hello_of(status_of("training")), 0.0)
    a.adopted(0, 1, digest_of("first"), 0.0)
    described = {"fragment": 0, "term": a.syncers[0].term, "base_version": 0, "steps": 1, "tokens": 1}
    contribution = Contribution(base_digest=a.digests[0], manifest_hash=MANIFEST, **described)
    a.heard("b", status_of("exchanging", [1, 0]), 0.5)
    a.heard("c", status_of("exchanging", [0, 1]), 0.6)
    assert a.offer("c", contribution).accepted

    a.syncers[0].folded("c")
    assert a.arrived("c", 0, 1.0) == []
    assert [len(of_type(Merge, a.tick(now))) for now in (2.0, 6.0)] == [0, 1]
