"""The history of a fragment: which head follows which, and what is in an anchor. Sans-IO.

    line -> does the book object? -> head -> is anything wrong? -> the next tip

A signature is over the id of the run, so that one of another run says nothing here. It is not over
the manifest: after a restart a run may go on with other settings, such as a larger budget, and its
history stays what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from diloco.core.units import count, overlaps, sound, union
from diloco.messages.fields import MAX_LENGTH, MAX_RANGES, MAX_TOKENS, Units, at_most
from diloco.messages.heads import MAX_LEDGER, Book, Entry, Head, Key, Line, digest

Reach = tuple[float, float, float]
OTHERS = ""  # stands in a ledger for the peers that were absent longest and are named no more
EMPTY = Book({OTHERS: Entry(0, 0)})


class Signer(Protocol):
    """Signs as this peer, and checks the signatures of all; a transport is one."""

    def sign(self, content: bytes) -> bytes: ...
    def verify(self, peer: str, content: bytes, signature: bytes) -> bool: ...


class Bounds(NamedTuple):
    """An honest update is no longer than `update`; momentum and window are not longer than `reach`
    after it."""

    update: float
    reach: Reach


class Arithmetic(Protocol):
    """What a history needs to know of the outer optimizer; equal on all machines."""

    def bounds(
        self, number: int, contributions: int, pushes: int, delay: int, longest: float, reach: Reach
    ) -> Bounds:
        """Of the step to version `number` from contributions no longer than `longest`, and the
        `reach` before it."""


class Record(NamedTuple):
    """A head, and its encoded update, from which the next anchor follows."""

    head: Head
    update: Any


@dataclass(frozen=True)
class Tip:
    """A head with what is in its anchor."""

    head: Head
    book: Book
    parts: tuple[str, ...] = ()  # digests of the parts of the anchor, if they are known

    @cached_property
    def bases(self) -> frozenset[str]:
        """Ids of the heads from which a contribution may have been learned."""
        return frozenset((self.head.id, *self.book.recent))

    @property
    def key(self) -> Key:
        """Work and id of the head."""
        return self.head.key

    def objection(self, line: Line) -> str:
        """Why a contribution cannot go into the next version; empty if it can."""
        if line.stamp <= self.book.of(line.peer)[0]:
            return "in"  # it, or a later one
        if line.base not in self.bases:
            return "late"  # or of another history
        return "data" if overlaps(self.book.merged, line.units) else ""


def blank(fragment: int) -> Tip:
    """What a peer has that waits for the initial weights: less than anybody else."""
    return Tip(Head(fragment, 0, "", "", "", (), 1, 0, "", "0" * 64), EMPTY)


def genesis(fragment: int, run_id: str, parts: Sequence[str]) -> Tip:
    """The tip of a run that begins, with the digests of the parts of its initial anchor. Nobody
    signs it."""
    return Tip(
        Head(fragment, 0, run_id, "", "", (), 1, 0, "", state_of(EMPTY, parts)), EMPTY, tuple(parts)
    )


def state_of(book: Book, parts: Sequence[str]) -> str:
    """The digest by which a head names its book and its anchor."""
    return digest("state", book.digest, list(parts))


def sign(one: Any, signer: Signer, run_id: str) -> Any:
    """The line or head with this peer's signature."""
    return replace(one, signature=signer.sign(run_id.encode() + one.content))


def is_signed(one: Line | Head, peer: str, signer: Signer, run_id: str) -> bool:
    """Whether that peer has signed it."""
    return signer.verify(peer, run_id.encode() + one.content, one.signature)


def wrong(tip: Tip, head: Head, signer: Signer, run_id: str) -> str:
    """Why no honest author makes that version of this tip; empty if one may. The update itself is
    not looked at."""
    counted, here = head.counted, tip.head
    if (
        head.prev != here.id
        or head.number != here.number + 1
        or head.fragment != here.fragment
        or not counted
    ):
        return "it does not follow"
    if head.work != at_most(here.work + sum(line.tokens for line in counted), MAX_TOKENS):
        return "its work is not that of its contributions"
    if tip.book.pushes and head.delay != tip.book.delay:
        return "a window changes its length"
    if len({line.peer for line, _ in head.lines}) < len(head.lines):
        return "it has two contributions of one peer"
    for line, _ in head.lines:
        if line.fragment != head.fragment:
            return f"a line of {line.peer} is of another fragment"
        if objection := tip.objection(line):
            return f"a contribution of {line.peer} cannot be in it ({objection})"
    if count(union(*(line.units for line in counted))) < sum(count(line.units) for line in counted):
        return "it has data twice"
    if not is_signed(head, head.author, signer, run_id):
        return "its author has not signed it"
    unsigned = next(
        (line.peer for line, _ in head.lines if not is_signed(line, line.peer, signer, run_id)),
        None,
    )
    return "" if unsigned is None else f"a line is not signed by {unsigned}"


def wrong_state(head: Head, book: Book, parts: Sequence[str], signer: Signer, run_id: str) -> str:
    """Why that is no state of a history that one would switch to; empty if it is one."""
    if not is_signed(head, head.author, signer, run_id) if head.number else head.work:
        return "its author has not signed it"
    if (
        OTHERS not in book.ledger
        or not sound(book.merged)
        or head.work != at_most(book.tokens, MAX_TOKENS)
    ):
        return "its work is not that of its contributions"
    return "" if head.state == state_of(book, parts) else "it is not the one that its head names"


def follow(tip: Tip, head: Head, late: int, arithmetic: Arithmetic) -> tuple[Book, float]:
    """The book after a head that is not `wrong`, and how long its update may be. A base may be so
    many heads back."""
    before, counted = tip.book, head.counted
    ledger = dict(before.ledger)
    for line, weight in head.lines:
        known = before.ledger.get(line.peer, Entry(0, 0, 0, head.number))
        tokens = at_most(known.tokens + line.tokens * bool(weight), MAX_TOKENS)
        last = head.number if weight else known.last
        ledger[line.peer] = Entry(
            line.stamp, tokens, known.contributions + bool(weight), known.first, last, line.name
        )
    while len(ledger) > MAX_LEDGER:
        _sum_up_the_oldest(ledger)
    recent = (*before.recent, tip.head.id)[-late:]
    merged = _few(union(before.merged, *(line.units for line in counted)))
    longest = max(line.norm for line in counted)
    bounds = arithmetic.bounds(
        head.number, len(counted), before.pushes, head.delay, longest, before.reach
    )
    pushes = (before.pushes + len(counted)) % head.delay
    momentum, window, lost = (min(length, MAX_LENGTH) for length in bounds.reach)
    return Book(ledger, recent, merged, pushes, head.delay, (momentum, window, lost)), bounds.update


def _sum_up_the_oldest(ledger: dict[str, Entry]) -> None:
    """Whoever was absent longest is named no more; the highest of their stamps stays, so that
    nothing counts again."""
    peer = min(
        (peer for peer in ledger if peer != OTHERS), key=lambda peer: (ledger[peer].stamp, peer)
    )
    one, others = ledger.pop(peer), ledger[OTHERS]
    ledger[OTHERS] = Entry(
        max(one.stamp, others.stamp),
        at_most(one.tokens + others.tokens, MAX_TOKENS),
        others.contributions + one.contributions,
        min(one.first, others.first or one.first),
        max(one.last, others.last),
    )


def _few(merged: Units) -> Units:
    """Ranges that fit into a book. The lowest gaps are closed: their data is never dealt out,
    rather than twice."""
    over = len(merged) - MAX_RANGES
    return merged if over <= 0 else ((merged[0][0], merged[over][1]), *merged[over + 1 :])
