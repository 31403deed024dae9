"""When a peer sends which fragments and adopts which updates, counted in inner steps. Sans-IO.

sync_every 6, 3 fragments, overlap 1           S sends, R receives
together     . . . . . S S S | R R R . . . . .
staggered    . S0 R0 S1 R1 S2 | R2 S0 ...                (Streaming DiLoCo, arXiv 2501.18512, Algorithm 2)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Due", "Schedule", "dylu_steps"]


class Due(NamedTuple):
    """Fragments to send now, and fragments whose updates must be adopted before the next inner step."""

    send: tuple[int, ...]
    receive: tuple[int, ...]


@dataclass
class Schedule:
    """The cycle of a peer.

    Attributes:
        fragments: how many there are. sync_every: H, inner steps of a full cycle.
        staggered: fragments are due one after another, evenly over the cycle; else all at its end.
        overlap: inner steps from sending a pseudo-gradient to adopting the update.
        inner_step: position in the cycle. target_steps: its length, which the owner may set as one begins: a
            slow peer with DyLU takes fewer than H.
    """

    fragments: int
    sync_every: int
    staggered: bool = False
    overlap: int = 0
    inner_step: int = 0
    target_steps: int = 0
    _flying: list[tuple[int, int]] = field(default_factory=list)  # inner steps left, fragment

    def begin(self, position: int = 0, steps: int | None = None) -> None:
        """A cycle begins, with nothing under way; at a later `position` if the others are there already."""
        self.inner_step = position
        self.target_steps = self.sync_every if steps is None else steps
        self._flying = []

    def advance(self) -> Due:
        """An inner step is done."""
        self.inner_step += 1
        self._flying = [(left - 1, fragment) for left, fragment in self._flying]
        send = tuple(f for f in range(self.fragments) if self._sent_at(f) == self.inner_step)
        self._flying += [(self.overlap, fragment) for fragment in send]
        receive = tuple(fragment for left, fragment in self._flying if left <= 0)
        self._flying = [(left, fragment) for left, fragment in self._flying if left > 0]
        if self.inner_step >= self.target_steps:
            self.inner_step = 0
        return Due(send, receive)

    @property
    def flying(self) -> tuple[int, ...]:
        """Fragments that were sent and whose updates are not adopted yet."""
        return tuple(fragment for _, fragment in self._flying)

    def position_after(self, outrun: Collection[int], due: Due) -> int:
        """Where in the cycle this peer goes on once the others have made versions of these fragments without it.

        The others come to each of them again only after all the rest. A peer that came to one of them earlier would
        wait for the others there, while they wait for what it would send later. So it leaves out turns until these
        are the last ones of its cycle, apart from the fragments that it is exchanging now. `due` is what is due now.
        """
        if not self.staggered:
            return self.inner_step
        exchanging = {*self.flying, *due.receive}
        ahead = [fragment for fragment in range(self.fragments) if fragment not in exchanging]
        ahead.sort(key=lambda fragment: (self._sent_at(fragment) - self.inner_step - 1) % self.target_steps)
        for left_out in range(len(ahead)):
            order = ahead[left_out:] + ahead[:left_out]
            if set(order[len(order) - len(outrun) :]) == set(outrun):
                return self._sent_at(ahead[left_out - 1]) % self.target_steps if left_out else self.inner_step
        return self.inner_step

    def _sent_at(self, fragment: int) -> int:
        if not self.staggered:
            return self.target_steps
        return -(-(fragment + 1) * self.target_steps // self.fragments)


def dylu_steps(mine: float, fastest: float, sync_every: int, floor: int = 5) -> int:
    """Inner steps of a peer that makes `mine` steps a second, if it should finish when the fastest finishes
    `sync_every`.

    Dynamic local updates of Asynchronous Local-SGD (arXiv 2401.09135, Algorithm 2): floor(mine / fastest * H), at
    least `floor` (5 in the authors' code) and at most H. A peer takes H if it measured itself faster than the fastest
    known peer, or if a speed is not known yet (0).
    """
    assert mine >= 0 and fastest >= 0 and sync_every >= 1, f"speeds {mine}, {fastest} are impossible"
    if not 0 < mine < fastest:
        return sync_every
    return min(sync_every, max(floor, int(mine / fastest * sync_every)))
