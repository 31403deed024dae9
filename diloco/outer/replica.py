"""A peer's half of every fragment: the anchor, the pseudo-gradient against it, and the updates that move it.

    encode        base - local, chunk by chunk, as payload           (every peer)
    hold          the syncer's half, `Held`: payloads -> update      (the syncer)
    apply         update -> anchor, then its digest is compared      (every peer)
    stand by      update -> momentum and window, as on the syncer    (the heir)

The *base* is the anchor that the local parameters started from. At a barrier it is the anchor itself. Where a fragment
moves on while this peer trains, `keep_base` keeps a copy until the peer exchanges. Parameters narrower than fp32
started from a rounded base. The pseudo-gradient is measured from there; else it would hold the same rounding error in
every round and on every peer, and the anchor would drift while nobody trains.

Memory, in fp32 copies of the parameters: 1 for the anchors, 3 for the fragments held (see `held`), and 1 for the
fragments this peer is backup of; with a windowed optimizer these are 4 and 2. Everything else is chunk-sized. Settings
that add to it: a payload for each fragment whose exchange is overlapped (`capture`), 1 for error feedback, a base for
the fragments held when versions do not wait for this peer. All tensors here live on the CPU; local parameters may be on
any device (see `local`).
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
from diloco.outer.codecs import codec
from diloco.outer.digest import digest_of
from diloco.outer.fragments import Fragment, chunks
from diloco.outer.held import Held
from diloco.outer.local import Local, Source
from diloco.outer.optimizer import OPTIMIZERS, OuterStep, pseudo_gradient_
from diloco.outer.payloads import Codec, buffer, norm_of
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


class Replica:
    """Anchors over the parameters of a model, and `held`, the outer state of the fragments that this peer is syncer of.

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
        self.held: dict[int, Held] = {}
        self.standby: dict[int, OuterState] = {}  # of fragments held elsewhere
        self.residuals: dict[int, Tensor] = {}  # what codec_up lost, with error feedback
        self._local = [
            _Local(fragment, anchor, self.up.offsets(fragment.numel), self.down.offsets(fragment.numel))
            for fragment, anchor in zip(self.fragments, self.anchors, strict=True)
        ]
        for local in self._local:
            for start, stop in self.chunks[local.fragment.index]:
                self.local.gather_(local.anchor[start:stop], local.fragment, start, stop)

    # -- what this peer sends -----------------------------------------------------------------------------------------

    def encode(self, fragment: int, chunk: int) -> Tensor:
        """Payload (uint8) of a chunk of the pseudo-gradient, captured or as it is now. Raises `DivergedError`."""
        local = self._local[fragment]
        if local.captured is not None:
            return local.captured[local.payload_at[chunk] : local.payload_at[chunk + 1]]
        payload = torch.empty(self.payload_nbytes(fragment, chunk), dtype=torch.uint8)
        for delta in self._deltas(local, [self.chunks[fragment][chunk]]):
            self.up.encode(delta, payload)
        return payload

    def _deltas(self, local: _Local, ranges: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
        """The pseudo-gradient in each of these ranges, fp32, in this thread's buffer."""
        source = local.copy or Source(self.local, local.fragment)
        for (start, stop), own in zip(ranges, source.local.read(source.fragment, ranges), strict=True):
            delta = buffer("chunk", torch.float32, stop - start)
            base = (local.anchor if local.base is None else local.base)[start:stop]
            rounded = buffer("base", torch.float32, stop - start)
            base = source.local.as_loaded(rounded, base, source.fragment, start)
            pseudo_gradient_(delta, base, own)
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

    def capture(self, fragment: int) -> None:
        """Keep the payload of the whole pseudo-gradient as it is now, until `release_capture`; training may go on.

        After `copy_local` the pseudo-gradient is that of then, and training goes on meanwhile. The payload is the same,
        bit for bit: values are copied, and what is computed is computed on the CPU either way.

        With error feedback the residual, which is what the codec loses, is added to the next pseudo-gradient before it
        is encoded: e = beta e + delta - sent (SparseLoCo, arXiv 2508.15706). With beta = 1 nothing is ever lost, only
        late; with less, what stays unsent fades, and stale directions are forgotten. The residual is never sent.
        """
        local, beta = self._local[fragment], self.settings.error_feedback
        captured = torch.empty(self.payload_numel(fragment), dtype=torch.uint8)
        residual = self.residuals.get(fragment)
        if beta and residual is None:
            residual = self.residuals[fragment] = torch.zeros(local.fragment.numel, dtype=torch.float32)
        for chunk, delta in enumerate(self._deltas(local, self.chunks[fragment])):
            start, stop = self.chunks[fragment][chunk]
            payload = captured[local.payload_at[chunk] : local.payload_at[chunk + 1]]
            if residual is not None:
                delta.add_(residual[start:stop], alpha=beta)
            self.up.encode(delta, payload)
            if residual is not None:
                self.up.accumulate_(delta, payload, -1.0)
                residual[start:stop].copy_(delta)
        local.captured, local.copy = captured, None

    def release_capture(self, fragment: int) -> None:
        """Forget the captured payload, or the copy that it was to be made of."""
        self._local[fragment].captured = self._local[fragment].copy = None

    def keep_base(self, fragment: int) -> None:
        """Copy the anchor before it moves, if local parameters started from it and are not captured yet."""
        local = self._local[fragment]
        if local.base is None and local.captured is None:
            local.base = local.anchor.clone()

    def payload_nbytes(self, fragment: int, chunk: int) -> int:
        """Length of `encode`'s result in bytes."""
        payload_at = self._local[fragment].payload_at
        return payload_at[chunk + 1] - payload_at[chunk]

    def payload_numel(self, fragment: int) -> int:
        """Length of the payload of a whole fragment in bytes."""
        return self._local[fragment].payload_at[-1]

    def payload_norm(self, fragment: int, payload: Tensor) -> float:
        """L2 norm of a whole contribution (uint8). `PayloadError` if it is invalid."""
        if payload.numel() != self.payload_numel(fragment):
            raise PayloadError(f"a contribution to fragment {fragment} has {payload.numel()} bytes")
        return self._norm(fragment, self.up, payload, self._local[fragment].payload_at)

    def _norm(self, fragment: int, codec: Codec, payload: Tensor, offsets: Sequence[int]) -> float:
        ranges = zip(pairwise(offsets), self.chunks[fragment], strict=True)
        return math.hypot(
            *(norm_of(codec.values(payload[begin:end], stop - start)) for (begin, end), (start, stop) in ranges)
        )

    # -- what this peer adopts ----------------------------------------------------------------------------------------

    def update_nbytes(self, fragment: int) -> int:
        """Length of a whole update of a fragment in bytes."""
        return self._local[fragment].update_at[-1]

    def apply_update_(self, fragment: int, update: Tensor, step: OuterStep | None = None) -> str:
        """Move the anchor by a whole update (uint8) and return its new digest. Without a `step` no state follows.

        `PayloadError` before anything is changed when the length is wrong. An update that is invalid inside leaves an
        anchor that the caller repairs by fetching the fragment's state.
        """
        if update.numel() != self.update_nbytes(fragment):
            raise PayloadError(f"an update of fragment {fragment} has {update.numel()} bytes")
        local, transition = self._local[fragment], None if step is None else self.optimizer.transition(step)
        held = self.held.get(fragment)  # the syncer before this one published once more
        state = None if step is None else self.standby.get(fragment) if held is None else held.state
        if state is not None and step is not None:
            state.join_(step)
        for chunk, (start, stop) in enumerate(self.chunks[fragment]):
            payload = update[local.update_at[chunk] : local.update_at[chunk + 1]]
            anchor = local.anchor[start:stop]
            if state is not None and transition is not None:
                adopt_(self.down, transition, anchor, state.part(start, stop), payload)
            else:
                self.down.apply_update_(anchor, payload)
        if state is not None and step is not None:
            state.took_(step)
        return self.digest(fragment)

    def update_norm(self, fragment: int, update: Tensor) -> float:
        """L2 norm of the displacement of the anchor that is here by a whole update (uint8), before it is applied.

        `PayloadError` if the update is invalid.
        """
        if update.numel() != self.update_nbytes(fragment):
            raise PayloadError(f"an update of fragment {fragment} has {update.numel()} bytes")
        offsets = self._local[fragment].update_at
        if not self.down.carries_values:
            return self._norm(fragment, self.down, update, offsets)
        norms = []
        for (begin, end), (start, stop) in zip(pairwise(offsets), self.chunks[fragment], strict=True):
            moved = buffer("moved", torch.float32, stop - start)
            values = self.down.values(update[begin:end], stop - start)
            norms.append(norm_of(torch.sub(values, self.anchors[fragment][start:stop], out=moved)))
        return math.hypot(*norms)

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

    # -- becoming backup and syncer -----------------------------------------------------------------------------------

    @property
    def can_stand_by(self) -> bool:
        """Whether a backup has anything to know, and can compute it from the updates."""
        return self.optimizer.can_follow and (self.settings.momentum > 0 or self.settings.windowed)

    def stand_by(self, fragments: Collection[int]) -> None:
        """Be backup of these fragments, and of no others: follow momentum and window, from zeros on."""
        if self.can_stand_by:
            wanted = [fragment for fragment in fragments if fragment not in self.held]
            self.standby = {one: self.standby.get(one) or self._zeros(one) for one in wanted}

    def hold(
        self, fragment: int, version: int = 0, master: Tensor | None = None, state: OuterState | None = None
    ) -> None:
        """Become syncer of the anchor at that version, with the outer state of a checkpoint, or keep the one there is.

        Without either the master starts at the anchor, with momentum and window of the backup, or zeros.
        """
        standby, held = self.standby.pop(fragment, None), self.held.get(fragment)
        if held is not None and master is None:
            return
        state = state or standby or self._zeros(fragment)
        state.settle_(version)
        self.held[fragment] = Held(
            self.fragments[fragment], self.anchors[fragment], self.settings, self.rng,
            master=master, state=state, norms=None if held is None else held.norms, shapes=self.local.shapes,
        )  # fmt: skip

    def _zeros(self, fragment: int) -> OuterState:
        return OuterState.zeros(self.fragments[fragment].numel, self.optimizer.num_buffers)

    def renumber(self, fragment: int, version: int) -> None:
        """The anchor that is here has another number from now on; so has what belongs to it."""
        if fragment in self.standby:
            self.standby[fragment].version = version
        if fragment in self.held:
            self.held[fragment].state.version = version

    def plan(self, rounds: int | None) -> None:
        """The outer momentum rises over so many rounds."""
        self.settings = self.settings.model_copy(update={"rounds": rounds})
        for optimizer in (self.optimizer, *(held.optimizer for held in self.held.values())):
            optimizer.settings = self.settings

    def release(self, fragment: int) -> None:
        """Stop being syncer."""
        self.held.pop(fragment, None)
