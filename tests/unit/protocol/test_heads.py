"""Heads and lines: what is wrong with them is named in one line, and nothing raises."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.protocol.heads import does_not_follow, sign_head, wrong_record, wrong_shares
from diloco.protocol.messages import decode, encode
from diloco.protocol.messages.heads import Line, Record
from diloco.protocol.shares import Share, credited
from tests.support.certificates import RUN, Keys, Nobody, certified, digest_of, line_of, record_of

ZERO, ONE, TWO = (digest_of(version) for version in range(3))
ANYBODY = Keys("anybody")
TOKENS = {"a": 30, "b": 10}


def first(**fields: Any) -> Record:
    """Version 1, of two contributions."""
    return record_of(1, ZERO, ONE, TOKENS, **fields)


def altered(record: Record, **fields: Any) -> Record:
    """The record with another head, which its author has not signed."""
    return record.model_copy(update={"head": record.head.model_copy(update=fields)})


def resigned(record: Record, author: str = "s", **fields: Any) -> Record:
    """The record with another head, which its author has signed."""
    head = record.head.model_copy(update={"author": author, **fields})
    return record.model_copy(update={"head": sign_head(Keys(author), RUN, head)})


def test_anybody_can_check_a_certificate_also_after_the_wire() -> None:
    record = first()
    assert wrong_record(ANYBODY, RUN, record) is None
    assert decode(encode(record)) == record and wrong_record(ANYBODY, RUN, record) is None
    assert does_not_follow(record, 0, ZERO, {}, clock=True) is None
    shares = credited({}, 1, TOKENS, {"a": "a name that others may not know"})
    assert wrong_shares(record, shares, clock=True) is None
    second = record_of(2, ONE, TWO, {"a": 5}, shares=shares)
    assert does_not_follow(second, 1, ONE, shares, clock=True) is None and second.lines[0].total == 35


WRONG_LINES = [
    ([line_of("a", 0, ZERO)._replace(signature=b"")], "not signed by a"),
    ([line_of("a", 0, ZERO)._replace(tokens=99)], "99 tokens, and 10 with all before"),
    ([line_of("a", 0, ZERO)._replace(steps=99)], "not signed by a"),
    ([line_of("b", 0, ZERO)._replace(peer="a")], "not signed by a"),
    ([line_of("a", 0, ZERO, fragment=1)], "not signed by a"),
    ([line_of("a", 1, ZERO)], "learned from version 1"),
    ([line_of("a", 0, ONE)], "learned from another anchor"),
    ([line_of("a", 0, ZERO), line_of("a", 0, ZERO)], "one of each contributor"),
    ([line_of("b", 0, ZERO), line_of("a", 0, ZERO)], "one of each contributor"),
]


@pytest.mark.parametrize(("lines", "says"), WRONG_LINES)
def test_lines_that_are_unsigned_foreign_or_repeated_are_refused(lines: list[Line], says: str) -> None:
    """And those of other anchors."""
    assert says in str(wrong_record(ANYBODY, RUN, certified(lines, 1, ZERO, ONE)))


WRONG_HEADS = [
    (altered(first(), signature=b""), "not signed by s"),
    (altered(first(), signature=b"\xff" * 600), "not signed by s"),
    (altered(first(), author="t"), "not signed by t"),
    (altered(first(), digest=TWO), "not signed by s"),
    (altered(first(), applied_tokens=2**61), "not signed by s"),
    (first().model_copy(update={"lines": first().lines[:1]}), "other lines than its head"),
    (first().model_copy(update={"lines": []}), "other lines than its head"),
]


@pytest.mark.parametrize(("record", "says"), WRONG_HEADS)
def test_heads_that_are_not_as_they_were_signed_are_refused(record: Record, says: str) -> None:
    assert says in str(wrong_record(ANYBODY, RUN, record))


def test_a_certificate_of_another_run_says_nothing_here() -> None:
    assert "not signed" in str(wrong_record(ANYBODY, "f" * 64, first()))
    assert "not signed" in str(wrong_record(Nobody(), RUN, first()))


def test_heads_that_do_not_link_or_do_not_add_up_are_not_adopted() -> None:
    shares = credited({}, 1, TOKENS, {})
    assert "does not follow version 0" in str(does_not_follow(first(), 0, TWO, {}, clock=True))
    assert "does not follow version 1" in str(does_not_follow(first(), 1, ONE, shares, clock=True))
    for lies in ({"applied_tokens": 41}, {"applied_tokens": 2**61}):
        assert "swarm clock" in str(does_not_follow(resigned(first(), **lies), 0, ZERO, {}, clock=True))
    other = resigned(first(), shares=b"\1" * 32)
    assert "other contributions" in str(does_not_follow(other, 0, ZERO, {}, clock=True))


def test_a_line_of_an_earlier_version_is_not_counted_again() -> None:
    """A syncer repeats what it once got; the total says that it is old."""
    shares = credited({}, 1, TOKENS, {})
    again = certified([line_of("a", 0, ZERO, 30)], 2, ONE, TWO, shares=shares)
    assert wrong_record(ANYBODY, RUN, again) is None, "its signature is right"
    assert "a signed 30 tokens, and has 60" in str(does_not_follow(again, 1, ONE, shares, clock=True))


def test_an_empty_head_gives_the_same_anchor_a_higher_number() -> None:
    shares = credited({}, 1, TOKENS, {})
    empty: dict[str, Any] = {"shares": shares, "author": "s", "skipped": 8}
    moved = certified([], 9, ONE, ONE, **empty)
    assert wrong_record(ANYBODY, RUN, moved) is None
    assert does_not_follow(moved, 1, ONE, shares, clock=True) is None
    after = record_of(10, ONE, TWO, {"a": 5}, shares=shares, skipped=8)
    assert does_not_follow(after, 9, ONE, shares, clock=True, skipped=8) is None
    for wrong in (
        certified([], 9, ONE, ONE, **{**empty, "skipped": 7}),
        certified([], 9, ONE, TWO, **empty),
        certified([line_of("a", 0, ZERO, 5, before=30)], 9, ONE, ONE, **empty),
        certified([], 1, ONE, ONE, **{**empty, "skipped": 0}),
        record_of(10, ONE, TWO, {"a": 5}, shares=shares, skipped=9),
    ):
        version, skipped = (9, 8) if wrong.version == 10 else (1, 0)
        assert "does not follow" in str(does_not_follow(wrong, version, ONE, shares, clock=True, skipped=skipped))


@given(st.binary(max_size=700))
def test_any_bytes_are_a_signature_or_none(signature: bytes) -> None:
    assert "not signed" in str(wrong_record(ANYBODY, RUN, altered(first(), signature=signature)))
    line = line_of("a", 0, ZERO)._replace(signature=signature)
    assert "not signed" in str(wrong_record(ANYBODY, RUN, certified([line], 1, ZERO, ONE)))


@given(st.data())
def test_one_changed_field_of_a_head_breaks_its_signature(data: st.DataObject) -> None:
    head = first().head
    field = data.draw(st.sampled_from(["fragment", "term", "version", "delay", "applied_tokens", "cursor"]))
    changed = head.model_copy(update={field: getattr(head, field) + data.draw(st.integers(1, 2**40))})
    record = first().model_copy(update={"head": changed})
    assert "not signed" in str(wrong_record(ANYBODY, RUN, record))


def test_shares_are_named_without_display_names() -> None:
    shares = {"a": Share(1, 30, 1, 1, "x"), "b": Share(1, 10, 1, 1)}
    assert wrong_shares(first(), shares, clock=True) is None
    assert wrong_shares(first(), {**shares, "b": Share(1, 11, 1, 1)}, clock=True) is not None
