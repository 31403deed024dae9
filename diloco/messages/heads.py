"""What is written into the history of a fragment: lines, heads, and the book that follows from
them.

    Line   what one contributor signed: what it learned from which anchor      (a contribution
           without its payload)
    Head   what an author signed: the step from one anchor to the next, and the lines in it
           (a version)
    Book   what is in an anchor: a function of the heads that led to it

The rules are in `diloco.core.history`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated

import msgspec
from blake3 import blake3
from msgspec import Meta, Struct

from diloco.messages.fields import (
    MAX_LINES,
    MAX_RANGES,
    MAX_UNIT_RANGES,
    Count,
    Digest,
    Index,
    Length,
    Name,
    Range,
    Raw,
    ShortName,
    SomeSteps,
    SomeTokens,
    Stamp,
    Tokens,
    Weight,
)

MAX_LEDGER = 2048  # peers named in a book; they fit into a frame
MAX_LATE = 64  # versions that a contribution's base may be behind
TIE_DIGITS = 8

Key = tuple[Tokens, str]
"""Work and id of a head. The heads of a fragment are ordered by it."""


def digest(label: str, *what: object) -> str:
    """Digest (hex) of values of the basic types, lists, tuples and structs; the label keeps uses
    apart."""
    return blake3(msgspec.msgpack.encode((label, *what))).hexdigest()


class Line(Struct, frozen=True, dict=True, array_like=True, forbid_unknown_fields=True):
    """A contribution without its payload, as its contributor signed it.

    Attributes:
        stamp: grows over all lives of the peer: milliseconds, or one more than before. With `peer`
            it is the name of the contribution.
        base: id of the head from which it was learned.
        units: the sequences that it was learned from; only lines of fragment 0 name any.
        norm: L2 norm of the decoded payload. root: digest of the payload.
        name: display name of the contributor.
    """

    fragment: Index
    peer: Name
    stamp: Stamp
    base: Digest
    steps: SomeSteps
    tokens: SomeTokens
    units: Annotated[tuple[Range, ...], Meta(max_length=MAX_UNIT_RANGES)]
    norm: Length
    root: Digest
    name: ShortName = ""
    signature: Raw = b""

    @cached_property
    def content(self) -> bytes:
        """What the signature is over, beside the id of the run."""
        return b"line" + msgspec.msgpack.encode(msgspec.structs.astuple(self)[:-1])


class Head(Struct, frozen=True, dict=True, array_like=True, forbid_unknown_fields=True):
    """A version of a fragment, as its author signed it; its digest is its id.

    Attributes:
        number: outer steps that led to it.
        prev: id of the head before. next: the peer that makes the next version.
        lines: its contributions, each with its weight; 0: it was judged and left out.
        delay: contributions to a momentum step of the window that was open (Delayed Nesterov); else
            1.
        work: tokens in the anchor: what all lines from genesis on say.
        update: digest of the encoded update. state: digest of anchor and book after it.
    """

    fragment: Index
    number: Count
    prev: str
    author: Name
    next: Name
    lines: Annotated[tuple[tuple[Line, Weight], ...], Meta(max_length=MAX_LINES)]
    delay: Annotated[int, Meta(ge=1, le=100_000)]
    work: Tokens
    update: str
    state: Digest
    signature: Raw = b""

    @cached_property
    def content(self) -> bytes:
        """What the signature is over, beside the id of the run."""
        return b"head" + msgspec.msgpack.encode(msgspec.structs.astuple(self)[:-1])

    @cached_property
    def id(self) -> str:
        """Its contributors come first, so that a tie of two sides of a split falls alike in all
        fragments."""
        return (
            digest("tie", [line.peer for line, _ in self.lines])[:TIE_DIGITS]
            + digest("head", self)[TIE_DIGITS:]
        )

    @cached_property
    def key(self) -> Key:
        """What heads are ordered by."""
        return self.work, self.id

    @property
    def counted(self) -> list[Line]:
        """The lines that are in the anchor."""
        return [line for line, weight in self.lines if weight]


class Entry(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One peer's part in an anchor: its newest stamp, its tokens, its contributions from number
    `first` to `last`."""

    stamp: Stamp
    tokens: Tokens
    contributions: Count = 0
    first: Count = 0
    last: Count = 0
    name: ShortName = ""


class Book(Struct, frozen=True, dict=True, array_like=True, forbid_unknown_fields=True):
    """What is in an anchor.

    Attributes:
        ledger: by peer; "" stands for those that are named no more.
        recent: ids of the heads before the tip.
        merged: the sequences in the anchor; only of fragment 0.
        pushes: contributions of the momentum window that is open. delay: how many that window
            takes.
        reach: how long momentum, window, and what encodings lost may be (`OuterOptimizer.reach`).
    """

    ledger: Annotated[dict[Name, Entry], Meta(max_length=MAX_LEDGER)]
    recent: Annotated[tuple[str, ...], Meta(max_length=MAX_LATE)] = ()
    merged: Annotated[tuple[Range, ...], Meta(max_length=MAX_RANGES)] = ()
    pushes: Count = 0
    delay: Annotated[int, Meta(ge=1, le=100_000)] = 1
    reach: tuple[Length, Length, Length] = (0.0, 0.0, 0.0)

    def of(self, peer: str) -> tuple[int, int]:
        """Newest stamp and tokens of a peer."""
        known = self.ledger.get(peer)
        return (known.stamp, known.tokens) if known else (self.ledger[""].stamp, 0)

    @cached_property
    def tokens(self) -> int:
        """Tokens in the anchor."""
        return sum(entry.tokens for entry in self.ledger.values())

    @cached_property
    def digest(self) -> str:
        """Equal for equal books."""
        return digest(
            "book",
            sorted(self.ledger.items()),
            self.recent,
            self.merged,
            self.pushes,
            self.delay,
            self.reach,
        )
