"""Which of two histories goes on: work decides, all peers alike, and nobody alone outweighs several others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diloco.protocol.forks import goes_on, outweighs
from diloco.protocol.fragment import Fragment, Lease
from diloco.protocol.messages.bulk import StateHeader
from diloco.protocol.shares import Share
from tests.protocol_helpers import digest_of, record_of

ONE, TWO = digest_of(1), digest_of(2)


def shares(**tokens: int) -> dict[str, Share]:
    return {peer: Share(1, number, 1, 1) for peer, number in tokens.items() if number}


some = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 1000)).map(lambda drawn: shares(**drawn))


@given(some, some)
def test_of_two_histories_one_at_most_outweighs_the_other(one: dict[str, Share], other: dict[str, Share]) -> None:
    assert not (outweighs(one, other) and outweighs(other, one))


@given(some, some, some)
def test_what_both_have_in_common_does_not_count(
    one: dict[str, Share], other: dict[str, Share], common: dict[str, Share]
) -> None:
    def after(more: dict[str, Share]) -> dict[str, Share]:
        total = {peer: sum(each[peer].tokens for each in (common, more) if peer in each) for peer in common | more}
        return shares(**total)

    assert outweighs(after(one), after(other)) == outweighs(one, other)


@given(some, st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 1000), min_size=1))
def test_a_history_that_goes_on_from_another_one_outweighs_it(before: dict[str, Share], more: dict[str, int]) -> None:
    after = {peer: share.tokens for peer, share in before.items()}
    after |= {peer: after.get(peer, 0) + tokens for peer, tokens in more.items()}
    assert outweighs(shares(**after), before) and not outweighs(before, shares(**after))


def test_a_peer_that_was_alone_and_fast_does_not_outweigh_the_others() -> None:
    common = dict.fromkeys("abcdefg", 1000)
    alone = shares(**common | {"a": 1000 + 10272})
    six = shares(**common | dict.fromkeys("bcdefg", 1000 + 2352))
    assert outweighs(six, alone) and not outweighs(alone, six)


@given(st.integers(1, 2**61))
def test_no_number_of_tokens_that_one_peer_claims_outweighs_three_others(claimed: int) -> None:
    assert outweighs(shares(b=100, c=100, d=100), shares(a=claimed))


def test_of_equal_histories_that_of_the_syncer_goes_on_and_terms_do_not_count() -> None:
    here = Fragment(0, 2, ONE, shares=shares(a=10, b=10), lease=Lease(0, "h", 3, 5, TWO))

    def theirs(**tokens: int) -> StateHeader:
        record = record_of(5, ONE, TWO, {"a": 5}, term=2, author="a")
        return StateHeader(fragment=0, digest=TWO, record=record, shares=shares(**tokens), outer=False)

    assert goes_on(theirs(a=20, b=10), here, "h") and goes_on(theirs(a=20, b=10), here, "x")
    assert not goes_on(theirs(a=15), here, "h"), "b did more in the history here"
    assert goes_on(theirs(a=10, b=10), here, "h") and not goes_on(theirs(a=10, b=10), here, "x")


def test_of_two_peers_that_parted_the_one_that_did_more_goes_on() -> None:
    assert outweighs(shares(a=500, b=100), shares(a=100, b=300))
