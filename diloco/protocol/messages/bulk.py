"""What peers say on bulk streams to move tensors and work units: a request and its answers, each followed by raw
payload whose length both sides know beforehand.

A message that brings an anchor brings the certificate of its version (see `heads`) and its *shares*: which peer
contributed how much to it (see `shares`).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, FailFast, Field, model_validator

from diloco.protocol.messages.base import (
    MEMBERS,
    WORKERS,
    Digest,
    FewUnits,
    Index,
    Message,
    Name,
    Place,
    Said,
    Units,
    at_most_keys,
)
from diloco.protocol.messages.heads import MAX_LINES, Line, Record
from diloco.protocol.numbers import (
    MAX_COUNT,
    Count,
    Seconds,
    SomeSteps,
    SomeTokens,
    Term,
    Tokens,
    Version,
)
from diloco.protocol.shares import MAX_SHARES, Share, short_name

__all__ = [
    "MAX_MOMENTS", "MAX_PARTS", "MAX_UNITS_WANTED", "Anchor", "Contribution", "InnerHeader", "InnerRequest", "PartList",
    "PartRequest", "Receipt", "Signed", "StateHeader", "StateRequest", "UnitGrant", "UnitRequest", "Verdict",
]  # fmt: skip

MAX_PARTS = 2**13  # their digests fill half a frame; a fragment of more than 32 GiB comes in one piece
MAX_MOMENTS = 2**14  # tensors of an inner optimizer's state; their names and sizes fill half a frame
MAX_UNITS_WANTED = 2**20  # sequences in one request


def _sound(share: Share) -> Share:
    if share.first_version > share.last_version:
        raise ValueError("a share does not end before it begins")
    if share.name != short_name(share.name):
        raise ValueError("a name in a share is short and can be printed")
    return share


Shares = Annotated[dict[Name, Annotated[Share, AfterValidator(_sound)]], at_most_keys(MAX_SHARES)]


class Contribution(Message, kind="contribution", place=Place.REQUEST, roles=WORKERS):
    """Header of a contribution; the encoded pseudo-gradient follows once the syncer has accepted it.

    `base_digest` names the anchor that it was learned from: after a split, two anchors may have one version. `units`
    names the leased data that it was learned from. Only contributions to the control fragment name it. `age_s` are the
    seconds since the pseudo-gradient was taken. `total` are the contributor's tokens in this history of the fragment,
    with these; its line has to say them.
    """

    manifest_hash: Digest
    fragment: Index
    term: Term
    base_version: Version
    base_digest: Digest
    steps: SomeSteps
    tokens: SomeTokens
    total: Tokens = 0
    age_s: Seconds = 0.0
    units: Units = Field(default_factory=list)


class Verdict(Message, kind="verdict"):
    """The syncer's answer to a contribution.

    `accepted` means: send the payload from chunk `first_chunk` on. That is 0, or the number of chunks when the syncer
    has the whole payload already. Otherwise `reason` says why not, and
    `version` and `term` say where the syncer stands. `late` says that the swarm went on without the contribution; with
    `record_follows` the updates that it missed come next. `merged` says that this very contribution is in the model
    already, because its receipt was lost.
    """

    accepted: bool
    first_chunk: Count = 0
    late: bool = False
    record_follows: bool = False
    merged: bool = False
    reason: Annotated[Said, Field(max_length=512)] = ""
    version: Version = 0
    term: Count = 0


class Signed(Message, kind="line"):
    """Behind the payload of a contribution: what its contributor answers for, which the syncer passes on to everybody.

    It comes last, because the payload is encoded while it is sent.
    """

    line: Line


class Receipt(Message, kind="receipt"):
    """The syncer has folded in the whole payload of a contribution, and its line is as it should be."""


class StateRequest(Message, kind="state_request", place=Place.REQUEST, roles=MEMBERS):
    """Asks for a fragment's newest anchor.

    A donor that still has the update records from `have_version` on sends them instead. Else, with `in_parts`, it sends
    a `PartList` and waits for a `PartRequest` on the same stream.
    """

    manifest_hash: Digest
    fragment: Index
    have_version: Annotated[int, Field(ge=-1, le=MAX_COUNT)] = -1
    in_parts: bool = False


class Anchor(Message):
    """Base of the messages that describe a fragment's anchor, with the certificate of its version; version 0 has none.

    No share in it is of a later version than the anchor. `lines` are the newest ones of contributors that are not in
    the certificate: they prove how many tokens these have in this history.
    """

    fragment: Index
    digest: Digest
    record: Record | None = None
    shares: Shares = Field(default_factory=dict)
    lines: Annotated[list[Line], Field(max_length=MAX_LINES)] = Field(default_factory=list)

    @property
    def version(self) -> int:
        """The version of the anchor."""
        return 0 if self.record is None else self.record.version

    @model_validator(mode="after")
    def _fits_its_record(self) -> Anchor:
        if self.record is not None and (self.record.fragment, self.record.digest) != (self.fragment, self.digest):
            raise ValueError("a certificate is that of the anchor")
        if any(share.last_version > self.version for share in self.shares.values()):
            raise ValueError("a share is not of later versions than the anchor")
        return self


class PartList(Anchor, kind="part_list"):
    """The digests of all parts of a fragment's anchor; together they give `digest`."""

    parts: Annotated[list[Digest], Field(min_length=1, max_length=MAX_PARTS), FailFast()]


class PartRequest(Message, kind="part_request", place=Place.REQUEST, roles=MEMBERS):
    """Asks for one part of the anchor with that digest; begins a stream, or follows on one that the asker began.

    The answer is the `StateHeader` of the anchor that the donor has, followed by the fp32 values of the part if this is
    the anchor that was asked for.
    """

    manifest_hash: Digest
    fragment: Index
    digest: Digest
    part: Annotated[int, Field(ge=0, le=MAX_PARTS - 1)]


class StateHeader(Anchor, kind="state"):
    """Header of a fragment's state: the anchor follows.

    As the answer to a `PartRequest` it is followed by one part, and it has no shares: the `PartList` had them.
    """


class UnitRequest(Message, kind="unit_request", place=Place.REQUEST, roles=WORKERS):
    """Asks the control fragment's syncer to lease `wanted` more sequences; `has` is all that the asker has left."""

    manifest_hash: Digest
    wanted: Annotated[int, Field(ge=1, le=MAX_UNITS_WANTED)]
    has: FewUnits


class UnitGrant(Message, kind="unit_grant"):
    """Leases these sequences to the asker, until they are in the model or the asker is lost."""

    units: Units


class InnerRequest(Message, kind="inner_request", place=Place.REQUEST, roles=WORKERS):
    """Asks for the state of the inner optimizer; a newcomer's first question once it has the anchor."""

    manifest_hash: Digest


class InnerHeader(Message, kind="inner"):
    """Header of an inner optimizer's state; the fp32 values of its tensors follow.

    Attributes:
        names, numels: name and number of elements of each tensor.
        steps: inner steps that the optimizer has counted for each parameter.
    """

    names: Annotated[list[Annotated[str, Field(max_length=32)]], Field(max_length=MAX_MOMENTS), FailFast()]
    numels: Annotated[list[Count], Field(max_length=MAX_MOMENTS), FailFast()]
    steps: Annotated[list[SomeSteps], Field(max_length=MAX_MOMENTS), FailFast()]
