"""The author's half of a fragment: merging contributions into the next update, once per version.

    contributions, encoded   -> judged   by norms and directions of all of them (`robust`)
                             -> averaged (`merging`)
                             -> an outer step of the master (`optimizer`)
    master - anchor          -> encoded: the update

A contribution stays encoded from its arrival until the version closes. The update moves the anchor,
momentum and window in `Replica.apply_update_`, on the author as on every other peer. The encoding
error of an update stays in master - anchor, and is part of later updates.

Memory, in fp32 copies of the fragment: 1 for the master; 0.03 for the sketch of each contribution;
with `outer.flatten` 1 more while a version is made.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from diloco.config import OuterConfig
from diloco.outer import robust
from diloco.outer.codecs import CODECS
from diloco.outer.fragments import Fragment
from diloco.outer.merging import MERGE_RULES, Part, directional_pieces, flatten_, matrices
from diloco.outer.optimizer import OUTER_OPTIMIZERS, OuterState, OuterStep
from diloco.outer.payloads import Layout, buffer, empty_payload, over_chunks

__all__ = ["Aggregate", "MergeResult", "Weighted"]


class Weighted(NamedTuple):
    """A whole contribution, encoded (uint8), the L2 norm of its values, and its weight, which is
    positive: 1 for equal ones (`core.author`), so that sums of 4- and 8-bit payloads are exact. A
    late one is multiplied with `discount`."""

    peer: str
    payload: Tensor
    norm: float
    weight: float
    discount: float = 1.0


@dataclass(frozen=True)
class MergeResult:
    """The update (uint8) that makes a version, its step, and the peers whose contributions it
    leaves out of that, or scales down. `alike` are pairs of peers whose contributions are nearly
    parallel, and the cosine."""

    update: Tensor
    step: OuterStep
    left_out: tuple[str, ...] = ()
    clipped: tuple[str, ...] = ()
    alike: tuple[tuple[str, str, float], ...] = ()


class Aggregate:
    """State that the author of a fragment keeps between two versions.

    Args:
        anchor: (numel,) fp32, this peer's anchor of the fragment; read only.
        rng: chooses the values of contributions to compare; must be unpredictable for others.
        shapes: of the parameters, by name; only `outer.flatten` needs them.
        master: (numel,) fp32, the anchor without the codec's error; starts as a copy of the anchor.
    """

    def __init__(
        self,
        fragment: Fragment,
        anchor: Tensor,
        settings: OuterConfig,
        rng: random.Random,
        shapes: Mapping[str, Sequence[int]],
        master: Tensor | None = None,
    ) -> None:
        self.fragment, self.anchor, self.settings = fragment, anchor, settings
        self.up, self.down = CODECS[settings.codec_up], CODECS[settings.codec_down]
        self.optimizer = OUTER_OPTIMIZERS[settings.optimizer](settings)
        self.master = anchor.clone() if master is None else master
        self.norms: deque[float] = deque(maxlen=robust.MEMORY)  # recent ones, after clipping
        self._payloads = Layout(self.up, fragment.numel)
        self._updates = Layout(self.down, fragment.numel)
        self._pieces = [directional_pieces(fragment, *chunk) for chunk in self._payloads.ranges]
        self._matrices = matrices(fragment, shapes) if settings.flatten else []
        self._rule = MERGE_RULES[settings.merge]
        self._rng = rng
        self.sketches = robust.Sketches(self.up, self._payloads, rng)  # for the next version

    def merge(
        self, contributions: Sequence[Weighted], step: OuterStep, state: OuterState, me: str = ""
    ) -> MergeResult:
        """Make the update of the next version. It moves the master, not the anchor.

        The order of contributions, one at least, does not matter. The state is that before the
        step; a window that does not fit is forgotten. `me` is this peer. An invalid payload raises
        `PayloadError` and changes nothing; a master that is not finite raises `DivergedError`.
        """
        contributions = sorted(contributions, key=lambda contribution: contribution.peer)
        peers = [contribution.peer for contribution in contributions]
        payloads = [contribution.payload for contribution in contributions]
        comparison = self.sketches.compare(payloads)
        self.sketches = robust.Sketches(self.up, self._payloads, self._rng)
        state.join_(step)
        own = peers.index(me) if me in peers else None
        judged = self._judge(comparison, contributions, state, own)
        counted = []  # the chunks of each contribution that counts, as parts
        weighted = zip(contributions, judged.weights, judged.scales, strict=True)
        for contribution, weight, scale in weighted:
            if weight:
                chunks = self._payloads.split(contribution.payload)
                scale *= contribution.discount
                counted.append([Part(self.up, chunk, weight, scale) for chunk, _ in chunks])
        step = replace(step, contributions=len(counted))
        return MergeResult(
            self._step_(counted, step, state),
            step,
            tuple(peers[i] for i in judged.left_out),
            tuple(peers[i] for i in judged.clipped),
            tuple((peers[i], peers[j], cosine) for i, j, cosine in comparison.alike()),
        )

    def _judge(
        self,
        comparison: robust.Comparison,
        contributions: Sequence[Weighted],
        state: OuterState,
        own: int | None,
    ) -> robust.Judgement:
        """Judge each contribution; keep the norms of those that count."""
        factor, momentum = self.settings.clip_factor, state.momentum
        norms, weights = (
            [contribution.norm for contribution in contributions],
            [contribution.weight for contribution in contributions],
        )
        if self.settings.robust == "none":
            return robust.Judgement(tuple(weights), (1.0,) * len(weights))
        if len(weights) >= robust.MIN_JUDGED:
            judged = robust.clip(norms, comparison.cosines, weights, factor, comparison.numel)
        else:
            references = [] if own is None else [comparison.cosines[own]]
            if momentum.any():
                references.append(comparison.cosines_with(momentum))
            # The momentum of a non-linear optimizer may be far shorter than contributions.
            expected = robust.usual(self.norms, momentum if self.optimizer.can_follow else None)
            judged = robust.clip_few(
                norms, weights, expected, references, comparison.numel, factor, own
            )
        scaled = zip(norms, judged.scales, judged.weights, strict=True)
        self.norms.extend(norm * scale for norm, scale, weight in scaled if weight)
        return judged

    def _step_(
        self, counted: Sequence[Sequence[Part]], step: OuterStep, state: OuterState
    ) -> Tensor:
        """Move the master by the average of the contributions that count, and encode
        master - anchor, chunk by chunk."""
        transition, update = self.optimizer.transition(step), empty_payload(self._updates.nbytes)
        flattened = self._flattened(counted) if self._matrices else None
        parts = self._updates.split(update)

        def step_(chunk: int) -> None:
            payload, (start, stop) = parts[chunk]
            if flattened is None:
                mean = buffer("merged", torch.float32, stop - start)
                self._average(mean, chunk, counted)
            else:
                mean = flattened[start:stop]
            master = self.master[start:stop]
            transition.move_(master, mean, state.part(start, stop))
            self.down.encode_update(master, self.anchor[start:stop], payload)

        over_chunks(step_, range(len(parts)))
        return update

    def _average(self, out: Tensor, chunk: int, counted: Sequence[Sequence[Part]]) -> None:
        self._rule.merge(out, [parts[chunk] for parts in counted], self._pieces[chunk])

    def _flattened(self, counted: Sequence[Sequence[Part]]) -> Tensor:
        """Return the flattened average of the whole fragment: a matrix may span several chunks."""
        whole = torch.empty(self.fragment.numel, dtype=torch.float32)
        ranges = self._payloads.ranges

        def average(chunk: int) -> None:
            self._average(whole[slice(*ranges[chunk])], chunk, counted)

        over_chunks(average, range(len(ranges)))
        flatten_(whole, self._matrices, self.settings.flatten)
        return whole

    def restart(self) -> None:
        """Start from the anchor, which another author's update or state has moved."""
        self.master.copy_(self.anchor)
