"""Claims of work: what a contribution may claim and weigh, by what the other peers do. Sans-IO.

    header  -> `impossible`   no honest peer claims that, whatever happened to it
    weights -> `Weights`      at most twice the median of their version

A peer of any pace is merged at its pace: what it claims is limited per contribution, and so is what that weighs.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping

from diloco.config import OuterConfig
from diloco.protocol.messages.bulk import Contribution

__all__ = ["Weights", "capped", "impossible"]

MOST_CYCLES = 8  # in the steps of one contribution; a peer that is in step sends one cycle, and after mishaps a few
HEAVIEST = 2.0  # times the median weight
KNOWN = 4  # Fewer weights of earlier contributions say nothing of another one.
MEMORY = 8  # weights that are remembered


def impossible(header: Contribution, tokens_per_step: int | None, sync_every: int) -> str | None:
    """Why no honest peer makes these claims, in one line; None when one may.

    Args:
        tokens_per_step: of the manifest; None where a training loop counts in its own way.
        sync_every: H, the inner steps of a cycle.
    """
    if tokens_per_step is not None and header.tokens > header.steps * tokens_per_step:
        return f"{header.tokens} tokens in {header.steps} steps are claimed, and a step has {tokens_per_step}"
    if header.steps > MOST_CYCLES * sync_every:
        return f"{header.steps} steps are claimed in one contribution, and a cycle has {sync_every}"
    return None


def capped(weights: Mapping[str, float]) -> dict[str, float]:
    """Weights (or work, see `forks`) of at most twice their median, which caps neither one nor two of them."""
    most = HEAVIEST * statistics.median(weights.values()) if weights else 0.0
    return {peer: min(weight, most) for peer, weight in weights.items()}


class Weights:
    """What contributions to one fragment weigh (`outer.weights`), and the newest weights, for those folded in early.

    Equal contributions have weight 1, so that sums of 4- and 8-bit payloads are exact in fp32, in any order of arrival.
    """

    def __init__(self, settings: OuterConfig) -> None:
        self._kind = settings.weights
        self._recent: deque[float] = deque(maxlen=MEMORY)
        self._unit = 0.0

    def offered(self, tokens: int, steps: int) -> None:
        """The first contribution to a version has the weight 1, if it is folded in as it arrives."""
        self._unit = self._unit or self._alone(tokens, steps)

    def on_arrival(self, tokens: int, steps: int) -> float:
        """The weight of a contribution while the others to its version are not known.

        It is over that of the first one offered. The cap is twice the median of the newest weights before the version.
        """
        self.offered(tokens, steps)  # it is unset if this one was offered for the version before
        return self._alone(tokens, steps) / self._unit

    def _alone(self, tokens: int, steps: int) -> float:
        raw = self._raw(tokens, steps)
        return raw if len(self._recent) < KNOWN else min(raw, HEAVIEST * statistics.median(self._recent))

    def together(self, counts: Mapping[str, tuple[int, int]]) -> dict[str, float]:
        """The weights of all contributions to a version, of so many tokens and steps, at most twice their median.

        They are over the weight of the first peer by name, independent of the order of arrival.
        """
        weights = capped({peer: self._raw(*counts[peer]) for peer in sorted(counts)})
        unit = next(iter(weights.values()))
        return {peer: weight / unit for peer, weight in weights.items()}

    def published(self, counts: Iterable[tuple[int, int]]) -> None:
        """A version of these contributions is made."""
        weights = {str(number): self._raw(*each) for number, each in enumerate(counts)}
        self._recent.extend(capped(weights).values())

    def restart(self) -> None:
        """The next version collects from now on."""
        self._unit = 0.0

    def _raw(self, tokens: int, steps: int) -> float:
        """What a contribution weighs before any cap."""
        match self._kind:
            case "tokens":
                return float(tokens)
            case "tokens2_per_step":  # Decoupled DiLoCo, arXiv 2604.21428
                return tokens**2 / steps
            case _:
                return 1.0
