"""What may be in a version, what is in a book after it, and who is dealt which data."""

from dataclasses import replace
from functools import partial

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace as altered

from diloco.core import events
from diloco.core.history import follow, genesis
from diloco.core.rules import data
from diloco.core.rules.learning import discarded
from diloco.messages.control import Lease, Status
from diloco.messages.heads import MAX_LEDGER, Entry, Head, Line
from diloco.ranges import Ranges, overlaps, union
from tests.support.core import ME, advance, core
from tests.support.core import line_of as signed_line
from tests.support.fake_tensors import RUN, Arithmetic, gradient
from tests.support.swarm_without_tensors import begun

DIGEST = "0" * 64
TIP = genesis(0, RUN, [DIGEST])


line_of = partial(signed_line, base=TIP.head.id, stamp=10, tokens=4)


def head_of(*lines: tuple[Line, float]) -> Head:
    work = sum(line.tokens for line, _ in lines)
    return Head(0, 1, TIP.head.id, "a", "a", lines, 1, work, "", DIGEST)


def test_a_contribution_counts_once_from_a_recent_head_and_with_new_data() -> None:
    book = altered(TIP.book, ledger={"": Entry(3, 0), "a": Entry(10, 4)}, merged=((0, 4),))
    tip = replace(TIP, book=book)
    assert tip.objection(line_of("a")) == tip.objection(line_of("stranger", stamp=3)) == "in"
    assert tip.objection(line_of("a", stamp=11, base=DIGEST)) == "late"
    assert tip.objection(line_of("a", stamp=11, units=((3, 7),))) == "data"
    assert tip.objection(line_of("a", stamp=11, units=((4, 8),))) == ""


def test_what_was_left_out_does_not_come_again_and_its_data_is_free() -> None:
    used, left_out = line_of("a", units=((0, 4),)), line_of("b", stamp=12, units=((4, 8),))
    book, _ = follow(TIP, head_of((used, 1.0), (left_out, 0.0)), 8, Arithmetic())
    assert book.of("a") == (10, 4) and book.of("b") == (12, 0)
    assert book.merged == ((0, 4),) and book.recent == (TIP.head.id,)


def test_a_book_names_so_many_peers_and_sums_up_the_rest() -> None:
    named = {f"x{number}": Entry(number + 1, 2) for number in range(MAX_LEDGER)}
    tip = replace(TIP, book=altered(TIP.book, ledger={"": Entry(0, 0), **named}))
    book, _ = follow(tip, head_of((line_of("new", stamp=10**6), 1.0)), 8, Arithmetic())
    assert len(book.ledger) == MAX_LEDGER
    assert book.tokens == tip.book.tokens + 4
    assert book.of("x0") == (book.ledger[""].stamp, 0) and book.ledger[""].stamp >= 1


def test_two_contributions_to_one_version_have_no_data_in_common() -> None:
    swarm, author, other = begun()
    for peer in ("x", "y"):
        line = line_of(peer, base=author.tip().head.id, units=((10**6, 10**6 + 4),))
        swarm.tell(author, events.Delivered(other.name, line, gradient(line)))
    number = len(swarm.made)
    swarm.until(swarm.now + 30.0, lambda: len(swarm.made) > number)
    assert len({"x", "y"} & {line.peer for line, _ in swarm.made[-1][1].lines}) == 1


NUMBERS = st.sets(st.integers(0, 30))


@given(one=NUMBERS, other=NUMBERS)
def test_sets_overlap_if_a_number_is_in_both(one: set[int], other: set[int]) -> None:
    ranges: list[Ranges] = [union((number, number + 1) for number in each) for each in (one, other)]
    assert overlaps(*ranges) == bool(one & other)


def test_a_dealer_deals_nothing_that_is_merged_or_that_anybody_has() -> None:
    swarm, author, other = begun()
    swarm.tell(author, events.Heard(other.name, Status(units=((500, 510),))))
    line = line_of("x", base=author.tip().head.id, units=((520, 530),))
    swarm.tell(author, events.Delivered(other.name, line, gradient(line)))
    new = data.deal(author.facts, "y", 600, ((540, 550),))
    taken = (
        *author.tip().book.merged,
        (500, 510),
        (520, 530),
        (540, 550),
        *author.facts.data.queue,
    )
    assert new and not any(overlaps(new, (unit,)) for unit in taken)
    assert overlaps(data.has(author.facts), ((520, 530),))
    assert not overlaps(data.deal(author.facts, "z", 600, ()), new)


