"""Work units on their way: no sequence is in the model twice, and those of the dead are handed out again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.protocol.actions import Action, Broadcast, Note
from diloco.protocol.ledger import Ledger, Units, count, difference, intersection, union
from diloco.protocol.messages.bulk import Contribution
from diloco.protocol.messages.control import Claim, Hello, Published, Status, Vote
from diloco.protocol.peer import Peer
from diloco.swarm.conversations.units import LeasedData
from diloco.train.island import Island
from diloco.train.leases import IslandLeases
from tests.support.certificates import MANIFEST, Nobody, digest_of, record_of
from tests.support.listener import hello
from tests.support.stories import SEQUENCES_PER_ROUND, story

# -- whole swarms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dies", ["nobody", "the dealer", "another one"])
def test_a_swarm_applies_no_unit_twice_and_loses_none(seed: int, dies: str) -> None:
    with story(seed, fragments=2, outer_steps=6, units=True, loss=0.1) as swarm:
        swarm.start("abc", min_peers=3)
        lost: Units = []
        if dies != "nobody":
            swarm.run_until_training()
            swarm.run_for(2.0 + 0.7 * seed)
            dealer = swarm.dealer()
            victim = dealer if dies == "the dealer" else next(name for name in "abc" if name != dealer)
            lost = swarm.has_units(victim)
            assert lost
            swarm.crowd.crash(victim)
        dealt = swarm.dealt(swarm.run_to_the_end())
        assert dealt.twice == 0 and not intersection(dealt.applied, dealt.open)
        assert not difference([(0, dealt.cursor)], union(dealt.applied, dealt.open))
        assert not intersection(lost, dealt.free), "they go before any new ones"
        if dies == "nobody":
            assert len(dealt.learned) == 3 * 6 and union(dealt.applied, dealt.open) == [(0, dealt.cursor)]
            # Right after the start, or when a stream broke, peers may have trained on data of their own.
            assert count(dealt.applied) >= 3 * 6 * SEQUENCES_PER_ROUND * 0.75


# -- one peer, by hand ------------------------------------------------------------------------------------------------


def hello_of(name: str, version: int = 0, units: Sequence[Sequence[int]] = (), **word: Any) -> Hello:
    status = Status(state="training", versions=[version], units=[list(unit) for unit in units])
    claims = [Claim(fragment=0, term=1, version=version, digest=digest_of(version), **word)] if word else []
    return hello(*claims, name=name, manifest_hash=MANIFEST, status=status)


def follower(version: int = 0, **word: Any) -> Peer:
    """A peer that knows the syncer `s`, and `b`, who trains."""
    peer = Peer("a", "a", "run", MANIFEST, [digest_of(version)], Nobody(), versions=[version], newcomer=True)
    peer.connected("s", hello_of("s", version, **({"cursor": 0} | word)), 0.0)
    peer.connected("b", hello_of("b", version), 0.0)
    peer.discovered(0.0)
    return peer


def take_over(peer: Peer) -> Ledger:
    peer.lost("s", 1.0, "connection reset")
    for now in (2.0, 6.0, 9.0, 12.0):
        peer.heard("b", peer.members.get("b").status, now)  # type: ignore[union-attr]
        peer.tick(now)
    assert peer.accounts.dealer.ledger is not None
    return peer.accounts.dealer.ledger


def dealing(sequences: int = 0) -> tuple[Peer, Ledger]:
    """A peer that has taken over, and so many sequences of `b`."""
    peer = follower()
    ledger = take_over(peer)
    assert not sequences or peer.accounts.lease_units("b", sequences, []) == [(0, sequences)]
    return peer, ledger


def offer(peer: Peer, sender: str, units: Units) -> None:
    """The sender begins to contribute what it learned from these units."""
    syncer = peer.syncers[0]
    header = Contribution(
        base_digest=peer.digests[0], manifest_hash=MANIFEST, fragment=0, term=syncer.term,
        base_version=syncer.version, steps=1, tokens=1, units=[list(unit) for unit in units],
    )  # fmt: skip
    assert peer.offer(sender, header).accepted


def contribute(peer: Peer, sender: str, units: Units) -> list[Action]:
    """A contribution, whole, and the version that it makes."""
    offer(peer, sender, units)
    peer.arrived(sender, 0, 13.0)
    return peer.published(0, digest_of(peer.syncers[0].version + 1), {sender: 1}, 13.0)


def twice_noted(actions: list[Action]) -> list[object]:
    return [action.fields["count"] for action in actions if isinstance(action, Note) and action.kind == "units_twice"]


def test_only_the_syncer_of_the_control_fragment_deals() -> None:
    """And only to members."""
    peer = follower()
    assert peer.accounts.lease_units("b", 4, []) is None
    take_over(peer)
    assert peer.accounts.lease_units("b", 4, []) == [(0, 4)]
    assert peer.accounts.lease_units("a", 4, []) == [(4, 8)]
    assert peer.accounts.lease_units("stranger", 4, []) is None
    messages = [action.message for action in contribute(peer, "b", [(0, 2)]) if isinstance(action, Broadcast)]
    [said] = [message for message in messages if isinstance(message, Published)]
    assert (said.cursor, said.open) == (8, [[2, 8]]) and peer.hello().claims[0].open == [[2, 8]]
    peer.heard("s2", Status(state="ready", versions=[1]), 10.0)
    claim = Claim(fragment=0, term=9, version=1, digest=peer.digests[0], cursor=9, open=[[2, 9]])
    peer.heard("b", Vote(fragment=0, term=9, holder="s2"), 10.0)
    peer.connected("s2", hello_of("s2", 1).model_copy(update={"claims": [claim]}), 10.0)  # after a split
    assert peer.accounts.lease_units("b", 4, []) is None and peer.accounts.dealer.cursor_at(1) == (9, [(2, 9)])


@pytest.mark.parametrize("heard", ["published", "record"])
def test_what_a_version_holds_is_not_handed_out_again(heard: str) -> None:
    """1. s merges b's units 0 to 4 into version 1. 2. It dies before b has said that they are not its any more."""
    peer = follower(cursor=8, open=[[0, 8]])
    peer.heard("b", Status(state="training", versions=[0], units=[[0, 8]]), 0.5)
    word: dict[str, Any] = {"cursor": 8, "open": [[4, 8]]}
    if heard == "published":
        named: dict[str, Any] = {"fragment": 0, "version": 1, "digest": digest_of(1), "applied_tokens": 1}
        peer.heard("s", Published(term=1, contributors=["b"], **named, **word), 0.6)
    else:
        peer.accounts.hear_data_cursor(record_of(1, digest_of(0), digest_of(1), {"b": 1}, **word).head)
    peer.adopted(0, 1, digest_of(1), 0.7, contributors={"b": 1})
    ledger = take_over(peer)
    assert ledger.open == [(4, 8)] and ledger.leased == {"b": [(4, 8)]}


