"""What all messages are made of: the base, a refusal, and the types of their fields."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field

__all__ = [
    "MAX_FRAME_BYTES",
    "MAX_RANGES",
    "MAX_UNIT_RANGES",
    "Count",
    "Digest",
    "FewUnits",
    "Index",
    "Message",
    "Name",
    "Names",
    "Rate",
    "Refusal",
    "Unit",
    "Units",
]

MAX_FRAME_BYTES = 1 << 20  # the largest honest frame is a manifest or a list of part digests: some kilobytes
MAX_UNIT_RANGES = 64  # that a peer has at a time
MAX_RANGES = 2**10  # of all peers together

Name = Annotated[str, Field(max_length=128)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, lt=2**62)]
Index = Annotated[int, Field(ge=0, lt=2**20)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# A list fails at its first wrong item: a frame of a million of them would keep the node busy for seconds.
Addresses = Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=16), FailFast()]
Names = Annotated[list[Name], Field(max_length=4096), FailFast()]


def _ascending(unit: list[int]) -> list[int]:
    if unit[0] >= unit[1]:
        raise ValueError("a range of sequences is not empty and does not run backwards")
    return unit


Unit = Annotated[list[Count], Field(min_length=2, max_length=2), FailFast(), AfterValidator(_ascending)]
Units = Annotated[list[Unit], Field(max_length=MAX_RANGES), FailFast()]
FewUnits = Annotated[list[Unit], Field(max_length=MAX_UNIT_RANGES), FailFast()]


class Message(BaseModel):
    """Base of all messages: frozen, strict, and no field that the schema does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Refusal(Message):
    """The stream is not wanted; `reason` is one line for the user of the other side."""

    kind: Literal["refusal"] = "refusal"
    reason: Annotated[str, Field(max_length=2048)]
