"""Merging contributions to one pseudo-gradient: merge rules (`outer.merge`), chunk by chunk, and
flattening of the merged matrices' singular values (`outer.flatten`).

The weight of each contribution is decided in `robust`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from diloco.config import registry
from diloco.outer.fragments import Fragment
from diloco.outer.payloads import Codec, buffer

SMALLEST_NORM = 2.0**-126
"""Smaller norms are subnormal in fp32; hardware that flushes them to zero would divide by zero."""
CANCELLED = 2.0**-20  # relative to the weight: a shorter sum of directions is rounding error
SMALLEST_SINGULAR = 1e-6  # relative to the largest: smaller singular values are rounding error

Piece = tuple[int, int]
"""A half-open range of a chunk: the part of a tensor that lies in it."""


class Part(NamedTuple):
    """A chunk of one contribution: its values are the decoded payload (uint8) times `scale`, and
    have this weight, which is positive."""

    codec: Codec
    payload: Tensor
    weight: float
    scale: float = 1.0

    def values(self, numel: int) -> Tensor:
        """Values (numel,) fp32, in memory that the next call may overwrite: clone to keep."""
        values = self.codec.values(self.payload, numel)
        if self.scale == 1.0:
            return values
        return torch.mul(values, self.scale, out=buffer("chunk", torch.float32, numel))

    def add_to_(self, out: Tensor) -> None:
        """out += weight * values."""
        self.codec.accumulate_(out, self.payload, self.weight * self.scale)


class MergeRule(ABC):
    """A merge rule. It keeps no state, so threads share it."""

    name: ClassVar[str]

    @abstractmethod
    def merge(self, out: Tensor, parts: Sequence[Part], pieces: Sequence[Piece]) -> None:
        """Fill `out`, (n,) fp32, a chunk, with the average of its parts, at least one.

        Their order is the same on every peer. The pieces are those of `directional_pieces`.
        """


class Mean(MergeRule):
    """The weighted mean: sum(weight scale x) / sum(weight)."""

    name = "mean"

    def merge(self, out: Tensor, parts: Sequence[Part], pieces: Sequence[Piece]) -> None:
        out.zero_()
        for part in parts:
            part.add_to_(out)
        out.div_(sum(part.weight for part in parts))


class RadialDirectional(MergeRule):
    """The mean direction with the mean norm, piece by piece (Decoupled DiLoCo, arXiv 2604.21428):

        (sum w |v| / sum w) * unit(sum w unit(v))

    So the step does not shrink as 1 / sqrt(peers) when peers disagree, and one outer learning rate
    fits any number of peers. The paper averages tensor by tensor; pieces need no more than a chunk
    at a time. Elements outside all pieces get the plain mean, as embeddings do in the paper.
    Directions that cancel each other give zeros: their unit vector would be rounding errors.
    """

    name = "rda"

    @torch.no_grad()
    def merge(self, out: Tensor, parts: Sequence[Part], pieces: Sequence[Piece]) -> None:
        outside, norms = list(_between(pieces, out.numel())), [0.0] * len(pieces)
        total = sum(part.weight for part in parts)
        out.zero_()
        for part in parts:
            values = part.values(out.numel())
            for start, stop in outside:
                out[start:stop].add_(values[start:stop], alpha=part.weight)
            for index, (start, stop) in enumerate(pieces):
                norm = _norm(values[start:stop])
                if norm >= SMALLEST_NORM:  # weight / norm may exceed fp32, unit vectors do not
                    unit = buffer("displacement", torch.float32, stop - start)
                    torch.div(values[start:stop], norm, out=unit)
                    out[start:stop].add_(unit, alpha=part.weight)
                    norms[index] += part.weight * norm
        for start, stop in outside:
            out[start:stop].div_(total)
        for (start, stop), norm_sum in zip(pieces, norms, strict=True):
            norm = _norm(out[start:stop])
            if norm < CANCELLED * total:
                out[start:stop].zero_()
            else:
                out[start:stop].mul_(norm_sum / total / norm)


MERGE_RULES: registry.Registry[MergeRule] = registry.MERGE_RULES
for _rule in (Mean(), RadialDirectional()):
    MERGE_RULES.add(_rule.name, _rule)


def directional_pieces(fragment: Fragment, start: int, stop: int) -> list[Piece]:
    """The pieces of [start, stop) of a fragment, relative to start: one for each tensor that is not
    an embedding, as Hugging Face models call these (embed_tokens, embeddings, wte, wpe)."""

    def is_embedding(name: str) -> bool:
        return any("embed" in part or part in ("wte", "wpe") for part in name.split("."))

    slices = fragment.locate(start, stop)
    return [(at, at + part.numel) for at, part in slices if not is_embedding(part.name)]


def _norm(x: Tensor) -> float:
    """L2 norm in float64, because squares of magnitudes up to LIMIT overflow fp32."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def _between(pieces: Sequence[Piece], numel: int) -> Iterator[Piece]:
    end = 0
    for start, stop in [*pieces, (numel, numel)]:
        if end < start:
            yield end, start
        end = stop


# -- outer.flatten ---------------------------------------------------------------------------------


class Matrix(NamedTuple):
    """Whole rows of a matrix, in the flat vector of a fragment."""

    start: int
    rows: int
    columns: int


def matrices(fragment: Fragment, shapes: Mapping[str, Sequence[int]]) -> list[Matrix]:
    """The matrices inside the model, by Muon's rule: two dimensions, and neither embedding nor
    head.

    Where a fragment ends inside a matrix, the whole rows on each side count as a matrix; a row that
    is cut, or alone, belongs to none.
    """
    result = []
    for at, piece in fragment.locate(0, fragment.numel):
        shape = shapes[piece.name]
        if len(shape) != 2 or "embed" in piece.name or "head" in piece.name:
            continue
        columns = shape[1]
        first, last = -(-piece.start // columns), piece.stop // columns
        if last - first > 1 and columns > 1:
            result.append(Matrix(at + first * columns - piece.start, last - first, columns))
    return result


@torch.no_grad()
def flatten_(values: Tensor, where: Sequence[Matrix], part: float) -> None:
    """Even out the singular values of each matrix of a merged pseudo-gradient, (numel,) fp32:

        U S V^T   ->   c U S^(1 - part) V^T         c keeps the Frobenius norm; 0 <= part <= 1

    Peers agree on the few directions with large singular values, which an average of AdamW's steps
    therefore favours; in the many others most of what they learn cancels as noise does. With part=1
    all singular values become equal (IsoLoCo, arXiv 2607.03011; Iso-C, arXiv 2502.04959).

    It is (M M^T)^(-part / 2) M, one eigenvalue decomposition of the matrix's shorter side. A matrix
    of zeros stays as it is.
    """
    for start, rows, columns in where:
        matrix = values[start : start + rows * columns].view(rows, columns)
        wide = (matrix if rows <= columns else matrix.T).double()
        norm = torch.linalg.vector_norm(wide)
        if not norm:
            continue
        wide /= norm  # squares of what a codec carries may exceed even float64
        squares, vectors = torch.linalg.eigh(wide @ wide.T)
        squares.clamp_(min=float(squares[-1]) * SMALLEST_SINGULAR**2)
        flat = (vectors * squares ** (-part / 2)) @ (vectors.T @ wide)
        flat *= norm / torch.linalg.vector_norm(flat)
        matrix.copy_(flat if rows <= columns else flat.T)
