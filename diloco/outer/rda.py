"""Radial-directional averaging (RDA): an average that keeps the length of what it averages.

The mean direction with the mean norm (Decoupled DiLoCo, arXiv 2604.21428),

    (sum w |v| / sum w) * unit(sum w unit(v))

so that the step does not shrink as 1 / sqrt(peers) when peers disagree, and one outer learning rate fits any number of
peers. `add_directions_` adds each decoded contribution, and `radial_directional_` then turns the sum into the average.

The paper averages tensor by tensor. We average *piece* by piece, a piece being the part of a tensor that lies in one
chunk, so that no average needs more than a chunk at a time. Elements outside all pieces get the plain mean, as
embeddings do in the paper.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from diloco.outer.fragments import Fragment
from diloco.outer.payloads import buffer

__all__ = ["CANCELLED", "SMALLEST_NORM", "add_directions_", "directional_pieces", "radial_directional_"]

Piece = tuple[int, int]  # a half-open range of a chunk

SMALLEST_NORM = 2.0**-126
"""Smaller norms are subnormal in fp32; hardware that flushes them to zero would divide by zero."""
CANCELLED = 2.0**-20  # A sum of directions that is shorter than this part of its weight consists of rounding errors.


def directional_pieces(fragment: Fragment, start: int, stop: int) -> list[Piece]:
    """The pieces of [start, stop) of a fragment, relative to start: one for each tensor that is not an embedding."""
    return [(at, at + part.numel) for at, part in fragment.locate(start, stop) if not _is_embedding(part.name)]


@torch.no_grad()
def add_directions_(total: Tensor, values: Tensor, pieces: Sequence[Piece], weight: float) -> list[float]:
    """total += weight * unit(values) in every piece, and weight * values outside of them.

    A norm below 2**-126 counts as zero, and the piece then adds nothing. Returns weight * norm of each piece.

    `total` and `values` are (n,) fp32. Values, a decoded contribution with magnitudes of at most `LIMIT`, are left as
    they are. Pieces are in order and disjoint; the weight is finite and not negative.
    """
    assert total.shape == values.shape, "total and values must have one shape"
    norms = []
    for start, stop in _outside(pieces, total.numel()):
        total[start:stop].add_(values[start:stop], alpha=weight)
    for start, stop in pieces:
        norm = _norm(values[start:stop])
        if norm < SMALLEST_NORM:
            norm = 0.0
        else:  # weight / norm may exceed fp32, unit vectors do not
            unit = torch.div(values[start:stop], norm, out=buffer("displacement", values.dtype, stop - start))
            total[start:stop].add_(unit, alpha=weight)
        norms.append(weight * norm)
    return norms


@torch.no_grad()
def radial_directional_(total: Tensor, pieces: Sequence[Piece], weight_sum: float, norm_sums: Sequence[float]) -> None:
    """Turn the sum that `add_directions_` made into the average, in place; (n,) fp32.

    Directions that cancel each other give zeros: their unit vector would be rounding errors at full length. The sum of
    the weights is finite and positive; `norm_sums` are, for each piece, the sum of what `add_directions_` returned.
    """
    assert 0 < weight_sum < float("inf"), f"total weight {weight_sum} is not positive"
    for start, stop in _outside(pieces, total.numel()):
        total[start:stop].div_(weight_sum)
    for (start, stop), norm_sum in zip(pieces, norm_sums, strict=True):
        norm = _norm(total[start:stop])
        if norm < CANCELLED * weight_sum:
            total[start:stop].zero_()
        else:
            total[start:stop].mul_(norm_sum / weight_sum / norm)


def _norm(x: Tensor) -> float:
    """L2 norm in float64, because squares of magnitudes up to LIMIT overflow fp32."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def _outside(pieces: Sequence[Piece], numel: int) -> Iterator[Piece]:
    """The ranges of [0, numel) between the pieces."""
    end = 0
    for start, stop in pieces:
        assert end <= start < stop <= numel, f"piece [{start}, {stop}) is empty, out of order or out of the chunk"
        if end < start:
            yield end, start
        end = stop
    if end < numel:
        yield end, numel


def _is_embedding(name: str) -> bool:
    """Whether it is called as Hugging Face models call embeddings: embed_tokens, embeddings, wte, wpe."""
    return any("embed" in component or component in ("wte", "wpe") for component in name.split("."))
