"""The base class of all messages: it gives their kind, their place, and the roles that may send
it."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, ClassVar, get_args

from msgspec import Meta, Struct

from diloco.messages.fields import printable
from diloco.protocol import Role

# the largest honest frame has a head of 256 lines, a book of 2048 peers, and 8192 digests
MAX_FRAME_BYTES = 1 << 21
EVERYBODY: frozenset[Role] = frozenset(get_args(Role))
MEMBERS: frozenset[Role] = frozenset({"worker", "host", "contributor"})
WORKERS: frozenset[Role] = frozenset({"worker", "contributor"})


class Place(Enum):
    """The places in the conversation of two peers where a message may stand."""

    GREETING = "on a greeting stream"
    HELLO = "first on a control stream"
    CONTROL = "on a control stream"
    REQUEST = "first on a bulk stream"
    ANSWER = "later on any stream"

    @property
    def begins(self) -> bool:
        """True if the message begins a stream; admission then checks the role of the sender."""
        return self in (Place.GREETING, Place.HELLO, Place.REQUEST)


class Message(Struct, frozen=True, omit_defaults=True, tag_field="kind"):
    """Base of all messages: frozen. Unknown fields, of a newer peer, are dropped, and each new
    field has a default; in what is signed (`heads`), every field counts."""

    place: ClassVar[Place] = Place.ANSWER
    roles: ClassVar[frozenset[Role]] = frozenset()  # that may begin a stream with it
    opens_with_version: ClassVar[bool] = False  # its `wire_version` is looked at before the rest

    @property
    def kind(self) -> str:
        """The message's name on the wire."""
        return str(self.__struct_config__.tag)


class Refusal(Message, frozen=True, tag="refusal"):
    """A stream is refused; `reason` is one line for the user of the other side."""

    reason: Annotated[str, Meta(max_length=2048)]

    def __post_init__(self) -> None:
        printable(self, "reason")
