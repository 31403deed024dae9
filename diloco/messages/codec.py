"""Messages as bytes: each is one msgpack map, without the 4 bytes of its length that go before it.

Nothing read from the network becomes an object without passing its schema: unknown fields, wrong
types and values out of range all raise `PayloadError`, at the first of them.

A new kind does not raise the wire version: an older peer refuses such a request with the reason,
skips it on a control stream, and holds neither against its sender (`UnknownKind`). A new field, or
another meaning of an old one, raises it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TypeVar

import msgspec

from diloco.config import WIRE_VERSION
from diloco.errors import PayloadError
from diloco.messages import bulk, control  # noqa: F401  (they define kinds)
from diloco.messages.base import MAX_FRAME_BYTES, Message, Refusal
from diloco.text import plain

M = TypeVar("M", bound=Message)
REMEDY = "install the same diloco version on both sides"

_kinds: dict[str, type[Message]] = {}


class OtherVersion(PayloadError):
    """The sender speaks another wire version. Whatever else is wrong with the message is no fault
    of its sender."""


class UnknownKind(PayloadError):
    """The kind of a message is well-formed and not known here: its sender may be newer. That is no
    offence."""


class _Opening(msgspec.Struct):
    kind: str


class _Version(msgspec.Struct):
    wire_version: int


_last: tuple[Message | None, bytes] = (None, b"")


def kinds() -> dict[str, type[Message]]:
    """Every kind of message by its name on the wire, of the modules imported so far."""
    return {str(one.__struct_config__.tag): one for one in Message.__subclasses__()}


def encode(message: Message) -> bytes:
    """A message as msgpack. The last one is remembered: a broadcast is encoded once and not once
    per peer."""
    global _last
    if _last[0] is not message:
        _last = (message, msgspec.msgpack.encode(message))
    return _last[1]


def decode(frame: bytes) -> Message:
    """Parse and validate one untrusted frame. `PayloadError` when it is too large, or does not fit
    the schema of its kind; `UnknownKind` when there is none; `OtherVersion` when it begins a
    conversation in another wire version.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise PayloadError(f"a frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}")
    kind = "a frame"
    try:
        kind = msgspec.msgpack.decode(frame, type=_Opening).kind
        if kind not in _kinds:  # a module that was imported since may define it
            _kinds.update(kinds())
        if kind in _kinds:
            if _kinds[kind].opens_with_version:
                _check_version(frame)
            return msgspec.msgpack.decode(frame, type=_kinds[kind])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PayloadError(
            f"a message does not fit its schema: {kind}: {plain(str(error)[:200])}"
        ) from None
    if len(kind) <= 32 and kind.isascii() and kind.isidentifier():
        raise UnknownKind(f"messages of kind {kind} are not known here; {REMEDY}")
    raise PayloadError(f"a message does not fit its schema: no kind is called {plain(kind[:100])}")


def _check_version(frame: bytes) -> None:
    with suppress(msgspec.ValidationError):  # looked at first: the rest may follow another schema
        if objection := objection_to_wire(
            msgspec.msgpack.decode(frame, type=_Version).wire_version
        ):
            raise OtherVersion(objection)


def objection_to_wire(version: int) -> str | None:
    """Why a peer of that wire version cannot be talked to, as one line for its user; None when it
    can."""
    here = WIRE_VERSION
    return (
        None
        if version == here
        else f"wire version {version} there does not fit {here} here; {REMEDY}"
    )


def expect(message: Message, kind: type[M]) -> M:
    """Narrow a message to the kind that may come here; `PayloadError` for others, for a `Refusal`
    with its reason."""
    if isinstance(message, kind):
        return message
    why = f"refused: {message.reason}" if isinstance(message, Refusal) else ""
    raise PayloadError(why or f"expected {kind.__name__}, got {type(message).__name__}")
