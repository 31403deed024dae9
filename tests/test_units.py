"""Work units on their way: no sequence is in the model twice, and those of the dead are handed out again."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.protocol.ledger import Units, count, difference, intersection, union
from diloco.protocol.peer import CONTROL_FRAGMENT
from diloco.sim.bare import BareNode, Swarm
from diloco.sim.transfers import CHUNKS

seeds = st.integers(0, 10**9)
BATCH = {"batch_size": 2, "outer_steps": 6}


def dealer_of(swarm: Swarm) -> BareNode:
    """The syncer of the control fragment."""
    [node] = [node for node in swarm.alive_nodes() if CONTROL_FRAGMENT in node.peer.syncers]
    return node


def merged_units(swarm: Swarm) -> list[Units]:
    """What each contribution that is in the surviving control fragment was learned from."""
    digest = swarm.alive_nodes()[0].peer.digests[CONTROL_FRAGMENT]
    return [swarm.learned_from[whose] for whose in swarm.lineage.merged(digest, CHUNKS)]


def twice(swarm: Swarm) -> int:
    """Sequences that are in the model more than once."""
    merged = merged_units(swarm)
    return sum(map(count, merged)) - count(union(*merged))


@given(seeds)
@settings(max_examples=20)
def test_peers_that_live_train_on_disjoint_units_that_leave_no_gap(seed: int) -> None:
    swarm = Swarm(seed, min_peers=3, break_rate=0.1, **BATCH)
    swarm.start("abc")
    swarm.run_to_the_end()
    assert twice(swarm) == 0
    applied = union(*merged_units(swarm))
    ledger = dealer_of(swarm).peer.dealer.ledger
    assert ledger is not None
    assert count(applied) >= 3 * 6 * 2 * 4 * 0.5  # the rest, right after the start or a broken stream, is their own
    assert union(applied, ledger.open) == [(0, ledger.cursor)] and not intersection(applied, ledger.open)


@given(seeds, st.booleans())
@settings(max_examples=40)
def test_units_of_the_dead_are_handed_out_again_and_nothing_is_applied_twice(seed: int, deals: bool) -> None:
    swarm = Swarm(seed, min_peers=4, break_rate=0.1, **BATCH)
    swarm.start("abcd")
    swarm.run_for(4.0 + seed % 40 / 10)
    dealer = dealer_of(swarm)
    victim = dealer if deals else next(node for node in swarm.alive_nodes() if node is not dealer)
    swarm.kill(victim.name)
    swarm.run_to_the_end()
    ledger = dealer_of(swarm).peer.dealer.ledger
    assert ledger is not None
    applied = union(*merged_units(swarm))
    assert twice(swarm) == 0
    assert not intersection(applied, ledger.open)
    assert not difference([(0, ledger.cursor)], union(applied, ledger.open))
    assert not intersection(victim.reserve.all, ledger.free)  # they go before any new ones