def test_units_of_one_that_comes_back_are_its_again_or_counted() -> None:
    peer, ledger = dealing(8)
    peer.lost("b", 9.0, "silent")
    assert peer.accounts.lease_units("a", 4, []) == [(0, 4)]
    peer.connected("b", hello_of("b", units=[(0, 8)]), 9.5)
    assert ledger.leased["b"] == [(4, 8)]
    assert twice_noted(contribute(peer, "b", [(2, 8)])) == [2]
    assert twice_noted(contribute(peer, "a", [(0, 2)])) == []


# -- what a peer has --------------------------------------------------------------------------------------------------


STEPS = st.sampled_from(["add", "take", "send", "settle", "forget"])


@given(st.lists(st.tuples(STEPS, st.integers(1, 9)), max_size=60))
def test_every_sequence_comes_once_and_is_kept_until_settled(steps: list[tuple[str, int]]) -> None:
    data, ledger = LeasedData(), Ledger()
    data.expect(8)
    taken, sent, settled = list[Units](), [], []
    for what, number in steps:
        match what:
            case "add":
                data.add(ledger.grant("a", data.missing or number, data.all))
                assert data.missing == 0
            case "take":
                units = data.take(number)
                if units is not None:
                    assert count(units) == number and not intersection(units, union(*taken))
                    taken.append(units)
            case "send":
                sent = data.send()
                assert sent == difference(union(*taken), settled)
            case "settle":
                data.drop(sent)
                ledger.apply("a", sent)  # what is discarded instead may come back with the next grant
                settled = union(settled, sent)
            case "forget":
                ledger.grant("b", number, [])
        assert not intersection(data.all, settled)
        assert data.all == ledger.leased.get("a", [])


class Ranks:
    """What `share` does for the ranks of an island that are called one after the other."""

    def __init__(self, leads: bool, said: list[Any]) -> None:
        self.leads, self.said = leads, said

    def share(self, value: Any) -> Any:
        if self.leads:
            self.said.append(value)
        return self.said[-1]


@given(st.lists(st.tuples(st.sampled_from(["add", "take"]), st.integers(0, 60), st.integers(1, 6)), max_size=40))
def test_all_ranks_of_an_island_take_the_units_of_rank_0(steps: list[tuple[str, int, int]]) -> None:
    data, alone, said = LeasedData(), LeasedData(), list[Any]()
    leads, follows = (IslandLeases(cast(Island, Ranks(first, said)), lambda: data, 3) for first in (True, False))
    for what, start, size in steps:
        if what == "add":
            for units in (data, alone):
                units.add([(start, start + size)])
            continue
        expected = alone.take(size)
        assert leads.take(size) == expected == follows.take(size)
        # After a refusal nothing is known of what comes, as it is not enough.
        coming = [] if expected is None else alone.ahead(3 * size)
        assert leads.ahead(3 * size) == coming == follows.ahead(3 * size)
        assert count(follows.ahead(size)) <= size
    assert data.send() == alone.send()
