"""Leases: higher terms win, equal terms are settled alike by everybody, in whatever order claims arrive."""

from __future__ import annotations

import random

from hypothesis import example, given
from hypothesis import strategies as st

from diloco.protocol.fragment import LEAP, Fragment, Lease, LeaseTable
from diloco.protocol.messages.control import Claim, Published
from diloco.protocol.numbers import MAX_COUNT
from diloco.protocol.rendezvous import order
from tests.support.certificates import digest_of


def claim_of(peer: str, term: int, version: int, fragment: int = 0) -> tuple[str, Claim]:
    digest = digest_of(peer, fragment, term, version)
    return peer, Claim(fragment=fragment, term=term, version=version, digest=digest)


def table_of(*claims: tuple[str, Claim]) -> LeaseTable:
    table = LeaseTable([Fragment(index, 0, digest_of(index)) for index in range(6)])
    for peer, claim in claims:
        table.claim(peer, claim)
    return table


FIRST, _, THIRD = order("abc", 0)
claims = st.lists(
    st.builds(claim_of, st.sampled_from("abc"), st.integers(1, 4), st.integers(0, 4), st.integers(0, 1)), max_size=12
)


def test_a_stale_term_is_ignored_even_in_a_vacancy() -> None:
    table = table_of(claim_of(THIRD, 2, 0))
    assert not table.claim(*claim_of(FIRST, 1, 9))
    table.vacate(0)
    assert not table.claim(*claim_of(FIRST, 1, 9))
    assert table.get(0) is None and table.term(0) == 2
    assert table.claim(*claim_of(FIRST, 3, 0))


def test_a_repeated_claim_of_a_holder_elsewhere_counts() -> None:
    table = table_of(claim_of("a", 1, 3))
    assert not table.claim(*claim_of("a", 1, 3))
    assert not table.claim(*claim_of("a", 1, 2))
    assert table.claim(*claim_of("a", 1, 4))
    healed = Claim(fragment=0, term=1, version=4, digest=digest_of("healed"))
    assert table.claim("a", healed)
    assert table.get(0) == Lease(0, "a", 1, 4, healed.digest)


@example([claim_of("a", 1, 1), claim_of("b", 1, 2)], random.Random(0))
@example([claim_of("a", 1, 2), claim_of("b", 1, 1)], random.Random(0))
@given(claims, st.randoms())
def test_the_order_of_arrival_does_not_matter(arrived: list[tuple[str, Claim]], r: random.Random) -> None:
    tables = [table_of(*r.sample(arrived, len(arrived))) for _ in range(3)]
    for fragment in (0, 1):
        ranks = [
            (claim.term, -order("abc", fragment).index(peer), claim.version)
            for peer, claim in arrived
            if claim.fragment == fragment
        ]
        for table in tables:
            lease = table.get(fragment)
            assert lease == tables[0].get(fragment)
            rank = lease and (lease.term, -order("abc", fragment).index(lease.holder), lease.version)
            assert rank == max(ranks, default=None)


@given(claims)
def test_terms_never_fall(arrived: list[tuple[str, Claim]]) -> None:
    table, highest = table_of(), 0
    for peer, claim in arrived:
        table.claim(peer, claim)
        if claim.fragment == 0:
            highest = max(highest, claim.term)
        assert table.term(0) == highest


def publication(fragment: int, term: int, version: int, digest: str) -> Published:
    return Published(
        fragment=fragment, term=term, version=version, digest=digest, contributors=["a"], applied_tokens=version
    )


def test_a_publication_counts_under_the_current_term_and_once() -> None:
    table = table_of(claim_of("a", 2, 3))
    digest = digest_of("new")
    for fragment, term, version in ((1, 2, 4), (7, 2, 4), (0, 1, 4), (0, 3, 4), (0, 2, 3)):
        assert not table.published(publication(fragment, term, version, digest))
    assert table.published(publication(0, 2, 4, digest))
    assert not table.published(publication(0, 2, 4, digest_of("other")))
    assert table.get(0) == Lease(0, "a", 2, 4, digest, applied_tokens=4)


def test_a_term_known_from_elsewhere_is_passed_over() -> None:
    table = table_of()
    table.see_term(0, 5)
    table.see_term(0, 3)
    assert table.term(0) == 5
    assert not table.claim(*claim_of("a", 4, 0)) and table.claim(*claim_of("a", 5, 0))


def test_there_is_a_next_term_whatever_others_claim() -> None:
    """Terms are numbers from the network; the one after the highest that is believed must be one that can be sent."""
    table = table_of()
    assert not table.claim(*claim_of("a", MAX_COUNT, 0)) and not table.claim(*claim_of("a", LEAP + 1, 0))
    table.see_term(0, MAX_COUNT)
    assert table.term(0) == 0
    assert table.claim(*claim_of("a", LEAP, 0))
    table.see_term(0, 2 * LEAP)
    assert table.term(0) == 2 * LEAP


@given(st.lists(st.tuples(claims, st.none() | st.integers(0, 1)), max_size=6))
def test_what_is_counted_along_is_what_the_leases_say(steps: list[tuple[list[tuple[str, Claim]], int | None]]) -> None:
    table = table_of()
    for arrived, vacated in steps:
        for peer, claim in arrived:
            before, generation = table.get(claim.fragment), table.generation
            table.claim(peer, claim)
            after = table.get(claim.fragment)
            same_holder = (before and before.holder) == (after and after.holder)
            assert same_holder == (table.generation == generation)
        if vacated is not None:
            table.vacate(vacated)
        leases = [lease for fragment in range(6) if (lease := table.get(fragment)) is not None]
        for peer in "abc":
            assert table.held_by(peer) == [lease for lease in leases if lease.holder == peer]
            assert table.load(peer) == len(table.held_by(peer))
