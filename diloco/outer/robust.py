"""Merging that one bad contribution cannot spoil: what each contribution counts, from norms and inner products.

    clip           norms above factor x the median are scaled down to it; what points against the others is left out
    trimmed mean   coordinate by coordinate, the largest and smallest values are left out (Yin et al., arXiv 1803.01498)
    CenteredClip   v += mean(min(1, r / |x_i - v|) (x_i - v)), again and again (Karimireddy et al., arXiv 2012.10333)

Clip and CenteredClip give *coefficients*: the merged pseudo-gradient is their combination of the contributions. All
that they need to know is the Gram matrix of the contributions, because every iterate of CenteredClip is itself such a
combination; so they see each value once, whatever the number of iterations. The radius r is the median distance from
the starting point, the contribution whose median distance from the others is least: a fixed one means nothing for
pseudo-gradients, whose length falls with the learning rate.

The order of arrival changes nothing: contributions come in the order of their peers' names.

What this does not do. There is no defence against a majority that colludes, nor against one person with many
identities. Whoever sends what looks like the others' work is believed: a bias that stays below the norm and the angle
allowed here moves the model, as a back door may. Clip alone bounds the *length* of a lie, and a lie at the bound still
counts like an honest contribution; it is the angle that takes a reversed one out. With three contributions or fewer
there is no majority to go by, so nothing is done. And a syncer is trusted with its fragments.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from diloco.config import OuterConfig
from diloco.errors import PayloadError

__all__ = [
    "MIN_PEERS", "Judgement", "Norms", "Rule", "centered_clip", "clip", "norm_of", "opposed", "rule_of",
    "trim_count", "trimmed_mean",
]  # fmt: skip

Rule = Literal["none", "recent", "clip", "trimmed_mean", "centered_clip"]
"""How a syncer goes about it: `recent` folds contributions in as they come, clipped by norms seen before."""

MIN_PEERS = 4
"""Contributions (or norms seen) below which nothing is judged."""
OPPOSED_COSINE = -0.1
"""Honest pseudo-gradients of one round agree: the least cosine against the mean of the others that was measured over
the presets is positive, and a reversed one is at its negative."""
OPPOSED_DEVIATIONS = 4.0
"""Cosines of what is pure noise spread by numel ** -0.5; few values so prove nothing."""
ITERATIONS = 20
"""Of CenteredClip, as in its authors' code."""
RISE = 4 / 3
"""Norms seen before say less than those of the same round: in a warm-up of the learning rate they rise up to threefold
from one round to the next."""
MEMORY = 8
"""Norms remembered per chunk: few, because they follow the learning rate."""
SAFE = 1e15
"""Norms beyond it, or below its inverse, are taken in float64: squares of what a peer may send exceed fp32."""
ABSURD = 1000.0
"""Times the median: no honest pseudo-gradient; refused, where what is only too long is clipped."""


@dataclass(frozen=True)
class Judgement:
    """What becomes of contributions, in the order in which they were given: the merged value is
    sum(coefficient x) / sum(weight) over those that are kept.
    """

    coefficients: tuple[float, ...]
    weights: tuple[float, ...]
    clipped: tuple[int, ...] = ()
    left_out: tuple[int, ...] = ()


def rule_of(settings: OuterConfig) -> Rule:
    """What `outer.robust` comes to with these settings.

    To judge contributions together a syncer keeps their payloads until the version closes. That is cheap where a
    value takes a byte or less, so `auto` does it there; 16- and 32-bit payloads it folds in as they come, and so does
    `clip` where a version has a quorum and may close with one contribution.
    """
    wide = settings.codec_up in ("fp32", "fp16")
    if settings.robust == "auto":
        return "recent" if wide or settings.quorum is not None else "clip"
    if settings.robust == "clip" and settings.quorum is not None:
        return "recent"
    return settings.robust


def clip(norms: Sequence[float], gram: Tensor, weights: Sequence[float], factor: float, numel: int) -> Judgement:
    """Median-norm clip, then without those that oppose the others. Few contributions are all kept as they are.

    Honest contributions come out with coefficient = weight, so that the mean is the plain one, bit for bit.

    Args:
        norms: L2 norms of n contributions.
        gram: (n, n) float64, cosines of the contributions with each other.
        weights: what they count in the mean; finite, positive.
        factor: times the median norm that are allowed.
        numel: values of a contribution.
    """
    if len(norms) < MIN_PEERS:
        return Judgement(tuple(weights), tuple(weights))
    limit = factor * statistics.median_low(norms)
    clipped = tuple(i for i, norm in enumerate(norms) if norm > limit)
    left_out = opposed(gram, numel)
    scales = [limit / norm if norm > limit else 1.0 for norm in norms]
    kept = [0.0 if i in left_out else weight for i, weight in enumerate(weights)]
    return Judgement(
        tuple(weight * scale for weight, scale in zip(kept, scales, strict=True)), tuple(kept), clipped, left_out
    )


