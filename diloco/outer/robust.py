"""The math of judging: how much each contribution counts, so that one bad contribution cannot spoil a version.

`clip` scales norms above factor x the median down to that, and leaves out what points against the others. It needs only
the norms and the Gram matrix of the contributions. The order of arrival changes nothing: contributions are taken in the
order of their peers' names.

Limits. There is no defence against a majority that colludes, nor against one person with many identities. A lie that
stays within the norm and the angle allowed here moves the model, as a back door may. Clipping alone bounds the *length*
of a lie; the angle is what takes a reversed contribution out. Fewer than `MIN_JUDGED` contributions have no majority to
compare with. They are compared with earlier ones, with the momentum, and with the syncer's own. That bounds their
length, and takes out what opposes all of these.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.errors import PayloadError
from diloco.outer.payloads import norm_of

__all__ = [
    "MIN_JUDGED", "Judgement", "Norms", "alike", "clip", "clip_few", "opposed", "opposes",
]  # fmt: skip

MIN_JUDGED = 4  # Fewer contributions to a version, or fewer norms seen before, are not judged.
OPPOSED_COSINE = -0.1
"""Least cosine with the mean of the others that is tolerated. Honest pseudo-gradients of one round agree: all cosines
measured over the presets are positive, and a reversed contribution has the negative of an honest one's."""
OPPOSED_DEVIATIONS = 4.0
"""Cosines of pure noise have a standard deviation of numel ** -0.5, so cosines of few values prove nothing."""
ALIKE_COSINE = 0.9995
"""Contributions with a larger cosine come from the same data. Measured: equal batches 1.0000 with every codec, .99999
where sums are taken in another order; different data at most .93 in the quick start, .96 in the experiments, each in a
first version, and .9988 with batches of 256 and 4 steps of SGD. (Over 300 steps the order of sums comes to .988.)"""
ALIKE_VALUES = 1024  # Fewer are a toy, whose different data may well say the same.
RISE = 4 / 3
"""Extra tolerance for norms of earlier rounds, which say less than norms of the same round: while the learning rate
warms up, norms rise up to threefold from one round to the next."""
MEMORY = 8  # norms remembered per chunk; few, because norms follow the learning rate
ABSURD = 1000.0
"""No honest pseudo-gradient has this many times the median norm; it is refused, where shorter ones are clipped."""


@dataclass(frozen=True)
class Judgement:
    """What each contribution to a version counts, in the order in which they were given.

    With `outer.merge=mean` the merged value is sum(coefficient x) / sum(weight). A contribution with coefficient below
    weight is scaled down by their quotient before any average takes it; one with weight 0 is left out.
    """

    coefficients: tuple[float, ...]
    weights: tuple[float, ...]
    clipped: tuple[int, ...] = ()  # indices of contributions that were scaled down
    left_out: tuple[int, ...] = ()

    @property
    def scales(self) -> list[float]:
        """What each contribution is multiplied with before it is averaged; 0 for one that is left out."""
        pairs = zip(self.coefficients, self.weights, strict=True)
        return [coefficient / weight if weight else 0.0 for coefficient, weight in pairs]


def clip(norms: Sequence[float], gram: Tensor, weights: Sequence[float], factor: float, numel: int) -> Judgement:
    """Clip norms at `factor` times their median, and leave out the contributions that oppose the others.

    Honest contributions come out with coefficient = weight, so that the mean is the plain one, bit for bit.

    Args:
        norms: L2 norms of n contributions, at least `MIN_JUDGED`.
        gram: (n, n) float64, cosines of the contributions with each other.
        weights: what they count in the mean; finite, positive.
        factor: how many times the median norm is allowed.
        numel: how many values of each contribution the cosines compare.
    """
    limit = factor * statistics.median_low(norms)
    clipped = tuple(i for i, norm in enumerate(norms) if norm > limit)
    left_out = opposed(gram, numel)
    scales = [limit / norm if norm > limit else 1.0 for norm in norms]
    kept = [0.0 if i in left_out else weight for i, weight in enumerate(weights)]
    coefficients = tuple(weight * scale for weight, scale in zip(kept, scales, strict=True))
    return Judgement(coefficients, tuple(kept), clipped, left_out)


