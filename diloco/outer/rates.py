"""Outer learning rate, outer momentum and inner steps per round, as pure functions of what every peer knows.

    momentum_at     by version: Nesterov's own schedule at the start, for runs of few rounds
    lr_at           by the number of peers
    dylu_steps      by the speed of a peer

So every syncer computes the same values, and so does a successor that takes a fragment over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

__all__ = ["dylu_steps", "lr_at", "momentum_at"]


def momentum_at(version: int, momentum: float, warmup: int) -> float:
    """Outer momentum of the step from `version` to the next, for a warm-up of that many versions (0 for none).

    1 / (1 - m), which times lr is the effective learning rate, rises linearly from 1 at version 0 to that of
    `momentum` at version `warmup`, as an inner learning rate warms up. This is m = t / (t + const), the schedule of
    Nesterov's method for convex functions. Its memory 1 / (1 - m) is about a fixed part of the rounds so far, which
    soon forgets the deltas of the steep start. If m itself were linear, the effective rate would rise almost only in
    the last rounds.

    Pier (arXiv 2511.17849) lowers the momentum instead, from 0.99 to 0.9, after a data-parallel start, which we do not
    have.
    """
    assert 0 <= momentum < 1 and version >= 0, f"momentum={momentum}, version={version} is impossible"
    if version >= warmup:
        return momentum
    memory = 1 + (1 / (1 - momentum) - 1) * version / warmup
    return 1 - 1 / memory


def lr_at(version: int, peers: int, lr: float, lr_by_peers: Mapping[int, float]) -> float:
    """Outer learning rate of the step from `version`, merged from `peers` contributors.

    `lr_by_peers` gives it for some numbers of peers (scaling laws of DiLoCo, arXiv 2503.09799: 1: .4, 2: .6, 4: .6,
    8: .8). In between it is linear in log2(peers), and beyond the ends constant. Empty means `lr`. The version changes
    nothing, because a decay of the outer learning rate gained nothing (DiLoCo, arXiv 2311.08105).
    """
    assert version >= 0 and peers >= 1, f"version={version}, peers={peers} is impossible"
    if not lr_by_peers:
        return lr
    known = sorted(lr_by_peers.items())
    for (low, at_low), (high, at_high) in pairwise(known):
        if low <= peers < high:
            return at_low + (at_high - at_low) * math.log2(peers / low) / math.log2(high / low)
    return known[0][1] if peers < known[0][0] else known[-1][1]


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
