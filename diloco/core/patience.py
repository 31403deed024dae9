"""How long a version waits for whom, at a barrier. Sans-IO.

    enough contributions are here -> does it wait for the rest? (`wait_s`) -> closed, perhaps
    without some closed -> who was missing, or took too long? -> `slow`: nobody waits for that peer
    until it is quicker

A slow peer's own word counts for nothing, with one exception: it may say that it evaluates or saves
a checkpoint. What this makes the others wait is taken from the peer's bucket, which fills slowly,
so it cannot hold a swarm up by saying it. All times are seconds of one monotonic clock, the
author's.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping

from diloco.core.limits import Buckets
from diloco.core.members import PAUSE_LIMIT_S, Member

ROUNDS = 3.0  # median rounds of the contributors for which a version waits
PAUSE_RATE = 0.05  # of all time: what one peer may make the others wait in the long run


class Patience:
    """For whom the versions of one fragment wait, and for how long, as its author sees it; a new
    one waits for all."""

    def __init__(self, floor_s: float) -> None:
        # were missing from a version, and none of their contributions was quick since
        self.slow: set[str] = set()
        self._paused: set[str] = set()  # while they were waited for
        self._floor_s = floor_s
        # seconds beyond the others' patience
        self._pauses: Buckets[str] = Buckets(PAUSE_RATE, PAUSE_LIMIT_S)

    def wait_s(self, rounds_s: Collection[float]) -> float:
        """How long the rest is waited for, by the rounds of those that came: `ROUNDS` in all (cf.
        arXiv 1604.00981)."""
        return (
            max(self._floor_s, (ROUNDS - 1) * statistics.median_low(rounds_s))
            if rounds_s
            else self._floor_s
        )

    def pauses(self, missing: Mapping[str, Member | None], seconds: float, now: float) -> bool:
        """Whether any of them pauses, and may: the seconds since that was asked last come out of
        its bucket."""
        pausing = [
            member.peer
            for member in missing.values()
            if member is not None and now >= member.paused_at
        ]
        self._paused.update(pausing)
        return any([self._pauses.take(peer, now, seconds) for peer in pausing])

    def forgive(self, resumed: Collection[str], now: float) -> None:
        """These went on in this round after a pause: they are in step again, and waited for if
        their buckets allow."""
        for peer in sorted(self.slow & self._paused & set(resumed)):
            self._paused.remove(peer)
            if self._pauses.take(peer, now, self._floor_s):
                self.slow.remove(peer)

    def closed(self, rounds_s: Mapping[str, float], missing: Collection[str]) -> None:
        """A version is made. Who is missing is slow, and who was quick enough after its base came
        is not any more."""
        longest_s = statistics.median_low(rounds_s.values()) + self.wait_s(rounds_s.values())
        self.slow.update(missing)
        self.slow -= {peer for peer, round_s in rounds_s.items() if round_s <= longest_s}
