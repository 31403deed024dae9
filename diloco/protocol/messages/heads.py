"""What a version of a fragment is, signed by whoever answers for it.

Line      what one contributor signed: what it learned from which anchor
Head      what the author signed: the step from one anchor to the next, and the lines that it is made of
    Record    a head with its lines: the *certificate* of a version, for anybody to check alone (see `protocol.heads`)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, NamedTuple

from pydantic import Field, model_validator

from diloco.protocol.messages.base import Digest, Index, Message, Name, Units
from diloco.protocol.numbers import (
    MAX_COUNT,
    Count,
    Sequence,
    SomeSteps,
    SomeTokens,
    Term,
    Tokens,
    Version,
)

__all__ = ["MAX_LINES", "MAX_RECORDS", "Delay", "Head", "Line", "Record", "Signature"]

MAX_RECORDS = 8  # that are smaller than a state in fp32 together, with the codec of the fewest bits
MAX_LINES = 256  # contributions to one version; their lines fit into a frame

Raw = Annotated[bytes, Field(min_length=32, max_length=32)]
Signature = Annotated[bytes, Field(max_length=1024)]
Delay = Annotated[int, Field(ge=1, le=100_000)]


class Line(NamedTuple):
    """One contribution, as its contributor signed it.

    Attributes:
        peer: who contributed.
        base_version, base: version and digest of the anchor that it was learned from.
        steps, tokens: inner steps and tokens of this contribution.
        total: the contributor's tokens in this history of the fragment, with these. The newest line of each peer
            therefore tells the work of a whole history.
    """

    peer: Name
    base_version: Version
    base: Raw
    steps: SomeSteps
    tokens: SomeTokens
    total: Tokens
    signature: Signature = b""


class Head(Message):
    """What a version is, as its author signed it; the id of the run is signed with it.

    Attributes:
        digest_before, digest: of the anchor before and after.
        lines: digest over the lines, with their signatures. shares: digest over the shares after this version.
        pushes, delay: `pushes` of the `delay` contributions of a window are in earlier versions (see `OuterStep`).
        applied_tokens: of the control fragment, the swarm clock after this version. cursor, open: its data cursor.
        skipped: numbers up to this one that were given to no version of this history (see `forks`).
    """

    fragment: Index
    term: Term
    version: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    author: Name
    digest_before: Digest
    digest: Digest
    lines: Raw
    shares: Raw
    pushes: Count = 0
    delay: Delay = 1
    applied_tokens: Tokens = 0
    cursor: Sequence = 0
    open: Units = Field(default_factory=list)
    skipped: Count = 0
    signature: Signature = b""

    @model_validator(mode="after")
    def _window_is_not_full(self) -> Head:
        if self.pushes >= self.delay:
            raise ValueError("a window that goes on is not full")
        return self


class Record(Message, kind="record"):
    """The certificate of a version. As the header of an update record the encoded displacement follows it, in chunks.

    After that come `more` records of the versions after this one, each of which says how many still come.
    """

    head: Head
    lines: Annotated[list[Line], Field(max_length=MAX_LINES)]
    more: Annotated[int, Field(ge=0, le=MAX_RECORDS)] = 0

    @property
    def fragment(self) -> int:
        """The fragment whose version this is."""
        return self.head.fragment

    @property
    def version(self) -> int:
        """The version that the update leads to."""
        return self.head.version

    @property
    def digest(self) -> str:
        """Digest of the anchor at that version."""
        return self.head.digest

    @property
    def digest_before(self) -> str:
        """Digest of the anchor that the update is added to."""
        return self.head.digest_before

    @cached_property
    def contributors(self) -> Mapping[str, int]:
        """Tokens of each contribution, by peer."""
        return {line.peer: line.tokens for line in self.lines}