def test_the_lowest_sequences_are_dealt_first() -> None:
    _, author, _ = begun()
    f = author.facts.control
    stop = f.tip.book.merged[-1][1]
    f.tip = replace(f.tip, book=altered(f.tip.book, merged=((3, stop),)))
    assert data.deal(author.facts, "y", 3, ())[0] == (0, 3)


def test_a_lease_is_passed_on_to_a_dealer_that_the_other_does_not_hear() -> None:
    swarm, author, other = begun()
    swarm.add("c")
    swarm.until(swarm.now + 15.0)
    assert other.core
    for sender, lease, to in (
        (author.name, Lease("x", 5), []),
        ("c", Lease("c", 5), [author.name]),
    ):
        actions = other.core.receive(events.Heard(sender, lease), swarm.now)
        sent = [one for one in actions if isinstance(one, events.Send)]
        assert [one.peer for one in sent if one.message == lease] == to


def test_a_sleeper_drops_its_data_and_listens_first() -> None:
    swarm, _, other = begun()
    assert other.core and other.facts.data.queue
    other.core.receive(events.Tick(), swarm.now + 11.0)
    assert not other.facts.life.ready and not other.facts.data.queue


def test_a_hello_is_answered_by_all_that_changed_since() -> None:
    swarm, author, other = begun()
    assert author.core and other.core
    sent = author.core.receive(events.Connected(other.name, other.core.hello()), swarm.now)
    said = [one.message for one in sent if isinstance(one, events.Send)]
    assert any(isinstance(message, Status) and message.whole for message in said)


def test_one_that_leaves_is_none_to_begin_with() -> None:
    """A peer that goes on from its checkpoint may meet the other's last session: it waits for the
    next one."""
    _, author, other = begun()
    other.facts.loop.steps, other.facts.life.min_peers = 0, 3
    status = author.core.status()
    assert status.steps and not other.facts.lacks_peers()
    leaving = altered(status, leaves=True)
    other.core.receive(events.Heard(author.name, leaving), other.facts.now)
    assert other.facts.lacks_peers()


def test_a_version_is_dropped_when_another_peer_is_the_author_by_then() -> None:
    """Two would make it, and what is in the one that loses would be merged again."""
    for passed_over in (False, True):
        swarm, author, _ = begun()
        swarm.work_s, f = 1.0, author.facts.control
        swarm.until(swarm.now + 60.0, lambda f=f: f.round.merge is not None)  # type: ignore[misc]
        assert author.core and f.round.merge
        if passed_over:
            author.facts.shun(author.name, swarm.now + 99.0)
        made = events.Merged(0, f.round.merge.base, object(), DIGEST)
        author.core.receive(made, swarm.now)
        assert (f.inbox.moving is None) == passed_over


def test_a_history_that_knows_more_than_the_checkpoint_is_believed() -> None:
    swarm, _, other = begun()
    old = other.saved()._replace(processed=0)
    swarm.die(other)
    swarm.start(other, old)
    swarm.until(swarm.now + 30.0)
    assert discarded(other.facts, other.facts.control) == 0
    assert other.facts.loop.processed >= old.tips[0].book.of(other.name)[1]


def test_when_the_run_is_over_no_head_is_waited_for() -> None:
    """A peer that began between the last heads of two fragments has sent what it learned from one
    of these."""
    peer = core()
    for f in peer.facts.fragments:
        f.learned.steps_left = 0
        for _ in range(9):
            assert peer.facts.waits
            advance(peer.facts, f, ME)
    assert not peer.facts.waits


def test_with_a_budget_in_tokens_all_fragments_end_with_the_round_of_the_swarm_clock() -> None:
    """One that closes later is not over before it has that version, though it may have fewer
    tokens."""
    facts = core().facts
    facts.planned = (0, 20, 0)
    clock, other = facts.fragments
    advance(facts, clock, ME, "other")
    assert [facts.over(f.tip) for f in facts.fragments] == [True, False]
    advance(facts, other, ME)
    assert [facts.over(f.tip) for f in facts.fragments] == [True, True]
