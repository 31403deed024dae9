"""How often a peer says its status and acts upon what it heard, so that both stay cheap in large swarms. Sans-IO.

A node hears every other one, so what it hears grows with the number of peers; what it spends on that must not.

- It acts on all statuses and publications that arrive within `TICK_S` together. (Claims, losses and contributions are
  rare; the peer acts on them at once.)
- Every peer says less in a larger swarm: with N others a heartbeat in N / `HEARTBEATS_PER_S` seconds, and news of
  ordinary changes once in N / `STATUSES_PER_S` seconds. Silence and stalls are judged by the measured interval, and a
  stream that ends is noticed at once, whatever the interval.
"""

from __future__ import annotations

from math import inf

from diloco.protocol.actions import Wake

__all__ = ["HEARTBEATS_PER_S", "LOOK_S", "STATUSES_PER_S", "TICK_S", "Pace"]

TICK_S = 0.05
LOOK_S = 1.0  # between two looks for silent members
HEARTBEATS_PER_S = 64.0  # heard from all others together; in smaller swarms each says one when its owner asks
STATUSES_PER_S = 256.0  # heard from all others together, of those that tell of ordinary changes


class Pace:
    """Remembers when this peer did what last; all times are seconds of the owner's clock."""

    def __init__(self) -> None:
        self.untold = False  # A change has not been told to the others yet.
        self._ticked_at = self._looked_at = self._told_at = self._beat_at = -inf
        self._wakes: set[float] = set()  # asked for, and not past

    def ticks(self, now: float) -> None:
        """The peer acts on everything that it has heard."""
        self._ticked_at = now
        self._wakes = {at for at in self._wakes if at > now}

    @property
    def tick_due(self) -> float:
        """When the peer acts next on what it hears now."""
        return self._ticked_at + TICK_S

    def wake(self, at: float) -> list[Wake]:
        """Ask for a tick at that time, unless an earlier one is on its way: that one asks again."""
        if any(earlier <= at for earlier in self._wakes):
            return []
        self._wakes.add(at)
        return [Wake(at)]

    def looks(self, now: float) -> bool:
        """Whether it is time to look for silent members; if so, the next look is `LOOK_S` away."""
        if now - self._looked_at < LOOK_S:
            return False
        self._looked_at = now
        return True

    def beats(self, now: float, others: int) -> bool:
        """Whether a heartbeat is due; if so, it tells everything."""
        if now - self._beat_at < others / HEARTBEATS_PER_S:
            return False
        self._beat_at = self._told_at = now
        self.untold = False
        return True

    def tells(self, now: float, others: int, at_once: bool = False) -> bool:
        """Whether a change is told now; if not, it is `untold` until `tell_due`."""
        self.untold = now < self.tell_due(others) and not at_once
        if not self.untold:
            self._told_at = now
        return not self.untold

    def tell_due(self, others: int) -> float:
        """When the next ordinary change may be told."""
        return self._told_at + others / STATUSES_PER_S
