"""Contributions that the syncer keeps encoded until a version closes, so that a rule can compare them (see `merging`).

    put        payload, chunk by chunk -> kept, with its norm and a sketch         as it arrives
    norms      L2 norm of each contribution                                        at the close
    cosines    of every two contributions, by their sketches                       at the close
    decoded    the values of a chunk, contribution by contribution                 while it is merged

A *sketch* is some 8,000 values of a chunk at equal distances; a short chunk is its own sketch. The distance is odd, so
it is in step with no layer's width. A generator that only the syncer knows chooses where each sketch begins, anew for
each version, so nobody can be honest in exactly the sketched values. A cosine is known to about 0.01 from one chunk,
and better from several.

Memory: one encoded fragment per contributor, a quarter of a fp32 copy with int8, plus 1/31 of a copy for the sketch.
There is no sum of one fp32 copy then. Time: each payload is decoded twice, once to check and once to merge it.

A contribution that never became whole leaves nothing behind.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from diloco.outer.payloads import Codec
from diloco.outer.robust import Norms, norm_of

__all__ = ["SKETCH", "Staged"]

SKETCH = 8192
"""Values of a chunk that are compared."""


class _Chunk(NamedTuple):
    payload: Tensor  # (nbytes,) uint8
    norm: float
    sketch: Tensor  # (about SKETCH,) fp32


class Staged:
    """Contributions to the next version of one fragment.

    Args:
        sizes: elements of each chunk of the fragment.
        codec: decodes the payloads.
        norms: of recent contributions; one that is absurd beside them is refused.
        rng: chooses where sketches begin; nobody else may be able to foresee it.
    """

    def __init__(self, sizes: Sequence[int], codec: Codec, norms: Norms, rng: random.Random | None = None) -> None:
        self.sizes, self.codec = tuple(sizes), codec
        self._norms = norms
        self._rng = rng or random.SystemRandom()
        self._kept: dict[str, dict[int, _Chunk]] = {}  # by peer and chunk
        self._begin: dict[int, int] = {}

    def put(self, peer: str, chunk: int, payload: Tensor) -> None:
        """Keep a chunk (uint8) in place of an earlier one of this peer; an invalid one raises PayloadError."""
        values = self.codec.values(payload, self.sizes[chunk])
        norm = norm_of(values)
        self._norms.see(chunk, norm, math.inf)
        stride = max(1, len(values) // SKETCH - 1 | 1)
        begin = self._begin.setdefault(chunk, self._rng.randrange(stride))
        sketch = values[begin::stride] * stride**0.5  # as long as the whole chunk
        self._kept.setdefault(peer, {})[chunk] = _Chunk(payload, norm, sketch)

    def norms(self, peers: Sequence[str]) -> list[float]:
        """L2 norms of whole contributions."""
        return [math.hypot(*(chunk.norm for chunk in self._kept[peer].values())) for peer in peers]

    def cosines(self, peers: Sequence[str]) -> tuple[Tensor, int]:
        """(n, n) float64 cosines of the sketches, and how many values each sketch has."""
        chunks = range(len(self.sizes))
        sketches = torch.stack([torch.cat([self._kept[peer][chunk].sketch for chunk in chunks]) for peer in peers])
        largest = sketches.abs().amax(1, keepdim=True)
        sketches /= largest.clamp_min(1e-30)  # keeps squares finite
        gram = (sketches @ sketches.T).double()
        lengths = gram.diagonal().clamp_min(1e-30).sqrt()
        return gram / lengths.outer(lengths), sketches.shape[1]

    def decoded(self, peers: Sequence[str], chunk: int) -> Tensor:
        """(n, elements) fp32, a chunk of each of these peers."""
        values = torch.empty(len(peers), self.sizes[chunk])
        for row, peer in zip(values, peers, strict=True):
            self.codec.decode(self.payload(peer, chunk), row)
        return values

    def payload(self, peer: str, chunk: int) -> Tensor:
        """What a peer sent (uint8)."""
        return self._kept[peer][chunk].payload

    def clear(self) -> None:
        """Forget everything: the version is made, or given up."""
        self._kept.clear()
        self._begin.clear()
