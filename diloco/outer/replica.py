"""A peer's half of every fragment: the anchor, the pseudo-gradient against it, and the updates that move it.

    encode        base - local, chunk by chunk, as payload           (every peer)
    hold          the syncer's half, `Held`: payloads -> update      (the syncer)
    apply         update -> anchor, then its digest is compared      (every peer)
    stand by      update -> the momentum behind it                   (the backup)

The *base* is the anchor that the local parameters started from. At a barrier it is the anchor itself. Where a fragment
moves on while this peer trains, `keep_base` keeps a copy until the peer exchanges.

Memory, in fp32 copies of the parameters: 1 for the anchors, 3 for the fragments held (see `held`), and 1 for the
fragments this peer is backup of. Everything else is chunk-sized. Settings that add to it: a payload for each fragment
whose exchange is overlapped (`capture`), 1 for error feedback, a base for the fragments held when versions do not wait
for this peer, 1 base when updates are a round late, and then 3 for eager ones. All tensors here live on the CPU; local
parameters may be on any device.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.config import OuterConfig
from diloco.errors import PayloadError
from diloco.outer.codecs import codec
from diloco.outer.digest import digest_of
from diloco.outer.fragments import Fragment, chunks, gather_, gathered, scatter_
from diloco.outer.held import Held
from diloco.outer.optimizer import OPTIMIZERS, OuterStep, eager_, pseudo_gradient_
from diloco.outer.payloads import buffer

__all__ = ["Replica", "Standby"]


@dataclass
class Standby:
    """A backup's momentum of a fragment, and its version. It stays behind when the backup misses an update."""

    version: int
    momentum: Tensor  # (numel,)


@dataclass
class _Local:
    """What every peer has of one fragment."""

    fragment: Fragment
    anchor: Tensor  # (numel,) fp32
    payload_at: tuple[int, ...]  # where chunks begin in a payload
    update_at: tuple[int, ...]  # where chunks begin in an update
    base: Tensor | None = None  # (numel,) what the local parameters started from, where it is not the anchor
    captured: Tensor | None = None  # (bytes,) uint8
    shadow: tuple[Tensor, Tensor, Tensor] | None = None  # offset, its velocity, last pseudo-gradient; see `eager_`


