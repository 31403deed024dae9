"""A peer's tensors: the anchor of every fragment, and the outer state of the fragments it is syncer of.

    encode        base - local, chunk by chunk, as payload           (every peer)
    fold          payload -> weighted sum                            (the syncer; or `stage` and `judge`: robust)
    merge         sum -> mean -> outer step on the master -> update  (the syncer)
    apply         update -> anchor, then its digest is compared      (every peer)
    stand by      update -> the momentum that it was made with       (the backup)

The *base* is the anchor that the local parameters started from. At a barrier it is the anchor; a syncer whose fragment
moves on while it trains keeps a copy until it exchanges.

Memory, in fp32 copies of the parameters: 1 for the anchors, 3 (master, momentum, weighted sum) for the fragments held,
and 1 for the fragments this peer is backup of. Where contributions are judged together (`stages`), there is no sum but
the payload of each contributor, a quarter of a copy with int8. `draw` decides what of it is compared; nobody else may
be able to foresee it. Everything else is chunk-sized. What other settings add: a payload for each fragment whose
exchange is overlapped (`capture`), 1 for a delayed momentum of the fragments held, 1 for error feedback, a base for the
fragments held when versions do not wait for this peer, 1 base when updates are a round late, and then 3 for eager ones.
All tensors here live on the CPU; local parameters may be on any device.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diloco.config import OuterConfig
from diloco.errors import PayloadError
from diloco.outer.codecs import codec
from diloco.outer.digest import fragment_digest, part_digests
from diloco.outer.eager import eager_
from diloco.outer.fragments import Fragment, chunks, gather_, scatter_
from diloco.outer.merge import add_directions_, directional_pieces, radial_directional_
from diloco.outer.optimizer import delayed_nesterov_, followed_, mean_, nesterov_, pseudo_gradient_
from diloco.outer.rates import lr_at, momentum_at
from diloco.outer.robust import Judgement, Norms, norm_of, rule_of, trimmed_mean
from diloco.outer.staged import Staged

__all__ = ["OuterState", "OuterStep", "Replica"]


@dataclass
class OuterState:
    """Outer optimizer of one fragment: fp32 vectors of `numel` elements, and per chunk what its sum is made of."""

    fragment: int
    master: Tensor  # (numel,) what the anchor would be without the codec's loss; the residual is master - anchor
    momentum: Tensor  # (numel,)
    total: Tensor  # (numel,) weighted sum of pseudo-gradients; (0,) where contributions are staged
    weights: list[float]  # per chunk: a contribution that broke midway counts where it arrived
    buffer: Tensor | None = None  # (numel,) contributions since the last momentum step
    norms: dict[int, list[float]] = field(default_factory=dict)  # per chunk and piece: weighted sum of norms
    staged: Staged | None = None


@dataclass
class Standby:
    """Momentum of a fragment at a version, as its updates tell it; an update that was missed leaves it behind."""

    version: int
    momentum: Tensor  # (numel,)


@dataclass(frozen=True)
class OuterStep:
    """What the step to the next version is made of: from which version, of how many contributions; see `Close`."""

    version: int
    contributions: int
    delay: int = 1
    flush: bool = True


class Replica:
    """Anchors and outer states over the parameters of a model.

    Args:
        parameters: the local parameters by name; read when encoding, written by `load_local_`.
        fragments: a partition of them.
        settings: codecs, merge rule and outer optimizer.

    The anchors start as copies of the local parameters. A non-finite local parameter raises `DivergedError` when it is
    encoded; an invalid payload raises `PayloadError` and changes nothing.
    """

    def __init__(self, parameters: Mapping[str, Tensor], fragments: Sequence[Fragment], settings: OuterConfig) -> None:
        self.parameters = dict(parameters)
        self.fragments = tuple(fragments)
        self.settings = settings
        self.up = codec(settings.codec_up)
        self.down = codec(settings.codec_down)
        self.rule = rule_of(settings)
        self.draw: random.Random = random.SystemRandom()
        self._norms = Norms()
        self.chunks = [list(chunks(fragment.numel)) for fragment in self.fragments]
        self.outer: dict[int, OuterState] = {}
        self._merging: dict[int, OuterState] = {}
        self.standby: dict[int, Standby] = {}  # of fragments held elsewhere
        self.residuals: dict[int, Tensor] = {}
        self._bases: dict[int, Tensor] = {}
        self._captured: dict[int, Tensor] = {}
        self._shadows: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # offset, its velocity, last pseudo-gradient
        self.anchors = [torch.empty(fragment.numel) for fragment in self.fragments]
        for fragment, anchor in zip(self.fragments, self.anchors, strict=True):
            for start, stop in self.chunks[fragment.index]:
                gather_(anchor[start:stop], fragment, start, stop, self.parameters)

    # -- every peer ---------------------------------------------------------------------------------------------------

    def encode(self, fragment: int, chunk: int) -> Tensor:
        """Payload (uint8) of one chunk of the pseudo-gradient, captured or as the parameters are now.

        `DivergedError` when it is not finite.
        """
        captured = self._captured.get(fragment)
        if captured is not None:
            at = sum(self.payload_nbytes(fragment, earlier) for earlier in range(chunk))
            return captured[at : at + self.payload_nbytes(fragment, chunk)]
        payload = torch.empty(self.payload_nbytes(fragment, chunk), dtype=torch.uint8)
        self.up.encode(self._delta(fragment, chunk), payload)
        return payload

    def _delta(self, fragment: int, chunk: int) -> Tensor:
        start, stop = self.chunks[fragment][chunk]
        delta = torch.empty(stop - start)
        gather_(delta, self.fragments[fragment], start, stop, self.parameters)
        base = self._bases.get(fragment, self.anchors[fragment])
        pseudo_gradient_(delta, base[start:stop], delta)
        return delta

    def capture(self, fragment: int) -> None:
        """Keep the payload of the whole pseudo-gradient as it is now, until `release_capture`; training may go on.

        With error feedback what the codec loses is added to the next one (e = beta e + delta - sent; SparseLoCo, arXiv
        2508.15706). The residual is this peer's own and never sent.
        """
        beta = self.settings.error_feedback
        captured = torch.empty(self.payload_numel(fragment), dtype=torch.uint8)
        residual = self.residuals.get(fragment)
        if beta and residual is None:
            residual = self.residuals[fragment] = torch.zeros(self.fragments[fragment].numel)
        at = 0
        for chunk, (start, stop) in enumerate(self.chunks[fragment]):
            payload = captured[at : at + self.payload_nbytes(fragment, chunk)]
            at += payload.numel()
            delta = self._delta(fragment, chunk)
            if residual is not None:
                delta.add_(residual[start:stop], alpha=beta)
            self.up.encode(delta, payload)
            if residual is not None:
                self.up.accumulate_(delta, payload, -1.0)
                residual[start:stop].copy_(delta)
        self._captured[fragment] = captured

    def release_capture(self, fragment: int) -> None:
        """The captured payload is not needed any more."""
        self._captured.pop(fragment, None)

    def keep_base(self, fragment: int) -> None:
        """The anchor is about to move, and the local parameters started from it; nothing to do once they are sent."""
        if fragment not in self._bases and fragment not in self._captured:
            self._bases[fragment] = self.anchors[fragment].clone()

    def payload_nbytes(self, fragment: int, chunk: int) -> int:
        """Length of `encode`'s result in bytes."""
        start, stop = self.chunks[fragment][chunk]
        return self.up.nbytes(stop - start)

    def payload_numel(self, fragment: int) -> int:
        """Length of the payload of a whole fragment in bytes."""
        return sum(self.up.nbytes(stop - start) for start, stop in self.chunks[fragment])

    def update_nbytes(self, fragment: int) -> int:
        """Length of a whole update of a fragment in bytes."""
        return sum(self.down.nbytes(stop - start) for start, stop in self.chunks[fragment])

    def apply_update_(self, fragment: int, update: Tensor, step: OuterStep | None = None) -> str:
        """Move the anchor by a whole update (uint8) and return the digest of what it is now. A backup needs the `step`.

        `PayloadError` before anything is changed when the length is wrong; an update that is invalid inside leaves an
        anchor that the caller heals by fetching the fragment's state.
        """
        if update.numel() != self.update_nbytes(fragment):
            raise PayloadError(f"an update of fragment {fragment} has {update.numel()} bytes")
        standby, outer, at = self.standby.get(fragment), self.outer.get(fragment), 0
        if standby is not None and (step is None or step.version != standby.version):
            standby = None
        momentum = None if standby is None else standby.momentum
        if outer is not None and step is not None and self.can_stand_by:
            momentum = outer.momentum  # the syncer before this one published once more
        for start, stop in self.chunks[fragment]:
            size = self.down.nbytes(stop - start)
            anchor = self.anchors[fragment][start:stop]
            before = anchor.clone() if momentum is not None else anchor
            self.down.apply_update_(anchor, update[at : at + size])
            if momentum is not None and step is not None:
                followed_(momentum[start:stop], anchor - before, *self._rates(step))
            at += size
        if standby is not None:
            standby.version += 1
        return self.digest(fragment)

    def load_local_(self, fragments: Sequence[int] | None = None, mixing: float = 0.0) -> None:
        """Local parameters become the anchors (of these fragments; all by default).

        With `mixing` they keep that part of themselves: local = (1 - a) anchor + a local (Streaming DiLoCo, arXiv
        2501.18512, Algorithm 2).
        """
        for index in range(len(self.fragments)) if fragments is None else fragments:
            self._bases.pop(index, None)
            for start, stop in self.chunks[index]:
                values = self.anchors[index][start:stop]
                if mixing:
                    local = torch.empty(stop - start)
                    gather_(local, self.fragments[index], start, stop, self.parameters)
                    values = torch.lerp(values, local, mixing)
                scatter_(self.parameters, self.fragments[index], start, stop, values)

    def load_late_(self, fragment: int, peers: int) -> None:
        """Local parameters become an anchor that lacks what they learned in this round, and start the next one there.

        The pseudo-gradient of the round was captured before and acts in the next update. With `eager` this peer's own
        part of it acts at once, for itself: a *shadow* of the Nesterov step is added (Eager updates, arXiv 2502.12996).
        """
        numel, settings = self.fragments[fragment].numel, self.settings
        base = self._bases.get(fragment)
        if settings.eager and fragment not in self._shadows:
            self._shadows[fragment] = (torch.zeros(numel), torch.zeros(numel), torch.zeros(numel))
        start_of_round = torch.empty(numel) if base is None else base
        for chunk, (start, stop) in enumerate(self.chunks[fragment]):
            delta = self._delta(fragment, chunk)
            values = self.anchors[fragment][start:stop].clone()
            if settings.eager:
                shadow, velocity, previous = (vector[start:stop] for vector in self._shadows[fragment])
                eager_(shadow, velocity, previous, delta, peers=peers, lr=settings.lr, beta=settings.momentum)
                values += shadow
            scatter_(self.parameters, self.fragments[fragment], start, stop, values)
            start_of_round[start:stop] = values
        self._bases[fragment] = start_of_round

    def show_anchor_(self, fragment: int) -> None:
        """Local parameters become the anchor for a while; the base of the next pseudo-gradient stays."""
        for start, stop in self.chunks[fragment]:
            scatter_(self.parameters, self.fragments[fragment], start, stop, self.anchors[fragment][start:stop])

    def digest(self, fragment: int) -> str:
        """Digest of the fragment's anchor (hex)."""
        return self.digest_of(self.anchors[fragment])

    def digest_of(self, anchor: Tensor) -> str:
        """Digest of any fp32 vector in an anchor's place (hex)."""
        return fragment_digest(part_digests(anchor))

    def digests(self) -> list[str]:
        """Digests of all anchors, by fragment."""
        return [self.digest(index) for index in range(len(self.fragments))]

    # -- the syncer ---------------------------------------------------------------------------------------------------

    @property
    def can_stand_by(self) -> bool:
        """Whether the outer state follows from the updates."""
        return self.settings.optimizer == "nesterov" and self.settings.momentum > 0

    def stand_by(self, fragment: int, version: int = 0, momentum: Tensor | None = None) -> None:
        """Become backup: follow the momentum from this version on; at version 0 it is zero."""
        momentum = torch.zeros_like(self.anchors[fragment]) if momentum is None else momentum
        self.standby[fragment] = Standby(version, momentum)

    def stand_down(self, fragment: int) -> None:
        """Be backup no more."""
        self.standby.pop(fragment, None)

    def hold(self, fragment: int, master: Tensor | None = None, momentum: Tensor | None = None) -> None:
        """Become syncer: keep the outer state there is or take what is given; else it starts at the anchor with the
        momentum of the backup, or zero.
        """
        standby = self.standby.pop(fragment, None)
        if fragment in self.outer and master is None:
            return
        anchor = self.anchors[fragment]
        if momentum is None and standby is not None:
            momentum = standby.momentum
        self.outer[fragment] = OuterState(
            fragment=fragment,
            master=anchor.clone() if master is None else master,
            momentum=torch.zeros_like(anchor) if momentum is None else momentum,
            total=torch.zeros(0) if self.stages else torch.zeros_like(anchor),
            weights=[0.0] * len(self.chunks[fragment]),
            buffer=None if self.settings.optimizer == "nesterov" else torch.zeros_like(anchor),
            staged=self._new_staged(fragment) if self.stages else None,
        )

    def release(self, fragment: int) -> None:
        """Be syncer no more."""
        self.outer.pop(fragment, None)
        self._norms.forget(fragment)

    @contextmanager
    def merging(self, fragment: int) -> Iterator[None]:
        """A version is made inside, perhaps in another thread: what it is made of stays, even after `release`."""
        self._merging[fragment] = self.outer[fragment]
        try:
            yield
        finally:
            del self._merging[fragment]

    def _held(self, fragment: int) -> OuterState:
        return self._merging[fragment] if fragment in self._merging else self.outer[fragment]

    @property
    def stages(self) -> bool:
        """Whether contributions are kept and judged together (`stage`, `judge`), or folded in as they come (`fold`)."""
        return self.rule not in ("none", "recent")

    def _new_staged(self, fragment: int) -> Staged:
        sizes = [stop - start for start, stop in self.chunks[fragment]]
        return Staged(fragment, sizes, self.up, self._norms, self.draw)

    def stage(self, fragment: int, chunk: int, peer: str, payload: Tensor) -> None:
        """Keep a received chunk until the version closes; `PayloadError` leaves everything as it was."""
        staged = self.outer[fragment].staged
        assert staged is not None, f"contributions are folded in with outer.robust={self.settings.robust}"
        staged.put(peer, chunk, payload)

    def judge(self, fragment: int, weights: Mapping[str, float]) -> tuple[list[str], Judgement]:
        """What the staged contributions of these peers count, by name; those left out count nothing."""
        staged = self._held(fragment).staged
        assert staged is not None
        return staged.judge(weights, self.rule, self.settings.clip_factor)

    def merge_staged_(
        self, fragment: int, chunk: int, step: OuterStep, peers: Sequence[str], judged: Judgement, out: Tensor
    ) -> None:
        """As `merge_chunk_`, of what was staged."""
        outer = self._held(fragment)
        start, stop = self.chunks[fragment][chunk]
        staged = outer.staged
        assert staged is not None
        if self.rule == "trimmed_mean":
            merged = trimmed_mean(staged.decoded(peers, chunk), self.settings.trim)
        else:
            merged = torch.zeros(stop - start)
            kept = [part for part in zip(peers, judged.coefficients, judged.weights, strict=True) if part[2]]
            for peer, coefficient, weight in kept:
                payload = staged.payload(peer, chunk)
                self._add_(outer, chunk, merged, payload, weight, coefficient / weight)
            self._mean_(outer, chunk, merged, sum(weight for _, _, weight in kept))
        self._publish_(outer, start, stop, merged, step, out)

    def staged(self, fragment: int) -> Staged | None:
        """Contributions to the next version, where they are kept."""
        return self._held(fragment).staged

    def clear_staged(self, fragment: int) -> None:
        """The version is made."""
        staged = self.staged(fragment)
        if staged is not None:
            staged.clear()

    def norm_of(self, fragment: int, chunk: int, payload: Tensor) -> float:
        """L2 norm of a received chunk; `PayloadError` for one that `fold` would refuse."""
        start, stop = self.chunks[fragment][chunk]
        values = torch.empty(stop - start)
        self.up.decode(payload, values)
        norm = norm_of(values)
        if self.rule == "recent":
            self._norms.check(fragment, chunk, norm)
        return norm

    def fold(
        self,
        fragment: int,
        chunk: int,
        payload: Tensor,
        weight: float,
        discount: float = 1.0,
        norm: float | None = None,
    ) -> None:
        """Add weight * discount times a received chunk to the sum; `PayloadError` leaves the sum as it was.

        The mean divides by the weights alone, so that a discount shrinks the step. `norm` is that of the chunk, where
        it is known already.
        """
        outer = self._held(fragment)
        start, stop = self.chunks[fragment][chunk]
        scale = 1.0
        if self.rule == "recent":
            norm = self.norm_of(fragment, chunk, payload) if norm is None else norm
            scale = self._norms.see(fragment, chunk, norm, self.settings.clip_factor)
        self._add_(outer, chunk, outer.total[start:stop], payload, weight * discount, scale)
        outer.weights[chunk] += weight

    def _add_(self, outer: OuterState, chunk: int, total: Tensor, payload: Tensor, weight: float, scale: float) -> None:
        """total += weight * scale * the chunk that a payload holds, or what RDA makes of it."""
        if self.settings.merge == "mean":
            self.up.accumulate_(total, payload, weight * scale)
            return
        start, stop = self.chunks[outer.fragment][chunk]
        values = torch.empty(stop - start)
        self.up.decode(payload, values)
        if scale != 1.0:
            values.mul_(scale)
        pieces = directional_pieces(self.fragments[outer.fragment], start, stop)
        norms = add_directions_(total, values, pieces, weight)
        sums = outer.norms.setdefault(chunk, [0.0] * len(pieces))
        outer.norms[chunk] = [one + other for one, other in zip(sums, norms, strict=True)]

    def _mean_(self, outer: OuterState, chunk: int, total: Tensor, weight: float) -> None:
        """Turns what `_add_` summed up into the average, in place."""
        if self.settings.merge == "mean":
            mean_(total, weight)
            return
        fragment = self.fragments[outer.fragment]
        pieces = directional_pieces(fragment, *self.chunks[fragment.index][chunk])
        radial_directional_(total, pieces, weight, outer.norms.pop(chunk))

    def merge_chunk_(self, fragment: int, chunk: int, step: OuterStep, out: Tensor) -> None:
        """Mean of the sum, outer step on the master, update encoded into `out` (uint8) and applied to the anchor."""
        outer = self._held(fragment)
        start, stop = self.chunks[fragment][chunk]
        total = outer.total[start:stop]
        self._mean_(outer, chunk, total, outer.weights[chunk])
        self._publish_(outer, start, stop, total, step, out)
        total.zero_()
        outer.weights[chunk] = 0.0

    def _publish_(self, outer: OuterState, start: int, stop: int, merged: Tensor, step: OuterStep, out: Tensor) -> None:
        """Outer step on the master with a merged chunk; the update goes to `out` and to the anchor."""
        self._outer_step_(outer, start, stop, merged, step)
        anchor = self.anchors[outer.fragment][start:stop]
        self.down.encode_update(outer.master[start:stop], anchor, out)
        self.down.apply_update_(anchor, out)

    def _outer_step_(self, outer: OuterState, start: int, stop: int, delta: Tensor, step: OuterStep) -> None:
        """Move the master by the merged pseudo-gradient."""
        settings = self.settings
        lr, beta = self._rates(step)
        master, momentum = outer.master[start:stop], outer.momentum[start:stop]
        if outer.buffer is None:
            nesterov_(master, momentum, delta, lr, beta)
            return
        buffer = outer.buffer[start:stop]
        pushes = step.contributions
        if settings.optimizer == "delayed_nesterov":
            delayed_nesterov_(
                master, momentum, buffer, delta,
                lr=lr, beta=beta, pushes=pushes, delay=step.delay, flush=step.flush, c=settings.delay_c,
            )  # fmt: skip
            return
        buffer.add_(delta, alpha=pushes / step.delay)
        if step.flush:  # FedBuff: one step with the mean of `delay` contributions
            nesterov_(master, momentum, buffer, lr, beta)
            buffer.zero_()

    def _rates(self, step: OuterStep) -> tuple[float, float]:
        """Learning rate and momentum of an outer step."""
        settings = self.settings
        rates = {int(peers): lr for peers, lr in settings.lr_by_peers.items()}
        lr = lr_at(step.version, max(step.contributions, step.delay), settings.lr, rates)
        return lr, momentum_at(step.version, settings.momentum, settings.momentum_warmup)

    def restart(self, fragment: int) -> None:
        """The anchor of a held fragment was replaced: the master starts from it, with the momentum that there is."""
        outer = self.outer[fragment]
        outer.master.copy_(self.anchors[fragment])
        outer.total.zero_()
        outer.weights = [0.0] * len(self.chunks[fragment])
        outer.norms.clear()
        self.clear_staged(fragment)
        if outer.buffer is not None:
            outer.buffer.zero_()
