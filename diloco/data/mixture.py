"""Several sources as one endless list, so much of each.

The list is made of blocks of `MIXTURE_BLOCK` sequences. In every block each source has its part, to
one sequence, in a random order (if sources took turns, a shard could read one source only), and
continues where it stopped in the block before. So a number alone says which source a sequence is
from and how many of that source come before it. Each source begins its next epoch when it is used
up, at its own pace.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from diloco.config import MIXTURE_BLOCK
from diloco.data.numbered import EndlessList
from diloco.data.packing import permuted


class Mixture:
    """Sources with counts (sequences in a block), as one `EndlessList`. All have sequences of the
    same length."""

    def __init__(
        self, names: Sequence[str], sources: Sequence[EndlessList], weights: Sequence[float]
    ) -> None:
        self.names = names
        self.sources = sources
        self.counts = counts_of(weights)
        content = [
            f"{name}/{count}/{one.digest}"
            for name, count, one in zip(names, self.counts, sources, strict=True)
        ]
        self.digest = blake3(" ".join(content).encode()).hexdigest()[:16]

    def read(self, numbers: NDArray[np.int64], order: str) -> NDArray[Any]:
        sources, ranks = places(numbers, order, self.counts)
        named = enumerate(zip(self.names, self.sources, strict=True))
        rows = np.concatenate(
            [one.read(ranks[sources == index], f"{order}/{name}") for index, (name, one) in named]
        )
        found = np.empty_like(rows)
        found[np.argsort(sources, kind="stable")] = rows
        return found


def counts_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Sequences of each source in a block, which are as near to the weights as whole numbers can
    be."""
    exact = np.asarray(weights, dtype=np.float64) * (MIXTURE_BLOCK / sum(weights))
    counts = np.floor(exact).astype(int)
    missing = MIXTURE_BLOCK - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    return tuple(counts.tolist())


def places(
    numbers: NDArray[np.int64], order: str, counts: tuple[int, ...]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each number, (N,), the index of its source, and how many sequences of that source come
    before it: two (N,)."""
    blocks, positions = np.divmod(numbers, MIXTURE_BLOCK)
    sources, ranks = np.empty_like(positions), np.empty_like(positions)
    for block in np.unique(blocks):
        here = blocks == block
        pattern = _pattern(f"{order}/mixture/{block}", counts)
        sources[here] = pattern[0][positions[here]]
        ranks[here] = block * np.asarray(counts)[sources[here]] + pattern[1][positions[here]]
    return sources, ranks


@functools.lru_cache(maxsize=16)
def _pattern(key: str, counts: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each position in a block, its source, and how many positions before it have the same
    one."""
    numbers = permuted(np.arange(MIXTURE_BLOCK), MIXTURE_BLOCK, key)
    sources = np.searchsorted(np.cumsum(counts), numbers, side="right")
    ranks = np.empty_like(sources)
    for index, count in enumerate(counts):
        ranks[sources == index] = np.arange(count)
    return sources, ranks
