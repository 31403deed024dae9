"""Everything peers say to each other, as schemas.

    base        what all messages are made of
    control     who is there, who is doing what, who holds what        one stream in each direction between two peers
    bulk        contributions, updates, state, work units              one stream per transfer
    watching    the manifest, snapshots, probes                        the same, also for who takes no part

Each is one msgpack map behind a 4-byte length. Nothing read from the network becomes an object without passing its
schema: unknown fields, wrong types, values out of range and unknown kinds all raise `PayloadError`.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgpack
from pydantic import Field, TypeAdapter, ValidationError

from diloco.config import WIRE_VERSION
from diloco.errors import PayloadError
from diloco.protocol.messages.base import MAX_FRAME_BYTES, Message, Refusal
from diloco.protocol.messages.bulk import (
    Contribution,
    InnerHeader,
    InnerRequest,
    PartList,
    PartRequest,
    Receipt,
    Record,
    StateHeader,
    StateRequest,
    UnitGrant,
    UnitRequest,
    Verdict,
)
from diloco.protocol.messages.control import Claim, Greeting, Hello, Published, Revocations, Status
from diloco.protocol.messages.watching import (
    DialBack,
    DialBackReply,
    ManifestReply,
    ManifestRequest,
    Probe,
    ProbeReply,
    SnapshotReply,
    SnapshotRequest,
)

__all__ = ["Message", "OtherVersion", "Refusal", "decode", "encode", "expect", "objection_to_wire"]


class OtherVersion(PayloadError):
    """Somebody speaks another wire version; whatever else may be wrong with what it says is no fault of its own."""


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
        OtherVersion: it begins a conversation in another wire version.
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
            raise OtherVersion(objection)
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
