"""Work units: ranges, leases, successors. No sequence is applied twice, and none is forgotten."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.protocol.ledger import Dealer, Ledger, Units, count, difference, intersection, union

ranges = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6)


def members(units: list[tuple[int, int]]) -> set[int]:
    return {sequence for start, stop in units for sequence in range(start, stop)}


@settings(max_examples=50)
@given(one=ranges, other=ranges)
def test_ranges_are_sets(one: Units, other: Units) -> None:
    assert members(union(one, other)) == members(one) | members(other)
    assert members(difference(one, other)) == members(one) - members(other)
    assert members(intersection(one, other)) == members(one) & members(other)
    for units in (union(one, other), difference(one, other), intersection(one, other)):
        assert all(start < stop for start, stop in units)
        assert all(stop < start for (_, stop), (start, _) in pairwise(units))
        assert count(units) == len(members(units))


def dealing(*leases: tuple[str, int]) -> Dealer:
    """A dealer of a run that begins, which has leased so many sequences to each."""
    dealer = Dealer()
    dealer.resume(0, {})
    for peer, number in leases:
        assert count(dealer.lease(peer, number, []) or []) == number
    return dealer


def test_units_of_the_dead_are_handed_out_before_new_ones() -> None:
    ledger = Ledger()
    assert [ledger.grant(peer, 8, []) for peer in "ab"] == [[(0, 8)], [(8, 16)]]
    ledger.apply("a", [(0, 4)])
    ledger.lost("a")
    assert ledger.free == [(4, 8)]
    assert ledger.grant("b", 6, [(8, 16)]) == [(4, 8), (16, 18)] and ledger.cursor == 18


def test_a_late_contribution_from_units_of_another_is_told() -> None:
    ledger = Ledger()
    ledger.grant("a", 8, [])
    ledger.lost("a")
    ledger.grant("b", 8, [])
    assert ledger.foreign("a", [(0, 4)]) == [(0, 4)] and ledger.foreign("b", [(0, 4)]) == []
    ledger.apply("b", [(0, 4)])
    assert ledger.foreign("b", [(2, 6)]) == [(2, 4)]


def test_what_was_leased_to_others_is_not_applied_by_a_word() -> None:
    ledger = Ledger()
    assert ledger.grant("a", 8, []) == [(0, 8)]
    ledger.apply("liar", [(0, 2**62)])
    assert ledger.open == [(0, 8)] and ledger.leased["a"] == [(0, 8)]
    dealer = dealing(("a", 8), ("liar", 8))
    dealer.offered("a", [(0, 4)])
    dealer.offered("liar", [(0, 2**62)])
    assert dealer.after(["a", "liar"]) == (16, [(4, 8)]), "what was leased to it, it may use up"
    assert dealer.published(1, ["a", "liar"], ["a", "liar"]) > 0
    assert dealer.cursor_at(1) == (16, [(4, 8)])


def test_a_peer_has_a_few_times_what_the_others_ask_for() -> None:
    """And no more data."""
    dealer = dealing(("a", 8), ("b", 8), ("c", 8))
    assert count(dealer.lease("liar", 2**20, []) or []) == 32
    assert dealer.lease("liar", 2**20, [(24, 56)]) == []
    dealer.has("liar", [(56, 56 + 2**20)])
    assert dealer.ledger is not None and dealer.ledger.cursor == 88
    for number in range(20):  # whoever trains is not held up
        assert count(dealer.lease("a", 8, dealer.ledger.leased["a"][-1:]) or []) == 8, number


kinds = st.sampled_from(["grant", "merge", "discard", "die", "succeed"])


@given(st.lists(st.tuples(kinds, st.sampled_from("abc"), st.integers(1, 9)), max_size=40))
def test_every_sequence_is_applied_at_most_once_and_none_is_lost(steps: list[tuple[str, str, int]]) -> None:
    ledger, has = Ledger(), {peer: [] for peer in "abc"}
    word: tuple[int, Units] = (0, [])
    applied: set[int] = set()
    for what, peer, number in steps:
        if what == "grant":
            has[peer] = union(has[peer], ledger.grant(peer, number, has[peer]))
        elif what == "merge":
            used = [(start, min(stop, start + number)) for start, stop in has[peer][:1]]
            assert not ledger.foreign(peer, used) and not members(used) & applied
            ledger.apply(peer, used)
            applied |= members(used)
            has[peer] = difference(has[peer], used)
            word = (ledger.cursor, ledger.open)
        elif what == "discard":
            has[peer] = has[peer][1:]
        elif what == "die":
            has[peer] = []
            ledger.lost(peer)
        else:
            ledger = Ledger()
            ledger.resume(*word, has)
        held = [members(units) for units in has.values()]
        assert sum(map(len, held)) == len(set().union(*held))
        assert members(ledger.open) >= set().union(*held) and not members(ledger.open) & applied
        assert members(ledger.open) | applied == set(range(ledger.cursor))
