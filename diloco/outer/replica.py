"""A peer's half of every fragment: the anchor, the pseudo-gradient against it, and the updates that move it.

    capture          base - local, chunk by chunk, as payload                    (every peer)
    aggregates       payloads -> update (see `aggregate`)                        (the author)
    apply_update_    update -> anchor, momentum and window; then its digest      (everybody, the author too)

The *base* is the anchor that the local parameters started from. At a barrier it is the anchor itself. Where a fragment
moves on while this peer trains, `keep_base` keeps a copy until the peer exchanges. Parameters narrower than fp32
started from a rounded base. The pseudo-gradient is measured from there; else it would hold the same rounding error in
every round and on every peer, and the anchor would drift while nobody trains.

Memory, in fp32 copies of the parameters: 1 for the anchors, 1 for the masters of this peer's own fragments, and for
these and those that it may inherit 1 for the momentum, or 2 with a windowed optimizer. A payload for each fragment that
is being exchanged (a quarter of a copy with int8), and whatever payloads wait for their version. Settings that add to
it: 1 for error feedback, a base where versions do not wait for this peer. Everything else is chunk-sized. All tensors
here live on the CPU; local parameters may be on any device (see `local`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from diloco.config import OuterConfig
from diloco.errors import PayloadError
from diloco.outer.aggregate import Aggregate
from diloco.outer.codecs import codec
from diloco.outer.digest import digest_of
from diloco.outer.fragments import Fragment, chunks
from diloco.outer.local import Local, Source
from diloco.outer.optimizer import OPTIMIZERS, OuterStep
from diloco.outer.payloads import buffer, norm_of
from diloco.outer.state import OuterState, adopt_

__all__ = ["Replica"]


@dataclass
class _Local:
    """What every peer has of one fragment."""

    fragment: Fragment
    anchor: Tensor  # (numel,) fp32
    payload_at: tuple[int, ...]  # where chunks begin in a payload
    update_at: tuple[int, ...]  # where chunks begin in an update
    base: Tensor | None = None  # (numel,) what the local parameters started from, where it is not the anchor
    copy: Source | None = None  # of the local parameters as they are to be captured
    captured: Tensor | None = None  # (bytes,) uint8

    @property
    def start(self) -> Tensor:
        """What the local parameters started from."""
        return self.anchor if self.base is None else self.base


class Replica:
    """Anchors over the parameters of a model, `aggregates` of the fragments that this peer is author of, and `states`:
    momentum and window of these and of those that it may inherit.

    Args:
        parameters: the local parameters, by name or as `Local`; read when encoding, written by `load_local_`. They may
            get another dtype, device or storage between two calls, but no other shape.
        fragments: a partition of them.
        settings: codecs, merge rule and outer optimizer.

    The anchors start as copies of the local parameters. A non-finite local parameter raises `DivergedError` when it is
    encoded; an invalid payload raises `PayloadError` and changes nothing.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor] | Local, fragments: Sequence[Fragment], settings: OuterConfig
    ) -> None:
        self.local = parameters if isinstance(parameters, Local) else Local(parameters)
        self.fragments = tuple(fragments)
        self.settings = settings
        self.up, self.down = codec(settings.codec_up), codec(settings.codec_down)
        self.optimizer = OPTIMIZERS[settings.optimizer](settings)
        self.rng: random.Random = random.SystemRandom()
        self.chunks = [list(chunks(fragment.numel)) for fragment in self.fragments]
        self.anchors = [torch.empty(fragment.numel, dtype=torch.float32) for fragment in self.fragments]
        self.aggregates: dict[int, Aggregate] = {}
        self.states: dict[int, OuterState] = {}
        self.residuals: dict[int, Tensor] = {}  # what codec_up lost, with error feedback
        self._local = [
            _Local(fragment, anchor, self.up.offsets(fragment.numel), self.down.offsets(fragment.numel))
            for fragment, anchor in zip(self.fragments, self.anchors, strict=True)
        ]
        for local in self._local:
            for start, stop in self.chunks[local.fragment.index]:
                self.local.gather_(local.anchor[start:stop], local.fragment, start, stop)

    # -- what this peer sends -----------------------------------------------------------------------------------------

    def _deltas(self, local: _Local) -> Iterator[Tensor]:
        """The pseudo-gradient, chunk by chunk, fp32, in this thread's buffer."""
        source, ranges = local.copy or Source(self.local, local.fragment), self.chunks[local.fragment.index]
        for (start, stop), own in zip(ranges, source.local.read(source.fragment, ranges), strict=True):
            delta, rounded = (buffer(name, torch.float32, stop - start) for name in ("chunk", "base"))
            torch.sub(source.local.as_loaded(rounded, local.start[start:stop], source.fragment, start), own, out=delta)
            yield delta

    def copy_local(self, fragment: int) -> bool:
        """Copy the fragment's local parameters on their device, for the next `capture`; training may go on at once.

        The anchor may move before that capture only after `keep_base`. Returns False, and has no copy, when the device
        has no memory for one; then `capture` has to come first.
        """
        local = self._local[fragment]
        try:
            local.copy = self.local.copied(local.fragment)
        except torch.OutOfMemoryError:
            return False
        return True

    def is_taken(self, fragment: int) -> bool:
        """Whether the next exchange does not need the local parameters any more: they are captured, or copied."""
        return self._local[fragment].copy is not None or self._local[fragment].captured is not None

    @property
    def capturing(self) -> bool:
        """Whether some copy is not captured yet."""
        return any(local.copy is not None for local in self._local)

    @torch.no_grad()
    def capture(self, fragment: int) -> Tensor:
        """The payload (uint8) of the whole pseudo-gradient as it is now, kept until `release_capture`; training may go
        on. Raises `DivergedError`.

        After `copy_local` the pseudo-gradient is that of then, and training goes on meanwhile. The payload is the same,
        bit for bit: values are copied, and what is computed is computed on the CPU either way.

        With error feedback the residual, which is what the codec loses, is added to the next pseudo-gradient before it
        is encoded: e = beta e + delta - sent (SparseLoCo, arXiv 2508.15706). With beta = 1 nothing is ever lost, only
        late; with less, what stays unsent fades, and stale directions are forgotten. The residual is never sent.
        """
        local, beta = self._local[fragment], self.settings.error_feedback
        captured = torch.empty(self.payload_nbytes(fragment), dtype=torch.uint8)
        residual = self.residuals.get(fragment)
        if beta and residual is None:
            residual = self.residuals[fragment] = torch.zeros(local.fragment.numel, dtype=torch.float32)
        payloads = self.payload_chunks(fragment, captured)
        for delta, payload, (start, stop) in zip(self._deltas(local), payloads, self.chunks[fragment], strict=True):
            if residual is not None:
                delta.add_(residual[start:stop], alpha=beta)
            self.up.encode(delta, payload)
            if residual is not None:
                self.up.accumulate_(delta, payload, -1.0)
                residual[start:stop].copy_(delta)
        local.captured, local.copy = captured, None
        return captured

    def captured(self, fragment: int) -> Tensor:
        """The payload that was captured last."""
        captured = self._local[fragment].captured
        assert captured is not None, f"fragment {fragment} is not captured"
        return captured

    def release_capture(self, fragment: int) -> None:
        """Forget the captured payload, or the copy that it was to be made of."""
        self._local[fragment].captured = self._local[fragment].copy = None

    def keep_base(self, fragment: int) -> None:
        """Copy the anchor before it moves, if local parameters started from it and are not captured yet."""
        local = self._local[fragment]
        if local.base is None and local.captured is None:
            local.base = local.anchor.clone()

    def payload_nbytes(self, fragment: int) -> int:
        """Length of the payload of a whole fragment in bytes."""
        return self._local[fragment].payload_at[-1]

    def payload_chunks(self, fragment: int, payload: Tensor) -> list[Tensor]:
        """Views of the chunks of a whole payload. `PayloadError` if its length is wrong."""
        return _parts(payload, self._local[fragment].payload_at)

    def payload_norm(self, fragment: int, payload: Tensor) -> float:
        """L2 norm of a whole contribution (uint8). `PayloadError` if it is invalid."""
        parts = zip(self.payload_chunks(fragment, payload), self.chunks[fragment], strict=True)
        return math.hypot(*(norm_of(self.up.values(part, stop - start)) for part, (start, stop) in parts))

    # -- what this peer adopts ----------------------------------------------------------------------------------------

    def update_nbytes(self, fragment: int) -> int:
        """Length of a whole update of a fragment in bytes."""
        return self._local[fragment].update_at[-1]

    def update_chunks(self, fragment: int, update: Tensor) -> list[Tensor]:
        """Views of the chunks of a whole update. `PayloadError` if its length is wrong."""
        return _parts(update, self._local[fragment].update_at)

    def update_norm(self, fragment: int, update: Tensor) -> float:
        """How far (L2) a whole update (uint8) moves the anchor that is here. `PayloadError` if it is invalid."""
        norms = []
        for part, (start, stop) in zip(self.update_chunks(fragment, update), self.chunks[fragment], strict=True):
            values = self.down.values(part, stop - start)
            if self.down.carries_values:
                moved = buffer("moved", torch.float32, stop - start)
                values = torch.sub(values, self.anchors[fragment][start:stop], out=moved)
            norms.append(norm_of(values))
        return math.hypot(*norms)

    def apply_update_(self, fragment: int, update: Tensor, step: OuterStep | None = None) -> str:
        """Move the anchor by a whole update (uint8), with momentum and window if they are here, and return its new
        digest. Without a `step` these stay behind.

        `PayloadError` before anything is changed when the length is wrong. An update that is invalid inside leaves an
        anchor that the caller repairs by fetching the fragment's state.
        """
        parts, anchor = self.update_chunks(fragment, update), self.anchors[fragment]
        state = None if step is None else self.states.get(fragment)
        if state is None or step is None:
            for part, (start, stop) in zip(parts, self.chunks[fragment], strict=True):
                self.down.apply_update_(anchor[start:stop], part)
            return self.digest(fragment)
        transition = self.optimizer.transition(step)
        state.join_(step)
        for part, (start, stop) in zip(parts, self.chunks[fragment], strict=True):
            adopt_(self.down, transition, anchor[start:stop], state.part(start, stop), part)
        state.took_(step)
        return self.digest(fragment)

    @torch.no_grad()
    def load_local_(self, fragments: Sequence[int] | None = None, mixing: float = 0.0) -> None:
        """Local parameters become the anchors (of these fragments; all by default).

        With `mixing` they keep that part of themselves: local = (1 - a) anchor + a local (Streaming DiLoCo, arXiv
        2501.18512, Algorithm 2).
        """
        for index in range(len(self.fragments)) if fragments is None else fragments:
            assert self._local[index].copy is None, f"fragment {index} is not captured yet; its base would be lost"
            self._local[index].base = None
            if not mixing:
                self.show_anchor_(index)
                continue
            owns = self.local.read(self.fragments[index], self.chunks[index])
            for (start, stop), own in zip(self.chunks[index], owns, strict=True):
                mixed = buffer("chunk", torch.float32, stop - start)
                torch.lerp(self.anchors[index][start:stop], own, mixing, out=mixed)
                self.local.scatter_(self.fragments[index], start, stop, mixed)

    def show_anchor_(self, fragment: int) -> None:
        """Local parameters become the anchor for a while; the base of the next pseudo-gradient stays."""
        for start, stop in self.chunks[fragment]:
            self.local.scatter_(self.fragments[fragment], start, stop, self.anchors[fragment][start:stop])

    def digest(self, fragment: int) -> str:
        """Digest of the fragment's anchor (hex)."""
        return digest_of(self.anchors[fragment])

    def digests(self) -> list[str]:
        """Digests of all anchors, by fragment."""
        return [self.digest(index) for index in range(len(self.fragments))]

    # -- what an author keeps, and who may inherit ---------------------------------------------------------------------

    @property
    def can_follow(self) -> bool:
        """Whether an heir has anything to know, and can compute it from the updates."""
        return self.optimizer.can_follow and (self.settings.momentum > 0 or self.settings.windowed)

    def follow(self, fragments: Collection[int]) -> None:
        """Keep momentum and window of these fragments, and of this peer's own, and of no others; from zeros on."""
        wanted = {*self.aggregates, *(fragments if self.can_follow else ())}
        self.states = {one: self.states.get(one) or self._zeros(one) for one in sorted(wanted)}

    def hold(self, fragment: int, master: Tensor | None = None, state: OuterState | None = None) -> None:
        """Become author, with master and outer state of a checkpoint, or keep what there is.

        Without either the master starts at the anchor, and momentum and window as they were followed, or at zeros.
        """
        self.states[fragment] = state or self.states.get(fragment) or self._zeros(fragment)
        if fragment not in self.aggregates or master is not None:
            self.aggregates[fragment] = Aggregate(
                self.fragments[fragment], self.anchors[fragment], self.settings, self.rng, self.local.shapes, master
            )

    def release(self, fragment: int) -> None:
        """Stop being author; momentum and window stay until the next `follow`."""
        self.aggregates.pop(fragment, None)

    def plan(self, rounds: int | None) -> None:
        """The outer momentum rises over so many rounds."""
        self.settings = self.settings.model_copy(update={"rounds": rounds})
        for optimizer in (self.optimizer, *(aggregate.optimizer for aggregate in self.aggregates.values())):
            optimizer.settings = self.settings

    def _zeros(self, fragment: int) -> OuterState:
        return OuterState.zeros(self.fragments[fragment].numel, self.optimizer.num_buffers)


def _parts(whole: Tensor, offsets: Sequence[int]) -> list[Tensor]:
    if whole.numel() != offsets[-1]:
        raise PayloadError(f"{offsets[-1]} bytes of a fragment are expected, these are {whole.numel()}")
    return [whole[begin:end] for begin, end in pairwise(offsets)]