def opposed(gram: Tensor, numel: int) -> tuple[int, ...]:
    """Contributions that point against the mean direction of the others; none when they are not a clear minority.

    The worst one goes first, and the others are looked at without it: two that lie would make an honest one look bad.

    Args:
        gram: (n, n) float64, cosines. numel: values of a contribution.
    """
    limit = min(OPPOSED_COSINE, -OPPOSED_DEVIATIONS * numel**-0.5)
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


def centered_clip(norms: Sequence[float], gram: Tensor, weights: Sequence[float]) -> Judgement:
    """CenteredClip in coefficients; arguments as of `clip`."""
    count = len(norms)
    if count < MIN_PEERS:
        return Judgement(tuple(weights), tuple(weights))
    unit = max(statistics.median_low(norms), 1e-300)
    lengths = (torch.tensor(norms, dtype=torch.float64) / unit).clamp_max(1e12)  # so that squares stay finite
    products = gram * lengths.outer(lengths)
    squares = products.diagonal()
    between = (squares.unsqueeze(0) + squares.unsqueeze(1) - 2 * products).clamp_min(0).sqrt()
    start = int(between.median(1).values.argmin())
    radius = float(between[start].median())
    shares = torch.tensor(weights, dtype=torch.float64)
    shares = shares / shares.sum()
    center = torch.zeros(count, dtype=torch.float64)
    center[start] = 1.0
    for _ in range(ITERATIONS):
        from_center = (squares - 2 * products @ center + center @ products @ center).clamp_min(0).sqrt()
        pulls = shares * (radius / from_center.clamp_min(1e-300)).clamp_max(1.0)
        center = center * (1 - pulls.sum()) + pulls
    coefficients = tuple(center.tolist())
    total = sum(coefficients)  # 1 but for rounding; the mean divides by it
    return Judgement(coefficients, tuple(total / count for _ in range(count)))


def trim_count(count: int, trim: float) -> int:
    """How many of `count` values the trimmed mean leaves out at each end: at least one, and some are kept."""
    return 0 if count < MIN_PEERS else min(max(1, int(trim * count)), (count - 1) // 2)


def trimmed_mean(values: Tensor, trim: float) -> Tensor:
    """(n, m) -> (m,): the mean without the `trim_count` largest and smallest values of each coordinate, unweighted."""
    count = values.shape[0]
    left_out = trim_count(count, trim)
    return values.sort(dim=0).values[left_out : count - left_out].mean(0)


def norm_of(x: Tensor) -> float:
    """L2 norm of (n,) fp32 values, finite for all that a codec carries."""
    norm = float(torch.linalg.vector_norm(x))
    return norm if 1 / SAFE < norm < SAFE else float(torch.linalg.vector_norm(x, dtype=torch.float64))


class Norms:
    """Norms of recent contributions, chunk by chunk, for those that are folded in as they come.

    Nothing is known after a takeover, so the first three contributions to a fragment pass as they are.
    """

    def __init__(self) -> None:
        self._recent: dict[tuple[int, int], deque[float]] = {}

    def see(self, fragment: int, chunk: int, norm: float, factor: float) -> float:
        """What a chunk of this norm is multiplied with so that it is not too long; it is remembered.

        Raises PayloadError, and remembers nothing, for a norm that is `ABSURD`.
        """
        median = self.check(fragment, chunk, norm)
        limit = RISE * factor * median if median else math.inf
        scale = limit / norm if norm > limit else 1.0
        self._recent.setdefault((fragment, chunk), deque(maxlen=MEMORY)).append(norm * scale)
        return scale

    def check(self, fragment: int, chunk: int, norm: float) -> float:
        """The median of the recent norms, 0 while there are few; PayloadError for a norm that is `ABSURD` beside it."""
        recent = self._recent.get((fragment, chunk), ())
        median = statistics.median_high(recent) if len(recent) >= MIN_PEERS else 0.0
        if median and norm > ABSURD * median:
            raise PayloadError(f"a contribution of norm {norm:.3g} is absurd where {median:.3g} is usual")
        return median

    def forget(self, fragment: int) -> None:
        """This peer is syncer of the fragment no more."""
        self._recent = {key: norms for key, norms in self._recent.items() if key[0] != fragment}
