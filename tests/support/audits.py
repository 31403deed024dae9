"""A syncer with random contributions, and what a member that audits it has of each version."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from diloco.config import OuterConfig
from diloco.outer.audit import parts
from diloco.outer.fragments import CHUNK, chunks, partition
from diloco.outer.held import Held
from diloco.outer.merkle import LEAF
from diloco.outer.optimizer import OuterStep
from diloco.outer.payloads import Codec
from diloco.outer.recompute import Counted, Seen
from diloco.outer.robust import Norms
from tests.support.outer import merge, payloads_of, take

Lie = Callable[[Tensor], Tensor]
"""What a syncer makes of the master of a fragment before it publishes."""


class _Scales(Norms):
    """What each chunk was multiplied with, in the order of their arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def see(self, chunk: int, norm: float, factor: float, opposes: bool = False, momentum: float = 0.0) -> float:
        scale = super().see(chunk, norm, factor, opposes, momentum)
        self.seen.append(scale)
        return scale


class Made(NamedTuple):
    """A version: its step and update, how long its contributions were, and the anchor that it moved."""

    step: OuterStep
    update: Tensor
    lengths: dict[str, float]
    before: Tensor


@dataclass
class Syncer:
    """Makes versions of one fragment; `logs` are what an audit of all its parts knows of them."""

    settings: OuterConfig
    numels: dict[str, int]
    seed: int = 0
    scale: float = 1e-3

    def __post_init__(self) -> None:
        [self.fragment] = partition(self.numels, 1)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.rng = random.Random(self.seed)
        self.anchor = 0.05 * torch.randn(self.fragment.numel, generator=self.generator)
        self.common = self._noise()
        self.scales = _Scales()
        self.held = Held(self.fragment, self.anchor, self.settings, self.rng, norms=self.scales)
        self.places = parts(self.fragment, self.settings)
        self.logs: list[list[Seen]] = [[] for _ in self.places]

    def _noise(self) -> Tensor:
        return self.scale * torch.randn(self.fragment.numel, generator=self.generator)

    def version(
        self, peers: int, *, delay: int = 1, new_syncer: bool = False, lie: Lie | None = None, reverse: bool = False
    ) -> Made:
        """Make a version of the contributions of so many peers; one of them may point the other way."""
        held, before = self.held, self.anchor.clone()
        self.common = 0.8 * self.common + 0.6 * self._noise()
        deltas = [self.common + self._noise() for _ in range(peers)]
        deltas[-1] *= -20 if reverse else self.rng.choice([0.5, 1.0, 5.0])
        sent = {f"p{peer}": payloads_of(held.up, delta) for peer, delta in enumerate(deltas)}
        weights = {peer: float(self.rng.randint(1, 5)) for peer in sent}
        lengths, counted = dict[str, float](), dict[str, tuple[float, float, list[float]]]()
        for peer, payloads in sent.items():
            discount = 1.0 if self.settings.barrier else self.rng.choice([1.0, 0.7])
            seen, tally = held.seen(payloads)
            lengths[peer] = tally.norm
            self.scales.seen.clear()
            if held.staged is not None or self.settings.barrier:
                take(held, peer, payloads, weights[peer])
            else:
                held.fold_whole(payloads, seen, weights[peer], discount)
            counted[peer] = weights[peer], discount, self.scales.seen[:] or [1.0] * len(payloads)
        step = held.state.step(peers, delay)
        if lie is not None:
            held.master.copy_(lie(held.master))
        update, _, judged = merge(held, step, weights)
        if judged is not None:
            each = zip(judged[0], judged[1].weights, judged[1].scales, strict=True)
            counted = {peer: (weight, 1.0, [scale] * len(held.chunks)) for peer, weight, scale in each}
        at = held.down.offsets(self.fragment.numel)
        of_update = self._cut(held.down, [update[start:stop] for start, stop in itertools.pairwise(at)])
        cuts = {peer: self._cut(held.up, payloads) for peer, payloads in sent.items()}
        for place, (part, log) in enumerate(zip(self.places, self.logs, strict=True)):
            known = [
                Counted(cuts[peer][place], weight, discount, scales[part.start // CHUNK])
                for peer, (weight, discount, scales) in counted.items()
                if weight
            ]
            log.append(Seen(step, of_update[place], known, new_syncer))
        return Made(step, update, lengths, before)

    def _cut(self, one: Codec, payloads: Sequence[Tensor]) -> list[Tensor]:
        """The payloads of all parts."""
        unit = LEAF if self.settings.merge != "rda" else 16 * LEAF
        found = []
        for payload, (start, stop) in zip(payloads, chunks(self.fragment.numel), strict=True):
            ends = [*range(0, stop - start, unit), stop - start]
            found += [one.cut(payload, stop - start, *both) for both in itertools.pairwise(ends)]
        return found
