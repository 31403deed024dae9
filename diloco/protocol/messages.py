"""Everything peers say to each other, as schemas.

Two kinds of streams carry these messages, each as one msgpack map behind a 4-byte length:

- *control* streams, one in each direction between any two peers: `Hello` first, then `Status`, `Claim`, `Published`,
  `Revocations`;
- *bulk* streams, one per transfer: a `Contribution`, `StateRequest`, `PartRequest`, `InnerRequest`, `UnitRequest`,
  `ManifestRequest`, `SnapshotRequest`, `Probe` or `DialBack` and the answers to it, each followed by raw payload whose
  length both sides know beforehand.

Before either, two peers exchange a `Greeting` on a stream of its own.

What speaks of a version of the control fragment carries the ledger's *word* on it: `cursor` and `open` (see `ledger`);
for other fragments they are empty. What brings an anchor brings its *shares* (see `shares`): who contributed how much.

Nothing read from the network becomes an object without passing its schema: unknown fields, wrong types, values out of
range and unknown kinds all raise `PayloadError`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgpack
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from diloco.admission.revocations import MAX_REVOKED
from diloco.config import WIRE_VERSION
from diloco.errors import PayloadError
from diloco.protocol.shares import MAX_SHARES, Share, short_name

__all__ = [
    "MAX_FRAME_BYTES",
    "MAX_MOMENTS",
    "MAX_PARTS",
    "MAX_PROBE_BYTES",
    "MAX_RANGES",
    "MAX_SNAPSHOT_PIECE_BYTES",
    "MAX_UNITS_WANTED",
    "MAX_UNIT_RANGES",
    "Claim",
    "Contribution",
    "DialBack",
    "DialBackReply",
    "Figures",
    "Greeting",
    "Hello",
    "InnerHeader",
    "InnerRequest",
    "ManifestReply",
    "ManifestRequest",
    "Message",
    "PartList",
    "PartRequest",
    "Probe",
    "ProbeReply",
    "Published",
    "Receipt",
    "Record",
    "Refusal",
    "Revocations",
    "SnapshotReply",
    "SnapshotRequest",
    "State",
    "StateHeader",
    "StateRequest",
    "Status",
    "UnitGrant",
    "UnitRequest",
    "Verdict",
    "decode",
    "encode",
    "expect",
    "objection_to_wire",
]

MAX_FRAME_BYTES = 1 << 20  # the largest honest frame is a manifest or a list of part digests: some kilobytes
MAX_PARTS = 2**13  # whose digests fill half a frame; a fragment of more than 32 GiB comes in one piece
MAX_MOMENTS = 2**14  # tensors of an inner optimizer's state, whose names and sizes fill half a frame
MAX_UNIT_RANGES = 64  # that a peer has at a time
MAX_RANGES = 2**10  # of all peers together
MAX_UNITS_WANTED = 2**20  # sequences of one request
MAX_SNAPSHOT_PIECE_BYTES = MAX_FRAME_BYTES // 2
MAX_PROBE_BYTES = 2**22  # each way: a second of a 32 Mbit/s link

State = Literal["starting", "ready", "training", "exchanging", "leaving", "done"]
Name = Annotated[str, Field(max_length=128)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, lt=2**62)]
Index = Annotated[int, Field(ge=0, lt=2**20)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# A list fails at its first wrong item: a frame of a million of them would keep the node busy for seconds.
Names = Annotated[list[Name], Field(max_length=4096), FailFast()]
Contributors = Annotated[dict[Name, Count], Field(max_length=MAX_SHARES)]
Addresses = Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=16), FailFast()]
Versions = Annotated[list[Count], Field(max_length=2**20), FailFast()]


def _ascending(unit: list[int]) -> list[int]:
    if unit[0] >= unit[1]:
        raise ValueError("a range of sequences is not empty and does not run backwards")
    return unit


Unit = Annotated[list[Count], Field(min_length=2, max_length=2), FailFast(), AfterValidator(_ascending)]


def _sound(share: Share) -> Share:
    if share.first_version > share.last_version:
        raise ValueError("a share does not end before it begins")
    if share.name != short_name(share.name):
        raise ValueError("a name in a share is short and can be printed")
    return share


Shares = Annotated[dict[Name, Annotated[Share, AfterValidator(_sound)]], Field(max_length=MAX_SHARES)]
Units = Annotated[list[Unit], Field(max_length=MAX_RANGES), FailFast()]
FewUnits = Annotated[list[Unit], Field(max_length=MAX_UNIT_RANGES), FailFast()]


class Message(BaseModel):
    """Base of all messages: frozen, strict, and no field that the schema does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Revocations(Message):
    """The list of the run's owner of what counts no more, under its growing number; see `diloco.admission`."""

    kind: Literal["revocations"] = "revocations"
    number: Annotated[int, Field(ge=1, lt=2**62)]
    token_ids: Annotated[
        list[Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]], Field(max_length=MAX_REVOKED), FailFast()
    ]
    peer_ids: Annotated[list[Name], Field(max_length=MAX_REVOKED), FailFast()]
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


