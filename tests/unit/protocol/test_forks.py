"""Which of two histories goes on: work decides, all peers alike, and nobody alone outweighs several others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diloco.config import WIRE_VERSION
from diloco.protocol.forks import goes_on, outweighs, proved_heavier
from diloco.protocol.fragment import Fragment, Lease
from diloco.protocol.messages.bulk import StateHeader
from diloco.protocol.messages.control import Hello, Status, mark
from diloco.protocol.peer import Peer
from diloco.protocol.shares import Share
from tests.support.certificates import MANIFEST, Keys, digest_of, line_of, record_of

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


@given(st.integers(1, 2**61))
def test_no_claim_of_tokens_outweighs_three_others(claimed: int) -> None:
    assert outweighs(shares(b=100, c=100, d=100), shares(a=claimed))


def test_of_equal_histories_that_of_the_syncer_goes_on() -> None:
    """Terms do not count."""
    here = Fragment(0, 2, ONE, shares=shares(a=10, b=10), lease=Lease(0, "h", 3, 5, TWO))

    def theirs(**tokens: int) -> StateHeader:
        record = record_of(5, ONE, TWO, {"a": 5}, term=2, author="a")
        return StateHeader(fragment=0, digest=TWO, record=record, shares=shares(**tokens))

    assert goes_on(theirs(a=20, b=10), here, "h") and goes_on(theirs(a=20, b=10), here, "x")
    assert not goes_on(theirs(a=15), here, "h"), "b did more in the history here"
    assert goes_on(theirs(a=10, b=10), here, "h") and not goes_on(theirs(a=10, b=10), here, "x")


# -- what nobody believes but by signatures ---------------------------------------------------------------------------


def syncer_of(*others: str, disputed_by: str = "", **tokens: int) -> Peer:
    """A syncer, which trains, with other peers that train."""
    syncer = Peer("s", "s", "run", MANIFEST, [ONE], signer=Keys("s"))
    syncer.tick(0.0)
    for other in others:
        status = Status(state="training", versions=[0], marks=mark(ONE), disputed=[0] if other in disputed_by else [])
        hello = Hello(
            wire_version=WIRE_VERSION, run_id="run", manifest_hash=MANIFEST, name=other, trains=True, holds=True,
            peers=[], status=status, claims=[], votes=[],
        )  # fmt: skip
        syncer.connected(other, hello, 1.0)
    syncer.accounts.restore_shares([shares(**tokens)])
    return syncer


def disputed(signed: dict[str, int], **tokens: int) -> StateHeader:
    """An anchor by `a`, whose shares are these, with lines of peers that have signed so many tokens."""
    record = record_of(5, ONE, TWO, {}, author="a", shares=shares(**tokens))
    lines = [line_of(peer, 4, ONE, 1, before=number - 1) for peer, number in signed.items()]
    return StateHeader(fragment=0, digest=TWO, record=record, shares=shares(**tokens), lines=lines)


def test_work_that_its_contributors_have_signed_is_proved() -> None:
    syncer = syncer_of("a", "b", "c", s=100, c=100)
    assert proved_heavier(syncer, disputed({"a": 150, "b": 150}, a=150, b=150))
    assert not proved_heavier(syncer, disputed({"a": 80, "b": 80}, a=80, b=80)), "less than here"


def test_work_that_nobody_has_signed_does_not_count() -> None:
    syncer = syncer_of("a", "b", "c", s=100, c=100)
    invented = disputed({"a": 500}, a=500, b=500, c=500, s=500)
    assert outweighs(invented.shares, syncer.fragments[0].shares) and not proved_heavier(syncer, invented)
    header = disputed({"a": 150, "b": 150}, a=150, b=150)
    foreign = [line_of("a", 4, ONE, 1, before=149), line_of("a", 4, ONE, 1, before=149)._replace(peer="b")]
    assert not proved_heavier(syncer, header.model_copy(update={"lines": foreign})), "a signed for b"
    elsewhere = [line_of(peer, 4, ONE, 1, before=149, fragment=1) for peer in "ab"]
    assert not proved_heavier(syncer, header.model_copy(update={"lines": elsewhere})), "lines of another fragment"


def test_who_goes_on_alone_from_the_same_anchor_shows_nothing() -> None:
    common = {"a": 100, "b": 100, "c": 100, "s": 100}
    syncer = syncer_of("a", "b", "c", **common)
    alone = disputed({"a": 2**40}, **{**common, "a": 2**40})
    assert outweighs(alone.shares, syncer.fragments[0].shares), "as it would with a certificate that is believed"
    assert not proved_heavier(syncer, alone)
    assert not proved_heavier(syncer_of("a", "b", "c", disputed_by="a", **common), alone)
