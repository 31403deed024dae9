"""The history of a fragment: which head follows which, and what is in an anchor. Sans-IO.

    line -> does the book object? -> head -> is anything wrong? -> the next tip

A signature is over the id of the run, so that one of another run says nothing here. It is not over
the manifest: after a restart a run may go on with other settings, such as a larger budget, and its
history stays what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from diloco.messages.fields import MAX_LENGTH, MAX_RANGES, MAX_TOKENS, Units, at_most
from diloco.messages.heads import MAX_LEDGER, Book, Entry, Head, Key, Line, digest
from diloco.ranges import count, overlaps, sound, union

Reach = tuple[float, float, float]
OTHERS = ""  # stands in a ledger for the peers that were absent longest and are named no more
EMPTY = Book({OTHERS: Entry(0, 0)})


class Signer(Protocol):
    """Signs as this peer, and checks the signatures of all; a transport is one."""

    def sign(self, content: bytes) -> bytes: ...
    def verify(self, peer: str, content: bytes, signature: bytes) -> bool: ...


class Bounds(NamedTuple):
    """How long an honest update may be, and momentum, window and lost values after it."""

    update: float
    reach: Reach


class Arithmetic(Protocol):
    """Bounds of the outer optimizer that a history needs; equal on all machines."""

    def bounds(
        self, number: int, contributions: int, pushes: int, delay: int, longest: float, reach: Reach
    ) -> Bounds:
        """Of the step to version `number`, from contributions of at most `longest` (L2 norm)."""


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
    """The tip of a peer that waits for the initial weights: less than any other."""
    return Tip(Head(fragment, 0, "", "", "", (), 1, 0, "", "0" * 64), EMPTY)


def genesis(fragment: int, run_id: str, parts: Sequence[str]) -> Tip:
    """The tip of a run that begins, by the digests of its initial anchor. Nobody signs it."""
    head = Head(fragment, 0, run_id, "", "", (), 1, 0, "", state_of(EMPTY, parts))
    return Tip(head, EMPTY, tuple(parts))


def state_of(book: Book, parts: Sequence[str]) -> str:
    """The digest by which a head names its book and its anchor."""
    return digest("state", book.digest, list(parts))


def sign(one: Any, signer: Signer, run_id: str) -> Any:
    """The line or head with this peer's signature."""
    return replace(one, signature=signer.sign(run_id.encode() + one.content))


SignedBy = Callable[[Line | Head, str], bool]
"""Returns True if that peer has signed a line or a head."""


def wrong(tip: Tip, head: Head, signed_by: SignedBy) -> str:
    """Why no honest author makes that version of this tip, its update aside; empty if one may."""
    here, counted, lines = tip.head, head.counted, [line for line, _ in head.lines]
    after = here.id, here.number + 1, here.fragment
    if (head.prev, head.number, head.fragment) != after or not counted:
        return "it does not follow"
    if head.work != at_most(here.work + sum(line.tokens for line in counted), MAX_TOKENS):
        return "its work is not that of its contributions"
    if tip.book.pushes and head.delay != tip.book.delay:
        return "a window changes its length"
    if len({line.peer for line in lines}) < len(lines):
        return "it has two contributions of one peer"
    for line in lines:
        if line.fragment != head.fragment:
            return f"a line of {line.peer} is of another fragment"
        if objection := tip.objection(line):
            return f"a contribution of {line.peer} cannot be in it ({objection})"
    if count(union(*(line.units for line in counted))) < sum(count(line.units) for line in counted):
        return "it has data twice"
    if not signed_by(head, head.author):
        return "its author has not signed it"
    unsigned = next((line.peer for line in lines if not signed_by(line, line.peer)), None)
    return "" if unsigned is None else f"a line is not signed by {unsigned}"


def wrong_state(head: Head, book: Book, parts: Sequence[str], signed_by: SignedBy) -> str:
    """Why that is no state of a history that one would switch to; empty if it is one."""
    if not signed_by(head, head.author) if head.number else head.work:
        return "its author has not signed it"
    honest = OTHERS in book.ledger and sound(book.merged)
    if not honest or head.work != at_most(book.tokens, MAX_TOKENS):
        return "its work is not that of its contributions"
    return "" if head.state == state_of(book, parts) else "it is not the one that its head names"


def follow(tip: Tip, head: Head, late: int, arithmetic: Arithmetic) -> tuple[Book, float]:
    """The book after a head that is not `wrong`, with `late` bases, and its longest update."""
    before, counted, ledger = tip.book, head.counted, dict(tip.book.ledger)
    for line, weight in head.lines:
        known, used = ledger.get(line.peer, Entry(0, 0, 0, head.number)), bool(weight)
        tokens, times = at_most(known.tokens + line.tokens * used, MAX_TOKENS), known.contributions
        last = head.number if used else known.last
        ledger[line.peer] = Entry(line.stamp, tokens, times + used, known.first, last, line.name)
    while len(ledger) > MAX_LEDGER:
        _sum_up_the_oldest(ledger)
    recent = (*before.recent, tip.head.id)[-late:]
    merged = _few(union(before.merged, *(line.units for line in counted)))
    longest, pushes = max(line.norm for line in counted), before.pushes + len(counted)
    step = head.number, len(counted), before.pushes, head.delay, longest, before.reach
    bounds = arithmetic.bounds(*step)
    momentum, window, lost = (min(length, MAX_LENGTH) for length in bounds.reach)
    reach = momentum, window, lost
    return Book(ledger, recent, merged, pushes % head.delay, head.delay, reach), bounds.update


def _sum_up_the_oldest(ledger: dict[str, Entry]) -> None:
    """Name the peer that was absent longest no more; its stamp stays, so nothing counts again."""
    peer = min(ledger.keys() - {OTHERS}, key=lambda peer: (ledger[peer].stamp, peer))
    oldest, others = ledger.pop(peer), ledger[OTHERS]
    ledger[OTHERS] = Entry(
        stamp=max(oldest.stamp, others.stamp),
        tokens=at_most(oldest.tokens + others.tokens, MAX_TOKENS),
        contributions=oldest.contributions + others.contributions,
        first=min(oldest.first, others.first or oldest.first),
        last=max(oldest.last, others.last),
    )


def _few(merged: Units) -> Units:
    """Ranges that fit into a book. The lowest gaps are closed: their data is never dealt out."""
    over = len(merged) - MAX_RANGES
    return merged if over <= 0 else ((merged[0][0], merged[over][1]), *merged[over + 1 :])
