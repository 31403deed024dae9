"""What a head says of the audits of its version, and what of it everybody checks without one. Sans-IO.

A head names the root over its update and what each contribution counts. An audit (see `outer.audit`) recomputes a part
of the update from that and from the contributions, so what they count must not be the syncer's free choice: a weight is
what the tokens and steps of its line make of it, or the cap of all that are heavier.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from diloco.config import OuterConfig
from diloco.protocol.messages.heads import Record
from diloco.protocol.work import raw_weight

__all__ = ["counts", "wrong_counts"]

TOLERANCE = 1e-6  # sums of 64 bit


def counts(peers: Sequence[str], weights: Mapping[str, float], coefficients: Mapping[str, float]) -> dict[str, Any]:
    """The fields of a head that say what the contributions of these peers count, in the order of its lines."""
    total = sum(weights[peer] for peer in peers)
    return {
        "weights": [min(1.0, weights[peer] / total) for peer in peers],
        "coefficients": [min(1.0, max(0.0, coefficients[peer] / total)) for peer in peers],
    }


def wrong_counts(outer: OuterConfig, record: Record) -> str | None:
    """Why no honest syncer counts contributions as this certificate says; no honest peer passes such a one on."""
    head, lines = record.head, record.lines
    what = f"version {head.version} of fragment {head.fragment}"
    if not outer.audited or not lines:
        said = head.weights or head.coefficients
        moves = outer.audited and not lines and head.digest != head.digest_before
        return f"{what} has contributions that are not named" if said or moves else None
    if len(head.weights) != len(lines) or len(head.coefficients) != len(lines):
        return f"{what} does not say what each of its {len(lines)} contributions counts"
    if not math.isclose(sum(head.weights), 1.0, rel_tol=TOLERANCE) or sum(head.coefficients) > 1 + TOLERANCE:
        return f"the weights of {what} are not parts of their sum"
    raw = [raw_weight(outer.weights, line.tokens, line.steps) for line in lines]
    unit = max(weight / one for weight, one in zip(head.weights, raw, strict=True))
    cap = max(head.weights)
    for line, weight, one in zip(lines, head.weights, raw, strict=True):
        if not math.isclose(weight, min(cap, unit * one), rel_tol=TOLERANCE):
            return f"{what} counts what {line.peer} contributed in another way than the rest"
    return None
