"""Seeded splits of many shapes, as fault schedules of their own: their draws change no seed of `faults`.

lone       one peer is cut off, often one that is much faster than the others
halves     two sides of any size
thirds     three sides
one_way    what one side says does not reach the other; what the other says does
flap       two sides lose and find each other every few seconds
election   two sides, and a syncer dies as they part, so that its fragments are claimed on both
"""

from __future__ import annotations

import random
from itertools import combinations, pairwise
from typing import Any

from diloco.testing.fuzz.crowd import Member
from diloco.testing.fuzz.faults import Fault, Scenario

__all__ = ["FLAP_S", "SHAPES", "pairs", "split_scenario"]

SHAPES = ("lone", "halves", "thirds", "one_way", "flap", "election")
FLAP_S = 3.0


def split_scenario(seed: int) -> Scenario:
    """The split schedule of a seed."""
    r = random.Random(f"splits {seed}")
    trainers, hosts, fast = r.choice([3, 4, 5, 6, 7]), r.choice([0, 0, 0, 1]), r.random() < 0.5
    members = tuple(
        Member(
            name,
            trains=number < trainers,
            step_s=0.25 if fast and number == 0 else r.choice([1.0, 1.0, 1.0, 2.0]),
            latency_s=r.choice([0.02, 0.1, 0.1, 0.4]),
        )
        for number, name in enumerate("abcdefgh"[: trainers + hosts])
    )
    faults = [_split(r) for _ in range(r.choice([1, 1, 2, 3]))]
    return Scenario(
        seed=seed,
        members=members,
        outer=tuple(_outer(r).items()),
        together=r.random() < 0.7,
        heartbeat_s=r.choice([1.0, 2.0]),
        loss=r.choice([0.0, 0.0, 0.05]),
        executor_s=r.choice([0.0, 0.3, 1.5]),
        units=r.random() < 0.3,
        cold=False,
        pieces=r.random() < 0.3,
        closed=False,
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
    )


def _split(r: random.Random) -> Fault:
    at_s = round(r.uniform(3.0, 50.0), 2)
    return Fault(
        at_s, r.choice([0, r.randrange(40)]), r.choice(SHAPES), r.randrange(100), r.choice([12.0, 30.0, 66.0, 120.0])
    )


def _outer(r: random.Random) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "sync_every": r.choice([2, 4]),
        "fragments": r.randint(1, 2),
        "lr": 0.7,
        "momentum": 0.9,
    }
    match r.choice(["barrier"] * 4 + ["overlap", "quorum", "async"]):
        case "overlap":
            settings |= {"overlap": 1}
        case "quorum":
            settings |= {"quorum": 2, "grace_s": 1.0, "staleness_limit": 1}
        case "async":
            settings |= {"quorum": 1, "staleness_limit": 10, "optimizer": "delayed_nesterov"}
    return settings


def pairs(shape: str, names: list[str], r: random.Random) -> list[tuple[str, str]]:
    """Which peers cannot reach each other; with `one_way` what the first says does not reach the second."""
    if shape == "lone":
        sides = [["a" if "a" in names else names[0]], [name for name in names if name != "a"]]
    else:
        shuffled = r.sample(names, len(names))
        cuts = sorted(r.randint(0, len(names)) for _ in range(2 if shape == "thirds" else 1))
        ends = [0, *cuts, len(names)]
        sides = [shuffled[start:stop] for start, stop in pairwise(ends)]
    return [(a, b) for one, other in combinations(sides, 2) for a in one for b in other if a != b]
