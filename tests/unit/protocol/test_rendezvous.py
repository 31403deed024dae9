"""Rendezvous: one answer for everybody, even shares, and claims that do not disturb each other."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from diloco.protocol.rendezvous import assign, order, score

peers = st.lists(st.text("abcdefgh", min_size=1, max_size=3), unique=True, min_size=1, max_size=8)
sizes = st.integers(0, 24)


def held(assignment: dict[int, str], load: dict[str, int]) -> Counter[str]:
    """Fragments of each candidate once everything assigned is claimed."""
    return Counter(assignment.values()) + Counter(load)


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[int], list[str], dict[str, int]]:
    """Vacant fragments, candidates, and what these hold already."""
    candidates = draw(peers)
    load = {peer: draw(st.integers(0, 5)) for peer in candidates}
    return draw(st.lists(st.integers(0, 50), unique=True, max_size=20)), candidates, load


@given(situations(), st.randoms())
def test_the_answer_depends_on_the_sets_only(
    situation: tuple[list[int], list[str], dict[str, int]], r: random.Random
) -> None:
    vacant, candidates, load = situation
    answer = assign(vacant, candidates, load)
    assert set(answer) == set(vacant) and set(answer.values()) <= set(candidates)
    stranger = {"stranger": 9, **{peer: load[peer] for peer in r.sample(candidates, len(candidates))}}
    assert assign(set(vacant), frozenset(candidates), load) == answer
    assert assign(r.sample(vacant, len(vacant)), r.sample(candidates, len(candidates)), stranger) == answer


def test_nobody_is_assigned_anything_when_there_is_nobody() -> None:
    assert assign([1, 2], [], {}) == {}
    assert order([], 1) == []


@given(sizes, peers)
def test_shares_differ_by_one_fragment_at_most(count: int, candidates: list[str]) -> None:
    shares = [Counter(assign(range(count), candidates, {}).values())[peer] for peer in candidates]
    assert sum(shares) == count
    assert max(shares) - min(shares) <= 1


@given(situations())
def test_whoever_holds_much_already_gets_nothing_more(situation: tuple[list[int], list[str], dict[str, int]]) -> None:
    vacant, candidates, load = situation
    answer = assign(vacant, candidates, load)
    after, share = held(answer, load), (len(vacant) + sum(load.values())) / len(candidates)
    for peer in candidates:
        assert after[peer] <= max(load[peer], -(-(len(vacant) + sum(load.values())) // len(candidates)))
        assert load[peer] < share + 1 or peer not in answer.values()
    if max(load.values()) <= share:
        assert max(after[peer] for peer in candidates) - min(after[peer] for peer in candidates) <= 1


@given(situations(), st.randoms())
def test_claims_made_one_after_another_agree_with_the_answer_at_once(
    situation: tuple[list[int], list[str], dict[str, int]], r: random.Random
) -> None:
    """Each peer computes the rest from what it has heard so far, in whatever order the claims came."""
    vacant, candidates, load = situation
    answer, load = assign(vacant, candidates, load), dict(load)
    rest = r.sample(vacant, len(vacant))
    while rest:
        fragment = rest.pop()
        load[answer[fragment]] += 1
        assert assign(rest, candidates, load) == {other: answer[other] for other in rest}


@given(sizes, st.lists(st.text("abcdefgh", min_size=1, max_size=3), unique=True, min_size=2, max_size=8))
def test_when_peers_die_one_by_one_only_their_fragments_move_and_shares_stay_even(
    count: int, candidates: list[str]
) -> None:
    holders = assign(range(count), candidates, {})
    for dead in candidates[:-1]:
        survivors = [peer for peer in candidates if peer in candidates[candidates.index(dead) + 1 :]]
        vacant = [fragment for fragment, peer in holders.items() if peer == dead]
        load = Counter(peer for peer in holders.values() if peer != dead)
        moved = assign(vacant, survivors, load)
        assert set(moved) == set(vacant)
        holders.update(moved)
        shares = [Counter(holders.values())[peer] for peer in survivors]
        assert max(shares) - min(shares) <= 1


@given(peers, st.integers(0, 10))
def test_without_one_peer_the_order_of_the_others_is_the_same(candidates: list[str], fragment: int) -> None:
    ranked = order(candidates, fragment)
    assert sorted(ranked) == sorted(candidates)
    assert ranked[1:] == order(set(candidates) - {ranked[0]}, fragment)
    assert [score(peer, fragment) for peer in ranked] == sorted((score(p, fragment) for p in candidates), reverse=True)


def test_a_single_fragment_goes_to_the_first_in_its_order() -> None:
    for fragment in range(20):
        assert assign([fragment], "abcde", {}) == {fragment: order("abcde", fragment)[0]}


def test_peers_come_first_in_proportion_to_their_weight() -> None:
    """Weighted rendezvous: with weights 1, 1 and 2 the third wins half of the fragments (2000 trials, 5 sigma)."""
    weights = {"a": 1.0, "b": 1.0, "c": 2.0}
    winners = Counter(max(weights, key=lambda peer: score(peer, f, weights[peer])) for f in range(2000))
    assert abs(winners["c"] - 1000) < 5 * (2000 * 0.25) ** 0.5
    assert abs(winners["a"] - 500) < 5 * (2000 * 0.1875) ** 0.5


def test_scores_are_the_same_in_every_process_and_version() -> None:
    assert score("a", 0) == score("a", 0) != score("a", 1)
    assert order("abcd", 0) == ["b", "c", "a", "d"]
