"""A peer's access to the simulated network."""

from __future__ import annotations

from dataclasses import dataclass

# Bytes of a piece at most, at least, and otherwise the seconds that it takes a link
PIECE_BYTES, LEAST_BYTES, PIECE_S = 64 * 1024, 64, 0.1


@dataclass(frozen=True)
class PeerLink:
    """One peer's access: bytes per second (None: unlimited) and seconds of latency.

    A byte takes the mean of the two ends' `latency_s` from one to the other.
    """

    up: float | None = None
    down: float | None = None
    latency_s: float = 0.0


def piece_bytes(*rates: float | None) -> int:
    """Return the bytes that links with these rates take at a time; thin links take few."""
    slowest = min([rate for rate in rates if rate is not None], default=PIECE_BYTES / PIECE_S)
    return max(LEAST_BYTES, min(PIECE_BYTES, int(slowest * PIECE_S)))
