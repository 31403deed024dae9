"""A peer's tensors: the anchor of every fragment, and the outer state of the fragments it is syncer of.

    encode        anchor - local, chunk by chunk, as payload        (every peer)
    fold          payload -> weighted sum                            (the syncer)
    merge         sum -> mean -> outer step on the master -> update  (the syncer)
    apply         update -> anchor, then its digest is compared      (every peer)

Memory, in fp32 copies of the parameters: 1 for the anchors, and 3 (master, momentum, weighted sum) for the fragments
held. Everything else is chunk-sized. All tensors here live on the CPU; local parameters may be on any device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.errors import PayloadError
from diloco.outer.codecs import codec
from diloco.outer.digest import fragment_digest, part_digests
from diloco.outer.fragments import Fragment, chunks, gather_, scatter_
from diloco.outer.optimizer import mean_, nesterov_, pseudo_gradient_

__all__ = ["OuterState", "Replica"]


@dataclass
class OuterState:
    """Outer optimizer of one fragment: fp32 vectors of `numel` elements, and one weight per chunk of the sum."""

    master: Tensor  # (numel,) what the anchor would be without the codec's loss; the residual is master - anchor
    momentum: Tensor  # (numel,)
    total: Tensor  # (numel,) weighted sum of pseudo-gradients
    weights: list[float]  # per chunk: a contribution that broke midway counts where it arrived


class Replica:
    """Anchors and outer states over the parameters of a model.

    Args:
        parameters: the local parameters by name; read when encoding, written by `load_local_`.
        fragments: a partition of them.
        codec_up, codec_down: codecs of pseudo-gradients and of updates.
        lr, momentum: outer Nesterov settings.

    The anchors start as copies of the local parameters. A non-finite local parameter raises `DivergedError` when it is
    encoded; an invalid payload raises `PayloadError` and changes nothing.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        fragments: Sequence[Fragment],
        codec_up: str,
        codec_down: str,
        lr: float,
        momentum: float,
    ) -> None:
        self.parameters = dict(parameters)
        self.fragments = tuple(fragments)
        self.up = codec(codec_up)
        self.down = codec(codec_down)
        self.lr = lr
        self.momentum = momentum
        self.chunks = [list(chunks(fragment.numel)) for fragment in self.fragments]
        self.outer: dict[int, OuterState] = {}
        self.anchors = [torch.empty(fragment.numel) for fragment in self.fragments]
        for fragment, anchor in zip(self.fragments, self.anchors, strict=True):
            for start, stop in self.chunks[fragment.index]:
                gather_(anchor[start:stop], fragment, start, stop, self.parameters)

    # -- every peer ---------------------------------------------------------------------------------------------------

    def encode(self, fragment: int, chunk: int) -> Tensor:
        """Payload (uint8) of one chunk of the pseudo-gradient, in memory of its own; `DivergedError` when not
        finite.
        """
        start, stop = self.chunks[fragment][chunk]
        delta = torch.empty(stop - start)
        gather_(delta, self.fragments[fragment], start, stop, self.parameters)
        pseudo_gradient_(delta, self.anchors[fragment][start:stop], delta)
        payload = torch.empty(self.up.nbytes(stop - start), dtype=torch.uint8)
        self.up.encode(delta, payload)
        return payload

    def payload_nbytes(self, fragment: int, chunk: int) -> int:
        """Length of `encode`'s result in bytes."""
        start, stop = self.chunks[fragment][chunk]
        return self.up.nbytes(stop - start)

    def update_nbytes(self, fragment: int) -> int:
        """Length of a whole update of a fragment in bytes."""
        return sum(self.down.nbytes(stop - start) for start, stop in self.chunks[fragment])

    def apply_update_(self, fragment: int, update: Tensor) -> str:
        """Move the anchor by a whole update (uint8) and return the digest of what it is now.

        `PayloadError` before anything is changed when the length is wrong; an update that is invalid inside leaves an
        anchor that the caller heals by fetching the fragment's state.
        """
        if update.numel() != self.update_nbytes(fragment):
            raise PayloadError(f"an update of fragment {fragment} has {update.numel()} bytes")
        at = 0
        for start, stop in self.chunks[fragment]:
            size = self.down.nbytes(stop - start)
            self.down.apply_update_(self.anchors[fragment][start:stop], update[at : at + size])
            at += size
        return self.digest(fragment)

    def load_local_(self, fragments: Sequence[int] | None = None) -> None:
        """Local parameters become the anchors (of these fragments; all by default)."""
        for index in range(len(self.fragments)) if fragments is None else fragments:
            for start, stop in self.chunks[index]:
                scatter_(self.parameters, self.fragments[index], start, stop, self.anchors[index][start:stop])

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

    def hold(self, fragment: int, master: Tensor | None = None, momentum: Tensor | None = None) -> None:
        """Become syncer: keep the outer state there is or take what is given; else it starts at the anchor with zero
        momentum.
        """
        if fragment in self.outer and master is None:
            return
        anchor = self.anchors[fragment]
        self.outer[fragment] = OuterState(
            master=anchor.clone() if master is None else master,
            momentum=torch.zeros_like(anchor) if momentum is None else momentum,
            total=torch.zeros_like(anchor),
            weights=[0.0] * len(self.chunks[fragment]),
        )

    def release(self, fragment: int) -> None:
        """Be syncer no more."""
        self.outer.pop(fragment, None)

    def fold(self, fragment: int, chunk: int, payload: Tensor, weight: float) -> None:
        """Add weight times a received chunk to the sum; `PayloadError` leaves the sum as it was."""
        outer = self.outer[fragment]
        start, stop = self.chunks[fragment][chunk]
        self.up.accumulate_(outer.total[start:stop], payload, weight)
        outer.weights[chunk] += weight

    def fold_own(self, fragment: int, chunk: int, weight: float) -> None:
        """Add weight times this peer's own chunk, through the codec like everybody else's."""
        self.fold(fragment, chunk, self.encode(fragment, chunk), weight)

    def merge_chunk_(self, fragment: int, chunk: int, out: Tensor) -> None:
        """Mean of the sum, outer step on the master, update encoded into `out` (uint8) and applied to the anchor."""
        outer = self.outer[fragment]
        start, stop = self.chunks[fragment][chunk]
        total, master = outer.total[start:stop], outer.master[start:stop]
        mean_(total, outer.weights[chunk])
        nesterov_(master, outer.momentum[start:stop], total, self.lr, self.momentum)
        anchor = self.anchors[fragment][start:stop]
        self.down.encode_update(master, anchor, out)
        self.down.apply_update_(anchor, out)
        total.zero_()
        outer.weights[chunk] = 0.0

    def restart(self, fragment: int) -> None:
        """The anchor of a held fragment was replaced: the master starts from it, with the momentum that there is."""
        outer = self.outer[fragment]
        outer.master.copy_(self.anchors[fragment])
        outer.total.zero_()
        outer.weights = [0.0] * len(self.chunks[fragment])
