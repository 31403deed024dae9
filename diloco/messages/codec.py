"""Messages as bytes: each is one msgpack map, without the 4 bytes of its length that go before it.

Nothing read from the network becomes an object without passing its schema: wrong types and values
out of range raise `PayloadError`, at the first of them; unknown fields are left out.

So a swarm can be upgraded peer by peer. A new kind does not raise the wire version: an older peer
refuses such a request with the reason, skips it on a control stream, and holds neither against its
sender (`UnknownKind`). Nor does a new field, which has a default. Another meaning of an old field
raises it, and so does a new one in what is signed: heads, their lines and books.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TypeVar

import msgspec

from diloco.errors import PayloadError
from diloco.messages import bulk, control  # noqa: F401  (they define kinds)
from diloco.messages.base import MAX_FRAME_BYTES, Message, Refusal
from diloco.protocol import WIRE_VERSION
from diloco.text import plain

M = TypeVar("M", bound=Message)
REMEDY = "install the same diloco version on both sides"
WRONG = "a message does not fit its schema: "

_kinds: dict[str, type[Message]] = {}


class OtherVersion(PayloadError):
    """The sender speaks another wire version; its other faults are then no offence."""


class UnknownKind(PayloadError):
    """The kind of a message is unknown. Its sender may be newer, which is no offence."""


class _Opening(msgspec.Struct):
    kind: str


class _Version(msgspec.Struct):
    wire_version: int


_last: tuple[Message | None, bytes] = (None, b"")


def kinds() -> dict[str, type[Message]]:
    """Return every kind of message by its name on the wire, of the modules imported so far."""
    return {str(subclass.__struct_config__.tag): subclass for subclass in Message.__subclasses__()}


def encode(message: Message) -> bytes:
    """Encode a message as msgpack. The last one is cached, so a broadcast is encoded once."""
    global _last
    if _last[0] is not message:
        _last = (message, msgspec.msgpack.encode(message))
    return _last[1]


def decode(frame: bytes) -> Message:
    """Parse and validate one untrusted frame.

    Raises `PayloadError` when it is too large, or does not fit the schema of its kind; of these
    `UnknownKind` for an unknown one, `OtherVersion` when another wire version begins to speak.
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
        raise PayloadError(f"{WRONG}{kind}: {plain(str(error)[:200])}") from None
    if len(kind) <= 32 and kind.isascii() and kind.isidentifier():
        raise UnknownKind(f"messages of kind {kind} are not known here; {REMEDY}")
    raise PayloadError(f"{WRONG}no kind is called {plain(kind[:100])}")


def _check_version(frame: bytes) -> None:
    with suppress(msgspec.ValidationError):  # looked at first: the rest may follow another schema
        version = msgspec.msgpack.decode(frame, type=_Version).wire_version
        if objection := objection_to_wire(version):
            raise OtherVersion(objection)


def objection_to_wire(version: int) -> str | None:
    """Return why a peer of that wire version is refused, in one line; None if it is not."""
    if version == WIRE_VERSION:
        return None
    return f"wire version {version} there does not fit {WIRE_VERSION} here; {REMEDY}"


def expect(message: Message, kind: type[M]) -> M:
    """Return the message if it is of that kind; else `PayloadError`, with a `Refusal`'s reason."""
    if isinstance(message, kind):
        return message
    if isinstance(message, Refusal):
        raise PayloadError(f"refused: {message.reason}")
    raise PayloadError(f"expected {kind.__name__}, got {type(message).__name__}")
