"""A peer's half of every fragment: the anchor, the pseudo-gradient against it, and the updates that
move it.

    capture          base - local, chunk by chunk, as payload        (every peer)
    aggregates       payloads -> update (see `aggregate`)            (the author)
    apply_update_    update -> anchor, momentum and window           (everybody, the author too)

The *base* is the anchor that the local parameters started from. At a barrier it is the anchor
itself. Where a fragment moves on while this peer trains, `keep_base` keeps a copy until the peer
exchanges. Parameters narrower than fp32 started from a rounded base. The pseudo-gradient is
measured from there; else it would hold the same rounding error in every round and on every peer,
and the anchor would drift while nobody trains.

Memory, in fp32 copies of the parameters: 1 for the anchors, 1 for the masters of this peer's own
fragments, and for these and those that it may inherit 1 for the momentum, or 2 with a windowed
optimizer. A payload for each fragment that is being exchanged (a quarter of a copy with int8), and
whatever payloads wait for their version. Settings that add to it: 1 for error feedback, a base
where versions do not wait for this peer. Everything else is chunk-sized. All tensors here live on
the CPU; local parameters may be on any device (see `local`).
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from blake3 import blake3
from torch import Tensor

from diloco.config import OuterConfig
from diloco.outer.aggregate import Aggregate
from diloco.outer.codecs import CODECS
from diloco.outer.digest import digest_of, part_ranges
from diloco.outer.fragments import Fragment, as_loaded, chunks
from diloco.outer.local import Local, Source
from diloco.outer.optimizer import OUTER_OPTIMIZERS, OuterState, OuterStep
from diloco.outer.payloads import Layout, buffer, empty_payload, norm_of, over_chunks

__all__ = ["Replica"]


class Replica:
    """Anchors over the parameters of a model, `aggregates` of the fragments that this peer is
    author of, and `states`: momentum and window of these and of those that it may inherit.

    Args:
        parameters: the local parameters, by name or as `Local`; read when encoding, written by
            `load_local_`. They may get another dtype, device or storage between two calls, but no
            other shape.
        fragments: a partition of them.
        settings: codecs, merge rule and outer optimizer.

    The anchors start as copies of the local parameters. A non-finite local parameter raises
    `DivergedError` when it is encoded; an invalid payload raises `PayloadError` and changes
    nothing.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor] | Local,
        fragments: Sequence[Fragment],
        settings: OuterConfig,
    ) -> None:
        self.local = parameters if isinstance(parameters, Local) else Local(parameters)
        self.fragments = tuple(fragments)
        self.settings = settings
        self.up, self.down = CODECS[settings.codec_up], CODECS[settings.codec_down]
        self.optimizer = OUTER_OPTIMIZERS[settings.optimizer](settings)
        self.rng: random.Random = random.SystemRandom()
        numels = [fragment.numel for fragment in self.fragments]
        self.anchors = [torch.empty(numel, dtype=torch.float32) for numel in numels]
        self.aggregates: dict[int, Aggregate] = {}
        self.states: dict[int, OuterState] = {}
        self.residuals: dict[int, Tensor] = {}  # what codec_up lost, with error feedback
        self.payloads = [Layout(self.up, fragment.numel) for fragment in self.fragments]
        self.updates = [Layout(self.down, fragment.numel) for fragment in self.fragments]
        # by fragment: base of the local parameters, if it is not the anchor
        self._bases: dict[int, Tensor] = {}
        self._copies: dict[int, Source] = {}  # by fragment: copy of local parameters to capture
        for fragment, anchor in zip(self.fragments, self.anchors, strict=True):
            for start, stop in chunks(fragment.numel):
                self.local.gather_(anchor[start:stop], fragment, start)

    # -- pseudo-gradients --------------------------------------------------------------------------

    def copy_local(self, fragment: int) -> bool:
        """Copy the fragment's local parameters on their device, for the next `capture`; training
        may go on at once. The anchor may move before that only after `keep_base`.

        Returns False when the device has no memory for it; then `capture` has to come first.
        """
        try:
            self._copies[fragment] = self.local.copied(self.fragments[fragment])
        except torch.OutOfMemoryError:
            return False
        return True

    @property
    def capturing(self) -> bool:
        """True while some copy is not captured yet."""
        return bool(self._copies)

    @torch.no_grad()
    def capture(self, fragment: int) -> Tensor:
        """Encode the whole pseudo-gradient to a payload (uint8). Raises `DivergedError`.

        After `copy_local` it is that of the copy, bit for bit, and training may continue meanwhile.

        With error feedback the residual, which is what the codec loses, is added to the next
        pseudo-gradient before it is encoded: e = beta e + delta - sent (SparseLoCo, arXiv
        2508.15706). With beta = 1 nothing is ever lost, only late; with less, what stays unsent
        fades. The residual is never sent.
        """
        beta, residual = self.settings.error_feedback, self.residuals.get(fragment)
        payload = empty_payload(self.payloads[fragment].nbytes)
        if beta and residual is None:
            residual = self.residuals[fragment] = torch.zeros_like(self.anchors[fragment])
        pieces = self.payloads[fragment].split(payload)

        def encode(pieces: Sequence[tuple[Tensor, tuple[int, int]]]) -> None:
            deltas = self._deltas(fragment, [range for _, range in pieces])
            for delta, (piece, (start, stop)) in zip(deltas, pieces, strict=True):
                if residual is not None:
                    delta.add_(residual[start:stop], alpha=beta)
                self.up.encode(delta, piece)
                if residual is not None:
                    self.up.accumulate_(delta, piece, -1.0)
                    residual[start:stop].copy_(delta)

        # copies from a device, and messages between ranks, must not run in parallel
        is_here = self.local.is_whole and not self.local.can_copy(self.fragments[fragment])
        try:
            over_chunks(encode, [[piece] for piece in pieces] if is_here else [pieces])
        finally:
            self._copies.pop(fragment, None)
        return payload

    def _deltas(self, index: int, ranges: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
        """Yield these ranges of the pseudo-gradient, fp32, each in this thread's buffer."""
        local, fragment = self._copies.get(index) or Source(self.local, self.fragments[index])
        for (start, stop), own in zip(ranges, local.read(fragment, ranges), strict=True):
            rounded = buffer("base", torch.float32, stop - start)
            # look the base up again: `keep_base` may replace it between two chunks
            base = self._bases.get(index, self.anchors[index])[start:stop]
            base = as_loaded(rounded, base, fragment, start, local.tensors)
            yield torch.sub(base, own, out=buffer("chunk", torch.float32, stop - start))

    def keep_base(self, fragment: int) -> None:
        """Before an anchor moves, copy it as the base of the local parameters."""
        if fragment not in self._bases:
            self._bases[fragment] = self.anchors[fragment].clone()

    def payload_norm(self, fragment: int, payload: Tensor) -> float:
        """L2 norm of a whole contribution (uint8). `PayloadError` if it is invalid."""
        if fragment in self.aggregates:
            return self.aggregates[fragment].sketches.add(payload)

        def norm(part: tuple[Tensor, tuple[int, int]]) -> float:
            values, (start, stop) = part
            return self.up.measured(values, stop - start)[1]

        return math.hypot(*over_chunks(norm, self.payloads[fragment].split(payload)))

    # -- updates and anchors -----------------------------------------------------------------------

    @torch.no_grad()
    def foresee(self, fragment: int, update: Tensor) -> tuple[float, tuple[str, ...]]:
        """Return the L2 distance by which a whole update (uint8) would move the anchor, and the
        digests of its parts afterwards; changes nothing. `PayloadError` if it is invalid.
        """
        anchor, pieces = self.anchors[fragment], self.updates[fragment].split(update)
        starts = [start for _, (start, _) in pieces]

        def foresee_part(part: tuple[int, int]) -> tuple[float, str]:
            first, last = (bisect_left(starts, end) for end in part)
            norms, hasher = [], blake3()
            for piece, (start, stop) in pieces[first:last]:
                after = self.down.updated(anchor[start:stop], piece)
                moved = buffer("moved", torch.float32, stop - start)
                norms.append(norm_of(torch.sub(after, anchor[start:stop], out=moved)))
                hasher.update(after.numpy().data.cast("B"))
            return math.hypot(*norms), hasher.hexdigest()

        norms, digests = zip(*over_chunks(foresee_part, part_ranges(anchor.numel())), strict=True)
        return math.hypot(*norms), digests

    def apply_update_(self, fragment: int, update: Tensor, step: OuterStep) -> None:
        """Move the anchor by a whole update (uint8), with momentum and window if they are here.

        `PayloadError` before anything is changed when the length is wrong. An update that is
        invalid inside leaves an anchor that the caller repairs by fetching the fragment's state.
        """
        parts = self.updates[fragment].split(update)
        anchor, state = self.anchors[fragment], self.states.get(fragment)
        if state is not None:
            state.apply_(step, self.optimizer.transition(step), self.down, anchor, parts)
            return

        def apply_(part: tuple[Tensor, tuple[int, int]]) -> None:
            self.down.apply_update_(anchor[slice(*part[1])], part[0])

        over_chunks(apply_, parts)

    @torch.no_grad()
    def load_local_(self, fragments: Sequence[int] | None = None, mixing: float = 0.0) -> None:
        """Load the anchors of these fragments (default: all) into the local parameters.

        With `mixing` they keep that part of themselves: local = (1 - a) anchor + a local (Streaming
        DiLoCo, arXiv 2501.18512, Algorithm 2).
        """
        for index in range(len(self.fragments)) if fragments is None else fragments:
            assert index not in self._copies, f"fragment {index} would lose its base"
            self._bases.pop(index, None)
            if not mixing:
                self.show_anchor_(index)
                continue
            fragment, ranges = self.fragments[index], self.payloads[index].ranges
            for (start, stop), own in zip(ranges, self.local.read(fragment, ranges), strict=True):
                mixed = buffer("chunk", torch.float32, stop - start)
                torch.lerp(self.anchors[index][start:stop], own, mixing, out=mixed)
                self.local.scatter_(fragment, start, mixed)

    def show_anchor_(self, fragment: int) -> None:
        """Show the anchor in the local parameters for a while; the next capture's base stays."""
        for start, stop in self.payloads[fragment].ranges:
            self.local.scatter_(self.fragments[fragment], start, self.anchors[fragment][start:stop])

    def digest(self, fragment: int) -> str:
        """Digest of the fragment's anchor (hex)."""
        return digest_of(self.anchors[fragment])

    # -- state of authors and heirs ----------------------------------------------------------------

    @property
    def can_follow(self) -> bool:
        """True if there is outer state, and an heir can compute it from the updates."""
        return self.optimizer.can_follow and (self.settings.momentum > 0 or self.settings.windowed)

    def follow(self, fragments: Collection[int]) -> None:
        """Keep momentum and window of these fragments and of this peer's own, and of no others."""
        wanted = {*self.aggregates, *(fragments if self.can_follow else ())}
        self.states = {fragment: self._state(fragment) for fragment in sorted(wanted)}

    def hold(
        self, fragment: int, master: Tensor | None = None, state: OuterState | None = None
    ) -> None:
        """Become author, with master and outer state of a checkpoint, or keep what there is: else
        the master starts at the anchor, momentum and window as they were followed, or at zeros."""
        self.states[fragment] = state or self._state(fragment)
        if fragment not in self.aggregates or master is not None:
            own, anchor = self.fragments[fragment], self.anchors[fragment]
            shapes = self.local.shapes
            aggregate = Aggregate(own, anchor, self.settings, self.rng, shapes, master)
            self.aggregates[fragment] = aggregate

    def release(self, fragment: int) -> None:
        """Stop being author; momentum and window stay until the next `follow`."""
        self.aggregates.pop(fragment, None)

    def plan(self, rounds: int | None) -> None:
        """Let the outer momentum rise over so many rounds."""
        self.settings = self.settings.model_copy(update={"rounds": rounds})
        aggregates = self.aggregates.values()
        for optimizer in (self.optimizer, *(aggregate.optimizer for aggregate in aggregates)):
            optimizer.settings = self.settings

    def _state(self, fragment: int) -> OuterState:
        return self.states.get(fragment) or self.optimizer.zeros(self.fragments[fragment].numel)
