"""Judge contributions, so that one bad contribution cannot spoil a version.

`clip` scales norms above factor x the median down to that, and leaves out what points against the
others. Clipping alone bounds the *length* of a lie; the angle is what takes a reversed contribution
out. A lie within the norm and the angle allowed here moves the model, as a back door may. There is
no defence against a majority that colludes, nor against one person with many identities.

Fewer than `MIN_JUDGED` contributions have no majority to compare with. `clip_few` compares them
with earlier ones, with the momentum, and with the author's own. That bounds their length, and takes
out what opposes all of these.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from diloco.outer.payloads import Codec, Layout, norm_of, over_chunks

MIN_JUDGED = 4  # with fewer contributions, or earlier norms, there is no majority
OPPOSED_COSINE = -0.1
"""Least cosine with the mean of the others that is tolerated. Honest pseudo-gradients of one round
agree: all cosines measured over the presets are positive."""
OPPOSED_DEVIATIONS = 4.0
"""Cosines of pure noise deviate by numel ** -0.5, so cosines of few values prove nothing."""
ALIKE_COSINE = 0.9995
"""Contributions with a larger cosine come from the same data. Measured: equal batches 1.0000 with
every codec, .99999 where sums are taken in another order; different data at most .93 in the quick
start, .96 in the experiments, each in a first version, and .9988 with batches of 256 and 4 steps of
SGD. (Over 300 steps the order of sums comes to .988.)"""
ALIKE_VALUES = 1024  # smaller toy models may get equal gradients from different data
RISE = 4 / 3
"""Extra tolerance for norms of earlier rounds: while the learning rate warms up, norms rise up to
threefold from one round to the next."""
SKETCH = 8192  # values of a chunk that are compared
MEMORY = 8  # norms remembered; few, because norms follow the learning rate


@dataclass(frozen=True)
class Judgement:
    """Weight of each contribution to a version, in the order in which they were given: it is
    multiplied with its scale, and averaged with its weight; with weight 0 it is left out."""

    weights: tuple[float, ...]
    scales: tuple[float, ...]
    clipped: tuple[int, ...] = ()  # indices of contributions that were scaled down
    left_out: tuple[int, ...] = ()


def clip(
    norms: Sequence[float], gram: Tensor, weights: Sequence[float], factor: float, numel: int
) -> Judgement:
    """Clip norms at `factor` times their median, and leave out what opposes the others.

    Honest contributions come out with scale 1, so that the mean is the plain one, bit for bit.

    Args:
        norms: L2 norms of n contributions, at least `MIN_JUDGED`. weights: positive.
        gram: (n, n) float64, cosines of the contributions with each other, of `numel` values each.
    """
    limit = factor * statistics.median_low(norms)
    return _judgement(norms, [limit] * len(norms), weights, opposed(gram, numel))


def clip_few(
    norms: Sequence[float],
    weights: Sequence[float],
    expected: float,
    references: Sequence[Tensor],
    numel: int,
    factor: float,
    own: int | None,
) -> Judgement:
    """As `clip`, for fewer than `MIN_JUDGED` contributions.

    A contribution is left out if it opposes every reference. Without an own contribution those are
    a minority at most, because the momentum may have to turn; the others that oppose it may be as
    long as is usual, and no longer.

    Args:
        expected: norm that contributions usually have; 0 if none is known.
        references: (n,) cosines of the contributions with each direction that is known.
        own: index of the author's own contribution, which is neither scaled down nor left out.
    """
    limit, count = _least_cosine(numel), len(norms)
    opposing = [
        i
        for i in range(count)
        if references and all(float(reference[i]) < limit for reference in references)
    ]
    minority = own is not None or 2 * len(opposing) < count
    left_out = tuple(i for i in opposing if i != own and minority)
    usual_limit = RISE * factor * expected if expected else math.inf
    limits = [expected or math.inf if i in opposing else usual_limit for i in range(count)]
    if own is not None:
        limits[own] = math.inf
    for i in left_out:
        limits[i] = math.inf
    return _judgement(norms, limits, weights, left_out)


def _judgement(
    norms: Sequence[float],
    limits: Sequence[float],
    weights: Sequence[float],
    left_out: tuple[int, ...],
) -> Judgement:
    return Judgement(
        tuple(0.0 if i in left_out else weight for i, weight in enumerate(weights)),
        tuple(
            min(1.0, limit / norm) if norm else 1.0
            for norm, limit in zip(norms, limits, strict=True)
        ),
        tuple(i for i, norm in enumerate(norms) if norm > limits[i]),
        left_out,
    )


def _least_cosine(numel: int) -> float:
    return min(OPPOSED_COSINE, -OPPOSED_DEVIATIONS / math.sqrt(numel))


def opposed(gram: Tensor, numel: int) -> tuple[int, ...]:
    """Indices of contributions that point against the mean direction of the others; none if they
    are not a minority.

    The worst one goes first, and the rest are compared again without it: two liars would make an
    honest one look bad.
    """
    limit = _least_cosine(numel)
    left, out = list(range(gram.shape[0])), list[int]()
    while len(left) > 2:
        among = gram[left][:, left]
        with_others = among.sum(1) - among.diagonal()  # <u_i, sum of the others>
        squares = among.sum() - 2 * with_others - among.diagonal()  # |sum of the others| ** 2
        cosines = with_others / squares.clamp_min(1e-12).sqrt()
        worst = int(cosines.argmin())
        if not float(cosines[worst]) < limit:
            break
        out.append(left.pop(worst))
    return tuple(sorted(out)) if 2 * len(out) < gram.shape[0] else ()


def usual(norms: Sequence[float], momentum: Tensor | None) -> float:
    """Expected norm of a contribution: the median of earlier ones; 0 if unknown.

    Before an author knows `MIN_JUDGED` norms, it is the norm of the momentum, which is longer, as
    the momentum sums means.
    """
    if len(norms) >= MIN_JUDGED:
        return statistics.median_low(norms)
    return 0.0 if momentum is None else norm_of(momentum)


class Sketches:
    """Sketches of the contributions to one version, each made when its contribution arrives.

    A *sketch* is some 8,000 values of a chunk at equal distances; a short chunk is its own sketch.
    The distance is odd, so it is in step with no layer's width. A generator that only the author
    knows chooses where each sketch begins, anew for each version, so nobody can be honest in
    exactly the sketched values. A cosine is known to about 0.01 from one chunk, and better from
    several.

    Args:
        up: decodes contributions. layout: where their chunks are. rng: see above.
    """

    def __init__(self, up: Codec, layout: Layout, rng: random.Random) -> None:
        self._up, self._layout = up, layout
        self.taken: list[range] = []  # by chunk: indices of the sketched values in the fragment
        for start, stop in layout.ranges:
            distance = max(1, (stop - start) // SKETCH - 1 | 1)
            self.taken.append(range(start + rng.randrange(distance), stop, distance))
        self._ends = list(accumulate(map(len, self.taken)))
        self._kept = WeakTensorKeyDictionary()  # sketches by payload

    def add(self, payload: Tensor) -> float:
        """L2 norm of a whole contribution (uint8), whose sketch is kept for as long as the tensor.
        `PayloadError` if it is invalid."""
        parts = self._layout.split(payload)
        sketch = torch.empty(self._ends[-1], dtype=torch.float32)

        def add(chunk: int) -> float:
            (part, (start, stop)), taken, end = parts[chunk], self.taken[chunk], self._ends[chunk]
            values, norm = self._up.measured(part, stop - start)
            values = values[taken.start - start :: taken.step]
            # scale the sketch to about the norm of the chunk
            torch.mul(values, math.sqrt(taken.step), out=sketch[end - len(taken) : end])
            return norm

        norm = math.hypot(*over_chunks(add, range(len(parts))))
        self._kept[payload] = sketch
        return norm

    def compare(self, payloads: Sequence[Tensor]) -> Comparison:
        """Compare whole contributions; those that arrived before this version are sketched now."""
        for payload in payloads:
            if payload not in self._kept:
                self.add(payload)
        return Comparison(torch.stack([self._kept[payload] for payload in payloads]), self.taken)


class Comparison:
    """The directions of the contributions to one version, as far as sketches show them.

    Args:
        sketches: (n, numel) fp32, overwritten. taken: what they are of the whole fragment.

    Attributes:
        numel: how many values of each are compared.
        cosines: (n, n) float64, of the sketches with each other.
    """

    def __init__(self, sketches: Tensor, taken: Sequence[range]) -> None:
        self._sketches, self._taken, self.numel = sketches, taken, sketches.shape[1]
        # normalise magnitudes, to keep squares finite
        self._sketches /= self._sketches.abs().amax(1, keepdim=True).clamp_min(1e-30)
        gram = (self._sketches @ self._sketches.T).double()
        lengths = gram.diagonal().clamp_min(1e-30).sqrt()
        self.cosines = gram / lengths.outer(lengths)

    def cosines_with(self, vector: Tensor) -> Tensor:
        """(n,) float64 cosines of the contributions with a vector (numel,) fp32."""
        parts = [
            vector[taken.start : taken.stop : taken.step] * math.sqrt(taken.step)
            for taken in self._taken
        ]
        sketch, sketches = torch.cat(parts).double(), self._sketches.double()
        lengths = torch.linalg.vector_norm(sketches, dim=1) * torch.linalg.vector_norm(sketch)
        cosines: Tensor = torch.mv(sketches, sketch) / lengths.clamp_min(1e-300)
        return cosines

    def alike(self) -> list[tuple[int, int, float]]:
        """Indices of two contributions that are nearly parallel, and their cosine."""
        if self.numel < ALIKE_VALUES:
            return []
        pairs = (self.cosines.triu(1) > ALIKE_COSINE).nonzero().tolist()
        return [(first, second, float(self.cosines[first, second])) for first, second in pairs]
