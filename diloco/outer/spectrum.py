"""Evens out the singular values of a merged pseudo-gradient, matrix by matrix (`outer.flatten`).

    U S V^T   ->   c U S^(1 - part) V^T         c keeps the Frobenius norm

Peers agree on the few directions with large singular values, which an average of AdamW's steps
therefore favours; in the many others they learn too, and most of it cancels as noise does. With
part=1 all singular values become equal (IsoLoCo, arXiv 2607.03011; Iso-C, arXiv 2502.04959), with
0.5 the largest ones are damped.

The factor is a power of the smaller Gram matrix, (M M^T)^(-part / 2) M, so no singular vectors are
needed. It costs one eigenvalue decomposition of the matrix's shorter side, on the author only: the
others apply the update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from diloco.outer.fragments import Fragment

__all__ = ["Matrix", "flatten_", "matrices"]

# Singular values below this part of the largest one are rounding errors, and raised no more than
# it.
_SMALLEST = 1e-6


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
    found = []
    for at, piece in fragment.locate(0, fragment.numel):
        shape = shapes[piece.name]
        if len(shape) != 2 or "embed" in piece.name or "head" in piece.name:
            continue
        columns = shape[1]
        first, last = -(-piece.start // columns), piece.stop // columns
        if last - first > 1 and columns > 1:
            found.append(Matrix(at + first * columns - piece.start, last - first, columns))
    return found


@torch.no_grad()
def flatten_(values: Tensor, where: Sequence[Matrix], part: float) -> None:
    """Raise the singular values of each matrix to the power 1 - part, and keep its norm; values
    (numel,) fp32, finite.

    A matrix of zeros stays as it is. `part` is 0 to 1.
    """
    for start, rows, columns in where:
        matrix = values[start : start + rows * columns].view(rows, columns)
        wide = (matrix if rows <= columns else matrix.T).double()
        norm = torch.linalg.vector_norm(wide)
        if not norm:
            continue
        wide /= norm  # squares of what a codec carries may exceed even float64
        squares, vectors = torch.linalg.eigh(wide @ wide.T)
        squares.clamp_(min=float(squares[-1]) * _SMALLEST**2)
        flat = (vectors * squares ** (-part / 2)) @ (vectors.T @ wide)
        flat *= norm / torch.linalg.vector_norm(flat)
        matrix.copy_(flat if rows <= columns else flat.T)