class Replica:
    """Anchors over the parameters of a model, and `held`, the outer state of the fragments that this peer is syncer of.

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
        self.up, self.down = codec(settings.codec_up), codec(settings.codec_down)
        self.optimizer = OPTIMIZERS[settings.optimizer](settings)
        self.rng: random.Random = random.SystemRandom()
        self.chunks = [list(chunks(fragment.numel)) for fragment in self.fragments]
        self.anchors = [torch.empty(fragment.numel) for fragment in self.fragments]
        self.held: dict[int, Held] = {}
        self.standby: dict[int, Standby] = {}  # of fragments held elsewhere
        self.residuals: dict[int, Tensor] = {}  # what codec_up lost, with error feedback
        self._local = [
            _Local(fragment, anchor, self.up.offsets(fragment.numel), self.down.offsets(fragment.numel))
            for fragment, anchor in zip(self.fragments, self.anchors, strict=True)
        ]
        for local in self._local:
            for start, stop in self.chunks[local.fragment.index]:
                gather_(local.anchor[start:stop], local.fragment, start, stop, self.parameters)

    # -- what this peer sends -----------------------------------------------------------------------------------------

    def encode(self, fragment: int, chunk: int) -> Tensor:
        """Payload (uint8) of a chunk of the pseudo-gradient, captured or as it is now. Raises `DivergedError`."""
        local = self._local[fragment]
        if local.captured is not None:
            return local.captured[local.payload_at[chunk] : local.payload_at[chunk + 1]]
        payload = torch.empty(self.payload_nbytes(fragment, chunk), dtype=torch.uint8)
        self.up.encode(self._delta(local, chunk), payload)
        return payload

    def _delta(self, local: _Local, chunk: int) -> Tensor:
        """One chunk of the pseudo-gradient, fp32, in this thread's buffer."""
        start, stop = self.chunks[local.fragment.index][chunk]
        delta = buffer("chunk", torch.float32, stop - start)
        base = local.anchor if local.base is None else local.base
        own = gathered(delta, local.fragment, start, stop, self.parameters)
        pseudo_gradient_(delta, base[start:stop], own)
        return delta

    def capture(self, fragment: int) -> None:
        """Keep the payload of the whole pseudo-gradient as it is now, until `release_capture`; training may go on.

        With error feedback the residual, which is what the codec loses, is added to the next pseudo-gradient before it
        is encoded: e = beta e + delta - sent (SparseLoCo, arXiv 2508.15706). With beta = 1 nothing is ever lost, only
        late; with less, what stays unsent fades, and stale directions are forgotten. The residual is never sent.
        """
        local, beta = self._local[fragment], self.settings.error_feedback
        captured = torch.empty(self.payload_numel(fragment), dtype=torch.uint8)
        residual = self.residuals.get(fragment)
        if beta and residual is None:
            residual = self.residuals[fragment] = torch.zeros(local.fragment.numel)
        for chunk, (start, stop) in enumerate(self.chunks[fragment]):
            payload = captured[local.payload_at[chunk] : local.payload_at[chunk + 1]]
            delta = self._delta(local, chunk)
            if residual is not None:
                delta.add_(residual[start:stop], alpha=beta)
            self.up.encode(delta, payload)
            if residual is not None:
                self.up.accumulate_(delta, payload, -1.0)
                residual[start:stop].copy_(delta)
        local.captured = captured

    def release_capture(self, fragment: int) -> None:
        """Forget the captured payload."""
        self._local[fragment].captured = None

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

    # -- what this peer adopts ----------------------------------------------------------------------------------------

    def update_nbytes(self, fragment: int) -> int:
        """Length of a whole update of a fragment in bytes."""
        return self._local[fragment].update_at[-1]

    def apply_update_(self, fragment: int, update: Tensor, step: OuterStep | None = None) -> str:
        """Move the anchor by a whole update (uint8) and return its new digest. A backup needs the `step`.

        `PayloadError` before anything is changed when the length is wrong. An update that is invalid inside leaves an
        anchor that the caller repairs by fetching the fragment's state.
        """
        if update.numel() != self.update_nbytes(fragment):
            raise PayloadError(f"an update of fragment {fragment} has {update.numel()} bytes")
        local, standby = self._local[fragment], self.standby.get(fragment)
        if standby is not None and (step is None or step.version != standby.version):
            standby = None
        momentum = None if standby is None else standby.momentum
        if fragment in self.held and self.can_stand_by:
            momentum = self.held[fragment].momentum  # the syncer before this one published once more
        for chunk, (start, stop) in enumerate(self.chunks[fragment]):
            payload = update[local.update_at[chunk] : local.update_at[chunk + 1]]
            anchor = local.anchor[start:stop]
            if momentum is None or step is None:
                self.down.apply_update_(anchor, payload)
                continue
            moved = buffer("displacement", torch.float32, stop - start).copy_(anchor)
            self.down.apply_update_(anchor, payload)
            self.optimizer.follow_(momentum[start:stop], torch.sub(anchor, moved, out=moved), step)
        if standby is not None:
            standby.version += 1
        return self.digest(fragment)

    def load_local_(self, fragments: Sequence[int] | None = None, mixing: float = 0.0) -> None:
        """Local parameters become the anchors (of these fragments; all by default).

        With `mixing` they keep that part of themselves: local = (1 - a) anchor + a local (Streaming DiLoCo, arXiv
        2501.18512, Algorithm 2).
        """
        for index in range(len(self.fragments)) if fragments is None else fragments:
            self._local[index].base = None
            for start, stop in self.chunks[index]:
                values = self.anchors[index][start:stop]
                if mixing:
                    own = buffer("chunk", torch.float32, stop - start)
                    gather_(own, self.fragments[index], start, stop, self.parameters)
                    values = torch.lerp(values, own, mixing, out=own)
                scatter_(self.parameters, self.fragments[index], start, stop, values)

    def load_late_(self, fragment: int, peers: int) -> None:
        """Local parameters become an anchor that lacks what they learned in this round, and start the next one there.

        The pseudo-gradient of the round was captured before and acts in the next update. With `eager` this peer's own
        part of it acts at once, for itself: a *shadow* of the Nesterov step is added (Eager updates, arXiv 2502.12996).
        """
        local, settings = self._local[fragment], self.settings
        numel = local.fragment.numel
        if settings.eager and local.shadow is None:
            local.shadow = (torch.zeros(numel), torch.zeros(numel), torch.zeros(numel))
        start_of_round = torch.empty(numel) if local.base is None else local.base
        for chunk, (start, stop) in enumerate(self.chunks[fragment]):
            values = local.anchor[start:stop]
            if local.shadow is not None:
                delta = self._delta(local, chunk)
                shadow, velocity, previous = (vector[start:stop] for vector in local.shadow)
                eager_(shadow, velocity, previous, delta, peers=peers, lr=settings.lr, beta=settings.momentum)
                values = torch.add(values, shadow, out=delta)
            scatter_(self.parameters, local.fragment, start, stop, values)
            start_of_round[start:stop] = values
        local.base = start_of_round

    def show_anchor_(self, fragment: int) -> None:
        """Local parameters become the anchor for a while; the base of the next pseudo-gradient stays."""
        for start, stop in self.chunks[fragment]:
            scatter_(self.parameters, self.fragments[fragment], start, stop, self.anchors[fragment][start:stop])

    def digest(self, fragment: int) -> str:
        """Digest of the fragment's anchor (hex)."""
        return digest_of(self.anchors[fragment])

    def digests(self) -> list[str]:
        """Digests of all anchors, by fragment."""
        return [self.digest(index) for index in range(len(self.fragments))]

    # -- becoming backup and syncer -----------------------------------------------------------------------------------

    @property
    def can_stand_by(self) -> bool:
        """Whether there is an outer momentum, and a backup can compute it from the updates."""
        return self.optimizer.can_follow and self.settings.momentum > 0

    def stand_by(self, fragment: int, version: int = 0, momentum: Tensor | None = None) -> None:
        """Become backup: follow the momentum from this version on; at version 0 it is zero."""
        momentum = torch.zeros_like(self.anchors[fragment]) if momentum is None else momentum
        self.standby[fragment] = Standby(version, momentum)

    def hold(self, fragment: int, master: Tensor | None = None, momentum: Tensor | None = None) -> None:
        """Become syncer, with this outer state, or keep the one there is.

        Without either the state starts at the anchor, with the momentum of the backup, or zero.
        """
        standby, held = self.standby.pop(fragment, None), self.held.get(fragment)
        if held is not None and master is None:
            return
        if momentum is None and standby is not None:
            momentum = standby.momentum
        self.held[fragment] = Held(
            self.fragments[fragment], self.anchors[fragment], self.settings, self.rng,
            master=master, momentum=momentum, norms=None if held is None else held.norms,
            shapes={name: parameter.shape for name, parameter in self.parameters.items()},
        )  # fmt: skip

    def release(self, fragment: int) -> None:
        """Stop being syncer."""
        self.held.pop(fragment, None)
