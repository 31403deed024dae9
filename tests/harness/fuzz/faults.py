"""Seeded fault schedules: which peers there are, how they are set, what befalls them when.

A fault happens some turns of the event loop after its second, so that it hits the middle of what is
done in no time.

Schedules of splits are of their own:

lone       one peer is cut off, often one that is much faster than the others
halves     two sides of any size
thirds     three sides
one_way    what one side says does not reach the other; what the other says does
flap       two sides lose and find each other every few seconds
election   two sides, and a peer dies as they part
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from itertools import combinations, pairwise
from typing import Any

from tests.harness.fuzz.lives import PeerSpec
from tests.harness.fuzz.store import StoreSpec

KINDS = (
    "crash restart leave join host freeze suspend reset stall split hold garble hang slow flip"
    " stuck".split()
)
SHAPES = ("lone", "halves", "thirds", "one_way", "flap", "election")
# Peers lose each other, and live; or the history of one goes another way.
TEARING = ("freeze", "suspend", "reset", "stall", "split", "hold", "garble", "flip", *SHAPES)
START_S = 5.0  # peers meet, and begin
HORIZON_S = 40.0  # faults begin before that
SPLIT_PROGRESS_S = 66.0  # after so long on its own, a side must have made a version
FLAP_S = 3.0


@dataclass(frozen=True)
class Fault:
    """What happens: when, to whom (an index of the living then), and for how many seconds."""

    at_s: float
    turns: int
    kind: str
    who: int
    seconds: float

    def __str__(self) -> str:
        when = f"at {self.at_s:.2f} s and {self.turns} turns"
        return f"{self.kind} of living peer {self.who} {when}, {self.seconds:g} s"


@dataclass(frozen=True)
class Scenario:
    """Everything that decides a run; equal scenarios are the same run, turn by turn."""

    seed: int
    members: tuple[PeerSpec, ...]
    outer: tuple[tuple[str, Any], ...]
    together: bool  # all wait for all at the start; else the first one begins and the others join
    heartbeat_s: float
    loss: float  # of bulk streams
    executor_s: float  # the most that work in a thread takes, before and after it
    units: bool
    cold: bool  # joiners start with cold optimizers
    pieces: bool  # small chunks and parts: several of each fragment
    closed: bool  # only invited peers take part
    faults: tuple[Fault, ...]
    store: StoreSpec | None = None  # through which all exchange, instead of streams

    def describe(self) -> str:
        """The scenario in lines for people."""
        names = [one.name for one in fields(self) if one.name not in ("members", "faults")]
        settings = ", ".join(f"{name} {getattr(self, name)}" for name in names)
        faults = (f"fault {number}: {fault}" for number, fault in enumerate(self.faults))
        return "\n  ".join([settings, *map(str, self.members), *faults])


# -- faults of all kinds ---------------------------------------------------------------------------


def scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    r = random.Random(f"scenario {seed}")
    sizes = "11 20 20 30 30 21 12 40 31 41 50".split()
    trainers, hosts = map(int, r.choice(sizes))
    fragments = r.randint(1, 3)
    outer = _outer(r, fragments)
    liar = trainers >= 4 and "quorum" not in outer and r.random() < 0.5
    lockstep = not {"quorum", "overlap", "staggered"} & outer.keys()
    slow_boundary = r.choice([0.0] * 7 + [22.0]) if lockstep else 0.0
    members = tuple(
        PeerSpec(
            name,
            trains=number < trainers,
            reachable=number == 0 or number >= trainers or r.random() < 0.85,
            step_s=r.choice([0.5, 1.0, 1.0, 1.0, 2.0]),
            latency_s=r.choice([0.02, 0.1, 0.1, 0.4]),
            clock=(r.choice([1.0, 1.0, 0.9, 1.15]), r.choice([0.0, round(1e5 * r.random())])),
            lie=-10.0 if liar and number == trainers - 1 else 1.0,
            boundary_s=slow_boundary if number == 0 else 0.0,
        )
        for number, name in enumerate("abcdefgh"[: trainers + hosts])
    )
    faults = [_fault(r) for _ in range(r.choice([0, 1, 1, 1, 2, 2, 3, 4]))]
    return Scenario(
        seed,
        members,
        tuple(outer.items()),
        together=r.random() < 0.5,
        heartbeat_s=r.choice([1.0, 2.0, 2.0]),
        loss=r.choice([0.0, 0.0, 0.05, 0.2]),
        executor_s=r.choice([0.0, 0.3, 1.5]),
        units=r.random() < 0.4,
        cold=r.random() < 0.2,
        pieces=r.random() < 0.5,
        closed=r.random() < 0.15,
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
    )


def _fault(r: random.Random) -> Fault:
    """Mostly shorter than the silence after which a peer counts as lost; some splits are longer."""
    kind = r.choice(KINDS)
    seconds = r.choice([0.5, 1.0, 3.0, 3.0, 8.0, 8.0, 14.0, 14.0, 25.0])
    if kind == "split" and r.random() < 0.1:
        seconds = SPLIT_PROGRESS_S
    at_s = r.uniform(0.5, r.choice([START_S, HORIZON_S, HORIZON_S, HORIZON_S]))
    return Fault(round(at_s, 2), r.choice([0, r.randrange(40)]), kind, r.randrange(100), seconds)


def _outer(r: random.Random, fragments: int) -> dict[str, Any]:
    """Settings of the outer step: a barrier half of the time, and the other presets' kinds."""
    every = r.choice([2, 4])
    settings: dict[str, Any] = {"sync_every": every, "fragments": fragments}
    up, exact = {"codec_up": "fp32"}, {"codec_up": "fp32", "codec_down": "fp32"}
    settings |= r.choice([{}, {}, up, {"codec_up": "e3m0"}, exact])
    kinds = "robust overlap staggered grace async async decoupled"
    match r.choice(["barrier"] * 5 + kinds.split()):
        case "robust":
            settings |= {"robust": r.choice(["clip", "none"])}
        case "overlap":
            settings |= {"overlap": 1, "mixing": r.choice([0.0, 0.5])}
        case "staggered":
            settings |= {"staggered": fragments <= every, "overlap": r.randint(0, 1)}
        case "grace":
            settings |= {"quorum": r.randint(1, 3), "grace_s": r.choice([0.0, 1.0, 3.0])}
        case "async":
            settings |= {"quorum": 1, "optimizer": "delayed_nesterov", "dylu": r.random() < 0.5}
        case "decoupled":
            settings |= {"quorum": 1, "grace_slack": 0.8, "overlap": 1, "merge": "rda"}
            settings |= {"staggered": fragments <= every}
    return settings


