"""What the outer optimizer keeps of a fragment between two versions, on its syncer and on the backup of that."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diloco.outer.optimizer import OuterStep, Transition
from diloco.outer.payloads import Codec, buffer

__all__ = ["OuterState", "adopt_"]

SETTLED = 16  # steps after which less than 1e-5 of an error in the momentum is left


@dataclass
class OuterState:
    """Momentum and window of a fragment, which both follow from the published updates alone.

    Attributes:
        version: the version that they belong to.
        vectors: the momentum and the optimizer's further vectors, such as the window; each (numel,) fp32.
        pushes: contributions in the window.
        delay: contributions that make it full.
        followed: steps in a row that made the vectors. The error of a momentum that began at zeros, or missed a step,
            is less than half after each further one (see `Linear.follow_`).
    """

    version: int
    vectors: tuple[Tensor, ...]
    pushes: int = 0
    delay: int = 1
    followed: int = 0

    @classmethod
    def zeros(cls, numel: int, num_buffers: int) -> OuterState:
        """The state before the first step."""
        return cls(0, tuple(torch.zeros(numel, dtype=torch.float32) for _ in range(1 + num_buffers)))

    @property
    def momentum(self) -> Tensor:
        """The outer momentum (numel,)."""
        return self.vectors[0]

    def clone(self) -> OuterState:
        """The same in memory of its own."""
        return replace(self, vectors=tuple(vector.clone() for vector in self.vectors))

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
        self.version, self.delay, self.followed = step.version + 1, step.delay, self.followed + 1
        self.pushes = (step.pushes + step.contributions) % step.delay

    def settle_(self, version: int) -> None:
        """Belong to the anchor at that version. Of another version only the momentum is worth keeping."""
        if self.version != version:
            self.version, self.pushes, self.followed = version, 0, 0
            for further in self.vectors[1:]:
                further.zero_()

    def join_(self, step: OuterStep) -> None:
        """Go on with a step that does not follow what is here; what its window holds already is not known."""
        if not self.fits(step):
            self.version = -1
            self.settle_(step.version)
            self.pushes, self.delay = step.pushes, step.delay

    @property
    def known(self) -> bool:
        """Whether the momentum is the syncer's, but for rounding."""
        return self.followed >= min(self.version, SETTLED)


def adopt_(codec: Codec, transition: Transition, anchor: Tensor, vectors: list[Tensor], update: Tensor) -> None:
    """Move a chunk of an anchor by its update, and momentum and window with it; the syncer does it as a backup does."""
    moved = buffer("moved", torch.float32, anchor.numel()).copy_(anchor)
    codec.apply_update_(anchor, update)
    transition.follow_(vectors, torch.sub(anchor, moved, out=moved))
