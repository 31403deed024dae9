"""Contributions checked against data: does what a peer sends lower the loss on what it says that it learned from?

    score = L(theta) - L(theta - beta Delta)          LossScore of Gauntlet (arXiv 2505.21684)

theta are the anchors; only the checked fragment moves. `outer.robust` compares contributions with each other and needs
four of them, with an honest majority. This compares one contribution with data, if the syncer has any.

What it does not see: anything that the loss on these sequences does not show, such as a back door, and anything that
raises the loss by less than the score's error. A syncer does not check its own contribution. The contributor itself
names the sequences, except for the control fragment, whose syncer knows which sequences it leased to which peer.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from diloco.outer.fragments import scatter_
from diloco.outer.held import Judged
from diloco.outer.merging import Staged
from diloco.outer.replica import Replica
from diloco.protocol.fragment import CONTROL_FRAGMENT
from diloco.protocol.ledger import Units, count, intersection
from diloco.protocol.offers import Close
from diloco.protocol.syncer import Syncer
from diloco.swarm.conversations.context import Context
from diloco.swarm.conversations.tasks import in_thread

__all__ = ["Loss", "Score", "SpotChecks"]

Loss = Callable[[Mapping[str, Tensor], Sequence[int]], Sequence[float]]
"""Losses (nats per token) of parameters, given by name, on each of these sequences of the run's list, or on held-out
sequences when there are none. Called in other threads, one call at a time."""

BETA = 0.25
"""Part of a contribution that is tried. A whole honest contribution may raise the loss (4 to 17 in 100 do, measured):
it is longer and noisier than the mean of all, and the other fragments stay where they are. A part says whether the loss
falls in its direction.
"""
SEQUENCES = 16
"""Sequences of one check, out of those that the contribution was learned from. Two passes over them cost little beside
the inner steps of a round. A contributor that names fewer may have picked easy ones; held-out ones are used then."""
MARGIN = 1.5
"""A score may be below 0 by so many of its standard errors: late in a run scores come near 0 and differ by sequence."""


class Score(NamedTuple):
    """Mean gain over the sequences (nats per token), and its standard error."""

    gain: float
    error: float

    @classmethod
    def of(cls, before: Sequence[float], after: Sequence[float]) -> Score:
        """The gain from losses to losses on the same sequences."""
        gains = [one - other for one, other in zip(before, after, strict=True)]
        mean = sum(gains) / len(gains)
        squares = sum((gain - mean) ** 2 for gain in gains)
        return cls(mean, math.sqrt(squares / max(len(gains) - 1, 1) / len(gains)))

    @property
    def fails(self) -> bool:
        """Whether the loss rises for certain, or is not a number."""
        return not self.gain >= -MARGIN * self.error


class SpotChecks:
    """A node's checks of the contributions that it merges as syncer.

    A random generator that only this node knows picks those that are checked. The node's own contribution is never
    checked. When one fails, the version's others are checked too. If half of them or more fail, the anchor or the data
    must be wrong, and none is left out. Without a `seed` the generator takes the operating system's entropy.

    Memory: one copy of the parameters, on their device, while a version is checked. Versions are checked in turn.
    """

    def __init__(self, replica: Replica, seed: str | None = None, loss: Loss | None = None) -> None:
        self.loss = loss
        self._replica = replica
        self._random = Random(seed)
        self._one_at_a_time = asyncio.Lock()

    async def failing(
        self, context: Context, close: Close, syncer: Syncer, staged: Staged, judged: Judged
    ) -> list[str]:
        """The contributors to leave out of a version. Each check is an event.

        `judged` is what `outer.robust` makes of the staged contributions: each is tried with the length that it counts
        with.
        """
        others = [peer for peer in sorted(close.contributors) if peer != context.protocol.me]
        chosen = [peer for peer in others if self._random.random() < self._replica.settings.spot_check]
        if self.loss is None or not chosen:
            return []
        peers, judgement = judged
        parts = {
            peer: min(1.0, coefficient / weight) if weight else 0.0
            for peer, coefficient, weight in zip(peers, judgement.coefficients, judgement.weights, strict=True)
        }
        trials = {peer: (BETA * parts[peer], self._sequences(context, syncer, peer)) for peer in others}
        async with self._one_at_a_time:
            trial = _Trial(self._replica, staged, close.fragment, self.loss)
            scores = await in_thread(trial.scores, trials, chosen)
        failed = [peer for peer, score in scores.items() if score.fails]
        majority = 2 * len(failed) < len(close.contributors)
        for peer, score in scores.items():
            out, data = peer in failed, "leased" if trials[peer][1] else "held-out"
            why = {} if majority or not out else {"why": "half of the contributions fail, or more; so none is left out"}
            context.note(
                "spot_check", fragment=close.fragment, version=close.base_version + 1, peer=peer,
                data=data, score=score.gain, error=score.error, left_out=out and majority, **why,
            )  # fmt: skip
        return failed if majority else []

    def _sequences(self, context: Context, syncer: Syncer, peer: str) -> list[int]:
        """Numbers of some sequences that a contribution was learned from; empty when it names too few."""
        units = syncer.units(peer)
        if syncer.fragment == CONTROL_FRAGMENT:  # its syncer knows which sequences are leased to which peer
            units = intersection(units, context.protocol.accounts.leased_to(peer) or [])
        total = count(units)
        return _at(units, sorted(self._random.sample(range(total), SEQUENCES))) if total >= SEQUENCES else []


class _Trial:
    """The anchors as parameters of a model, of which one fragment moves by a part of one contribution or another."""

    def __init__(self, replica: Replica, staged: Staged, fragment: int, loss: Loss) -> None:
        self._replica, self._staged, self._fragment, self._loss = replica, staged, fragment, loss
        self._parameters: dict[str, Tensor] = {}
        self._before: dict[tuple[int, ...], Sequence[float]] = {}

    def scores(self, trials: Mapping[str, tuple[float, Sequence[int]]], chosen: Sequence[str]) -> dict[str, Score]:
        """Scores of the chosen peers, and of all others once one of them fails.

        `trials` are, for each peer, the part of its contribution that is tried, and the sequences to try it on.
        """
        replica = self._replica
        self._parameters = {name: torch.empty_like(parameter) for name, parameter in replica.parameters.items()}
        # Another fragment may move meanwhile. Its copy is then partly of the next version, in both passes alike.
        for fragment in range(len(replica.fragments)):
            self._place(fragment)
        scores = {peer: self._score(peer, *trials[peer]) for peer in chosen}
        if any(score.fails for score in scores.values()):
            scores |= {peer: self._score(peer, *trials[peer]) for peer in trials if peer not in scores}
        return scores

    def _score(self, peer: str, beta: float, numbers: Sequence[int]) -> Score:
        key = tuple(numbers)
        if key not in self._before:  # held-out sequences are the same for all
            self._before[key] = self._loss(self._parameters, numbers)
        self._place(self._fragment, peer, beta)
        after = self._loss(self._parameters, numbers)
        self._place(self._fragment)
        return Score.of(self._before[key], after)

    def _place(self, fragment: int, peer: str = "", beta: float = 0.0) -> None:
        """The parameters of a fragment become its anchor, less a part of a contribution."""
        replica = self._replica
        for chunk, (start, stop) in enumerate(replica.chunks[fragment]):
            values = replica.anchors[fragment][start:stop]
            if peer:
                values = torch.add(values, self._staged.decoded([peer], chunk)[0], alpha=-beta)
            scatter_(self._parameters, replica.fragments[fragment], start, stop, values)


def _at(units: Units, positions: Sequence[int]) -> list[int]:
    """The sequences at these positions of the units."""
    before = list(accumulate((stop - start for start, stop in units), initial=0))
    places = [(position, bisect_right(before, position) - 1) for position in positions]
    return [units[unit][0] + position - before[unit] for position, unit in places]
