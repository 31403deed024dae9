"""What peers say on bulk streams: a request and its answers, each followed by payload whose length
both sides know."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from diloco.messages.base import MEMBERS, WORKERS, Message, Place
from diloco.messages.fields import Bytes, Count, Digest, Index, SomeSteps
from diloco.messages.heads import Book, Head, Key, Line

MAX_PARTS = 2**13  # their digests fill a quarter of a frame; a part has 2**20 values
# tensors of an inner optimizer's state; their names and sizes fill a quarter of a frame
MAX_MOMENTS = 2**14
MAX_RECORDS = 8  # kept by a peer, and sent in a row


class Push(Message, frozen=True, tag="push"):
    """A contribution that is wanted. Its payload follows, from that byte on, as far as the sender
    has it."""

    place, roles = Place.REQUEST, MEMBERS
    line: Line
    at: Bytes = 0


class Get(Message, frozen=True, tag="get"):
    """What is newer than the head `have` of a fragment; or that part of the anchor of the head
    `want`."""

    place, roles = Place.REQUEST, MEMBERS
    fragment: Index
    have: Key
    want: str = ""
    part: Count = 0


class No(Message, frozen=True, tag="no"):
    """Not here, or not now."""


class Got(Message, frozen=True, tag="got"):
    """A payload is here, whole."""


class Values(Message, frozen=True, tag="values"):
    """The part of the anchor that was asked for follows."""


class RecordHeader(Message, frozen=True, tag="record"):
    """A head whose encoded update follows. So many records come after it, each of the next head."""

    head: Head
    more: Annotated[int, Meta(ge=0, lt=MAX_RECORDS)] = 0


class PartHeader(Message, frozen=True, tag="part"):
    """The first part of the anchor of a head follows; `digests` are those of all parts."""

    head: Head
    book: Book
    digests: Annotated[tuple[Digest, ...], Meta(max_length=MAX_PARTS)]


class InnerRequest(Message, frozen=True, tag="inner_request"):
    """Asks for the state of the inner optimizer."""

    place, roles = Place.REQUEST, WORKERS


class InnerHeader(Message, frozen=True, tag="inner"):
    """Name and number of elements of each tensor of an inner optimizer's state, whose fp32 values
    follow, and the inner steps that it has counted for each parameter.
    """

    names: Annotated[list[Annotated[str, Meta(max_length=32)]], Meta(max_length=MAX_MOMENTS)]
    numels: Annotated[list[Count], Meta(max_length=MAX_MOMENTS)]
    steps: Annotated[list[SomeSteps], Meta(max_length=MAX_MOMENTS)]
