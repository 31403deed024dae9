"""What the outer optimizer keeps of a fragment between two versions, on its syncer and on the backup of that."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diloco.outer import merkle
from diloco.outer.optimizer import OuterStep, Transition
from diloco.outer.payloads import Codec, buffer

__all__ = ["OuterState", "adopt_", "state_root"]


@dataclass
class OuterState:
    """Momentum and window of a fragment, which both follow from the published updates alone.

    Attributes:
        version: the version that they belong to. It stays behind when a backup misses an update.
        vectors: the momentum and the optimizer's further vectors, such as the window; each (numel,) fp32.
        pushes: contributions in the window.
        delay: contributions that make it full.
    """

    version: int
    vectors: tuple[Tensor, ...]
    pushes: int = 0
    delay: int = 1

    @classmethod
    def zeros(cls, numel: int, num_buffers: int, version: int = 0) -> OuterState:
        """The state before the first step."""
        return cls(version, tuple(torch.zeros(numel) for _ in range(1 + num_buffers)))

    @property
    def momentum(self) -> Tensor:
        """The outer momentum (numel,)."""
        return self.vectors[0]

    def clone(self) -> OuterState:
        """The same in memory of its own."""
        return OuterState(self.version, tuple(vector.clone() for vector in self.vectors), self.pushes, self.delay)

    def with_buffers(self, num_buffers: int) -> OuterState:
        """The same with so many further vectors; those of an older checkpoint, which has none, begin anew."""
        missing = 1 + num_buffers - len(self.vectors)
        return replace(self, vectors=(*self.vectors, *(torch.zeros_like(self.momentum) for _ in range(missing))))

    def part(self, start: int, stop: int) -> list[Tensor]:
        """Views of a chunk of the vectors."""
        return [vector[start:stop] for vector in self.vectors]

    def step(self, contributions: int, delay: int) -> OuterStep:
        """The step that merges so many contributions; a window that they begin is full with `delay`."""
        return OuterStep(self.version, contributions, self.pushes, self.delay if self.pushes else delay)

    def fits(self, step: OuterStep) -> bool:
        """Whether the step goes on from here."""
        here = (self.version, self.pushes, self.delay if self.pushes else step.delay)
        return here == (step.version, step.pushes, step.delay)

    def took_(self, step: OuterStep) -> None:
        """The vectors are those after this step."""
        self.version, self.delay = step.version + 1, step.delay
        self.pushes = (step.pushes + step.contributions) % step.delay

    def settle_(self, version: int) -> None:
        """Belong to the anchor at that version. Of another version only the momentum is worth keeping."""
        if self.version != version:
            self.version, self.pushes = version, 0
            for further in self.vectors[1:]:
                further.zero_()


def state_root(master: Tensor, state: OuterState) -> bytes:
    """The Merkle root (32 bytes) over master, momentum and window, by which a head commits to them.

    Its leaves are `merkle.LEAF` elements each, first those of the master. Takes 1 ns per element and vector.
    """
    hashes = []
    for vector in (master, *state.vectors):
        values = vector.numpy().data.cast("B")
        width = 4 * merkle.LEAF
        hashes += [merkle.leaf(values[at : at + width]) for at in range(0, len(values), width)]
    return merkle.root(hashes)


def adopt_(codec: Codec, transition: Transition, anchor: Tensor, vectors: list[Tensor], update: Tensor) -> None:
    """Move a chunk of an anchor by its update, and momentum and window with it; the syncer does it as a backup does."""
    moved = buffer("moved", torch.float32, anchor.numel()).copy_(anchor)
    codec.apply_update_(anchor, update)
    transition.follow_(vectors, torch.sub(anchor, moved, out=moved))
