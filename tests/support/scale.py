"""One run of cores on links, with all of its times multiplied by k: the same is merged.

Multiplied are steps, latencies (to `MOST_LATENCY_S`), faults, and the seconds that a byte takes.
Sizes stay, and what is about a process that answers or not: heartbeats and their silence. Where
there would be more than `BEATS` heartbeats in a round, these grow, too: more say nothing new, and
take long to play.

    drawn(seed) -> Run -> played(run, k) -> Outcome -> differences(at 1, at k)

What is the same:
1. At a barrier: the contributors of each version of each fragment. Of a peer that was killed or
   left, until then, as it may have been about to send its last; and not of one that came later.
2. With a quorum, where versions close while others are on their way, moments decide who is in
   which. So: the share of time in which peers train, but for `PACE`; and the share of
   contributions that come too late for any version, but for `LOST`; the last ones do not count.
   Where links are full, chance decides more than that: shares may lie between those at `NEARBY`.
3. No peer has more notes of a kind of `BAD` than at k = 1, until the run is over for it. With a
   quorum, until it is for anybody, as authors leave then; and versions are made without those who
   miss, and what is late is discarded: these are no faults.
4. It ends, for all with the same heads.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from random import Random
from statistics import mean
from typing import NamedTuple

from diloco.config import OuterConfig, SwarmConfig
from diloco.core.settings import Sizes
from diloco.swarm.node.options import core_settings
from tests.support.fake_tensors import PARTS
from tests.support.linked_swarm import TOKENS, Link, LinkedPeer, LinkedSwarm

SCALES = (0.1, 1.0, 10.0, 100.0, 1000.0)
BAD = ("missing", "stuck", "takeover", "discarded")
MOST_LATENCY_S = 0.5  # no network has more, and a process answers in time or not
BEATS = 50  # in a round, at most
NAMES = "abcdefghijklm"
NEARBY = (0.7, 0.8, 0.9, 1.1, 1.25, 1.4)  # what differs among these is chance, and no scale
SHORT_S = 5.0  # shares of runs that last less are left out: calling again takes a quarter second
PACE, LOST = 0.1, 0.05  # by how much shares differ where there is no barrier
LATER = 5  # times its expected length, until which a run has to end
PRESETS = {
    "barrier": {},
    "streaming": {"staggered": True, "overlap": 2, "codec_up": "e3m0"},
    "decoupled": {
        "staggered": True,
        "overlap": 2,
        "quorum": 1,
        "grace_slack": 0.8,
        "weights": "tokens2_per_step",
        "optimizer": "delayed_nesterov",
    },
    "async": {"quorum": 1, "optimizer": "delayed_nesterov", "dylu": True},
}


class Fault(NamedTuple):
    """What happens to a peer so long after it has made so many inner steps."""

    kind: str  # kill, leave, join, reset
    peer: str
    steps: int
    after_s: float


@dataclass(frozen=True)
class Run:
    """What a seed decides, at k = 1."""

    seed: int
    preset: str
    outer: OuterConfig
    step_s: tuple[float, ...]  # by peer
    links: tuple[Link, ...]
    model_bytes: int  # of a payload, or of an update
    versions: int  # of each fragment
    faults: tuple[Fault, ...]

    @property
    def round_s(self) -> float:
        """About how long a round takes: inner steps, contributions, and the update."""
        slowest = min(min(link.up, link.down) for link in self.links)
        exchange_s = 2 * len(self.links) * self.model_bytes / slowest
        return self.outer.sync_every * max(self.step_s) + exchange_s

    def describe(self) -> str:
        """In one line."""
        steps = " ".join(f"{one:.2f}" for one in self.step_s)
        ups = " ".join(f"{one.up / 1e3:.0f}" for one in self.links)
        what = f"{self.preset} F={self.outer.fragments} H={self.outer.sync_every} s=[{steps}]"
        faults = ", ".join(f"{f.kind} {f.peer} {f.steps}+{f.after_s:.2f}" for f in self.faults)
        return f"{what} kB/s=[{ups}] {self.model_bytes / 1e6:.1f} MB x{self.versions} {faults}"


class Outcome(NamedTuple):
    """What came of a run."""

    merged: dict[tuple[int, int], tuple[str, ...]]  # contributors, by fragment and number
    trained: dict[str, float]  # share of the time of each peer
    lost: float  # share of contributions
    before: dict[tuple[str, int], int]  # versions of a fragment when a peer was killed or left
    notes: Counter[tuple[str, str]]  # by peer and kind
    left: list[str]  # peers that have not ended
    last: int  # how many different tips the others ended with
    virtual_s: float


def drawn(seed: int) -> Run:
    """The run of a seed."""
    r = Random(f"scale {seed}")
    preset, fragments = r.choice([*PRESETS]), r.choice([1, 1, 4, 4, 24])
    takes_long = fragments == 24 or (fragments > 1 and "quorum" in PRESETS[preset])
    peers = r.choice([2, 3, 3] if takes_long else [2, 3, 4, 4, 5, 8])
    at_once = PRESETS[preset].get("staggered") is None
    every = r.choice([4, 6, 8]) if at_once else max(8, fragments)
    outer = OuterConfig(method="diloco", sync_every=every, fragments=fragments, **PRESETS[preset])
    step_s, spread = r.uniform(1.0, 3.0), r.choice([1.0, 1.0, 1.6, 2.5])
    steps = [step_s * r.uniform(1.0, spread) for _ in range(peers)]
    up, unlike = 1e6, r.choice([1.0, 1.0, 2.5])
    ups = [up * r.uniform(1.0, unlike) for _ in range(peers)]
    down, latency_s = r.choice([1.0, 1.0, 5.0]), r.choice([0.01, 0.05])
    links = tuple(Link(one, one * down, latency_s) for one in ups)
    share = r.uniform(0.1, 0.6) / min(peers - 1, 4) * (1 if at_once else 0.5)
    model_bytes = int(share * every * step_s * up)
    versions, names = r.choice([3, 4, 5]) if fragments < 24 else 2, NAMES[:peers]
    run = Run(seed, preset, outer, tuple(steps), links, model_bytes, versions, ())
    kinds = ["kill", "leave"] * (peers > 2) + ["join", "reset", "none"]
    kinds = r.sample(kinds, 2) if r.random() < 0.3 else [r.choice(kinds)]
    faults = [
        Fault(
            kind,
            NAMES[peers] if kind == "join" else r.choice(names),
            r.randint(1, every * (versions - 1)),
            r.uniform(0.0, run.round_s),
        )
        for kind in kinds
        if kind != "none"
    ]
    return replace(run, faults=tuple(faults))


def played(run: Run, k: float) -> Outcome:
    """Play a run with all times multiplied by `k`."""
    outer, peers = run.outer, len(run.step_s)
    settings = core_settings(outer, SwarmConfig(min_peers=peers))
    slower = max(1.0, run.round_s * k / settings.heartbeat_s / BEATS)
    settings = replace(
        settings, heartbeat_s=settings.heartbeat_s * slower, silence_s=settings.silence_s * slower
    )
    each = run.model_bytes // outer.fragments
    sizes = [Sizes(each, each, 4 * each, PARTS)] * outer.fragments
    tokens = TOKENS * outer.sync_every * peers * run.versions if outer.quorum else 0
    planned = 0 if outer.quorum else run.versions, tokens, 0
    swarm = LinkedSwarm(settings, sizes, planned, run.seed)
    slowed = [
        Link(link.up / k, link.down / k, min(link.latency_s * k, MOST_LATENCY_S))
        for link in run.links
    ]
    for name, step_s, link in zip(NAMES, run.step_s, slowed, strict=False):
        swarm.add(name, step_s=step_s * k, link=link, dylu=outer.dylu)
    gone_at = dict[str, float]()
    for fault in run.faults:
        _plan(swarm, fault, k, slowed[0], run.step_s[0] * k, gone_at)
    swarm.until(k * run.round_s * run.versions * LATER + 200.0, lambda: not swarm.alive())
    return _outcome(swarm, gone_at)


def _outcome(swarm: LinkedSwarm, gone_at: Mapping[str, float]) -> Outcome:
    merged, stamps = dict[tuple[int, int], tuple[str, ...]](), set[tuple[str, int, int]]()
    before = dict[tuple[str, int], int]()
    for fragment in range(swarm.settings.fragments):
        made = [(when, head.number) for when, head in swarm.made if head.fragment == fragment]
        for peer, gone in gone_at.items():
            before[peer, fragment] = max((one for when, one in made if when < gone), default=0)
        for head in swarm.history(fragment):
            merged[fragment, head.number] = tuple(sorted(line.peer for line in head.counted))
            stamps |= {(line.peer, fragment, line.stamp) for line in head.counted}
    lines = [line for line, _ in swarm.captured]
    newest = {(line.peer, line.fragment): line.stamp for line in lines}
    ended = [line for line in lines if newest[line.peer, line.fragment] != line.stamp]
    lost = sum((line.peer, line.fragment, line.stamp) not in stamps for line in ended)
    over_at = swarm.over_at if swarm.settings.quorum else inf
    said = (one for one in swarm.said if not one.over and one.at < over_at)
    notes = Counter((one.peer, one.kind) for one in said)
    trained = {peer.name: peer.utilization(swarm.now) for peer in swarm.peers.values()}
    left = [one.name for one in swarm.alive()]
    last, late = len({*swarm.ended.values()}), lost / max(1, len(ended))
    return Outcome(merged, trained, late, before, notes, left, last, swarm.now)


def _plan(
    swarm: LinkedSwarm,
    fault: Fault,
    k: float,
    link: Link,
    step_s: float,
    gone_at: dict[str, float],
) -> None:
    """Have a fault happen when it is time: a joiner comes when the first peer is so far."""
    watched = swarm.peers[NAMES[0] if fault.kind == "join" else fault.peer]

    def stepped(peer: LinkedPeer) -> None:
        if peer is watched and peer.made == fault.steps:
            swarm.at(swarm.now + k * fault.after_s, happen)

    def happen() -> None:
        if fault.kind == "join":
            dylu = watched.dylu
            swarm.add(fault.peer, step_s=step_s, link=link, dylu=dylu)
        elif watched.core is None:
            return
        elif fault.kind == "reset":
            for other in swarm.peers:
                swarm.reset(frozenset((watched.name, other)))
        else:
            gone_at[fault.peer] = swarm.now
            (swarm.die if fault.kind == "kill" else swarm.leave)(watched)

    swarm.on_step.append(stepped)


def differences(
    run: Run, at_one: Outcome, other: Outcome, nearby: Sequence[Outcome] = ()
) -> list[str]:
    """What is not the same in two outcomes of a run, in words; `other` at another k."""
    joined = {fault.peer for fault in run.faults if fault.kind == "join"}
    found = _faults_at_end(other)
    both = at_one, other
    for fragment, number in sorted(at_one.merged.keys() | other.merged.keys()):
        limits = [*at_one.before.items(), *other.before.items()]
        but = joined | {p for (p, f), before in limits if f == fragment and number > before}
        each = [{*one.merged.get((fragment, number), ())} - but for one in both]
        if run.outer.quorum is None and each[0] != each[1]:
            names = ", ".join("".join(sorted(one)) for one in each)
            found.append(f"fragment {fragment} version {number}: {names}")
    if run.outer.quorum and other.virtual_s >= SHORT_S:
        found += _differences_of_shares([at_one, *nearby], other, joined)
    kinds = BAD if run.outer.quorum is None else BAD[1:3]
    for (peer, kind), number in sorted(other.notes.items()):
        if kind in kinds and peer not in joined and number > at_one.notes[peer, kind]:
            found.append(f"{peer} notes {kind} {at_one.notes[peer, kind]}, {number} times")
    return found


def _faults_at_end(outcome: Outcome) -> list[str]:
    found = [f"does not end: {' '.join(outcome.left)}"] if outcome.left else []
    return found + [f"ends with {outcome.last} different tips"] * (outcome.last > 1)


def _differences_of_shares(
    near: Sequence[Outcome], other: Outcome, but: Collection[str]
) -> list[str]:
    found = list[str]()
    peers = near[0].trained.keys() - but
    *shares, share = (mean(one.trained[peer] for peer in peers) for one in (*near, other))
    if not min(shares) - PACE <= share <= max(shares) + PACE:
        found.append(f"peers train in {shares[0]:.0%}, {share:.0%} of the time")
    if other.lost > max(one.lost for one in near) + LOST:
        found.append(f"{near[0].lost:.0%}, {other.lost:.0%} of all contributions are late")
    return found


def scale_faults(seed: int, scales: Iterable[float] = SCALES) -> list[str]:
    """What of a seed's run is not the same at other scales; empty if it is."""
    run, nearby = drawn(seed), list[Outcome]()
    at_one = played(run, 1.0)
    found = [f"k=1: {fault}" for fault in _faults_at_end(at_one)]
    for k in scales:
        if k == 1.0:
            continue
        other = played(run, k)
        if run.outer.quorum and differences(run, at_one, other):
            nearby = nearby or [played(run, near) for near in NEARBY]
        found += [f"k={k:g}: {one}" for one in differences(run, at_one, other, nearby)]
    return found
