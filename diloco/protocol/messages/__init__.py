"""Everything peers say to each other, as schemas.

    base        what all messages are made of
    heads       what a version is, signed: lines, heads, certificates
    control     members, what they are doing, what they hold           one stream in each direction between two peers
    bulk        contributions, updates, state, work units              one stream per transfer
    watching    the manifest, snapshots, probes                        the same, also for peers that take no part

Each is one msgpack map behind a 4-byte length. Nothing read from the network becomes an object without passing its
schema: unknown fields, wrong types and values out of range all raise `PayloadError`.

A message describes itself: its class names its kind, its place in a conversation, and the roles that may begin a stream
with it. To add one, write the class here and a conversation in `swarm/conversations`.

A new kind does not raise the wire version: an older peer refuses a request of an unknown kind with the reason, skips an
unknown kind on a control stream, and holds neither against its sender (`UnknownKind`). A new field, or another meaning
of an old one, raises it, because schemas forbid fields that they do not know.
"""

from __future__ import annotations

from typing import TypeVar

import msgpack
from pydantic import ValidationError

from diloco.config import WIRE_VERSION
from diloco.errors import PayloadError
from diloco.protocol.messages import bulk, control, heads, watching  # noqa: F401  (each registers its kinds)
from diloco.protocol.messages.base import KINDS, MAX_FRAME_BYTES, Message, Refusal

__all__ = ["Message", "OtherVersion", "Refusal", "UnknownKind", "decode", "encode", "expect", "objection_to_wire"]

M = TypeVar("M", bound=Message)
SPEAKS_FIRST = (control.Hello.kind, watching.SnapshotReply.kind)  # kinds that carry the wire version of their sender
MAX_KIND = 32  # characters of the name of a kind
REMEDY = "install the same diloco version on both sides"


class OtherVersion(PayloadError):
    """The sender speaks another wire version. Whatever else is wrong with the message is no fault of its sender."""


class UnknownKind(PayloadError):
    """The kind of a message is well-formed and not known here: its sender may be newer. That is no offence."""


class _Encoded:
    """The message that was encoded last, and its bytes. A broadcast is encoded once and not once per peer."""

    last: tuple[Message | None, bytes] = (None, b"")


def encode(message: Message) -> bytes:
    """Serialise a message as msgpack (without the length prefix); fields that have their default are left out."""
    known, packed = _Encoded.last
    if known is not message:
        packed = msgpack.packb({"kind": message.kind, **message.model_dump(exclude_defaults=True)}, use_bin_type=True)
        _Encoded.last = (message, packed)
    return packed


def decode(frame: bytes) -> Message:
    """Parse and validate one untrusted frame.

    Raises:
        PayloadError: the frame is not msgpack, too large, or does not fit the schema of its kind.
        UnknownKind: no message of that kind is known here.
        OtherVersion: the frame begins a conversation in another wire version.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise PayloadError(f"a frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}")
    try:
        fields = msgpack.unpackb(frame, raw=False, strict_map_key=True)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise PayloadError(f"a frame is not valid msgpack: {error}") from None
    kind = fields.pop("kind", None) if isinstance(fields, dict) else None
    if not isinstance(kind, str):
        raise PayloadError("a message does not fit its schema: it names no kind")
    if kind in SPEAKS_FIRST:
        version = fields.get("wire_version")  # looked at first, for the rest may follow another schema
        if type(version) is int and (objection := objection_to_wire(version)) is not None:
            raise OtherVersion(objection)
    if kind not in KINDS:
        if len(kind) <= MAX_KIND and kind.isascii() and kind.isidentifier():
            raise UnknownKind(f"messages of kind {kind} are not known here; {REMEDY}")
        raise PayloadError(f"a message does not fit its schema: no kind is called {_shown(kind)}")
    unknown = next((key for key in fields if key not in KINDS[kind].model_fields), None)
    if unknown is not None:  # pydantic would list them all, which takes a second for a frame full of them
        raise PayloadError(f"a message does not fit its schema: {kind}.{_shown(unknown)}: no such field is known")
    try:
        return KINDS[kind].model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in (kind, *first["loc"]))
        # The sender chose the keys: they may be as long as a frame and hold line breaks.
        raise PayloadError(f"a message does not fit its schema: {_shown(where)}: {_shown(first['msg'], 200)}") from None


def _shown(text: str, length: int = 100) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text[:length])


def objection_to_wire(version: int) -> str | None:
    """Why a peer of that wire version cannot be talked to, as one line for its user; None when it can."""
    if version == WIRE_VERSION:
        return None
    return f"wire version {version} there does not fit {WIRE_VERSION} here; {REMEDY}"


def expect(message: Message, kind: type[M]) -> M:
    """Narrow a message to the kind that may come here; `PayloadError` for others, for a `Refusal` with its reason."""
    if isinstance(message, kind):
        return message
    if isinstance(message, Refusal):
        raise PayloadError(f"refused: {message.reason}")
    raise PayloadError(f"expected {kind.__name__}, got {type(message).__name__}")
