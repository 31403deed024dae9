"""Entries in the history of a fragment. The rules are in `diloco.core.history`.

Line   a contribution without its payload, as its contributor signed it
Head   a version, as its author signed it: the step from one anchor to the next
Book   what is in an anchor; follows from the heads that led to it
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, ClassVar

import msgspec
from blake3 import blake3
from msgspec import Meta, Struct

from diloco.messages import fields

MAX_LEDGER = 2048  # peers named in a book; they fit into a frame
MAX_LATE = 64  # versions that a contribution's base may be behind
TIE_DIGITS = 8

Key = tuple[fields.Tokens, str]
"""Work and id of a head. The heads of a fragment are ordered by it."""


def digest(label: str, *values: object) -> str:
    """Return the digest (hex) of basic values, lists, tuples and structs, for the use `label`."""
    return blake3(msgspec.msgpack.encode((label, *values))).hexdigest()


class Signed(Struct, frozen=True, dict=True, array_like=True, forbid_unknown_fields=True):
    """Base of signed structs; the last field is the signature."""

    label: ClassVar[bytes]

    @cached_property
    def content(self) -> bytes:
        """Return the signed bytes, without the id of the run."""
        return self.label + msgspec.msgpack.encode(msgspec.structs.astuple(self)[:-1])


class Line(Signed, frozen=True):
    """A contribution without its payload.

    Attributes:
        stamp: milliseconds, or one more than before: it grows over all lives of the peer.
        base: id of the head from which it was learned.
        units: the sequences that it was learned from; only lines of fragment 0 name any.
        norm: L2 norm of the decoded payload. root: digest of the payload.
        name: display name of the contributor.
    """

    label = b"line"
    fragment: fields.Index
    peer: fields.Name
    stamp: fields.Stamp
    base: fields.Digest
    steps: fields.SomeSteps
    tokens: fields.SomeTokens
    units: Annotated[fields.Units, Meta(max_length=fields.MAX_UNIT_RANGES)]
    norm: fields.Length
    root: fields.Digest
    name: fields.ShortName = ""
    signature: fields.Raw = b""


class Head(Signed, frozen=True):
    """A version of a fragment; its digest is its id.

    Attributes:
        number: outer steps that led to it.
        prev: id of the head before. next: the peer that makes the next version.
        lines: its contributions, each with its weight; 0: it was judged and left out.
        delay: contributions in the momentum window that was open (Delayed Nesterov); else 1.
        work: tokens in the anchor: what all lines from genesis on say.
        update: digest of the encoded update. state: digest of anchor and book after it.
    """

    label = b"head"
    fragment: fields.Index
    number: fields.Count
    prev: str
    author: fields.Name
    next: fields.Name
    lines: Annotated[tuple[tuple[Line, fields.Weight], ...], Meta(max_length=fields.MAX_LINES)]
    delay: fields.Delay
    work: fields.Tokens
    update: str
    state: fields.Digest
    signature: fields.Raw = b""

    @cached_property
    def id(self) -> str:
        """The digest. It begins with the contributors, so ties fall alike in all fragments.

        A head without predecessor and work has the lowest id: there is no anchor yet.
        """
        if not (self.prev or self.work):
            return "0" * 64
        contributors = [line.peer for line, _ in self.lines]
        return digest("tie", contributors)[:TIE_DIGITS] + digest("head", self)[TIE_DIGITS:]

    @cached_property
    def key(self) -> Key:
        """The sort key of heads."""
        return self.work, self.id

    @property
    def counted(self) -> list[Line]:
        """The lines that are in the anchor."""
        return [line for line, weight in self.lines if weight]


class Entry(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A peer's part in an anchor: newest stamp, tokens, contributions from number `first` on."""

    stamp: fields.Stamp
    tokens: fields.Tokens
    contributions: fields.Count = 0
    first: fields.Count = 0
    last: fields.Count = 0
    name: fields.ShortName = ""


class Book(Struct, frozen=True, dict=True, array_like=True, forbid_unknown_fields=True):
    """The content of an anchor.

    Attributes:
        ledger: by peer; "" stands for those that are named no more.
        recent: ids of the heads before the tip.
        merged: the sequences in the anchor; only of fragment 0.
        pushes: contributions in the momentum window that is open. delay: how many it takes.
        reach: how long momentum, window, and what encodings lost may be (`OuterOptimizer.reach`).
    """

    ledger: Annotated[dict[fields.Name, Entry], Meta(max_length=MAX_LEDGER)]
    recent: Annotated[tuple[str, ...], Meta(max_length=MAX_LATE)] = ()
    merged: fields.Ranges = ()
    pushes: fields.Count = 0
    delay: fields.Delay = 1
    reach: tuple[fields.Length, fields.Length, fields.Length] = (0.0, 0.0, 0.0)

    def of(self, peer: str) -> tuple[int, int]:
        """Return the newest stamp and the tokens of a peer."""
        known = self.ledger.get(peer)
        return (known.stamp, known.tokens) if known else (self.ledger[""].stamp, 0)

    def contributions(self, peer: str) -> int:
        """Return how many contributions of a peer are in the anchor."""
        known = self.ledger.get(peer)
        return known.contributions if known else 0

    @cached_property
    def tokens(self) -> int:
        """The tokens in the anchor."""
        return sum(entry.tokens for entry in self.ledger.values())

    @cached_property
    def digest(self) -> str:
        """The digest of the content."""
        return digest("book", sorted(self.ledger.items()), *msgspec.structs.astuple(self)[1:])
