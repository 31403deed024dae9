"""Fault schedules: the fast part of `scripts/fuzz_protocol`, and scenarios of what it found."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from diloco.config import WIRE_VERSION, OuterConfig
from diloco.protocol.exchange import Exchange, Step
from diloco.protocol.fragment import Lease
from diloco.protocol.messages.bulk import Contribution
from diloco.protocol.messages.control import Claim, Hello, Status
from diloco.protocol.peer import Peer
from diloco.protocol.shares import Share
from diloco.sim.virtual_time import VirtualLoop, virtual_time
from diloco.testing.fuzz import faults, stage
from diloco.testing.fuzz.crowd import Crowd, Life, Member
from diloco.testing.fuzz.faults import Fault, Scenario, scenario
from diloco.testing.fuzz.invariants import Violation, Watch, check_end
from diloco.testing.fuzz.lineage import Contributed, Lineage, Made, Total
from diloco.testing.fuzz.splits import SHAPES, pairs, split_scenario
from diloco.testing.fuzz.stage import Outcome, play, shrink
from tests.support.certificates import MANIFEST, digest_of
from tests.support.places import SCRIPTS

SCRIPT = SCRIPTS / "fuzz_protocol"
ASYNC = OuterConfig(method="diloco", sync_every=2, quorum=1, staleness_limit=10)


# -- schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(0, 40, 5))
def test_no_fault_schedule_breaks_an_invariant(first: int) -> None:
    failed = {seed: why for seed in range(first, first + 5) if (why := play(scenario(seed)).violation) is not None}
    assert failed == {}


def test_the_same_seed_is_the_same_run_line_by_line() -> None:
    stories: list[list[str]] = []
    for seed in (3, 3, 4):
        stories.append([])
        outcome = play(scenario(seed), stories[-1].append)
        assert outcome.violation is None and len(stories[-1]) > 30
        assert tuple(stories[-1]) == outcome.story
    assert stories[0] == stories[1] != stories[2]


BARRIER = Scenario(
    seed=0,
    members=(Member("a"), Member("b", step_s=0.5, latency_s=0.4, clock=(1.15, 5e4)), Member("h", trains=False)),
    outer=(("sync_every", 2), ("fragments", 2), ("lr", 0.7), ("momentum", 0.9)),
    together=True, heartbeat_s=2.0, loss=0.2, executor_s=1.5, units=True, cold=False, pieces=True, closed=True,
    faults=(
        Fault(8.0, 3, "join", 0, 1.0), Fault(9.0, 0, "join", 0, 1.0), Fault(14.0, 7, "restart", 1, 3.0),
        Fault(20.0, 5, "split", 2, 8.0), Fault(31.0, 0, "suspend", 3, 14.0), Fault(36.0, 9, "leave", 0, 1.0),
    ),
)  # fmt: skip
DECOUPLED = replace(
    BARRIER,
    outer=(
        *BARRIER.outer,
        ("quorum", 1),
        ("grace_slack", 0.8),
        ("overlap", 1),
        ("staleness_limit", 2),
        ("merge", "rda"),
    ),
    closed=False,
)


def order_of(outcome: Outcome) -> str:
    """Digest of the number of turns, and of who did what kind of thing at which millisecond."""
    events = [" ".join(line.split()[:3]) for line in outcome.story]
    return sha256("\n".join([str(outcome.turns), *events]).encode()).hexdigest()[:16]


@pytest.mark.parametrize(("plan", "order"), [(BARRIER, "a460dc154d228a32"), (DECOUPLED, "7c6455e176345356")])
def test_every_version_of_python_gives_the_same_order_of_events(plan: Scenario, order: str) -> None:
    """A change of what peers do changes both digests. Write down new ones once the oldest and newest Python agree."""
    outcome = play(plan)
    assert outcome.violation is None and order_of(outcome) == order


def test_a_trace_changes_nothing() -> None:
    assert play(scenario(3)) == play(scenario(3), lambda line: None)


def test_schedules_have_all_kinds_of_faults_and_settings() -> None:
    plans = [scenario(seed) for seed in range(400)]
    assert {fault.kind for plan in plans for fault in plan.faults} == set(faults.KINDS)
    settings = [dict(plan.outer) for plan in plans]
    assert {outer["fragments"] for outer in settings} == {1, 2, 3}
    barrier = {"sync_every", "fragments", "lr", "momentum", "codec_up", "codec_down", "audit"}
    assert sum(set(outer) <= barrier for outer in settings) > 100
    for key in ("quorum", "staleness_limit", "overlap", "staggered", "grace_s", "grace_slack", "robust", "merge"):
        assert any(outer.get(key) for outer in settings), key
    for trait in ("together", "loss", "executor_s", "units", "cold", "pieces", "closed"):
        assert {bool(getattr(plan, trait)) for plan in plans} == {True, False}, trait
    members = [member for plan in plans for member in plan.members]
    assert any(member.lie != 1.0 for member in members) and any(member.boundary_s > 20 for member in members)


# -- splits -----------------------------------------------------------------------------------------------------------

LONE = Scenario(
    seed=0,
    members=tuple(Member(name, step_s=0.25 if name == "a" else 1.0) for name in "abcdefg"),
    outer=(("sync_every", 4), ("fragments", 1), ("lr", 0.7), ("momentum", 0.9)),
    together=True, heartbeat_s=1.0, loss=0.0, executor_s=0.0, units=False, cold=False, pieces=False, closed=False,
    faults=(Fault(15.0, 0, "lone", 0, 66.0),),
)  # fmt: skip


def test_a_fast_peer_that_was_alone_does_not_overwrite_the_work_of_the_others() -> None:
    """It makes more versions, of less work."""
    assert play(LONE).violation is None


def test_the_work_of_two_histories_is_what_peers_did_since_they_parted_each_at_most_twice_the_median() -> None:
    lineage = Lineage()
    start, common, one, other = (digest_of(name) for name in ("start", "common", "one", "other"))

    def made(digest: str, before: str, version: int, **tokens: int) -> None:
        contributions = tuple((Contributed(peer, version - 1), number) for peer, number in tokens.items())
        lineage.add(digest, Made(before, 0, version, "a", 1, contributions))

    made(common, start, 1, a=8, b=8, c=8)
    made(one, common, 2, a=100)
    made(other, common, 2, b=8, c=9)
    assert (lineage.work(one, other), lineage.work(other, one)) == (18, 17)
    assert (lineage.work(common, one), lineage.work(one, start), lineage.work(start, one)) == (0, 32, 0)


def test_splits_have_all_shapes_and_cut_whom_they_name() -> None:
    plans = [split_scenario(seed) for seed in range(200)]
    assert {fault.kind for plan in plans for fault in plan.faults} == set(SHAPES)
    r = random.Random(0)
    assert pairs("lone", ["a", "b", "c"], r) == [("a", "b"), ("a", "c")]
    for shape in SHAPES:
        cut = [pairs(shape, list("abcdef"), r) for _ in range(20)]
        assert any(cut) and all(one != other for each in cut for one, other in each)
        assert all(len({frozenset(pair) for pair in each}) == len(each) for each in cut)


def test_a_violation_is_shrunk_to_the_faults_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash_is_wrong(plan: Scenario) -> Outcome:
        wrong = any(fault.kind == "crash" for fault in plan.faults)
        return Outcome(0, 0.0, (), "somebody crashed" if wrong else None)

    monkeypatch.setattr(stage, "play", crash_is_wrong)
    crash, leave = Fault(9.0, 0, "crash", 1, 1.0), Fault(5.0, 0, "leave", 0, 1.0)
    assert shrink(replace(scenario(0), faults=(leave, crash, leave))).faults == (crash,)


def test_the_script_plays_seeds_and_one_seed_with_its_story() -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, str(SCRIPT), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    found = run("--seeds", "3", "--jobs", "1")
    assert re.search(r"3/3 seeds, [\d.]+ per second, \d+ virtual s each, 0 violations", found)
    story = run("--first-seed", "3", "--trace")
    assert "seed 3:" in story and re.search(r"\d+\.\d{3} a +claim \{", story)


# -- the invariants see what is wrong ---------------------------------------------------------------------------------


def test_a_contribution_in_two_versions_of_one_anchor_is_found() -> None:
    lineage, twice, once = Lineage(), Contributed("a", 0), Contributed("b", 1)
    start, one, two = digest_of(0), digest_of(1), digest_of(2)
    lineage.add(one, Made(start, 0, 1, "b", 1, ((twice, 8),)))
    lineage.add(two, Made(one, 0, 2, "c", 2, ((twice, 8), (once, 8))))
    assert lineage.repeated(one) == [] and lineage.repeated(two) == [twice]
    assert lineage.merged(one) == {twice} and lineage.merged(two) == {twice, once}
    assert lineage.totals(two)["a"] == Total(2, 16, 1, 2)


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


def test_an_exception_that_nobody_takes_is_found() -> None:
    async def fails() -> None:
        raise ValueError("spilt")

    with virtual_time() as loop:
        crowd, watch = crowd_of_two(loop)
        loop.create_task(fails())
        loop.run_until_complete(asyncio.sleep(1.0))
        with pytest.raises(Violation, match=r"nobody took ValueError\('spilt'\)"):
            check_end(crowd, watch.lineage)


def test_a_task_that_outlives_its_peer_is_found() -> None:
    async def stays() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1.0)
                if done:
                    return

    done: list[bool] = []
    with virtual_time() as loop:
        crowd, watch = crowd_of_two(loop)
        with loop.owned_by(crowd.lives["a"].owner):
            loop.create_task(stays())
        loop.run_until_complete(asyncio.sleep(1.0))
        crowd.crash("a")
        loop.run_until_complete(asyncio.sleep(5.0))
        with pytest.raises(Violation, match=r"a has ended .killed., and goes on with"):
            check_end(crowd, watch.lineage)
        done.append(True)


def test_a_crashed_peer_that_does_not_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = asyncio.Event()

    async def stays(life: Life) -> None:
        while not ended.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await ended.wait()

    with virtual_time() as loop:
        crowd, watch = crowd_of_two(loop)
        monkeypatch.setattr(crowd, "_live", stays)
        crowd.start(Member("c"))
        loop.run_until_complete(asyncio.sleep(1.0))
        crowd.crash("c")
        loop.run_until_complete(asyncio.sleep(1.0))
        with pytest.raises(Violation, match=r"c has ended .killed., and goes on with"):
            check_end(crowd, watch.lineage)
        ended.set()


def test_a_sequence_that_an_anchor_has_learned_twice_is_found() -> None:
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


@pytest.mark.parametrize("settings", [{}, {"robust": "none"}, {"quorum": 2}])
def test_bytes_that_are_merged_under_another_name_are_found(settings: dict[str, Any]) -> None:
    with virtual_time() as loop:
        crowd, watch = crowd_of_two(loop, **settings)
        crowd.goal = 5
        loop.run_until_complete(asyncio.sleep(30.0))
        check_end(crowd, watch.lineage)
        made = [digest for digest, each in watch.lineage.made.items() if each.fragment == 0]
        first, second = (watch.lineage.payloads[digest] for digest in made[:2])
        assert len(first) == len(second) == 2
        second[0] = first[0]
        with pytest.raises(Violation, match="in fragment 0 1 payloads are merged more than once"):
            check_end(crowd, watch.lineage)


# -- what was found ---------------------------------------------------------------------------------------------------


def hello_of(name: str, version: int, claims: tuple[Claim, ...] = ()) -> Hello:
    status = Status(state="training", versions=[version])
    return Hello(
        wire_version=WIRE_VERSION, run_id="run", manifest_hash=MANIFEST, name=name, trains=True, holds=True, peers=[],
        status=status, claims=list(claims),
    )  # fmt: skip


def offer_of(base_version: int, term: int, digest: str) -> Contribution:
    return Contribution(
        base_digest=digest,
        manifest_hash=MANIFEST,
        fragment=0,
        term=term,
        base_version=base_version,
        steps=1,
        tokens=1,
    )


@pytest.mark.parametrize("way", ["record", "state", "checkpoint"])
def test_a_successor_does_not_merge_again_what_is_in_its_anchor(way: str) -> None:
    """1. The syncer merges b's contribution from version 0 into version 1, and dies before b has the record.
    2. a has version 1, takes over, and is offered the contribution again: within the staleness limit.
    """
    a = Peer("a", "a", "run", MANIFEST, [digest_of(0)], outer=ASYNC, newcomer=True)
    a.connected("b", hello_of("b", 0), 0.0)
    match way:
        case "record":
            a.adopted(0, 1, digest_of(1), 0.0, contributors={"b": 1})
        case "state":
            a.adopted(0, 1, digest_of(1), 0.0, shares={"b": Share(1, 1, 1, 1)})
        case "checkpoint":
            a.adopted(0, 1, digest_of(1), 0.0)
            a.accounts.restore_shares([{"b": Share(1, 1, 1, 1)}])
    a.discovered(0.0)
    a.tick(100.0)
    a.connected("b", hello_of("b", 0), 100.0)
    for now in (100.5, 110.0):
        a.tick(now)
    verdict = a.offer("b", offer_of(0, a.syncers[0].term, a.digests[0]))
    assert not verdict.accepted and verdict.merged
    assert a.offer("b", offer_of(1, a.syncers[0].term, a.digests[0])).accepted
    assert a.accounts.merged(0) == {"b": 0}


def test_a_peer_whose_syncer_died_knows_what_became_of_its_contribution() -> None:
    """Its stream broke, and then its anchor moved one version on by a state: with its contribution, or without it."""
    lease = Lease(0, "s", 1, 0, digest_of(0))
    for merged, discarded in ((3, False), (2, True), (-1, True)):
        exchange = Exchange(0, 3, "0" * 64, 1, 1, MANIFEST)
        exchange.header(lease)
        exchange.broke(lease)
        assert exchange.next_step(None, 4, 0.0, merged=merged) is Step.DONE
        assert exchange.discarded is discarded


def test_a_syncer_that_caught_up_does_not_know_its_version_by_the_contributors_of_an_older_one() -> None:
    a = Peer("a", "a", "run", MANIFEST, [digest_of(0)])
    a.tick(0.0)
    term = a.syncers[0].term
    assert a.offer("a", offer_of(0, term, a.digests[0])).accepted
    a.syncers[0].folded("a")
    a.enter("exchanging", 0.0)
    a.arrived("a", 0, 0.0)
    a.published(0, digest_of(1), {"a": 1}, 0.0)
    assert a.syncers[0].last_contributors == {"a"}
    a.adopted(0, 2, digest_of("theirs"), 1.0, shares={"c": Share(1, 5, 2, 2), "d": Share(1, 4, 1, 1)})
    assert a.syncers[0].last_contributors == {"c"}
    assert a.offer("c", offer_of(1, term, a.digests[0])).merged


def test_a_successor_waits_a_little_for_a_version_that_was_published_and_that_nobody_is_known_to_have() -> None:
    """1. s publishes version 1, which c has and a has not; s dies. 2. a hears of the death before it hears of c's
    version. 3. If a claimed at once, it would author another version 1; at the end of a run c would not follow.
    """
    a = Peer("a", "a", "run", MANIFEST, [digest_of(0)], newcomer=True)
    claim = Claim(fragment=0, term=1, version=1, digest=digest_of(1))
    a.connected("s", hello_of("s", 1, (claim,)), 0.0)
    a.connected("c", hello_of("c", 0), 0.0)
    a.discovered(0.0)
    a.catch_up_failed(0)
    a.lost("s", 1.0, "connection reset")
    assert a.syncers == {}
    a.heard("c", Status(state="exchanging", versions=[1]), 1.5)
    assert a.syncers == {}  # it, or c, first catches up
    alone = Peer("a", "a", "run", MANIFEST, [digest_of(0)], newcomer=True)
    alone.connected("s", hello_of("s", 1, (claim,)), 0.0)
    alone.discovered(0.0)
    alone.catch_up_failed(0)
    alone.lost("s", 1.0, "connection reset")
    for now in (2.0, 3.0):
        alone.tick(now)
        assert alone.syncers == {}
    alone.tick(5.0)
    assert sorted(alone.syncers) == [0]


def test_peers_that_wait_for_different_fragments_do_not_wait_for_each_other_for_ever() -> None:
    """1. Of a, b and c two make the quorum. In fragment 0 c comes too late, in fragment 1 b does.
    2. c waits for the next version of fragment 0, b for that of fragment 1: neither trains, so neither gets a second.
    """
    outer = OuterConfig(method="diloco", sync_every=2, fragments=2, quorum=2, staleness_limit=1)
    a = Peer("a", "a", "run", MANIFEST, [digest_of(0), digest_of(1)], trains=False, outer=outer)
    a.tick(0.0)
    for name in "bc":
        status = Status(state="training", versions=[0, 0])
        a.connected(name, hello_of(name, 0).model_copy(update={"status": status}), 0.0)
    a.adopted(0, 1, digest_of("first"), 0.0)
    a.heard("b", Status(state="exchanging", versions=[1, 0]), 0.5)
    a.heard("c", Status(state="exchanging", versions=[0, 1]), 0.6)
    assert a.offer("c", offer_of(0, a.syncers[0].term, a.digests[0])).accepted

    def merges(now: float) -> list[str]:
        return [type(action).__name__ for action in a.tick(now) if type(action).__name__ == "Merge"]

    a.syncers[0].folded("c")
    assert [type(action).__name__ for action in a.arrived("c", 0, 1.0)] == []
    assert merges(2.0) == []
    assert merges(6.0) == ["Merge"]
