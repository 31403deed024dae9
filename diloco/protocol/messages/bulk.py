"""What peers say on bulk streams to move tensors and work units: a request and its answers, each followed by raw
payload whose length both sides know beforehand.

What speaks of a version of the control fragment carries the ledger's *word* on it: `cursor` and `open` (see `ledger`);
for other fragments they are empty. What brings an anchor brings its *shares* (see `shares`): who contributed how much.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, FailFast, Field, model_validator

from diloco.protocol.messages.base import Count, Digest, FewUnits, Index, Message, Name, Units
from diloco.protocol.shares import MAX_SHARES, Share, short_name

__all__ = [
    "MAX_MOMENTS",
    "MAX_PARTS",
    "MAX_UNITS_WANTED",
    "Anchor",
    "Contribution",
    "InnerHeader",
    "InnerRequest",
    "PartList",
    "PartRequest",
    "Receipt",
    "Record",
    "StateHeader",
    "StateRequest",
    "UnitGrant",
    "UnitRequest",
    "Verdict",
]

MAX_PARTS = 2**13  # whose digests fill half a frame; a fragment of more than 32 GiB comes in one piece
MAX_MOMENTS = 2**14  # tensors of an inner optimizer's state, whose names and sizes fill half a frame
MAX_UNITS_WANTED = 2**20  # sequences of one request

Contributors = Annotated[dict[Name, Count], Field(max_length=MAX_SHARES)]


def _sound(share: Share) -> Share:
    if share.first_version > share.last_version:
        raise ValueError("a share does not end before it begins")
    if share.name != short_name(share.name):
        raise ValueError("a name in a share is short and can be printed")
    return share


Shares = Annotated[dict[Name, Annotated[Share, AfterValidator(_sound)]], Field(max_length=MAX_SHARES)]


class Contribution(Message):
    """Header of a contribution; the encoded pseudo-gradient follows once the syncer has accepted it.

    `units`, for the control fragment, is the leased data that it was learned from; with `outer.spot_check` other
    fragments name theirs, too.
    """

    kind: Literal["contribution"] = "contribution"
    manifest_hash: Digest
    fragment: Index
    term: Annotated[int, Field(ge=1, lt=2**62)]
    base_version: Count
    steps: Annotated[int, Field(ge=1, lt=2**40)]
    tokens: Annotated[int, Field(ge=1, lt=2**48)]
    units: Units = Field(default_factory=list)


class Verdict(Message):
    """The syncer's answer to a contribution.

    `accepted` means: send the payload from chunk `first_chunk` on (0, or later when an earlier stream broke midway; the
    number of chunks when the whole payload is here already). Otherwise `reason` says why not, `version` and `term`
    where the syncer stands; with `record_follows` the contribution is one version late and the update it missed comes
    next; `merged` says that this very contribution is in the model already (its receipt was lost).
    """

    kind: Literal["verdict"] = "verdict"
    accepted: bool
    first_chunk: Count = 0
    record_follows: bool = False
    merged: bool = False
    reason: Annotated[str, Field(max_length=512)] = ""
    version: Count = 0
    term: Count = 0


class Receipt(Message):
    """The syncer has folded in the whole payload of a contribution."""

    kind: Literal["receipt"] = "receipt"


class Record(Message):
    """Header of an update record; the encoded displacement follows, chunk after chunk.

    `contributors` have given so many tokens each.
    """

    kind: Literal["record"] = "record"
    fragment: Index
    term: Annotated[int, Field(ge=1, lt=2**62)]
    version: Count
    digest_before: Digest
    digest: Digest
    contributors: Contributors
    applied_tokens: Count
    cursor: Count = 0
    open: Units = Field(default_factory=list)


class StateRequest(Message):
    """Asks for a fragment's newest anchor, and with `outer` also for the syncer's master and momentum.

    A donor that still has the update record from `have_version` to the version after it sends that instead of the
    state; else, with `in_parts`, it sends a `PartList` and waits for a `PartRequest` on the same stream.
    """

    kind: Literal["state_request"] = "state_request"
    manifest_hash: Digest
    fragment: Index
    have_version: Annotated[int, Field(ge=-1, lt=2**62)] = -1
    outer: bool = False
    in_parts: bool = False


class Anchor(Message):
    """What is said of a fragment's anchor. Its shares end with its version."""

    fragment: Index
    version: Count
    digest: Digest
    applied_tokens: Count
    shares: Shares = Field(default_factory=dict)
    cursor: Count = 0
    open: Units = Field(default_factory=list)

    @model_validator(mode="after")
    def _no_share_of_the_future(self) -> Anchor:
        if any(share.last_version > self.version for share in self.shares.values()):
            raise ValueError("a share is not of later versions than the anchor")
        return self


class PartList(Anchor):
    """The digests of all parts of a fragment's anchor, which together give `digest`."""

    kind: Literal["part_list"] = "part_list"
    parts: Annotated[list[Digest], Field(min_length=1, max_length=MAX_PARTS), FailFast()]


class PartRequest(Message):
    """Asks for one part of the anchor with that digest; the first message of a stream, or a later one of the asker.

    The answer is the `StateHeader` of the anchor that the donor can give parts of, and if that is the one wanted the
    fp32 values of the part.
    """

    kind: Literal["part_request"] = "part_request"
    manifest_hash: Digest
    fragment: Index
    digest: Digest
    part: Annotated[int, Field(ge=0, lt=MAX_PARTS)]


class StateHeader(Anchor):
    """Header of a fragment's state; fp32 anchor follows, then master and momentum when `outer`, or one part of it when
    that was asked for (then without shares: they are in the `PartList`).
    """

    kind: Literal["state"] = "state"
    outer: bool


class UnitRequest(Message):
    """Asks the control fragment's syncer to lease that many sequences; `has` is all that the asker has left."""

    kind: Literal["unit_request"] = "unit_request"
    manifest_hash: Digest
    wanted: Annotated[int, Field(ge=1, le=MAX_UNITS_WANTED)]
    has: FewUnits


class UnitGrant(Message):
    """These sequences are the asker's, until they are in the model or it is lost."""

    kind: Literal["unit_grant"] = "unit_grant"
    units: Units


class InnerRequest(Message):
    """Asks for the state of the inner optimizer; a newcomer's first question once it has the anchor."""

    kind: Literal["inner_request"] = "inner_request"
    manifest_hash: Digest


class InnerHeader(Message):
    """Header of an inner optimizer's state: names and elements of its tensors, whose fp32 values follow, and the inner
    steps that it has counted for each parameter.
    """

    kind: Literal["inner"] = "inner"
    names: Annotated[list[Annotated[str, Field(max_length=32)]], Field(max_length=MAX_MOMENTS), FailFast()]
    numels: Annotated[list[Count], Field(max_length=MAX_MOMENTS), FailFast()]
    steps: Annotated[list[Annotated[int, Field(ge=1, lt=2**40)]], Field(max_length=MAX_MOMENTS), FailFast()]
