"""How fast a peer trains, and where its time goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple

from diloco.config import OuterConfig
from diloco.messages.control import Figures
from diloco.messages.fields import MAX_LOSS, MAX_SECONDS, MAX_TOKENS, at_most, within_bounds
from diloco.messages.snapshot import PhaseSeconds
from diloco.rundir.summary import PhaseTimer
from diloco.swarm.wire.streams import Traffic

DYLU_FLOOR = 5  # inner steps (arXiv 2401.09135, the authors' code)


class Progress:
    """The figures that a peer tells the swarm about its training.

    `steps_per_s` are inner steps per second without exchanges, since the last one; other peers plan
    with it.
    """

    def __init__(self, phases: PhaseTimer, clock: Callable[[], float]) -> None:
        self.steps_per_s = self.loss = 0.0
        # of the last round, by phase in the order of `PHASES`
        self._rounds, self._seconds = 0, list[float]()
        self._phases, self._clock = phases, clock
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
        """Inner steps of the coming round with DyLU, given the pace of the fastest peer."""
        floor = min(DYLU_FLOOR, outer.sync_every)
        return dylu_steps(self.steps_per_s, fastest(self.steps_per_s), outer.sync_every, floor)

    def end_round(self) -> None:
        """A round is over: the inner steps since the one before it, and its exchange."""
        now, began = self._phases.seconds(), self._round_began
        self._rounds, self._round_began = self._rounds + 1, now
        self._seconds = [max(0.0, spent) for spent in astuple(now - began)]

    def figures(self, tokens: int, discarded: int, traffic: Traffic) -> Figures:
        """What watchers are shown."""
        tokens, discarded = at_most(tokens, MAX_TOKENS), at_most(discarded, MAX_TOKENS)
        seconds = [within_bounds(spent, MAX_SECONDS) for spent in self._seconds]
        loss = within_bounds(self.loss, MAX_LOSS)
        return Figures(
            tokens,
            discarded,
            loss,
            traffic.bytes_sent,
            traffic.bytes_received,
            self._rounds,
            seconds,
        )


def dylu_steps(mine: float, fastest: float, sync_every: int, floor: int = DYLU_FLOOR) -> int:
    """Inner steps of a peer that makes `mine` steps a second, if it should finish when the fastest
    finishes `sync_every`.

    Dynamic local updates of Asynchronous Local-SGD (arXiv 2401.09135, Algorithm 2): floor(mine /
    fastest * H), at least `floor` and at most H. A peer takes H if it is the fastest, or if a speed
    is not known yet (0).
    """
    if not 0 < mine < fastest:
        return sync_every
    return min(sync_every, max(floor, int(mine / fastest * sync_every)))
