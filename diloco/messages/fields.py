"""The types of fields, each with a bound that no honest run reaches; no sum of them is infinite.

A peer cuts computed numbers to the bounds (`at_most`, `within_bounds`) before it sends them, so no
honest peer sends a message that its own schema refuses.
"""

from __future__ import annotations

from math import isfinite
from typing import Annotated, Any, TypeVar

from msgspec import Meta, Struct
from msgspec.inspect import FloatType, IntType, ListType, UnionType, type_info
from msgspec.structs import force_setattr

from diloco.text import plain

S = TypeVar("S", bound=Struct)

MAX_COUNT = 2**40  # with a version in each millisecond a fragment gets there in 35 years
MAX_TOKENS = 2**50  # a thousand times the tokens of the largest known runs; exact in a float
MAX_BYTES = 2**60
MAX_RATE = 1e6  # per second
MAX_LOSS = 1e4  # nats per token: a thousand times that of a model that guesses
MAX_SECONDS = 1e8  # three years
MAX_LENGTH = 1e30  # the norm of a tensor
MAX_FRAGMENTS = 2**16
MAX_LINES = 256  # contributions to one version; their lines fit into a frame
MAX_NAMED = 512  # peers in a hello; each of them may be called by whoever hears it
MAX_UNIT_RANGES = 64  # ranges of sequences that one peer has at a time
MAX_RANGES = 2**10  # ranges in a book

Name = Annotated[str, Meta(max_length=128)]
Names = Annotated[list[Name], Meta(max_length=4096)]
ShortName = Annotated[str, Meta(max_length=24)]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Raw = Annotated[bytes, Meta(max_length=1024)]  # a signature
# A signature with the run key, in hex; empty in an open run, or where the peer has none.
Seal = Annotated[str, Meta(pattern=r"^([0-9a-f]{128})?\Z")]
Instance = Annotated[str, Meta(pattern=r"^([0-9a-f]{16})?\Z")]
Index = Annotated[int, Meta(ge=0, lt=MAX_FRAGMENTS)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
SomeSteps = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Tokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
SomeTokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Stamp = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]  # milliseconds since 1970, or a little more
Delay = Annotated[int, Meta(ge=1, le=100_000)]  # contributions in a momentum window
Bytes = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
Rate = Annotated[float, Meta(ge=0, le=MAX_RATE)]  # 0 while there is no measurement
Pace = Annotated[float, Meta(ge=0, le=MAX_TOKENS)]  # tokens per second
Loss = Annotated[float, Meta(ge=0, le=MAX_LOSS)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
Length = Annotated[float, Meta(ge=0, le=MAX_LENGTH)]
Weight = Annotated[float, Meta(ge=0, le=MAX_LENGTH)]
Range = tuple[Tokens, Tokens]
Units = tuple[Range, ...]
"""Ranges [start, stop) of sequences: disjoint, ascending, none empty, no two touch."""
Ranges = Annotated[Units, Meta(max_length=MAX_RANGES)]
Addresses = Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=16)]


def at_most(number: int, limit: int = MAX_COUNT) -> int:
    """Cut a count to 0 and `limit`."""
    return min(max(number, 0), limit)


def within_bounds(number: float, limit: float, least: float = 0.0) -> float:
    """Cut a measurement to `limit`; 0 (none) for one that is not finite, or below `least`."""
    return min(number, limit) if isfinite(number) and number >= least and number > 0 else 0.0


def bounded(kind: type[S], **values: Any) -> S:
    """Make a struct of computed numbers, each cut to the bounds of its field. Of a measurement that
    is not finite, or 0, an optional field is None."""
    info: Any = type_info(kind)
    types = {field.name: field.type for field in info.fields}
    return kind(**{name: _cut(value, types[name]) for name, value in values.items()})


def _cut(value: Any, kind: Any) -> Any:
    match kind:
        case UnionType():
            return None if value is None else _cut(value, kind.types[0]) or None
        case ListType():
            return [_cut(item, kind.item_type) for item in value]
        case IntType():
            return at_most(value, int(kind.le or MAX_COUNT))
        case FloatType():
            return within_bounds(value, kind.le or MAX_RATE)
    return value


def printable(message: Struct, *fields: str) -> None:
    """Replace, in `__post_init__`, control characters of text for people by spaces."""
    for field in fields:
        force_setattr(message, field, plain(getattr(message, field)))


def forget_oldest(known: dict[Any, Any], most: int) -> None:
    """Drop the oldest items until `most` are left."""
    while len(known) > most:
        del known[next(iter(known))]
