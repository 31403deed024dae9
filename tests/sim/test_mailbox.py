"""Peers that exchange through a store in virtual time: what goes wrong there, and what it costs."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from diloco.core.fragment import FragmentState
from diloco.swarm.mailbox.carrier import PERIODS
from tests.harness.fuzz.crowd import Crowd
from tests.harness.fuzz.faults import Fault, Scenario, store_scenario
from tests.harness.fuzz.lives import PeerSpec
from tests.harness.fuzz.stage import play
from tests.harness.fuzz.store import StoreSpec
from tests.harness.fuzz.virtual import virtual_swarm

HEARTBEAT_S = 0.5
LOOK_S = PERIODS * HEARTBEAT_S


@pytest.mark.parametrize("seed", range(4))
def test_no_fault_of_a_store_breaks_an_invariant(seed: int) -> None:
    assert play(store_scenario(seed)).violation is None


def scene(*faults: Fault, store: StoreSpec | None = None, **outer: Any) -> Scenario:
    """Four peers of a barrier that begin together."""
    settings = {"sync_every": 4, "fragments": 2, **outer}
    members = tuple(PeerSpec(name) for name in "abcd")
    plan = replace(store_scenario(0), members=members, outer=tuple(settings.items()), faults=faults)
    changes = {"together": True, "heartbeat_s": HEARTBEAT_S, "executor_s": 0.0, "pieces": False}
    return replace(plan, **changes, store=store or StoreSpec())  # type: ignore[arg-type]


@pytest.mark.parametrize("turns", [0, 7])
@pytest.mark.parametrize("who", range(4))
def test_a_killed_peer_costs_no_more_than_its_silence(who: int, turns: int) -> None:
    """Whichever it is, so the author, too."""
    outcome = play(scene(Fault(22.0, turns, "crash", who, 1.0)))
    assert outcome.violation is None and "lost" in " ".join(outcome.story)


def test_a_store_that_is_away_costs_the_time_and_nothing_else() -> None:
    outcome = play(scene(store=StoreSpec(away=((20.0, 80.0),), retry_s=3.0)))
    story = " ".join(outcome.story)
    assert outcome.violation is None and "store_back" in story
    for kind in ("lost", "stuck", "takeover", "discarded", "missed"):
        assert f" {kind} " not in story, kind


def swarm(hurt: Any, seconds: float = 90.0) -> tuple[list[int], Counter[str]]:
    """Three peers whose store shows some objects otherwise than they were written."""
    kinds: Counter[str] = Counter()
    with virtual_swarm() as loop:
        outer = {"sync_every": 4, "fragments": 1}
        crowd = Crowd(loop, 0, outer, heartbeat_s=HEARTBEAT_S, store=StoreSpec())
        assert crowd.store is not None
        crowd.store.damage = hurt

        def note(life: Any, kind: str, fields: dict[str, Any]) -> None:
            kinds[kind] += 1
            kinds[f"{kind} {str(fields.get('why')).partition('/')[0]}"] += 1

        crowd.on_note = note

        async def story() -> None:
            for name in "abc":
                crowd.start(PeerSpec(name), 3)
            await crowd.until(lambda: loop.seconds > seconds, 2 * seconds, "time passes")
            reached.extend(versions(crowd))

        reached: list[int] = []
        assert crowd.violation_of(story()) is None
    return reached, kinds


def versions(crowd: Crowd) -> list[int]:
    """The newest version of each peer."""
    return [f.tip.head.number for life in crowd.living() for f in life.fragments] or [0]


def flipped(content: bytes, at: int = -1) -> bytes:
    changed = bytearray(content)
    changed[at] ^= 1
    return bytes(changed)


def test_what_is_damaged_is_named_and_not_used() -> None:
    """A payload, a record and a box; the others go on."""
    for folder, kind in (("payload", "refused"), ("record", "fetch_failed"), ("peers", "refused")):
        seen: list[str] = []

        def hurt(name: str, content: bytes, folder: str = folder, seen: Any = seen) -> bytes:
            if not name.startswith(folder) or len(seen) > 5:
                return content
            seen.append(name)
            return flipped(content)

        reached, kinds = swarm(hurt)
        assert kinds[f"{kind} {folder}"] and min(reached) >= 2, (folder, kinds)
        assert max(reached) - min(reached) <= 1


def test_an_object_that_is_cut_off_is_named_and_not_used() -> None:
    times: Counter[str] = Counter()

    def cut(name: str, content: bytes) -> bytes:
        times[name.partition("/")[0]] += 1
        return content[: len(content) // 2] if times[name.partition("/")[0]] <= 3 else content

    reached, kinds = swarm(cut)
    assert kinds["refused peers"] and min(reached) >= 2, kinds


def test_a_box_of_another_peer_or_an_older_one_is_not_believed() -> None:
    """Who may write to the store may copy boxes, and put old ones back."""
    first: dict[str, bytes] = {}

    def swapped(name: str, content: bytes) -> bytes:
        if not name.startswith("peers/"):
            return content
        first.setdefault(name, content)
        if name == "peers/c":
            return first.get("peers/a", content)
        return content

    reached, kinds = swarm(swapped, seconds=40.0)
    assert kinds["refused peers"] and not any(reached), "three are waited for"
    assert not kinds["penalty"]


def test_an_old_box_is_no_sign_of_life() -> None:
    """Somebody shows the others an early box of a peer, whenever it writes a new one."""
    first: dict[str, bytes] = {}

    def old(name: str, content: bytes) -> bytes:
        return first.setdefault(name, content) if name == "peers/c" else content

    reached, kinds = swarm(old, seconds=120.0)
    assert kinds["lost silent"] >= 2 and max(reached) >= 2


def test_a_bucket_does_not_grow_and_each_peer_makes_few_requests() -> None:
    with virtual_swarm() as loop:
        crowd = Crowd(loop, 0, {"sync_every": 4}, heartbeat_s=HEARTBEAT_S, store=StoreSpec())
        store = crowd.store
        assert store is not None
        counts: list[tuple[float, int, int]] = []
        anchors = set[str]()

        async def story() -> None:
            for name in "abcd":
                crowd.start(PeerSpec(name), 4)
            for version in (20, 60):
                await crowd.until(lambda v=version: min(versions(crowd)) >= v, 3000.0, "versions")
                counts.append((loop.seconds, store.requests, len(store.objects)))
                anchors.update(
                    name.rpartition("/")[0] for name in store.objects if name.startswith("part/")
                )

        assert crowd.violation_of(story()) is None
    (begin_s, before, objects), (end_s, after, later) = counts
    assert later < objects + 40, "records and anchors of 16 versions come and go"
    assert len(anchors) <= 2 * 3, "an anchor is written every 16 versions"
    minutes = (end_s - begin_s) / (60 * HEARTBEAT_S)  # at a heartbeat of a second
    assert (after - before) / 4 / minutes < 60


def test_a_peer_with_both_carries_between_streams_and_a_store() -> None:
    """Two peers have streams, two the store, and a host both: one history, with all in it."""
    with virtual_swarm() as loop:
        outer = {"sync_every": 30, "fragments": 2}
        crowd = Crowd(loop, 0, outer, heartbeat_s=HEARTBEAT_S, store=StoreSpec())
        crowd.with_streams, crowd.with_both = "abh", "h"

        async def story() -> None:
            crowd.start(PeerSpec("h", trains=False))
            await crowd.until(crowd.all_ready, 30.0, "the host is there")
            for name in "abcd":
                crowd.start(PeerSpec(name))
            await crowd.until(lambda: min(versions(crowd)) >= 6, 900.0, "versions")
            crowd.rests = True
            await crowd.until(lambda: len(tips()) == 2, 200.0, "all have the same")
            [books] = {f.tip.book.digest: f.tip.book for f in fragments() if not f.index}.values()
            assert all(books.of(name)[1] for name in "abcd")

        def fragments() -> list[FragmentState]:
            return [f for life in crowd.living() for f in life.fragments]

        def tips() -> set[str]:
            return {f.tip.head.id for f in fragments()}

        assert crowd.violation_of(story()) is None
