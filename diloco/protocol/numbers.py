"""The numbers of messages: a few types, each with a bound that no honest run reaches. Sans-IO.

    untrusted number -> type of its field (`PayloadError` outside of the bounds) -> arithmetic -> `at_most` -> message

A peer that says the largest number that it may say does no harm beyond that: under these bounds no sum is infinite, and
whatever this peer computes from such numbers is cut to the bounds again before it says it (`at_most`, `within_bounds`).
So no honest peer ever makes a message that its own schema refuses.
"""

from __future__ import annotations

from math import isfinite
from typing import Annotated, Any

from pydantic import AfterValidator, Field

__all__ = [
    "LEAP", "MAX_BYTES", "MAX_COUNT", "MAX_LOSS", "MAX_RATE", "MAX_SECONDS", "MAX_TOKENS", "MIN_RATE",
    "Bytes", "Count", "Late", "Loss", "Rate", "Seconds", "Sequence", "SomeSteps", "SomeTokens", "Term",
    "Tokens", "Version", "at_most", "forget_oldest", "leaps_too_far", "within_bounds",
]  # fmt: skip

MAX_COUNT = 2**40  # With a version in each millisecond a fragment gets there in 35 years.
MAX_TOKENS = 2**50  # a thousand times the tokens of the largest known runs; exact in a float
MAX_BYTES = 2**60
MIN_RATE, MAX_RATE = 1e-6, 1e6  # per second: a step takes between a microsecond and 11 days
MAX_LOSS = 1e4  # nats per token: a thousand times that of a model that guesses
MAX_SECONDS = 1e8  # three years
LEAP = 2**20  # No honest peer is this far ahead of what is known here, so a few messages cannot exhaust a count.


def _measured(rate: float) -> float:
    if 0 < rate < MIN_RATE:
        raise ValueError(f"a rate is 0 or at least {MIN_RATE:g}")
    return rate


Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""Inner steps, rounds, chunks, elements, and whatever else is counted."""
Version = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""Outer steps that a fragment has had."""
Term = Annotated[int, Field(ge=1, le=MAX_COUNT)]
SomeSteps = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Tokens = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
"""Tokens, also those of the swarm clock."""
SomeTokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Sequence = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
"""A place in the run's list of sequences."""
Bytes = Annotated[int, Field(ge=0, le=MAX_BYTES)]
Rate = Annotated[float, Field(ge=0, le=MAX_RATE, allow_inf_nan=False), AfterValidator(_measured)]
"""Per second; 0 while there is no measurement."""
Loss = Annotated[float, Field(ge=0, le=MAX_LOSS, allow_inf_nan=False)]
"""Nats per token; 0 while there is no measurement."""
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]
Late = Annotated[float, Field(ge=0, le=MAX_COUNT, allow_inf_nan=False)]
"""Staleness, in rounds."""


def at_most(number: int, limit: int = MAX_COUNT) -> int:
    """A count within its bounds: what is over the limit counts as the limit, and what is below 0 as 0."""
    return min(max(number, 0), limit)


def forget_oldest(known: dict[Any, Any], most: int) -> None:
    """Drop the items that came first, until so many are left."""
    while len(known) > most:
        del known[next(iter(known))]


def within_bounds(number: float, limit: float, least: float = 0.0) -> float:
    """A measurement within its bounds; one that is negative, not finite, or smaller than the least is none, which is 0.

    One that is over the limit counts as the limit.
    """
    return min(number, limit) if isfinite(number) and number >= least and number > 0 else 0.0


def leaps_too_far(here: int, there: int) -> bool:
    """Whether a peer at version `here` must not adopt `there`: it is in the upper half of all versions, and far away.

    So there are always versions left after a version that was adopted, and an outer step is never the last one.
    """
    return there > MAX_COUNT // 2 and there - here > LEAP
