"""A syncer with random contributions, and what a member that audits it has of each version."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diloco.config import OuterConfig
from diloco.outer.audit import parts
from diloco.outer.fragments import chunks, partition
from diloco.outer.held import Held
from diloco.outer.merkle import LEAF
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


@dataclass
class Syncer:
    """Makes versions of one fragment; `logs` are what an audit of all its parts knows of them."""

    settings: OuterConfig
    numels: dict[str, int]
    seed: int = 0
    spread: float = 1.0
    held: Held = field(init=False)
    logs: list[list[Seen]] = field(init=False)

    def __post_init__(self) -> None:
        [self.fragment] = partition(self.numels, 1)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.rng = random.Random(self.seed)
        self.anchor = 0.05 * torch.randn(self.fragment.numel, generator=self.generator)
        self.common = self._noise()
        self.scales = _Scales()
        self.held = Held(self.fragment, self.anchor, self.settings, self.rng, norms=self.scales)
        self.places = parts(self.fragment, self.settings)
        self.logs = [[] for _ in self.places]

    def _noise(self) -> Tensor:
        return 1e-3 * torch.randn(self.fragment.numel, generator=self.generator)

    def version(
        self, peers: int, *, delay: int = 1, new_syncer: bool = False, lie: Lie | None = None, reverse: bool = False
    ) -> None:
        """Make a version of the contributions of so many peers; one of them may point the other way."""
        held, settings = self.held, self.settings
        self.common = 0.8 * self.common + 0.6 * self._noise()
        deltas = [self.common + self.spread * self._noise() for _ in range(peers)]
        deltas[-1] *= -20 if reverse else self.rng.choice([0.5, 1.0, 5.0])
        payloads = [payloads_of(held.up, delta) for delta in deltas]
        weights = {f"p{peer}": float(self.rng.randint(1, 5)) for peer in range(peers)}
        discounts = [1.0 if settings.barrier else self.rng.choice([1.0, 0.7]) for _ in range(peers)]
        counted = self._take(payloads, weights, discounts)
        step = held.state.step(peers, delay)
        if lie is not None:
            held.master.copy_(lie(held.master))
        update, _, judged = merge(held, step, weights)
        if judged is not None:
            whole = zip(payloads, judged[1].weights, judged[1].scales, strict=True)
            counted = [[(sent, weight, 1.0, scale) for sent, weight, scale in whole]] * len(held.chunks)
        at = held.down.offsets(self.fragment.numel)
        of_update = self.cut(held.down, [update[start:stop] for start, stop in itertools.pairwise(at)])
        for place, (part, log) in enumerate(zip(self.places, self.logs, strict=True)):
            chunk = next(at for at, (start, stop) in enumerate(held.chunks) if start <= part.start < stop)
            found = [
                Counted(self.cut(held.up, sent)[place], weight, discount, scale)
                for sent, weight, discount, scale in counted[chunk]
                if weight
            ]
            log.append(Seen(step, of_update[place], found, new_syncer))

    def _take(
        self, payloads: Sequence[Sequence[Tensor]], weights: dict[str, float], discounts: Sequence[float]
    ) -> list[list[tuple[Sequence[Tensor], float, float, float]]]:
        held, counted = self.held, [[] for _ in self.held.chunks]
        for (peer, weight), sent, discount in zip(weights.items(), payloads, discounts, strict=True):
            if held.staged is not None:
                take(held, peer, list(sent), weight)
                continue
            self.scales.seen.clear()
            held.fold_whole(sent, held.seen(sent)[0], weight, discount)
            scales = self.scales.seen or [1.0] * len(sent)
            for into, scale in zip(counted, scales, strict=True):
                into.append((sent, weight, discount, scale))
        return counted

    def cut(self, one: Codec, payloads: Sequence[Tensor]) -> list[Tensor]:
        """The payloads of all parts."""
        unit = LEAF if self.settings.merge != "rda" else 16 * LEAF
        found = []
        for payload, (start, stop) in zip(payloads, chunks(self.fragment.numel), strict=True):
            ends = [*range(0, stop - start, unit), stop - start]
            found += [one.cut(payload, stop - start, *both) for both in itertools.pairwise(ends)]
        return found
