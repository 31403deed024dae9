"""The syncer's half of a fragment: contributions in, the next version out.

    fold       payload -> sum                                             each contribution as it arrives
    stage      payload -> kept; `judge` says what each contribution counts     where the merge rule compares them
    merge_     sum -> average -> outer step on the master -> update, which moves the anchor

Memory, in fp32 copies of the fragment: 3 (master, momentum, sum), and 1 for the window of a windowed optimizer. Where
contributions are judged together there is no sum but the payload of each contributor, a quarter of a copy with int8.
With `outer.flatten` there is 1 more while a version is made.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from diloco.config import OuterConfig
from diloco.outer.codecs import codec
from diloco.outer.digest import digest_of
from diloco.outer.fragments import Fragment, chunks
from diloco.outer.merging import AVERAGES, Staged, Sum
from diloco.outer.optimizer import OPTIMIZERS, OuterStep
from diloco.outer.payloads import buffer, norm_of
from diloco.outer.rda import directional_pieces
from diloco.outer.robust import MIN_JUDGED, Judgement, Norms, alike, clip, clip_few, opposes
from diloco.outer.spectrum import flatten_, matrices
from diloco.outer.state import OuterState, adopt_

__all__ = ["Held", "Judged", "Seen"]

Judged = tuple[list[str], Judgement]
"""Contributors in the order of their names, and what each contribution counts."""


class Seen(NamedTuple):
    """What is seen of a chunk before it is folded in: its norm, that of the momentum there, whether it opposes it."""

    norm: float
    momentum: float
    opposes: bool


class Held:
    """Outer state of one fragment, and the contributions to its next version.

    Args:
        anchor: (numel,) fp32, this peer's anchor of the fragment, which `merge_` moves.
        settings: codecs, merge rule and outer optimizer.
        rng: decides what of contributions is compared; nobody else may be able to foresee it.
        master: (numel,) fp32, what the anchor would be without the codec's loss; starts at the anchor. The residual
            master - anchor goes into later updates.
        state: momentum and window at the anchor's version; starts at zeros, at version 0.
        norms: of recent contributions, where they are known.
        shapes: of the parameters, by name; only `outer.flatten` needs them.

    It lives as long as this peer is syncer of the fragment. A thread that makes a version keeps its object, so losing
    the lease meanwhile, and even winning it again, does not disturb it. An invalid payload raises `PayloadError` and
    changes nothing; a master that is not finite raises `DivergedError` and leaves the version half made.
    """

    def __init__(
        self,
        fragment: Fragment,
        anchor: Tensor,
        settings: OuterConfig,
        rng: random.Random,
        *,
        master: Tensor | None = None,
        state: OuterState | None = None,
        norms: Norms | None = None,
        shapes: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        self.fragment, self.anchor, self.settings = fragment, anchor, settings
        self.up, self.down = codec(settings.codec_up), codec(settings.codec_down)
        self.optimizer, self.average = OPTIMIZERS[settings.optimizer](settings), AVERAGES[settings.merge]()
        self.master = anchor.clone() if master is None else master
        self.state = OuterState.zeros(fragment.numel, self.optimizer.num_buffers) if state is None else state
        self.norms = Norms() if norms is None else norms
        self.chunks = tuple(chunks(fragment.numel))
        self._numels = [stop - start for start, stop in self.chunks]
        self._pieces = [directional_pieces(fragment, start, stop) for start, stop in self.chunks]
        self._matrices = matrices(fragment, shapes) if settings.flatten else []
        self.staged: Staged | None = None
        self.sums: list[Sum] = []  # by chunk: a contribution that broke off midway counts where it arrived
        if not settings.judged_together:
            totals = torch.zeros_like(anchor).split_with_sizes(self._numels)
            self.sums = list(map(Sum, totals, self._pieces))
        else:
            self.staged = Staged(self._numels, self.up, self.norms, rng)
        self._clips = settings.judging == "recent"
        self._sums_means = self.optimizer.can_follow  # another momentum may be far shorter than what it is made of
        self._update_at = self.down.offsets(fragment.numel)

    def put(self, chunk: int, peer: str, payload: Tensor, weight: float, discount: float = 1.0) -> None:
        """Stage or fold a received chunk, as the merge rule needs it; `judge` gets the discounts of staged ones."""
        if self.staged is None:
            self.fold(chunk, payload, weight, discount)
        else:
            self.staged.put(peer, chunk, payload)

    def seen(self, payloads: Sequence[Tensor]) -> list[Seen]:
        """Norms and directions of the chunks of a whole contribution; `PayloadError` if `fold` would refuse one."""
        found = []
        for chunk, payload in enumerate(payloads):
            found.append(self._see(chunk, self.up.values(payload, self._numels[chunk])))
            if self._clips:
                self.norms.check(chunk, found[chunk].norm)
        return found

    def _see(self, chunk: int, values: Tensor) -> Seen:
        norm = norm_of(values)
        if not self._clips:
            return Seen(norm, 0.0, False)
        momentum = self.state.momentum[slice(*self.chunks[chunk])]
        length = norm_of(momentum)
        return Seen(norm, length if self._sums_means else 0.0, opposes(values, norm, momentum, length))

    def fold_whole(self, payloads: Sequence[Tensor], seen: Sequence[Seen], weight: float, discount: float) -> None:
        """Fold in a whole contribution, with what `seen` said of it."""
        for chunk, (payload, known) in enumerate(zip(payloads, seen, strict=True)):
            self.fold(chunk, payload, weight, discount, known)

    def fold(self, chunk: int, payload: Tensor, weight: float, discount: float = 1.0, seen: Seen | None = None) -> None:
        """Add weight * discount times a received chunk to the sum.

        The average divides by the weights alone, so a discount shrinks the step. `seen` is the chunk's, if known.
        """
        assert self.staged is None, "contributions are staged"
        into, scale, values = self.sums[chunk], 1.0, None
        if self._clips:
            if seen is None:
                values = self.up.values(payload, self._numels[chunk])
                seen = self._see(chunk, values)
            scale = self.norms.see(chunk, seen.norm, self.settings.clip_factor, seen.opposes, seen.momentum)
        if values is None:
            self.average.add_encoded_(into, self.up, payload, weight * discount, scale)
        else:
            self.average.add_(into, values, weight * discount, scale)
        into.weight += weight

    def judge(
        self, weights: Mapping[str, float], discounts: Mapping[str, float] = MappingProxyType({}), me: str = ""
    ) -> Judged:
        """What the staged contributions of these peers count, those that are late at a discount; `me` is this peer."""
        assert self.staged is not None, "contributions are folded in as they arrive"
        peers = sorted(weights)
        by_peer = [weights[peer] for peer in peers]
        if len(peers) < MIN_JUDGED:
            judged = self._judge_few(self.staged, peers, by_peer, me)
        else:
            gram, numel = self.staged.cosines(peers)
            judged = clip(self.staged.norms(peers), gram, by_peer, self.settings.clip_factor, numel)
        norms, scales = self.staged.norms(peers), judged.scales
        counted = [norm * min(scale, 1.0) for norm, scale in zip(norms, scales, strict=True)]
        self.norms.whole.extend(norm for norm, scale in zip(counted, scales, strict=True) if scale)
        late = tuple(one * discounts.get(peer, 1.0) for peer, one in zip(peers, judged.coefficients, strict=True))
        return peers, replace(judged, coefficients=late)

    def alike(self, peers: Sequence[str]) -> list[tuple[str, str, float]]:
        """Two of these peers whose staged contributions are nearly parallel, and the cosine."""
        assert self.staged is not None, "contributions are folded in as they arrive"
        if len(peers) < 2:
            return []
        return [(peers[one], peers[other], cosine) for one, other, cosine in alike(*self.staged.cosines(peers))]

    def _judge_few(self, staged: Staged, peers: list[str], weights: Sequence[float], me: str) -> Judgement:
        gram, numel = staged.cosines(peers)
        momentum, own = self.state.momentum, peers.index(me) if me in peers else None
        references = [] if own is None else [gram[own]]
        if momentum.any():
            references.append(staged.cosines_with(momentum, peers))
        usual = self.norms.usual(momentum if self._sums_means else None)
        return clip_few(staged.norms(peers), weights, usual, references, numel, self.settings.clip_factor, own)

    def merge_(self, step: OuterStep, update: Tensor, judged: Judged | None = None) -> str:
        """Make the next version: fill its `update` (uint8), move the anchor, and return its digest.

        `judged` says what staged contributions count; there is none where they were folded.
        """
        transition = self.optimizer.transition(step)
        flattened = self._flattened(judged) if self._matrices else None
        for chunk, (start, stop) in enumerate(self.chunks):
            into = self._average(chunk, judged) if flattened is None else flattened[chunk]
            payload = update[self._update_at[chunk] : self._update_at[chunk + 1]]
            master, anchor, vectors = self.master[start:stop], self.anchor[start:stop], self.state.part(start, stop)
            transition.move_(master, into.total, vectors)
            self.down.encode_update(master, anchor, payload)
            adopt_(self.down, transition, anchor, vectors, payload)
            into.clear()
        self.state.took_(step)
        if self.staged is not None:
            self.staged.clear()
        return digest_of(self.anchor)

    def _average(self, chunk: int, judged: Judged | None) -> Sum:
        if self.staged is None:
            into = self.sums[chunk]
        else:
            assert judged is not None, "contributions are judged before they are merged"
            into = Sum(buffer("merged", torch.float32, self._numels[chunk]).zero_(), self._pieces[chunk])
            self.staged.add_(into, chunk, *judged, self.average)
        self.average.average_(into)
        return into

    def _flattened(self, judged: Judged | None) -> list[Sum]:
        """All chunks averaged, because a matrix may lie in several of them, and then `flatten_`."""
        whole = torch.empty(self.fragment.numel, dtype=torch.float32)
        for chunk, (start, stop) in enumerate(self.chunks):
            into = self._average(chunk, judged)
            whole[start:stop].copy_(into.total)
            into.clear()
        flatten_(whole, self._matrices, self.settings.flatten)
        return list(map(Sum, whole.split_with_sizes(self._numels), self._pieces))

    def restart(self, version: int) -> None:
        """Start from the anchor, which was replaced by that version; forget all contributions.

        The momentum stays, and the window if it followed to that version.
        """
        self.state.settle_(version)
        self.master.copy_(self.anchor)
        for into in self.sums:
            into.clear()
        if self.staged is not None:
            self.staged.clear()
