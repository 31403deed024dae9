"""How the contributions to a version become one pseudo-gradient.

An `Average` (`outer.merge`) adds contributions to a sum, one by one: each as it arrives, or, where they are judged
together (`outer.robust`), those that are kept (`Staged`) until the version closes, each with what it counts. The math
is in `rda.py` and `robust.py`.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from diloco.outer.optimizer import mean_
from diloco.outer.payloads import Codec, buffer, norm_of
from diloco.outer.rda import Piece, add_directions_, radial_directional_
from diloco.outer.robust import Judgement, Norms

__all__ = ["AVERAGES", "SKETCH", "Average", "Staged", "Sum"]

SKETCH = 8192  # values of a chunk that are compared


@dataclass
class Sum:
    """What the contributions to one chunk add up to, or their average once `Average.average_` was called."""

    total: Tensor  # (n,) fp32
    pieces: Sequence[Piece]  # the parts of tensors in the chunk; see `rda`
    weight: float = 0.0  # sum of the weights of the contributions
    norms: list[float] = field(default_factory=list)  # for each piece, sum of weight * norm; `rda` only

    def clear(self) -> None:
        """Begin a new version."""
        self.total.zero_()
        self.weight = 0.0
        self.norms.clear()


class Average(ABC):
    """One value of `outer.merge`. It touches one chunk at a time and keeps no state, so threads may share it.

    A syncer that folds contributions in as they arrive decodes each of them once, and needs one fp32 copy for the sum.
    """

    name: ClassVar[str]

    @abstractmethod
    def add_(self, into: Sum, values: Tensor, weight: float, scale: float = 1.0) -> None:
        """Add weight * (scale * values) to a sum, or what the rule makes of that; the caller adds up the weights.

        Values (n,) fp32 are left as they are, unless they lie in this thread's buffer `chunk`.
        """

    @abstractmethod
    def average_(self, into: Sum) -> None:
        """Turn the sum into the average, in place; its weight is positive."""

    def add_encoded_(self, into: Sum, codec: Codec, payload: Tensor, weight: float, scale: float = 1.0) -> None:
        """As `add_`, with encoded values; a codec may have a quicker way. PayloadError leaves the sum as it was."""
        self.add_(into, codec.values(payload, into.total.numel()), weight, scale)


class Mean(Average):
    """The weighted mean."""

    name = "mean"

    def add_(self, into: Sum, values: Tensor, weight: float, scale: float = 1.0) -> None:
        into.total.add_(values, alpha=weight * scale)

    def add_encoded_(self, into: Sum, codec: Codec, payload: Tensor, weight: float, scale: float = 1.0) -> None:
        codec.accumulate_(into.total, payload, weight * scale)

    def average_(self, into: Sum) -> None:
        mean_(into.total, into.weight)


class RadialDirectional(Average):
    """The mean direction with the mean norm, piece by piece (Decoupled DiLoCo, arXiv 2604.21428); see `rda`."""

    name = "rda"

    def add_(self, into: Sum, values: Tensor, weight: float, scale: float = 1.0) -> None:
        if scale != 1.0:
            values = torch.mul(values, scale, out=buffer("chunk", torch.float32, len(values)))
        norms = add_directions_(into.total, values, into.pieces, weight)
        before = into.norms or [0.0] * len(norms)
        into.norms = [one + other for one, other in zip(before, norms, strict=True)]

    def average_(self, into: Sum) -> None:
        radial_directional_(into.total, into.pieces, into.weight, into.norms)


class _Chunk(NamedTuple):
    payload: Tensor  # (nbytes,) uint8
    norm: float
    sketch: Tensor  # (about SKETCH,) fp32


class Staged:
    """Contributions to the next version of one fragment, kept encoded so that a rule can compare them.

    A *sketch* is some 8,000 values of a chunk at equal distances; a short chunk is its own sketch. The distance is odd,
    so it is in step with no layer's width. A generator that only the syncer knows chooses where each sketch begins,
    anew for each version, so nobody can be honest in exactly the sketched values. A cosine is known to about 0.01 from
    one chunk, and better from several.

    Memory: one encoded fragment per contributor, plus 1/31 of a fp32 copy for the sketch.

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
        self._compared: tuple[tuple[str, ...], Tensor] | None = None  # whom `cosines` compared last

    def put(self, peer: str, chunk: int, payload: Tensor) -> None:
        """Keep a chunk (uint8) in place of an earlier one of this peer; an invalid one raises PayloadError."""
        values = self.codec.values(payload, self.sizes[chunk])
        norm = norm_of(values)
        self._norms.see(chunk, norm, math.inf)
        self._kept.setdefault(peer, {})[chunk] = _Chunk(payload, norm, self._sketch(chunk, values))
        self._compared = None

    def _sketch(self, chunk: int, values: Tensor) -> Tensor:
        stride = max(1, len(values) // SKETCH - 1 | 1)
        begin = self._begin.setdefault(chunk, self._rng.randrange(stride))
        sketch: Tensor = values[begin::stride] * math.sqrt(stride)  # as long as the whole chunk
        return sketch

    def norms(self, peers: Sequence[str]) -> list[float]:
        """L2 norms of whole contributions."""
        return [math.hypot(*(chunk.norm for chunk in self._kept[peer].values())) for peer in peers]

    def cosines(self, peers: Sequence[str]) -> tuple[Tensor, int]:
        """(n, n) float64 cosines of the sketches, and how many values each sketch has."""
        numel = sum(len(chunk.sketch) for chunk in self._kept[peers[0]].values())
        if self._compared is None or self._compared[0] != tuple(peers):
            sketches = self._sketches(peers)
            largest = sketches.abs().amax(1, keepdim=True)
            sketches /= largest.clamp_min(1e-30)  # keeps squares finite
            gram = (sketches @ sketches.T).double()
            lengths = gram.diagonal().clamp_min(1e-30).sqrt()
            self._compared = tuple(peers), gram / lengths.outer(lengths)
        return self._compared[1], numel

    def cosines_with(self, vector: Tensor, peers: Sequence[str]) -> Tensor:
        """(n,) float64 cosines of the contributions with a vector of the whole fragment, by their sketches."""
        parts = vector.split_with_sizes(list(self.sizes))
        sketch = torch.cat([self._sketch(chunk, part) for chunk, part in enumerate(parts)]).double()
        sketches = self._sketches(peers)
        lengths = torch.linalg.vector_norm(sketches, dim=1, dtype=torch.float64) * torch.linalg.vector_norm(sketch)
        cosines: Tensor = torch.mv(sketches.double(), sketch) / lengths.clamp_min(1e-300)
        return cosines

    def _sketches(self, peers: Sequence[str]) -> Tensor:
        chunks = range(len(self.sizes))
        return torch.stack([torch.cat([self._kept[peer][chunk].sketch for chunk in chunks]) for peer in peers])

    def add_(self, into: Sum, chunk: int, peers: Sequence[str], judged: Judgement, average: Average) -> None:
        """Add a chunk of these contributions to a sum, as they were judged."""
        for peer, weight, scale in zip(peers, judged.weights, judged.scales, strict=True):
            if weight:
                average.add_encoded_(into, self.codec, self._kept[peer][chunk].payload, weight, scale)
                into.weight += weight

    def clear(self) -> None:
        """Forget everything: the version is made, or given up."""
        self._kept.clear()
        self._begin.clear()
        self._compared = None


AVERAGES: dict[str, type[Average]] = {one.name: one for one in (Mean, RadialDirectional)}
