"""Fault schedules: the fast part of `scripts/fuzz_protocol`, and scenarios of what it found."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.config import OuterConfig
from diloco.protocol.exchange import Exchange, Step
from diloco.protocol.leases import Lease
from diloco.protocol.messages.bulk import Contribution
from diloco.protocol.messages.control import Claim, Hello, Status
from diloco.protocol.peer import WIRE_VERSION, Peer
from diloco.protocol.shares import Share
from diloco.sim import faults
from diloco.sim.arena import MANIFEST
from diloco.sim.bare import Swarm
from diloco.sim.faults import Fault, play, scenario, shrink
from diloco.sim.lineage import Contributed, Lineage, Made, digest_of
from diloco.sim.world import Clock, Violation

SCRIPT = Path(__file__).parents[1] / "scripts" / "fuzz_protocol"
ASYNC = OuterConfig(method="diloco", sync_every=2, quorum=1, staleness_limit=10)


# -- schedules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", range(0, 160, 20))
def test_no_fault_schedule_breaks_an_invariant(first: int) -> None:
    failed = {seed: why for seed in range(first, first + 20) if (why := play(scenario(seed)).violation) is not None}
    assert failed == {}


def test_the_same_seed_is_the_same_run_event_by_event() -> None:
    traces: list[list[str]] = []
    for seed in (3, 3, 4):
        traces.append([])
        outcome = play(scenario(seed), traces[-1].append)
        assert outcome.violation is None and len(traces[-1]) > 100
    assert traces[0] == traces[1] != traces[2]


def test_a_trace_changes_nothing() -> None:
    assert play(scenario(3)) == play(scenario(3), lambda line: None)


def test_schedules_have_all_kinds_of_faults_and_settings() -> None:
    plans = [scenario(seed) for seed in range(400)]
    assert {fault.kind for plan in plans for fault in plan.faults} == set(faults.KINDS)
    assert {plan.fragments for plan in plans} == {1, 2, 3, 4}
    settings = [dict(plan.outer) for plan in plans]
    assert sum(set(outer) == {"sync_every"} for outer in settings) > 100
    for key in ("quorum", "staleness_limit", "overlap", "staggered", "grace_s", "grace_slack"):
        assert any(outer.get(key) for outer in settings), key


def test_a_violation_is_shrunk_to_the_faults_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash_is_wrong(plan: faults.Scenario) -> faults.Outcome:
        wrong = any(fault.kind == "crash" for fault in plan.faults)
        return faults.Outcome(0, 0.0, [], "somebody crashed" if wrong else None)

    monkeypatch.setattr(faults, "play", crash_is_wrong)
    crash, leave = Fault(9, "crash", 1, 1.0), Fault(5, "leave", 0, 1.0)
    assert shrink(replace(scenario(0), faults=(leave, crash, leave))).faults == (crash,)


def test_the_script_plays_seeds_and_one_seed_with_its_trace() -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, str(SCRIPT), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    assert re.search(r"10/10 seeds, \d+ per second, \d+ events each, 0 violations", run("--seeds", "10", "--jobs", "1"))
    trace = run("--first-seed", "3", "--trace")
    assert "seed 3:" in trace and re.search(r"\d+\.\d{3} +\d+ a <- b Status \{", trace)
    assert len(run("--first-seed", "3", "--trace", "--without", "0").splitlines()) != len(trace.splitlines())


# -- the invariants see what is wrong ---------------------------------------------------------------------------------


def test_a_contribution_in_two_versions_of_one_anchor_is_found() -> None:
    lineage, twice = Lineage(), Contributed("a", 0)
    start, one, two = digest_of(0), digest_of(1), digest_of(2)
    lineage.add(one, Made(start, 0, 1, "b", 1, ((twice, 0), (twice, 1))))
    lineage.add(two, Made(one, 0, 2, "c", 2, ((twice, 0),)))
    assert lineage.repeated(one) == [] and lineage.repeated(two) == [(twice, 0)]
    assert lineage.merged(one, chunks=2) == {twice} and lineage.merged(one, chunks=3) == set()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda peer: peer.versions.__setitem__(0, 0), "go back|its anchor is at version 0"),
        (lambda peer: peer.digests.__setitem__(0, digest_of("other")), "is not what its digest says"),
        (lambda peer: peer.syncers.popitem(), "holds .* is syncer of"),
    ],
)
def test_what_is_wrong_with_a_peer_is_found_at_its_next_event(spoil: object, says: str) -> None:
    swarm = Swarm(0, fragments=2)
    watch = faults.Watch(swarm)
    swarm.check = watch.look
    swarm.start("ab", min_peers=2, outer_steps=10**6)
    swarm.run_for(10.0)
    spoil(next(node.peer for node in swarm.alive_nodes() if 0 in node.peer.syncers))  # type: ignore[operator]
    with pytest.raises(Violation, match=says):
        swarm.run_for(10.0)


def test_clocks_differ_and_a_wake_comes_at_the_right_time() -> None:
    clock = Clock(offset_s=100.0, rate=2.0)
    assert clock.read(5.0) == 110.0
    assert clock.until(120.0, 5.0) == pytest.approx(5.0, abs=1e-5)
    assert clock.until(90.0, 5.0) == pytest.approx(0.0, abs=1e-5)


# -- what was found ---------------------------------------------------------------------------------------------------


def hello_of(name: str, version: int, claims: tuple[Claim, ...] = ()) -> Hello:
    status = Status(state="training", versions=[version])
    return Hello(
        wire_version=WIRE_VERSION, run_id="run", manifest_hash=MANIFEST, name=name, trains=True, holds=True, peers=[],
        status=status, claims=list(claims),
    )  # fmt: skip


def offer_of(base_version: int, term: int) -> Contribution:
    return Contribution(manifest_hash=MANIFEST, fragment=0, term=term, base_version=base_version, steps=1, tokens=1)


@pytest.mark.parametrize("way", ["record", "state", "checkpoint"])
def test_a_successor_does_not_merge_again_what_is_in_its_anchor(way: str) -> None:
    """1. The syncer merges b's contribution from version 0 into version 1, and dies before b has the record.
    2. a has version 1, takes over, and is offered the contribution again: within the staleness limit.
    """
    a = Peer("a", "a", "run", MANIFEST, [digest_of(0)], outer=ASYNC, newcomer=True)
    a.connected("b", hello_of("b", 0), 0.0)
    match way:
        case "record":
            a.adopted(0, 1, digest_of(1), 1, 0.0, contributors={"b": 1})
        case "state":
            a.adopted(0, 1, digest_of(1), 1, 0.0, shares={"b": Share(1, 1, 1, 1)})
        case "checkpoint":
            a.adopted(0, 1, digest_of(1), 1, 0.0)
            a.restore_shares([{"b": Share(1, 1, 1, 1)}])
    a.discovered(0.0)
    a.tick(100.0)
    a.connected("b", hello_of("b", 0), 100.0)
    for now in (100.5, 110.0):
        a.tick(now)
    verdict = a.offer("b", offer_of(0, a.syncers[0].term))
    assert not verdict.accepted and verdict.merged
    assert a.offer("b", offer_of(1, a.syncers[0].term)).accepted
    assert a.merged(0) == {"b": 0}


def test_a_peer_whose_syncer_died_knows_what_became_of_its_contribution() -> None:
    """Its stream broke, and then its anchor moved one version on by a state: with its contribution, or without it."""
    lease = Lease(0, "s", 1, 0, digest_of(0))
    for merged, discarded in ((3, False), (2, True), (-1, True)):
        exchange = Exchange(0, 3, 1, 1, MANIFEST)
        exchange.header(lease)
        exchange.broke(lease)
        assert exchange.next_step(None, 4, 0.0, merged=merged) is Step.DONE
        assert exchange.discarded is discarded


def test_a_syncer_that_caught_up_does_not_know_its_version_by_the_contributors_of_an_older_one() -> None:
    a = Peer("a", "a", "run", MANIFEST, [digest_of(0)])
    a.tick(0.0)
    term = a.syncers[0].term
    assert a.offer("a", offer_of(0, term)).accepted
    a.syncers[0].folded("a")
    a.enter("exchanging", 0.0)
    a.arrived("a", 0, 0.0)
    a.published(0, digest_of(1), {"a": 1}, 0.0)
    assert a.syncers[0].last_contributors == {"a"}
    a.adopted(0, 2, digest_of("theirs"), 9, 1.0, shares={"c": Share(1, 5, 2, 2), "d": Share(1, 4, 1, 1)})
    assert a.syncers[0].last_contributors == {"c"}
    assert a.offer("c", offer_of(1, term)).merged


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
    a.adopted(0, 1, digest_of("first"), 0, 0.0)
    a.heard("b", Status(state="exchanging", versions=[1, 0]), 0.5)
    a.heard("c", Status(state="exchanging", versions=[0, 1]), 0.5)
    assert a.offer("c", offer_of(0, a.syncers[0].term)).accepted

    def merges(now: float) -> list[str]:
        return [type(action).__name__ for action in a.tick(now) if type(action).__name__ == "Merge"]

    a.syncers[0].folded("c")
    assert [type(action).__name__ for action in a.arrived("c", 0, 1.0)] == []
    assert merges(2.0) == []
    assert merges(6.0) == ["Merge"]
