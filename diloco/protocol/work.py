"""Claims of work: what a contribution may claim, weigh and delay, by what others do. Sans-IO; pure but for `Credit`.

    steps, tokens of a header -> `impossible`          no honest peer claims that, whatever happened to it
    steps             -> `Credit` -> when they count   a bucket per peer, filled at the pace of the other peers
    weights           -> `capped`                      at most twice the median
    seconds of rounds -> `too_long`                    a peer for which nobody waits
    arrivals          -> `patience_ends`               until when a version waits for those that are missing

A peer's word decides nothing about the peer itself: its pace, its round and its weight are compared with the others'.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from diloco.protocol.messages.bulk import Contribution

__all__ = [
    "MULTIPLE", "PATIENCE", "PATIENCE_FLOOR_S", "Credit", "capped", "fill_rate", "impossible", "patience_ends",
    "too_long",
]  # fmt: skip

MULTIPLE = 4.0  # times the pace of the others at which a peer's claims may grow
MOST_CYCLES = 8  # in the steps of one contribution; a peer that is in step sends one cycle, and after mishaps a few
HEAVIEST = 2.0  # times the median weight
PATIENCE = 3.0  # c: median rounds of the contributors for which a version waits
PATIENCE_FLOOR_S = 20.0
ROUND_FLOOR_S = 5.0  # Rounds are noisy: latencies, streams that broke, a first batch.
MAX_PEERS = 4096  # whose credit is remembered


def impossible(header: Contribution, tokens_per_step: int | None, sync_every: int) -> str | None:
    """Why no honest peer makes these claims, in one line; None when one may.

    Args:
        tokens_per_step: of the manifest; None where a training loop counts in its own way.
        sync_every: H, the inner steps of a cycle.
    """
    if tokens_per_step is not None and header.tokens > header.steps * tokens_per_step:
        return f"{header.tokens} tokens in {header.steps} steps are claimed, and a step has {tokens_per_step}"
    if header.steps > MOST_CYCLES * sync_every:
        return f"{header.steps} steps are claimed in one contribution, and a cycle has {sync_every}"
    return None


def fill_rate(paces: Collection[float]) -> float:
    """Steps per second at which a peer's claims may grow, from the paces of the other peers; inf if none is known.

    That is `MULTIPLE` times the upper quartile of the paces rather than their median. In a swarm of which half the
    peers are slow, the median is a slow one's pace, and the fast half does not lie. Up to a quarter of the others may.
    """
    known = sorted(pace for pace in paces if pace > 0)
    return MULTIPLE * known[-1 - len(known) // 4] if known else math.inf


@dataclass
class _Bucket:
    steps: float  # that may be claimed now; negative while in debt
    filled_at: float
    base_version: int = -1  # of the contribution that was paid last
    paid: float = 0.0  # for that one


class Credit:
    """When the claimed steps of each peer count: a token bucket per peer, which begins with H steps.

    It never refuses. A peer that claims more than its bucket holds is in debt, and its contribution counts only when
    that is paid. A retry of the same contribution costs nothing. All times are seconds of one monotonic clock.
    """

    def __init__(self, sync_every: int) -> None:
        self._sync_every = sync_every
        self._buckets: dict[str, _Bucket] = {}

    def counts_at(self, peer: str, base_version: int, steps: float, rate: float, now: float) -> float:
        """From when on these steps count, if the bucket fills with `rate` steps per second."""
        bucket = self._buckets.pop(peer, None) or _Bucket(self._sync_every, now)
        self._buckets[peer] = bucket  # moved to the end: the order is that of the last claim
        while len(self._buckets) > MAX_PEERS:
            del self._buckets[next(iter(self._buckets))]
        most = 2.0 * self._sync_every  # after a pause, and for what could not be sent
        grown = math.inf if rate == math.inf else bucket.steps + (now - bucket.filled_at) * rate
        bucket.steps, bucket.filled_at = min(grown, most), now
        if base_version != bucket.base_version:
            bucket.base_version, bucket.paid = base_version, 0.0
        bucket.steps -= max(0.0, steps - bucket.paid)
        bucket.paid = max(steps, bucket.paid)
        return now if bucket.steps >= 0 or rate == math.inf else now - bucket.steps / rate


def capped(weights: Mapping[str, float]) -> dict[str, float]:
    """Weights of at most twice their median, which for one or two contributions caps nothing."""
    most = HEAVIEST * statistics.median(weights.values())
    return {peer: min(weight, most) for peer, weight in weights.items()}


def too_long(round_s: float, others: Sequence[float]) -> bool:
    """Whether a round of so many seconds is too long to wait for, beside the newest rounds of the other peers."""
    return bool(others) and round_s > max(ROUND_FLOOR_S, PATIENCE * statistics.median_low(others))


def patience_ends(arrivals: Sequence[tuple[float, float]], expected: int) -> float:
    """Until when a version waits for the rest of so many `expected` contributions; inf while fewer than half are there.

    The peer in the middle has arrived after a round of r seconds, so the rest has (c - 1) r seconds more: c rounds in
    all. (Backup workers, arXiv 1604.00981, drop the last ones at once; here they are merged later.)

    Args:
        arrivals: for each contribution when it arrived, and after a round of how many seconds.
    """
    half = (expected + 1) // 2
    if not half or len(arrivals) < half:
        return math.inf
    in_order = sorted(arrivals)
    round_s = statistics.median_low([seconds for _, seconds in arrivals])
    return in_order[half - 1][0] + max(PATIENCE_FLOOR_S, (PATIENCE - 1) * round_s)
