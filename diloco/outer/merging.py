"""How the contributions to a version become one pseudo-gradient (`outer.merge`), chunk by chunk.

What each contribution counts is decided in `robust`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from diloco.outer.fragments import Fragment
from diloco.outer.payloads import Codec, buffer

SMALLEST_NORM = 2.0**-126
"""Smaller norms are subnormal in fp32; hardware that flushes them to zero would divide by zero."""
# A sum of directions that is shorter than this part of its weight consists of rounding errors.
CANCELLED = 2.0**-20

Piece = tuple[int, int]
"""A half-open range of a chunk: the part of a tensor that lies in it."""


class Part(NamedTuple):
    """A chunk of a contribution, encoded (uint8). Its values times `scale` have this weight, which
    is positive."""

    payload: Tensor
    weight: float
    scale: float = 1.0


Average = Callable[[Tensor, Codec, Sequence[Part], Sequence[Piece]], None]
"""Fills its first argument, (n,) fp32, with the average of a chunk of all contributions. The pieces
are those of `directional_pieces`. It keeps no state, so threads may share it."""


def mean(out: Tensor, up: Codec, parts: Sequence[Part], pieces: Sequence[Piece]) -> None:
    """The weighted mean: sum(weight scale x) / sum(weight)."""
    out.zero_()
    for payload, weight, scale in parts:
        up.accumulate_(out, payload, weight * scale)
    out.div_(sum(part.weight for part in parts))


@torch.no_grad()
def radial_directional(
    out: Tensor, up: Codec, parts: Sequence[Part], pieces: Sequence[Piece]
) -> None:
    """The mean direction with the mean norm, piece by piece (Decoupled DiLoCo, arXiv 2604.21428):

        (sum w |v| / sum w) * unit(sum w unit(v))

    So the step does not shrink as 1 / sqrt(peers) when peers disagree, and one outer learning rate
    fits any number of peers. The paper averages tensor by tensor; pieces need no more than a chunk
    at a time. Elements outside all pieces get the plain mean, as embeddings do in the paper.
    Directions that cancel each other give zeros, because their unit vector would be rounding errors
    at full length.
    """
    out.zero_()
    outside, norms, total = (
        list(_between(pieces, out.numel())),
        [0.0] * len(pieces),
        sum(part.weight for part in parts),
    )
    for payload, weight, scale in parts:
        values = up.values(payload, out.numel())
        if scale != 1.0:
            values = torch.mul(values, scale, out=buffer("chunk", torch.float32, out.numel()))
        for start, stop in outside:
            out[start:stop].add_(values[start:stop], alpha=weight)
        for index, (start, stop) in enumerate(pieces):
            norm = _norm(values[start:stop])
            if norm >= SMALLEST_NORM:  # weight / norm may exceed fp32, unit vectors do not
                unit = torch.div(
                    values[start:stop],
                    norm,
                    out=buffer("displacement", torch.float32, stop - start),
                )
                out[start:stop].add_(unit, alpha=weight)
                norms[index] += weight * norm
    for start, stop in outside:
        out[start:stop].div_(total)
    for (start, stop), norm_sum in zip(pieces, norms, strict=True):
        norm = _norm(out[start:stop])
        if norm < CANCELLED * total:
            out[start:stop].zero_()
        else:
            out[start:stop].mul_(norm_sum / total / norm)


AVERAGES: dict[str, Average] = {"mean": mean, "rda": radial_directional}


def directional_pieces(fragment: Fragment, start: int, stop: int) -> list[Piece]:
    """The pieces of [start, stop) of a fragment, relative to start: one for each tensor that is not
    an embedding, as Hugging Face models call these (embed_tokens, embeddings, wte, wpe).
    """
    return [
        (at, at + part.numel)
        for at, part in fragment.locate(start, stop)
        if not any(
            "embed" in component or component in ("wte", "wpe")
            for component in part.name.split(".")
        )
    ]


def _norm(x: Tensor) -> float:
    """L2 norm in float64, because squares of magnitudes up to LIMIT overflow fp32."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def _between(pieces: Sequence[Piece], numel: int) -> Iterator[Piece]:
    end = 0
    for start, stop in [*pieces, (numel, numel)]:
        if end < start:
            yield end, start
        end = stop
