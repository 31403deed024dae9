"""Claims of work: what a contribution may claim and weigh, by what the other peers do. Sans-IO.

    header  -> `impossible`   no honest peer claims that, whatever happened to it
    weights -> `weigh`        at most twice the median of their version

A peer of any pace is merged at its pace: what it claims is limited per contribution, and so is what that weighs.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from diloco.protocol.messages.bulk import Contribution

__all__ = ["capped", "impossible", "weigh"]

MOST_CYCLES = 8  # in the steps of one contribution; a peer that is in step sends one cycle, and after mishaps a few
HEAVIEST = 2.0  # times the median weight


def impossible(header: Contribution, tokens_per_step: int | None, sync_every: int) -> str | None:
    """Why no honest peer makes these claims, in one line; None when one may.

    Args:
        tokens_per_step: of the manifest; None where a training loop counts in its own way.
        sync_every: H, the inner steps of a cycle.
    """
    if tokens_per_step is not None and header.tokens > header.steps * tokens_per_step:
        return f"{header.tokens} tokens in {header.steps} steps are claimed, and a step has {tokens_per_step}"
    if header.steps > MOST_CYCLES * sync_every:
        return f"{header.steps} steps are claimed in one contribution, and a cycle has {sync_every}"
    return None


def capped(weights: Mapping[str, float]) -> dict[str, float]:
    """Weights (or work, see `forks`) of at most twice their median, which caps neither one nor two of them."""
    most = HEAVIEST * statistics.median(weights.values()) if weights else 0.0
    return {peer: min(weight, most) for peer, weight in weights.items()}


def weigh(kind: str, counts: Mapping[str, tuple[int, int]]) -> dict[str, float]:
    """What all contributions to a version weigh (`outer.weights`), of so many tokens and steps: at most twice their
    median.
    """
    return capped({peer: _raw(kind, *counts[peer]) for peer in sorted(counts)})


def _raw(kind: str, tokens: int, steps: int) -> float:
    match kind:
        case "tokens":
            return float(tokens)
        case "tokens2_per_step":  # Decoupled DiLoCo, arXiv 2604.21428
            return tokens**2 / steps
        case _:
            return 1.0
