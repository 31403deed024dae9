"""Requests for a fragment's history and anchor, and their answers, which payload follows. Other
requests have their schemas in `swarm/rpc`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from diloco.messages.base import MEMBERS, Message, Place
from diloco.messages.fields import Count, Digest, Index
from diloco.messages.heads import Book, Head, Key

MAX_PARTS = 2**13  # their digests fill a quarter of a frame; a part has 2**20 values
MAX_RECORDS = 8  # kept by a peer, and sent in a row
UPDATE_PARTS = 64  # of an update, at most; each is passed on when it is here


class Get(Message, frozen=True, tag="get"):
    """Request for the versions after the head `have`, or for a part of the anchor of `want`.

    held: id of the next head, of whose update `part` parts came on a stream that broke.
    """

    place, roles = Place.REQUEST, MEMBERS
    fragment: Index
    have: Key
    want: str = ""
    part: Count = 0
    held: str = ""


class No(Message, frozen=True, tag="no"):
    """The values are not here, or not now."""


class Values(Message, frozen=True, tag="values"):
    """A part of an update follows, or the requested part of the anchor."""


class Waiting(Message, frozen=True, tag="waiting"):
    """The next part follows when it has arrived at the donor."""


class RecordHeader(Message, frozen=True, tag="record"):
    """A head, whose encoded update follows in parts, from `part` on; `digests` are those of all.
    `more` records come after it, each of the next head."""

    head: Head
    digests: Annotated[tuple[Digest, ...], Meta(min_length=1, max_length=UPDATE_PARTS)]
    more: Annotated[int, Meta(ge=0, lt=MAX_RECORDS)] = 0
    part: Count = 0


class PartHeader(Message, frozen=True, tag="part"):
    """The first part of the anchor of a head follows; `digests` are those of all parts."""

    head: Head
    book: Book
    digests: Annotated[tuple[Digest, ...], Meta(max_length=MAX_PARTS)]