# -- stores ----------------------------------------------------------------------------------------


def store_scenario(seed: int) -> Scenario:
    """The schedule of a seed for peers that exchange through a store."""
    r, plan = random.Random(f"stores {seed}"), scenario(seed)
    kinds = "crash restart leave join host freeze suspend hang slow flip stuck".split()
    faults = [fault for fault in plan.faults if fault.kind in kinds]
    spans = tuple((at_s, at_s + r.choice([3.0, 20.0, 60.0])) for at_s in (r.uniform(5.0, 60.0),))
    store = StoreSpec(
        latency_s=r.choice([0.02, 0.15, 0.5]),
        bytes_per_s=r.choice([1e4, 1e6]),
        stale=r.choice([0.0, 0.1, 0.5]),
        away=spans if r.random() < 0.3 else (),
        full=spans if r.random() < 0.15 else (),
        retry_s=r.choice([0.0, 5.0]),
    )
    members = tuple(replace(member, reachable=True) for member in plan.members)
    heartbeat_s = r.choice([0.25, 0.5])
    changes = {"members": members, "heartbeat_s": heartbeat_s, "faults": tuple(faults)}
    return replace(plan, **changes, closed=False, store=store)  # type: ignore[arg-type]


# -- splits ----------------------------------------------------------------------------------------


def split_scenario(seed: int) -> Scenario:
    """The split schedule of a seed."""
    r = random.Random(f"splits {seed}")
    trainers, hosts, fast = r.choice([3, 4, 5, 6, 7]), r.choice([0, 0, 0, 1]), r.random() < 0.5
    members = tuple(
        PeerSpec(
            name,
            trains=number < trainers,
            step_s=0.25 if fast and number == 0 else r.choice([1.0, 1.0, 1.0, 2.0]),
            latency_s=r.choice([0.02, 0.1, 0.1, 0.4]),
        )
        for number, name in enumerate("abcdefgh"[: trainers + hosts])
    )
    faults = [_split(r) for _ in range(r.choice([1, 1, 2, 3]))]
    settings: dict[str, Any] = {"sync_every": r.choice([2, 4]), "fragments": r.randint(1, 2)}
    overlap, quorum = {"overlap": 1}, {"quorum": 2, "grace_s": 1.0}
    at_once = {"quorum": 1, "optimizer": "delayed_nesterov"}
    settings |= r.choice([{}, {}, {}, {}, overlap, quorum, at_once])
    return Scenario(
        seed,
        members,
        tuple(settings.items()),
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
    at_s, turns = round(r.uniform(3.0, 50.0), 2), r.choice([0, r.randrange(40)])
    shape, who = r.choice(SHAPES), r.randrange(100)
    return Fault(at_s, turns, shape, who, r.choice([12.0, 30.0, SPLIT_PROGRESS_S, 120.0]))


def pairs(shape: str, names: list[str], r: random.Random) -> list[tuple[str, str]]:
    """Peers that cannot reach each other; with `one_way` the second does not hear the first."""
    if shape == "lone":
        sides = [["a" if "a" in names else names[0]], [name for name in names if name != "a"]]
    else:
        shuffled = r.sample(names, len(names))
        cuts = sorted(r.randint(0, len(names)) for _ in range(2 if shape == "thirds" else 1))
        sides = [shuffled[start:stop] for start, stop in pairwise([0, *cuts, len(names)])]
    return [(a, b) for one, other in combinations(sides, 2) for a in one for b in other if a != b]
