"""When a peer exchanges which fragments, by its inner steps. Sans-IO."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Schedule"]


@dataclass
class Schedule:
    """The `sync` schedule: all fragments are due together, `sync_every` inner steps after the last exchange.

    Attributes:
        fragments: how many there are. sync_every: H.
        inner_step: inner steps of the round under way. target_steps: how many it will have; the first round of a peer
            that joins in the middle of the others' is shorter, so that nobody waits for it.
    """

    fragments: int
    sync_every: int
    inner_step: int = 0
    target_steps: int = 0

    def begin(self, steps: int | None = None) -> None:
        """A round begins; of `sync_every` inner steps unless said otherwise."""
        self.inner_step = 0
        self.target_steps = self.sync_every if steps is None else steps

    def advance(self) -> tuple[int, ...]:
        """An inner step is done; returns the fragments to exchange before the next one."""
        self.inner_step += 1
        return tuple(range(self.fragments)) if self.inner_step >= self.target_steps else ()
