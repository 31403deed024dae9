"""What the outer optimizer keeps of a fragment between two versions, on its author and on whoever may follow that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diloco.outer.optimizer import OuterStep, Transition
from diloco.outer.payloads import Codec, buffer

__all__ = ["OuterState"]


@dataclass
class OuterState:
    """Momentum and window of a fragment, which both follow from the published updates alone.

    A momentum that begins at zeros, or misses a step, is soon right (see `Linear.follow_`).

    Attributes:
        version: the version that they belong to.
        vectors: the momentum and the optimizer's further vectors, such as the window; each (numel,) fp32.
        pushes: contributions in the window.
        delay: contributions that make it full.
    """

    version: int
    vectors: tuple[Tensor, ...]
    pushes: int = 0
    delay: int = 1

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

    def step(self, version: int, contributions: int, delay: int) -> OuterStep:
        """The step from a version that merges so many contributions; a window that they begin is full with `delay`."""
        pushes = self.pushes if self.version == version else 0
        return OuterStep(version, contributions, pushes, self.delay if pushes else delay)

    def join_(self, step: OuterStep) -> None:
        """Belong to the anchor that the step starts from. Of another one only the momentum is worth keeping."""
        here = (self.version, self.pushes, self.delay if self.pushes else step.delay)
        if here != (step.version, step.pushes, step.delay):
            for further in self.vectors[1:]:
                further.zero_()
        self.version, self.pushes, self.delay = step.version, step.pushes, step.delay

    def apply_(
        self, step: OuterStep, transition: Transition, codec: Codec, anchor: Tensor,
        parts: Iterable[tuple[Tensor, tuple[int, int]]],
    ) -> None:  # fmt: skip
        """Move an anchor by the chunks of its update, each with its range, and the vectors by what it moved."""
        self.join_(step)
        for update, (start, stop) in parts:
            moved = buffer("moved", torch.float32, stop - start).copy_(anchor[start:stop])
            codec.apply_update_(anchor[start:stop], update)
            transition.follow_(self.part(start, stop), torch.sub(anchor[start:stop], moved, out=moved))
        self.version, self.pushes = step.version + 1, (step.pushes + step.contributions) % step.delay