class Greeting(Message):
    """Who is there and why it may be: each side shows its credential, if it has one, and the newest revocations."""

    kind: Literal["greeting"] = "greeting"
    credential: Annotated[str, Field(max_length=1024)] = ""
    revoked: Annotated[list[Revocations], Field(max_length=1)] = Field(default_factory=list)


class Figures(BaseModel):
    """What only those who watch want to know of a peer.

    Attributes:
        discarded: tokens that it processed and that are in no version, and will not be.
        loss: of its last inner steps, in nats per token; 0 while there is no measurement.
        bytes_sent, bytes_received: of this process, with every stream.
        rounds: how many rounds (exchanges and the inner steps before them) it has measured.
        seconds: of the last of them: compute, wait, comm, outer; empty before the first.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    discarded: Count = 0
    loss: Rate = 0.0
    bytes_sent: Count = 0
    bytes_received: Count = 0
    rounds: Count = 0
    seconds: Annotated[list[Rate], Field(max_length=4), FailFast()] = Field(default_factory=list)


class Status(Message):
    """What a peer is doing; sent on every change and as the heartbeat.

    Attributes:
        versions: anchor version of each fragment.
        inner_step, target_steps: inner steps done since the last exchange, and how many there will be before the next.
        steps_per_s: measured inner steps per second; 0 while there is no measurement.
        tokens: tokens this peer has processed in this run.
        units: ranges of sequences that this peer has and that are not in the model, as far as it knows.
        figures: with the heartbeat; None on a change, where they are those of before.
    """

    kind: Literal["status"] = "status"
    state: State
    versions: Versions
    inner_step: Count = 0
    target_steps: Count = 0
    steps_per_s: Rate = 0.0
    tokens: Count = 0
    units: FewUnits = Field(default_factory=list)
    figures: Figures | None = None


class Claim(Message):
    """A syncer's lease on a fragment: `term` is its fencing number, `digest` names the anchor it stands on.

    `applied_tokens`, for the control fragment, is the swarm clock there.
    """

    kind: Literal["claim"] = "claim"
    fragment: Index
    term: Annotated[int, Field(ge=1, lt=2**62)]
    version: Count
    digest: Digest
    applied_tokens: Count = 0
    cursor: Count = 0
    open: Units = Field(default_factory=list)


class Hello(Message):
    """First message on a control stream: which run this peer is in, what it can do, and whom it knows."""

    kind: Literal["hello"] = "hello"
    wire_version: Count
    run_id: Name
    manifest_hash: Digest
    name: Name
    trains: bool
    holds: bool
    device: Name = ""
    peers: Names
    status: Status
    claims: Annotated[list[Claim], Field(max_length=2**20), FailFast()]


class Published(Message):
    """Announcement of an update record: the fragment is now at `version`.

    `applied_tokens` is the swarm clock: tokens merged into the model since version 0. `staleness` is that of the oldest
    contribution in this version.
    """

    kind: Literal["published"] = "published"
    fragment: Index
    term: Annotated[int, Field(ge=1, lt=2**62)]
    version: Count
    digest: Digest
    contributors: Names
    applied_tokens: Count
    staleness: Count = 0
    cursor: Count = 0
    open: Units = Field(default_factory=list)


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


class ManifestRequest(Message):
    """Asks for the manifest of the run; needs no manifest hash, for it is how a newcomer learns it."""

    kind: Literal["manifest_request"] = "manifest_request"


class ManifestReply(Message):
    """The manifest as canonical JSON."""

    kind: Literal["manifest"] = "manifest"
    text: Annotated[str, Field(max_length=MAX_FRAME_BYTES // 2)]


class SnapshotRequest(Message):
    """Asks what the peer knows of the swarm; needs no manifest hash, for who watches takes no part."""

    kind: Literal["snapshot_request"] = "snapshot_request"


class SnapshotReply(Message):
    """A piece of a `snapshot.Snapshot`, packed; the next message is the next piece if there is `more`."""

    kind: Literal["snapshot"] = "snapshot"
    wire_version: Count
    data: Annotated[bytes, Field(max_length=MAX_SNAPSHOT_PIECE_BYTES)]
    more: bool = False


class Probe(Message):
    """Asks whether a peer is well and how well it is connected; `sends` bytes of no meaning follow.

    With `wants`, as many come back behind the reply: their time is the bandwidth.
    """

    kind: Literal["probe"] = "probe"
    sends: Annotated[int, Field(ge=0, le=MAX_PROBE_BYTES)] = 0
    wants: Annotated[int, Field(ge=0, le=MAX_PROBE_BYTES)] = 0


class ProbeReply(Message):
    """What a peer says of itself to one that does not know it yet.

    Attributes:
        unix_s: its clock as the reply is sent.
        addresses: where others reach it. known: ids of some peers that it is connected to.
        observed: multiaddr from which the asker's connection comes; empty where it is not known.
    """

    kind: Literal["probe_reply"] = "probe_reply"
    wire_version: Count
    run_id: Name
    name: Name
    unix_s: Annotated[float, Field(ge=0, lt=2**40, allow_inf_nan=False)]
    addresses: Addresses
    known: Annotated[list[Name], Field(max_length=64), FailFast()]
    observed: Annotated[str, Field(max_length=256)] = ""


class DialBack(Message):
    """Asks to be called at these addresses, anew: the asker wants to know whether others can reach it.

    Only addresses with the IP that the asker's connection comes from are called, and only the asker itself answers to
    its id, so this cannot be turned against others.
    """

    kind: Literal["dial_back"] = "dial_back"
    addresses: Addresses


class DialBackReply(Message):
    """Those addresses under which the asker answered; `why` says what became of the others.

    `observed` is the multiaddr from which its connection comes.
    """

    kind: Literal["dial_back_reply"] = "dial_back_reply"
    reached: Addresses
    why: Annotated[str, Field(max_length=512)] = ""
    observed: Annotated[str, Field(max_length=256)] = ""


class Refusal(Message):
    """The stream is not wanted; `reason` is one line for the user of the other side."""

    kind: Literal["refusal"] = "refusal"
    reason: Annotated[str, Field(max_length=2048)]


_Any = Annotated[
    Greeting
    | Revocations
    | Status
    | Claim
    | Hello
    | Published
    | Contribution
    | Verdict
    | Receipt
    | Record
    | StateRequest
    | PartList
    | PartRequest
    | StateHeader
    | InnerRequest
    | InnerHeader
    | UnitRequest
    | UnitGrant
    | ManifestRequest
    | ManifestReply
    | SnapshotRequest
    | SnapshotReply
    | Probe
    | ProbeReply
    | DialBack
    | DialBackReply
    | Refusal,
    Field(discriminator="kind"),
]
_adapter: TypeAdapter[Any] = TypeAdapter(_Any)
M = TypeVar("M", bound=Message)


def encode(message: Message) -> bytes:
    """Serialise a message as msgpack (without the length prefix); fields that have their default are left out."""
    fields = {"kind": message.kind, **message.model_dump(exclude_defaults=True)}  # type: ignore[attr-defined]
    packed: bytes = msgpack.packb(fields, use_bin_type=True)
    return packed


def decode(frame: bytes) -> Message:
    """Parse and validate one untrusted frame.

    Raises:
        PayloadError: the frame is not msgpack, too large, of an unknown kind, or does not fit its schema.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise PayloadError(f"a frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}")
    try:
        fields = msgpack.unpackb(frame, raw=False, strict_map_key=True)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise PayloadError(f"a frame is not valid msgpack: {error}") from None
    if isinstance(fields, dict) and fields.get("kind") in ("hello", "snapshot"):
        version = fields.get("wire_version")  # looked at first, for the rest may follow another schema
        if type(version) is int and (objection := objection_to_wire(version)) is not None:
            raise PayloadError(objection)
    try:
        message: Message = _adapter.validate_python(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        # Keys and tags are the sender's: they may be as long as a frame, and hold line breaks.
        shown = "".join(c if c.isprintable() else "?" for c in f"{where[:100]}: {first['msg'][:200]}")
        raise PayloadError(f"a message does not fit its schema: {shown}") from None
    return message


def objection_to_wire(version: int) -> str | None:
    """Why a peer of that wire version cannot be talked to, as one line for its user; None when it can."""
    if version == WIRE_VERSION:
        return None
    return (
        f"wire version {version} there does not fit {WIRE_VERSION} here; install the same diloco version on both sides"
    )


def expect(message: Message, kind: type[M]) -> M:
    """Narrow a message to the kind that the conversation allows here; a `Refusal` or other kind raises
    `PayloadError`.
    """
    if isinstance(message, kind):
        return message
    if isinstance(message, Refusal):
        raise PayloadError(f"refused: {message.reason}")
    raise PayloadError(f"expected {kind.__name__}, got {type(message).__name__}")
