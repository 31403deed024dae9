"""How the contributions to a version become one pseudo-gradient (`outer.merge`), chunk by chunk.

The math of `rda` is in `rda.py`; what each contribution counts is decided in `robust.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from diloco.outer.optimizer import mean_
from diloco.outer.payloads import Codec, buffer
from diloco.outer.rda import Piece, add_directions_, radial_directional_

__all__ = ["AVERAGES", "Average", "Part"]


class Part(NamedTuple):
    """A chunk of a contribution, encoded (uint8). Its values times `scale` have this weight, which is positive."""

    payload: Tensor
    weight: float
    scale: float = 1.0


Average = Callable[[Tensor, Codec, Sequence[Part], Sequence[Piece]], None]
"""Fills its first argument, (n,) fp32, with the average of a chunk of all contributions. The pieces are the parts of
tensors in the chunk (see `rda`). It keeps no state, so threads may share it."""


def mean(out: Tensor, up: Codec, parts: Sequence[Part], pieces: Sequence[Piece]) -> None:
    """The weighted mean: sum(weight scale x) / sum(weight)."""
    out.zero_()
    for payload, weight, scale in parts:
        up.accumulate_(out, payload, weight * scale)
    mean_(out, sum(part.weight for part in parts))


def radial_directional(out: Tensor, up: Codec, parts: Sequence[Part], pieces: Sequence[Piece]) -> None:
    """The mean direction with the mean norm, piece by piece (Decoupled DiLoCo, arXiv 2604.21428)."""
    out.zero_()
    norms = [0.0] * len(pieces)
    for payload, weight, scale in parts:
        values = up.values(payload, out.numel())
        if scale != 1.0:
            values = torch.mul(values, scale, out=buffer("chunk", torch.float32, out.numel()))
        added = add_directions_(out, values, pieces, weight)
        norms = [one + other for one, other in zip(norms, added, strict=True)]
    radial_directional_(out, pieces, sum(part.weight for part in parts), norms)


AVERAGES: dict[str, Average] = {"mean": mean, "rda": radial_directional}
