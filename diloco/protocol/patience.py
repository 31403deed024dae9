"""How long a version waits for whom, by what the other peers do. Sans-IO.

    opens -> arrived, arrived, ... -> does it wait for the rest? (`waits`) -> closed, perhaps without some
    closed -> how long was each round beside the others'? -> `slow`: nobody waits for that peer until it is quicker

A slow peer's own word counts for nothing, with one exception: a peer may say that it evaluates or saves a checkpoint.
What this makes the others wait is taken from the peer's bucket, which fills slowly, so it cannot hold a swarm up by
saying it. All times are seconds of one monotonic clock, the syncer's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from diloco.config import OuterConfig
from diloco.protocol.limits import Buckets
from diloco.protocol.membership import Member
from diloco.protocol.numbers import forget_oldest

__all__ = [
    "FLOOR_S",
    "PAUSE_LIMIT_S",
    "ROUNDS",
    "Arrival",
    "Patience",
    "about_to_send",
    "active",
    "grace_s",
    "patience_ends",
]

ROUNDS = 3.0  # c: median rounds of the contributors for which a version waits
FLOOR_S = 20.0
NOISE_S = 10.0  # latencies, streams that broke, thin uplinks, a first batch: no round is too long because of these
PAUSE_LIMIT_S = 600.0  # a training loop that evaluates and saves for longer than this has stopped
PAUSE_RATE = 0.05  # of all time: what one peer may make the others wait in the long run
REMEMBERED = 1024  # versions


class Arrival(NamedTuple):
    """When the payload of a contribution was whole, and how long that took.

    Attributes:
        round_s: since the peer began its round, as it says, and not before contributors could have its base version.
        base_s: since contributors could have its base version; inf if that is too long ago to be known.
        late: the contribution missed its version.
    """

    at: float
    round_s: float
    base_s: float
    late: bool


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
    """For whom the versions of one fragment wait, and for how long, as its syncer sees it.

    A syncer that is new waits for everybody once more.

    Attributes:
        slow: peers for which nobody waits. Each was missing from a version, or took longer than `ROUNDS` of the median
            round of its version, and no contribution of it was quicker since.
    """

    def __init__(self, version: int, now: float) -> None:
        self.slow: set[str] = set()
        self._opened = {version: now}  # when contributors could have each version
        self._last = (version, 0.0)  # from which a version was made last, and the longest round that is not slow
        # Seconds for which the others wait beyond their patience.
        self._pauses: Buckets[str] = Buckets(PAUSE_RATE, PAUSE_LIMIT_S)

    def opens(self, version: int, now: float) -> None:
        """Contributors can have this version from now on."""
        self._opened[version] = now
        forget_oldest(self._opened, REMEMBERED)

    def arrival(self, base_version: int, late: bool, now: float, began_at: float) -> Arrival:
        """The payload of a contribution is whole. The peer says that it began its round at `began_at`."""
        opened_at = self._opened.get(base_version, -math.inf)
        return Arrival(now, now - max(opened_at, began_at), now - opened_at, late)

    def waits(self, version: int, arrivals: Mapping[str, Arrival], rest: Collection[Member], now: float) -> bool:
        """Whether a version that is made from this one waits for the rest of its expected contributors."""
        timely = [arrival for arrival in arrivals.values() if not arrival.late]
        ends_at = patience_ends(timely, len(timely) + len(rest))
        return any(now < ends_at + self._pause_s(version, member, now) for member in rest)

    def closed(
        self, version: int, arrivals: Mapping[str, Arrival], missing: Collection[str], members: Mapping[str, Member],
        now: float,
    ) -> None:  # fmt: skip
        """A version is made from this one, without peers that could have come. Who took too long pays, or is slow.

        Rounds of one version are compared, so a pause that all make at the same time costs nobody anything.
        """
        timely = [arrival.base_s for arrival in arrivals.values() if not arrival.late]
        longest_s = max(NOISE_S, ROUNDS * statistics.median_low(timely)) if timely else 0.0
        self._last = (version, longest_s)
        took_s = {peer: arrival.base_s for peer, arrival in arrivals.items()}
        took_s |= dict.fromkeys(missing, now - self._opened[version])
        for peer, seconds in took_s.items():
            unpaid_s = self._pay(version, members.get(peer), seconds - longest_s, now)
            (self.slow.add if unpaid_s > 0 or peer in missing else self.slow.discard)(peer)

    def refused(self, peer: str, base_version: int, now: float) -> None:
        """A contribution came after its version was made. Who took no longer than the others might is not slow."""
        last, longest_s = self._last
        if base_version == last and now - self._opened[last] <= longest_s:
            self.slow.discard(peer)

    def _pause_s(self, version: int, member: Member | None, now: float) -> float:
        """Seconds for which a peer may still pause, if it has said since this version opened that it does."""
        if member is None or member.peer in self.slow or member.paused_at < self._opened[version]:
            return 0.0
        return self._pauses.of(member.peer, now).left(now)

    def _pay(self, version: int, member: Member | None, over_s: float, now: float) -> float:
        """Pay for seconds that were too long; returns those for which the peer has nothing."""
        paid_s = min(over_s, self._pause_s(version, member, now))
        if member is not None and paid_s > 0:
            self._pauses.take(member.peer, now, paid_s)
            return over_s - paid_s
        return over_s


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
    it as long as the overlap hides. It does not while the newcomer waits for the update of a fragment before this one:
    that one's syncer may wait for contributors to this one.
    """
    status = member.status
    exchanges = status.state == "exchanging"
    inner_step = status.inner_step + (0.0 if exchanges else (now - member.heard_at) * status.steps_per_s)
    left = -(-(fragment + 1) * status.target_steps // settings.fragments) - inner_step
    if member.ended_cycle and 2 * left > status.target_steps:  # it was due before the steps began again with 0
        left -= status.target_steps
    return status.steps_per_s > 0 and abs(left) <= settings.overlap + 1 and not (exchanges and left > 0)


def active(members: Mapping[str, Member]) -> int:
    """Peers that train, at least 1."""
    return max(1, sum(m.trains and m.status.counted_in for m in members.values()))
