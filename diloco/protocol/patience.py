"""How long a version waits for whom, by what the other peers do. Sans-IO.

    opens -> arrived, arrived, ... -> `ends` says until when the version waits for the rest -> closed without some
    arrived -> how long was its round, beside the others'? -> `slow`: nobody waits for that peer until it is quicker

A slow peer's own word counts for nothing. All times are seconds of one monotonic clock, the syncer's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from diloco.config import OuterConfig
from diloco.protocol.membership import Member

__all__ = ["FLOOR_S", "ROUNDS", "Arrival", "Patience", "about_to_send", "active", "grace_s", "patience_ends"]

ROUNDS = 3.0  # c: median rounds of the contributors for which a version waits
FLOOR_S = 20.0
NOISE_S = 5.0  # latencies, streams that broke, a first batch: no round is too long because of these
REMEMBERED = 1024  # versions


class Arrival(NamedTuple):
    """When the payload of a contribution was whole, and after a round of how many seconds."""

    at: float
    round_s: float


def patience_ends(arrivals: Sequence[Arrival], expected: int) -> float:
    """Until when a version waits for the rest of so many `expected` contributions; inf while fewer than half are there.

    The peer in the middle has arrived after a round of r seconds. The rest has (c - 1) r seconds more: c rounds in all.
    (Backup workers, arXiv 1604.00981, drop the last ones at once; here they are merged later.)
    """
    half = (expected + 1) // 2
    if not half or len(arrivals) < half:
        return math.inf
    middle = sorted(arrivals)[half - 1]
    round_s = statistics.median_low([arrival.round_s for arrival in arrivals])
    return middle.at + max(FLOOR_S, (ROUNDS - 1) * round_s)


class Patience:
    """The rounds of the contributors to one fragment, as their syncer sees them.

    A syncer that is new knows no rounds. It waits for everybody once more, and learns them from the first arrivals.

    Attributes:
        slow: peers for which nobody waits. Each was missing from a version, or its round took longer than `ROUNDS` of
            the others', and no contribution arrived since that took no longer.
    """

    def __init__(self, version: int, now: float) -> None:
        self.slow: set[str] = set()
        self._opened = {version: now}  # when contributors could have each version
        self._rounds: dict[str, float] = {}  # seconds of the newest round of each peer

    def opens(self, version: int, now: float) -> None:
        """Contributors can have this version from now on."""
        self._opened[version] = now
        while len(self._opened) > REMEMBERED:
            del self._opened[next(iter(self._opened))]

    def arrived(self, peer: str, base_version: int, late: bool, now: float, began_at: float) -> Arrival:
        """The payload of a contribution is whole. The peer says that it began its round at `began_at`."""
        opened_at = self._opened.get(base_version)
        others = [seconds for other, seconds in self._rounds.items() if other != peer]
        if opened_at is None or not others:
            too_long = late
        else:
            too_long = now - opened_at > max(NOISE_S, ROUNDS * statistics.median_low(others))
        if opened_at is None:
            return self._judged(peer, too_long, Arrival(now, 0.0))
        self._rounds[peer] = now - opened_at
        return self._judged(peer, too_long, Arrival(now, now - max(opened_at, began_at)))

    def _judged(self, peer: str, too_long: bool, arrival: Arrival) -> Arrival:
        (self.slow.add if too_long else self.slow.discard)(peer)
        return arrival

    def closed(self, missing: Collection[str], live: Collection[str]) -> None:
        """A version closes without peers that could have come; of the others that are not `live` nothing is kept."""
        self.slow |= set(missing)
        self._rounds = {peer: seconds for peer, seconds in self._rounds.items() if peer in live}


def grace_s(
    settings: OuterConfig, taken_at: Mapping[str, float], members: Mapping[str, Member], now: float, sync_s: float
) -> float:
    """With a quorum, once it is there: a fixed time, or a part of what the overlap hides, so that no inner step waits.

    That is gamma (tau xi_step - (xi_quorum + xi_sync)) of Decoupled DiLoCo (arXiv 2604.21428), for the contributor
    with the least time: it needs the update tau inner steps of its own after it took its pseudo-gradient (`taken_at`),
    xi_quorum have passed since then, and the update will be there xi_sync after the decision to close.
    """
    if not settings.grace_slack:
        return settings.grace_s
    paces = {peer: members[peer].status.steps_per_s for peer in taken_at if peer in members}
    due_at = [taken_at[peer] + settings.overlap / pace for peer, pace in paces.items() if pace > 0]
    return max(0.0, settings.grace_slack * (min(due_at, default=now) - now - sync_s))


def about_to_send(settings: OuterConfig, fragment: int, member: Member, now: float) -> bool:
    """Whether a newcomer is near the step at which this fragment is due.

    With staggered fragments a newcomer may be too late for this version, and is expected only after its first
    contribution. A newcomer that is a step behind the others would never deliver one in time; so its syncer waits for
    it as long as the overlap hides.
    """
    status = member.status
    due_at = -(-(fragment + 1) * status.target_steps // settings.fragments)
    left = due_at - status.inner_step - (now - member.heard_at) * status.steps_per_s
    return status.steps_per_s > 0 and abs(left) <= settings.overlap + 1


def active(members: Mapping[str, Member]) -> int:
    """Peers that train, at least 1."""
    return max(1, sum(m.trains and m.status.counted_in for m in members.values()))
