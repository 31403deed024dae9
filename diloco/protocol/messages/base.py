"""What all messages are made of: the base class, which registers each kind, a refusal, and the types of fields."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field

from diloco.admission.invitation import Role
from diloco.protocol.numbers import Sequence
from diloco.text import plain

__all__ = [
    "EVERYBODY", "KINDS", "MAX_FRAME_BYTES", "MAX_NAMED", "MAX_RANGES", "MAX_UNIT_RANGES", "MEMBERS", "WORKERS",
    "Addresses", "Digest", "FewUnits", "Index", "Message", "Name", "Names", "Place", "Refusal", "Said", "Seal", "Unit",
    "Units", "at_most_keys",
]  # fmt: skip

MAX_FRAME_BYTES = 1 << 20  # the largest honest frame is a manifest or a list of part digests: some kilobytes
MAX_UNIT_RANGES = 64  # ranges that one peer has at a time
MAX_RANGES = 2**10  # ranges that all peers together have
MAX_NAMED = 512  # peers in a hello; each of them may be called by whoever hears it

Name = Annotated[str, Field(max_length=128)]
# Text of a peer that a user reads: control characters, which move the cursor or turn the writing, become spaces.
Said = Annotated[str, AfterValidator(plain)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Seal = Annotated[str, Field(pattern=r"^([0-9a-f]{128})?$")]  # empty in an open run, or where the peer has none
Index = Annotated[int, Field(ge=0, le=2**20 - 1)]
# Lists fail at their first wrong item: to report a million wrong items would keep the node busy for seconds.
Addresses = Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=16), FailFast()]
Names = Annotated[list[Name], Field(max_length=4096), FailFast()]


def _ascending(unit: list[int]) -> list[int]:
    if unit[0] >= unit[1]:
        raise ValueError("a range of sequences is not empty and does not run backwards")
    return unit


Unit = Annotated[list[Sequence], Field(min_length=2, max_length=2), FailFast(), AfterValidator(_ascending)]
Units = Annotated[list[Unit], Field(max_length=MAX_RANGES), FailFast()]
FewUnits = Annotated[list[Unit], Field(max_length=MAX_UNIT_RANGES), FailFast()]


def at_most_keys(limit: int) -> BeforeValidator:
    """For a map, which has no `FailFast`: one that is too long is refused before its items are looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            raise ValueError(f"a map of {len(value)} items is over the limit of {limit}")
        return value

    return BeforeValidator(check)


class Place(Enum):
    """Where in the conversations of two peers a message may stand."""

    GREETING = "on a greeting stream"
    HELLO = "first on a control stream"
    CONTROL = "on a control stream"
    REQUEST = "first on a bulk stream"
    ANSWER = "later on any stream"

    @property
    def begins(self) -> bool:
        """Whether a stream begins with such a message; admission checks the role of its sender then."""
        return self in (Place.GREETING, Place.HELLO, Place.REQUEST)


EVERYBODY: frozenset[Role] = frozenset({"worker", "host", "contributor", "observer"})
MEMBERS: frozenset[Role] = frozenset({"worker", "host", "contributor"})
WORKERS: frozenset[Role] = frozenset({"worker", "contributor"})

KINDS: dict[str, type[Message]] = {}
"""Every kind of message by its name on the wire."""


class Message(BaseModel):
    """Base of all messages: frozen, strict, and no field that the schema does not know.

    A subclass registers itself by its keyword arguments; without `kind` it is a base of others:

        class Claim(Message, kind="claim", place=Place.CONTROL): ...

    Attributes:
        kind: its name on the wire.
        place: where it may stand.
        roles: the admission roles that may begin a stream with it; empty for a message that begins none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    kind: ClassVar[str] = ""
    place: ClassVar[Place] = Place.ANSWER
    roles: ClassVar[frozenset[Role]] = frozenset()

    def __init_subclass__(
        cls, kind: str = "", place: Place = Place.ANSWER, roles: frozenset[Role] = frozenset(), **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        if not kind:
            return
        assert kind not in KINDS, f"two messages are called {kind}"
        assert place.begins == bool(roles), f"{kind} begins a stream and names no roles, or the other way round"
        cls.kind, cls.place, cls.roles = kind, place, roles
        KINDS[kind] = cls

    def misfit(self, fragments: int) -> str | None:
        """Why no honest peer of a run with that many fragments says this, in one line; None when one may."""
        return None


class Refusal(Message, kind="refusal"):
    """The stream is not wanted; `reason` is one line for the user of the other side."""

    reason: Annotated[Said, Field(max_length=2048)]
