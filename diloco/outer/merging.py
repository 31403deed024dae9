"""Merge rules: how the contributions to a version become one pseudo-gradient. `RULES` has the class for every name.

    Average   outer.merge     mean, rda                             adds contributions to a sum, one by one
    Judge     outer.robust    clip, trimmed_mean, centered_clip     sees all contributions of a version at once

An average folds each contribution into the sum as it arrives. A judge has them kept (`Staged`), says what each counts
(`judge`), and merges them chunk by chunk (`merge_`), with the average unless it has its own way. The math of these
rules is in `rda.py` and `robust.py`.

A rule touches one chunk at a time and keeps no state, so threads may share it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from diloco.config import OuterConfig
from diloco.errors import ConfigError
from diloco.outer.optimizer import mean_
from diloco.outer.payloads import Codec, buffer
from diloco.outer.rda import Piece, add_directions_, radial_directional_
from diloco.outer.robust import Judgement, centered_clip, clip, trimmed_mean
from diloco.outer.staged import Staged

__all__ = ["RULES", "Average", "Coordinatewise", "Judge", "MergeRule", "Sum", "average_of", "judge_of"]


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


class MergeRule(ABC):
    """One value of `outer.merge` or `outer.robust`."""

    name: ClassVar[str]

    def __init__(self, settings: OuterConfig) -> None:
        self.settings = settings


class Average(MergeRule):
    """A rule that needs one contribution at a time.

    A syncer that folds contributions in as they arrive decodes each of them once, and needs one fp32 copy for the sum.
    """

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


class Judge(MergeRule):
    """A rule that compares all contributions of a version with each other.

    It decides in the order of the peers' names, so that the order of arrival changes no bit.
    """

    def judge(self, staged: Staged, peers: Sequence[str], weights: Sequence[float]) -> Judgement:
        """What each of these contributions counts; they are at least `MIN_JUDGED`. Their weights, by default."""
        return Judgement.plain(weights)

    def merge_(
        self, into: Sum, staged: Staged, chunk: int, peers: Sequence[str], judged: Judgement, average: Average
    ) -> None:
        """Turn an empty sum into the merged chunk; by default into `outer.merge`'s average, as judged."""
        for peer, weight, scale in zip(peers, judged.weights, judged.scales, strict=True):
            if weight:
                average.add_encoded_(into, staged.codec, staged.payload(peer, chunk), weight, scale)
                into.weight += weight
        average.average_(into)


class Clip(Judge):
    """Scales down what is longer than `outer.clip_factor` medians, and leaves out what opposes the others."""

    name = "clip"

    def judge(self, staged: Staged, peers: Sequence[str], weights: Sequence[float]) -> Judgement:
        gram, numel = staged.cosines(peers)
        return clip(staged.norms(peers), gram, weights, self.settings.clip_factor, numel)


class CenteredClip(Judge):
    """CenteredClip (Karimireddy et al., arXiv 2012.10333)."""

    name = "centered_clip"

    def judge(self, staged: Staged, peers: Sequence[str], weights: Sequence[float]) -> Judgement:
        gram, _ = staged.cosines(peers)
        return centered_clip(staged.norms(peers), gram, weights)


class Coordinatewise(Judge):
    """A judge that takes one coordinate after another, and needs all values of a chunk at once.

    Memory: one decoded chunk for each contribution, while a chunk is merged.
    """

    @abstractmethod
    def combine(self, values: Tensor, weights: Sequence[float]) -> Tensor:
        """(n, m) fp32 values of n contributions -> (m,) fp32."""

    def merge_(
        self, into: Sum, staged: Staged, chunk: int, peers: Sequence[str], judged: Judgement, average: Average
    ) -> None:
        into.total.copy_(self.combine(staged.decoded(peers, chunk), judged.weights))


class TrimmedMean(Coordinatewise):
    """The unweighted mean without the largest and smallest values (Yin et al., arXiv 1803.01498)."""

    name = "trimmed_mean"

    def combine(self, values: Tensor, weights: Sequence[float]) -> Tensor:
        return trimmed_mean(values, self.settings.trim)


RULES: dict[str, type[MergeRule]] = {
    one.name: one for one in (Mean, RadialDirectional, Clip, TrimmedMean, CenteredClip)
}
"""The merge rules by name."""


def average_of(settings: OuterConfig) -> Average:
    """The rule that `outer.merge` names. Raises ConfigError for an unknown one."""
    rule = _rule("outer.merge", settings.merge)(settings)
    assert isinstance(rule, Average), f"outer.merge={settings.merge} is not an average"
    return rule


def judge_of(settings: OuterConfig) -> Judge | None:
    """The rule that `outer.robust` names, likewise; None where contributions are folded in as they arrive."""
    if not settings.judged_together:
        return None
    rule = _rule("outer.robust", settings.judging)(settings)
    assert isinstance(rule, Judge), f"outer.robust={settings.judging} is not a judge"
    return rule


def _rule(key: str, name: str) -> type[MergeRule]:
    found = RULES.get(name)
    if found is None:
        raise ConfigError(f"{key}={name} is not known; choose one of {', '.join(RULES)}")
    return found
