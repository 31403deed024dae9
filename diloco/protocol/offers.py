"""What a syncer collects for the next version of a fragment, and what it decides to make of it. Sans-IO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diloco.protocol.messages.heads import Line
from diloco.protocol.patience import Arrival

__all__ = ["Close", "Offer"]


@dataclass(frozen=True)
class Close:
    """Decision to make the next version out of these whole contributions.

    Attributes:
        contributors: the tokens of each contribution.
        missing: peers that were expected and are left out.
        delay: contributions per momentum step, if a window of a windowed optimizer begins with this version (Delayed
            Nesterov, arXiv 2401.09135, Algorithm 3: N changes between two momentum steps only).
    """

    fragment: int
    base_version: int
    contributors: Mapping[str, int]
    missing: tuple[str, ...]
    delay: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of all contributions together."""
        return sum(self.contributors.values())


@dataclass
class Offer:
    """What a syncer knows of one peer's contribution to the next version."""

    base_version: int
    tokens: int
    steps: int
    chunks: int = 0  # that have arrived on its newest stream
    whole: bool = False
    line: Line | None = None  # once it is whole
    payload: Any = None  # once it is whole
    beside: bool = False  # the version does not wait for it
    late: bool = False  # it missed its version
    polled: int = 0  # chunks at the last poll
    progress_at: float = 0.0
    taken_at: float = 0.0  # when the peer took its pseudo-gradient
    arrival: Arrival | None = None
