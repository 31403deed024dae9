"""Rendezvous: one answer for everybody, even shares, and claims that do not disturb each other."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.protocol.rendezvous import assign, order, score

names = st.text("abcdefgh", min_size=1, max_size=3)
peers = st.lists(names, unique=True, min_size=1, max_size=8)


@settings(max_examples=50)
@given(peers, st.lists(st.integers(0, 50), unique=True, max_size=20), st.data(), st.randoms())
def test_everybody_finds_one_fair_answer_whatever_it_heard_first(
    candidates: list[str], vacant: list[int], data: st.DataObject, r: random.Random
) -> None:
    load = {peer: data.draw(st.integers(0, 5)) for peer in candidates}
    answer = assign(vacant, candidates, load)
    assert set(answer) == set(vacant) and set(answer.values()) <= set(candidates)
    # It depends on the sets only.
    stranger = {"stranger": 9, **{peer: load[peer] for peer in r.sample(candidates, len(candidates))}}
    assert assign(set(vacant), frozenset(candidates), load) == answer
    assert assign(r.sample(vacant, len(vacant)), r.sample(candidates, len(candidates)), stranger) == answer
    # Whoever holds much already gets nothing more.
    fragments, after = len(vacant) + sum(load.values()), Counter(answer.values()) + Counter(load)
    for peer in candidates:
        assert after[peer] <= max(load[peer], -(-fragments // len(candidates)))
        assert load[peer] < fragments / len(candidates) + 1 or peer not in answer.values()
    if max(load.values()) <= fragments / len(candidates):
        assert max(after[peer] for peer in candidates) - min(after[peer] for peer in candidates) <= 1
    # Each peer computes the rest from what it has heard so far, in whatever order the claims came.
    rest = r.sample(vacant, len(vacant))
    while rest:
        fragment = rest.pop()
        load[answer[fragment]] += 1
        assert assign(rest, candidates, load) == {other: answer[other] for other in rest}


@given(st.integers(0, 24), peers)
def test_when_peers_die_only_their_fragments_move(count: int, candidates: list[str]) -> None:
    """And shares stay even."""
    holders = assign(range(count), candidates, {})
    for survivors in [candidates[dead:] for dead in range(len(candidates))]:
        vacant = [fragment for fragment, peer in holders.items() if peer not in survivors]
        moved = assign(vacant, survivors, Counter(peer for peer in holders.values() if peer in survivors))
        assert set(moved) == set(vacant)
        holders.update(moved)
        shares = [Counter(holders.values())[peer] for peer in survivors]
        assert sum(shares) == count and max(shares) - min(shares) <= 1


@given(peers, st.integers(0, 10))
def test_without_one_peer_the_order_of_the_others_is_the_same(candidates: list[str], fragment: int) -> None:
    ranked = order(candidates, fragment)
    assert sorted(ranked) == sorted(candidates)
    assert ranked[1:] == order(set(candidates) - {ranked[0]}, fragment)
    assert [score(peer, fragment) for peer in ranked] == sorted((score(p, fragment) for p in candidates), reverse=True)
    assert assign([fragment], candidates, {}) == {fragment: ranked[0]}


def test_scores_are_the_same_in_every_process_and_version() -> None:
    assert score("a", 0) == score("a", 0) != score("a", 1)
    assert order("abcd", 0) == ["b", "c", "a", "d"]