def clip_few(
    norms: Sequence[float], weights: Sequence[float], usual: float, references: Sequence[Tensor], numel: int,
    factor: float, own: int | None,
) -> Judgement:  # fmt: skip
    """As `clip`, for fewer than `MIN_JUDGED` contributions: they are compared with what came before, and with the own.

    A contribution is left out if it opposes every reference. Without an own contribution those are a minority at most,
    because the momentum may have to turn.

    Args:
        usual: norm of earlier contributions; 0 if none is known.
        references: directions that are known, the (n,) cosines of the contributions with each. numel: as in `clip`.
        own: index of the syncer's own contribution, which is neither scaled down nor left out.
    """
    limit = _least_cosine(numel)
    out = [i for i in range(len(norms)) if references and all(float(cosines[i]) < limit for cosines in references)]
    left_out = tuple(i for i in out if i != own and (own is not None or 2 * len(out) < len(norms)))
    longest = RISE * factor * usual if usual else math.inf
    clipped = tuple(i for i, norm in enumerate(norms) if norm > longest and i != own and i not in left_out)
    kept = tuple(0.0 if i in left_out else weight for i, weight in enumerate(weights))
    coefficients = tuple(kept[i] * (longest / norms[i] if i in clipped else 1.0) for i in range(len(norms)))
    return Judgement(coefficients, kept, clipped, left_out)


def _least_cosine(numel: int) -> float:
    return min(OPPOSED_COSINE, -OPPOSED_DEVIATIONS / math.sqrt(numel))


def opposes(x: Tensor, norm: float, reference: Tensor, reference_norm: float) -> bool:
    """Whether (n,) values of that norm point against a reference; False if either is zero."""
    if not norm or not reference_norm:
        return False
    cosine = float(torch.dot(x, reference)) / norm / reference_norm
    return cosine < _least_cosine(x.numel())


def opposed(gram: Tensor, numel: int) -> tuple[int, ...]:
    """Indices of contributions that point against the mean direction of the others; none if they are not a minority.

    The worst one goes first, and the rest are compared again without it: two liars would make an honest one look bad.
    The arguments are those of `clip`.
    """
    limit = _least_cosine(numel)
    left, out = list(range(gram.shape[0])), list[int]()
    while len(left) > 2:
        among = gram[left][:, left]
        with_others = among.sum(1) - among.diagonal()  # <u_i, sum of the others>
        others = (among.sum() - 2 * with_others - among.diagonal()).clamp_min(1e-12).sqrt()  # |sum of the others|
        cosines = with_others / others
        worst = int(cosines.argmin())
        if not float(cosines[worst]) < limit:
            break
        out.append(left.pop(worst))
    return tuple(sorted(out)) if 2 * len(out) < gram.shape[0] else ()


def alike(gram: Tensor, numel: int) -> list[tuple[int, int, float]]:
    """Indices of two contributions that are nearly parallel, and their cosine; the arguments are those of `clip`."""
    if numel < ALIKE_VALUES:
        return []
    pairs = (gram.triu(1) > ALIKE_COSINE).nonzero().tolist()
    return [(one, other, float(gram[one, other])) for one, other in pairs]


class Norms:
    """Norms of recent contributions to one fragment, chunk by chunk; clips contributions that are folded in on arrival.

    A new syncer knows no norms. Until it knows `MIN_JUDGED`, the norm of the momentum takes their place. A momentum
    that sums means is longer than these. Without one, as at version 0, contributions pass as they are.

    Attributes:
        whole: norms of whole contributions, as they were merged.
    """

    def __init__(self) -> None:
        self.whole: deque[float] = deque(maxlen=MEMORY)
        self._recent: dict[int, deque[float]] = {}

    def usual(self, momentum: Tensor | None) -> float:
        """The norm that a whole contribution may be expected to have; 0 if nothing says it."""
        if len(self.whole) >= MIN_JUDGED:
            return statistics.median_low(self.whole)
        return 0.0 if momentum is None else norm_of(momentum)

    def see(self, chunk: int, norm: float, factor: float, opposes: bool = False, momentum: float = 0.0) -> float:
        """Remember the norm of a chunk, and return what the chunk is multiplied with, 1 unless it is too long.

        A chunk that opposes the momentum may be as long as is usual, and no longer. `momentum` is the norm there.
        Raises PayloadError, and remembers nothing, for a norm that is `ABSURD`.
        """
        usual = self.check(chunk, norm) or momentum
        limit = (1.0 if opposes else RISE * factor) * usual if usual else math.inf
        scale = limit / norm if norm > limit else 1.0
        self._recent.setdefault(chunk, deque(maxlen=MEMORY)).append(norm * scale)
        return scale

    def check(self, chunk: int, norm: float) -> float:
        """The median of the recent norms, or 0 while there are few. Raises PayloadError for a norm that is `ABSURD`."""
        recent = self._recent.get(chunk, ())
        median = statistics.median_high(recent) if len(recent) >= MIN_JUDGED else 0.0
        if median and norm > ABSURD * median:
            raise PayloadError(f"a contribution of norm {norm:.3g} is absurd where {median:.3g} is usual")
        return median
