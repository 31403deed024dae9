"""Peers at a barrier make their rounds together, whatever happened before."""

from dataclasses import replace
from random import Random

import pytest
from msgspec.structs import replace as with_fields

from diloco.core import events
from diloco.core.rules import learning, lifecycle
from diloco.core.settings import ProtocolSettings, Sizes
from diloco.ranges import NONE
from tests.support.fake_tensors import PARTS
from tests.support.linked_swarm import Link, LinkedPeer, LinkedSwarm
from tests.unit.core.test_thin_links import of_kind
from tests.unit.core.test_what_happens import Scene

STEP_S, EVERY = 0.14, 10
LINK = Link(5e6, 5e6, 0.1)
QUIET_S = 30.0  # after the last fault, in which who is silent is given up
SEEDS = [18, 21, 38]


def out_of_step(seed: int) -> str:
    """Play two peers that come, and two that freeze or go, within a few rounds; then look whether
    the rest have all fragments at the same version in each step, and are as fast as before."""
    random = Random(seed)
    swarm = LinkedSwarm(
        ProtocolSettings(fragments=4, sync_every=EVERY, min_peers=4),
        [Sizes(20_000, 20_000, 80_000, PARTS)] * 4,
        seed=seed,
    )
    rounds = list[tuple[float, tuple[int, ...]]]()

    def stepped(peer: LinkedPeer) -> None:
        rounds.append((swarm.now, tuple(f.tip.head.number for f in peer.facts.fragments)))

    swarm.on_step.append(stepped)
    for name in "abcd":
        swarm.add(name, link=LINK, step_s=STEP_S)
    begin_s, frozen = random.uniform(5.0, 8.0), list[LinkedPeer]()
    faults = [(begin_s + random.uniform(0.0, 6.0), name) for name in random.sample("abcd", 2)]
    faults += [(begin_s + random.uniform(0.0, 8.0), name) for name in "ef"]
    for at, name in sorted(faults):
        swarm.until(at, lambda: False)
        match name if name in "ef" else random.choice(["freeze", "freeze", "kill", "leave"]):
            case "freeze":
                swarm.freeze(swarm.peers[name])
                frozen.append(swarm.peers[name])
            case "kill":
                swarm.die(swarm.peers[name])
            case "leave":
                swarm.leave(swarm.peers[name])
            case _:
                swarm.add(name, link=LINK, step_s=STEP_S)
    if random.random() < 0.5:
        swarm.until(swarm.now + random.uniform(0.0, 15.0), lambda: False)
        for peer in frozen:
            swarm.thaw(peer)
    quiet_at = swarm.now + QUIET_S
    swarm.until(quiet_at + 10.0, lambda: False)
    first, second = (min(at for at, numbers in rounds if numbers[0] == n) for n in (1, 2))
    late = [numbers for at, numbers in rounds if at > quiet_at]
    if not late:
        return "nobody trains"
    if uneven := [numbers for numbers in late if len({*numbers}) > 1]:
        return f"fragments at {uneven[-1]} in {len(uneven)} of {len(late)} steps"
    made, usual = max(late)[0] - min(late)[0], 10.0 / (second - first)
    return "" if made >= 0.7 * usual - 1 else f"{made} rounds, not {usual:.1f}"


@pytest.mark.parametrize("seed", SEEDS)
def test_peers_are_in_step_again_after_some_freeze_and_others_come(seed: int) -> None:
    assert not out_of_step(seed)


def test_a_newcomer_begins_with_one_version_of_all_fragments() -> None:
    swarm = Scene(ProtocolSettings(fragments=2, sync_every=EVERY))
    swarm.until(20.0, lambda: False)
    facts = swarm.peers["a"].facts
    newer, other = facts.fragments
    facts.life.ready, facts.life.settled_at = False, facts.now
    facts.life.goals = [f.tip.key for f in facts.fragments]
    newer.tip = replace(newer.tip, head=with_fields(newer.tip.head, number=99))
    other.inbox.ahead = {"b": (other.tip.head.work + 1, "f" * 64)}
    lifecycle.get_ready(facts)
    assert not facts.life.ready and facts.life.goals[1] == other.inbox.ahead["b"]
    newer.tip = replace(newer.tip, head=with_fields(newer.tip.head, number=100))
    grown = with_fields(other.tip.head, number=99, work=other.tip.head.work + 2)
    other.tip = replace(other.tip, head=grown)
    lifecycle.get_ready(facts)
    assert facts.life.ready, "uneven once more"


@pytest.mark.parametrize("newest", [True, False])
def test_what_was_learned_from_a_head_that_others_lack_is_sent_later(newest: bool) -> None:
    swarm = Scene(ProtocolSettings(fragments=2, sync_every=EVERY))
    swarm.until(20.0, lambda: False)
    facts = swarm.peers["a"].facts
    ahead, other = facts.fragments
    base = ahead.tip.head.id
    ahead.tip = replace(ahead.tip, head=with_fields(ahead.tip.head, number=99))
    ahead.learned.base = ahead.tip.head.id if newest else base
    facts.loop.due, facts.loop.position = [], facts.loop.cycle - 1
    learning.stepped(facts, events.Stepped(1, NONE, 1.0))
    assert facts.loop.due == ([other] if newest else [ahead, other])


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("over", [True, False])
def test_who_has_finished_stays_while_others_make_a_last_version(trains: bool, over: bool) -> None:
    swarm = Scene(ProtocolSettings(fragments=2, sync_every=EVERY))
    swarm.until(20.0, lambda: False)
    peer = swarm.peers["a"]
    clock, behind = peer.facts.fragments
    if over:
        peer.facts.planned = (0, clock.tip.head.work, 0)
        clock.tip = replace(clock.tip, head=with_fields(clock.tip.head, number=99))
        behind.tip = replace(behind.tip, head=with_fields(behind.tip.head, work=1))
    for member in peer.facts.members.all():
        member.tips = {f.index: f.tip.key for f in (clock, behind)}
        member.status = with_fields(member.status, trains=trains)
    for f in (clock, behind):
        f.outbox.served_at, f.inbox.ahead, f.pool = {}, {}, {}
    assert peer.core is not None
    actions = peer.core.receive(events.Leave(finished=True), swarm.now)
    assert bool(of_kind(actions, events.Exit)) != (trains and over)
