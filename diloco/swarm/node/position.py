"""Position of a peer's training after a call of its loop, and the length of its next cycle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

DYLU_FLOOR = 5  # inner steps (arXiv 2401.09135, the authors' code)


class Position(NamedTuple):
    """Position of a peer's training, after a call of its loop.

    Attributes:
        stopped_by: the signal that ended the waiting, or 0; then nothing else is known. -1: none.
        version: the fewest outer steps of all fragments. applied_tokens: the swarm clock at the
            anchors here.
        discarded_tokens: this peer's own that are not in them and never will be.
        inner_step: of the cycle under way, which has `target_steps`.
        unsent_tokens: this peer's own that are in no contribution yet.
        exchanged: 1 after an exchange, which took `wait_s` and `outer_s` seconds.
    """

    stopped_by: int = -1
    version: int = 0
    applied_tokens: int = 0
    discarded_tokens: int = 0
    inner_step: int = 0
    target_steps: int = 0
    unsent_tokens: int = 0
    exchanged: int = 0
    wait_s: float = 0.0
    outer_s: float = 0.0

    @classmethod
    def of(cls, words: Sequence[float]) -> Position:
        """Return the position that came as numbers of a message."""
        *counts, wait_s, outer_s = words[: len(cls._fields)]
        return cls._make([*map(int, counts), wait_s, outer_s])


def dylu_steps(mine: float, fastest: float, sync_every: int, floor: int = DYLU_FLOOR) -> int:
    """Inner steps in which a peer is done when the fastest has made `sync_every`.

    `mine` and `fastest` are steps per second. Dynamic local updates of Asynchronous Local-SGD
    (arXiv 2401.09135, Algorithm 2): floor(mine / fastest * H), at least `floor` and at most H. A
    peer takes H if it is the fastest, or if a speed is not known yet (0).
    """
    if not 0 < mine < fastest:
        return sync_every
    return min(sync_every, max(min(floor, sync_every), int(mine / fastest * sync_every)))


def nothing() -> None:
    """Do nothing: there is nothing to prepare."""
