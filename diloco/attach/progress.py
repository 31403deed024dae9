"""How fast a peer trains, and where its time goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple

from diloco.config import OuterConfig
from diloco.messages.snapshot import PhaseSeconds
from diloco.rundir.summary import PhaseTimer

__all__ = ["Progress", "dylu_steps"]

DYLU_FLOOR = 5  # inner steps (arXiv 2401.09135, the authors' code)


class Progress:
    """The figures that a peer tells the swarm about its training.

    Attributes:
        steps_per_s: inner steps per second since the parameters were loaded last, without exchanges and what follows
            them; other peers plan with it.
        loss: mean loss of the last inner steps (nats per token). rounds: how many are over.
        seconds: of the last round, by phase in the order of `PHASES`; empty before the first round is over.
    """

    def __init__(self, phases: PhaseTimer, clock: Callable[[], float]) -> None:
        self.steps_per_s = 0.0
        self.loss = 0.0
        self.rounds = 0
        self.seconds: list[float] = []
        self._phases = phases
        self._clock = clock
        self._began = (0, 0.0)  # inner steps and the time when the parameters were loaded last
        self._round_began = PhaseSeconds()

    def begin_run(self, steps: int) -> None:
        """The peer begins to train, after so many inner steps in its earlier sessions."""
        self._round_began = self._phases.seconds()
        self.restart(steps)

    def restart(self, steps: int) -> None:
        """Training goes on after an exchange; `steps` is the peer's count of inner steps."""
        self._began = (steps, self._clock())

    def measure(self, steps: int) -> None:
        """Another inner step is done."""
        before, at = self._began
        self.steps_per_s = (steps - before) / max(self._clock() - at, 1e-9)

    def cycle_steps(self, outer: OuterConfig, fastest: Callable[[float], float]) -> int:
        """Inner steps of the coming round: H, or fewer on a slow peer (DyLU), given the pace of the fastest peer."""
        if not outer.dylu:
            return outer.sync_every
        floor = min(DYLU_FLOOR, outer.sync_every)
        return dylu_steps(self.steps_per_s, fastest(self.steps_per_s), outer.sync_every, floor)

    def end_round(self) -> None:
        """A round is over: the inner steps since the one before it, and its exchange."""
        now, began = self._phases.seconds(), self._round_began
        self.rounds, self._round_began = self.rounds + 1, now
        self.seconds = [max(0.0, spent) for spent in astuple(now - began)]


def dylu_steps(mine: float, fastest: float, sync_every: int, floor: int = DYLU_FLOOR) -> int:
    """Inner steps of a peer that makes `mine` steps a second, if it should finish when the fastest finishes
    `sync_every`.

    Dynamic local updates of Asynchronous Local-SGD (arXiv 2401.09135, Algorithm 2): floor(mine / fastest * H), at
    least `floor` and at most H. A peer takes H if it measured itself faster than the fastest known peer, or if a speed
    is not known yet (0).
    """
    assert mine >= 0 and fastest >= 0 and sync_every >= 1, f"speeds {mine}, {fastest} are impossible"
    if not 0 < mine < fastest:
        return sync_every
    return min(sync_every, max(floor, int(mine / fastest * sync_every)))
