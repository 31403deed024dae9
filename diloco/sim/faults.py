"""Seeded fault schedules: which peers there are, how they are set, what befalls them when; and playing one.

    seed -> scenario -> play: faults at numbered events, invariants after each -> everything heals -> all end as one

A scenario is data: a fault can be left out and the rest be played again, which is how one is shrunk.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from diloco.config import OuterConfig
from diloco.sim.bare import BareNode, Swarm
from diloco.sim.invariants import Watch, check_end
from diloco.sim.world import Clock, Violation

__all__ = ["Fault", "Member", "Outcome", "Scenario", "play", "scenario", "shrink"]

KINDS = ("crash", "restart", "leave", "join", "host", "freeze", "suspend", "reset", "stall", "split", "hold")
LIMIT_S = 600.0  # virtual, for everybody to be done once everything is healed
SPLIT_PROGRESS_S = 60.0  # after this long on its own, a side must have made a version
SETTLE_S = 5.0  # after the last fault, before the end may come: a peer that is done follows nobody at a barrier
AGREED_S = 30.0  # in which everybody who is done has what everybody has
DISCOVERY_S = 15.0  # in which peers that lost each other meet again


@dataclass(frozen=True)
class Fault:
    """What happens just before an event: to whom (an index of the living then), and for how many seconds."""

    at_event: int
    kind: str
    who: int
    seconds: float

    def __str__(self) -> str:
        return f"event {self.at_event}: {self.kind} of living peer {self.who}, {self.seconds:.1f} s"


@dataclass(frozen=True)
class Member:
    """A peer that is there from the start."""

    name: str
    trains: bool
    step_s: float
    clock: tuple[float, float]


@dataclass(frozen=True)
class Scenario:
    """Everything that decides a run; equal scenarios are the same run, event by event."""

    seed: int
    members: tuple[Member, ...]
    fragments: int
    outer: tuple[tuple[str, Any], ...]
    together: bool  # all wait for all at the start; else the first one begins and the others join
    latency_s: float
    heartbeat_s: float
    break_rate: float
    repeat_rate: float
    faults: tuple[Fault, ...]
    rounds: int = 2  # after everything is healed

    def describe(self) -> str:
        """The scenario in lines for people."""
        lines = [f"seed {self.seed}: {self.fragments} fragments, outer {dict(self.outer)}"]
        lines.append(
            f"latency up to {self.latency_s} s, heartbeat {self.heartbeat_s} s, streams break at "
            f"{self.break_rate} of chunks, {self.repeat_rate} of contributions are sent twice, "
            + ("all start together" if self.together else "the others join the first")
        )
        for member in self.members:
            what = f"trains, {member.step_s} s a step" if member.trains else "is a host"
            lines.append(f"  {member.name} {what}, clock {member.clock[0]:+.0f} s x {member.clock[1]}")
        lines += [f"  fault {number}: {fault}" for number, fault in enumerate(self.faults)]
        return "\n".join(lines)


@dataclass(frozen=True)
class Outcome:
    """How a scenario went: `violation` is None when every invariant held."""

    events: int
    seconds: float
    versions: list[int]
    violation: str | None


# -- making one -------------------------------------------------------------------------------------------------------


def scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    r = random.Random(f"scenario {seed}")
    trainers, hosts = r.choice(
        [(2, 0), (2, 0), (3, 0), (3, 0), (2, 1), (2, 1), (1, 2), (4, 0), (3, 1), (2, 2), (4, 1), (6, 0)]
    )
    fragments = r.randint(1, 4)
    members = tuple(
        Member(
            name,
            trains=number < trainers,
            step_s=r.choice([0.5, 1.0, 1.0, 1.0, 2.0]),
            clock=(r.choice([0.0, 1e5 * r.random()]), r.choice([1.0, 1.0, 0.9, 1.15])),
        )
        for number, name in enumerate("abcdefgh"[: trainers + hosts])
    )
    horizon = 60 + 50 * len(members)
    faults = [_fault(r, horizon) for _ in range(r.choice([0, 1, 1, 1, 2, 2, 3, 4]))]
    return Scenario(
        seed=seed,
        members=members,
        fragments=fragments,
        outer=tuple(_outer(r, fragments).items()),
        together=r.random() < 0.5,
        latency_s=r.choice([0.05, 0.2, 0.5, 1.5]),
        heartbeat_s=r.choice([1.0, 2.0, 3.0, 3.0]),
        break_rate=r.choice([0.0, 0.0, 0.05, 0.2]),
        repeat_rate=r.choice([0.0, 0.0, 0.3]),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_event)),
    )


def _fault(r: random.Random, horizon: int) -> Fault:
    """Mostly shorter than the silence after which a peer counts as lost; some splits are longer."""
    kind = r.choice(KINDS)
    seconds = r.choice([0.5, 1.0, 3.0, 3.0, 8.0, 8.0, 14.0, 14.0, 25.0])
    if kind == "split" and r.random() < 0.1:
        seconds = 1.1 * SPLIT_PROGRESS_S
    return Fault(r.randrange(horizon), kind, r.randrange(100), seconds)


def _outer(r: random.Random, fragments: int) -> dict[str, Any]:
    """Settings of the outer step: a barrier half of the time, and the other presets' kinds."""
    settings: dict[str, Any] = {"sync_every": r.choice([2, 4])}
    every = settings["sync_every"]
    match r.choice(["barrier"] * 4 + ["overlap", "staggered", "late", "grace", "async", "async", "decoupled"]):
        case "overlap":
            settings |= {"overlap": 1}
        case "staggered":
            settings |= {"staggered": fragments <= every, "overlap": r.randint(0, 1)}
        case "late":
            settings |= {"overlap": every}
        case "grace":
            settings |= {"quorum": r.randint(1, 3), "grace_s": r.choice([0.0, 1.0, 3.0]), "staleness_limit": 1}
        case "async":
            settings |= {"quorum": 1, "staleness_limit": r.choice([2, 10]), "optimizer": "delayed_nesterov"}
        case "decoupled":
            settings |= {"quorum": 1, "grace_slack": 0.8, "overlap": 1, "staleness_limit": 2}
            settings |= {"staggered": fragments <= every}
    return settings


# -- playing it -------------------------------------------------------------------------------------------------------


def play(plan: Scenario, trace: Callable[[str], None] | None = None) -> Outcome:
    """Run a scenario; the trace is called with one line per message and action."""
    stage = _Stage(plan)
    swarm = stage.swarm
    if trace is not None:
        swarm.trace = lambda name, what: trace(f"{swarm.now:9.3f} {swarm.events:5d} {name} {what}")
    violation = None
    try:
        stage.play()
    except Violation as error:
        violation = str(error)
    versions = [min(node.peer.versions) for node in swarm.alive_nodes()]
    return Outcome(swarm.events, swarm.now, versions, violation)


def shrink(plan: Scenario) -> Scenario:
    """The scenario without the faults that its violation does not need."""
    for fault in plan.faults:
        smaller = replace(plan, faults=tuple(f for f in plan.faults if f is not fault))
        if play(smaller).violation is not None:
            plan = smaller
    return plan


class _Stage:
    """A scenario on its way."""

    def __init__(self, plan: Scenario) -> None:
        self.plan = plan
        self.swarm = swarm = Swarm(plan.seed, plan.fragments, plan.break_rate, plan.latency_s)
        swarm.repeat_rate = plan.repeat_rate
        swarm.check = Watch(swarm).look
        self.outer = OuterConfig.model_validate({"method": "diloco", "fragments": plan.fragments, **dict(plan.outer)})
        self.pending = 0  # faults that did not end yet
        self.played = 0
        self.fresh = iter("stuvwxyz" * 4)
        self.members = {member.name: member for member in plan.members}
        for fault in plan.faults:
            at = fault.at_event
            while at in swarm.at_event:
                at += 1
            swarm.at_event[at] = partial(self.befall, fault)

    def play(self) -> None:
        """From the first hello to the last check."""
        swarm, plan = self.swarm, self.plan
        for number, member in enumerate(plan.members):
            together = plan.together or number == 0
            self.start(member, newcomer=not together, min_peers=len(plan.members) if plan.together else 1)
        swarm.run(lambda: not self.pending and not (swarm.at_event and swarm.living()), limit_s=5000.0)
        swarm.at_event.clear()
        if not swarm.living():
            self.join(trains=True)
        swarm.run_for(SETTLE_S)
        swarm.note("", "everything is healed")
        if not any(node.peer.trains and node.peer.state != "leaving" for node in swarm.living()):
            self.join(trains=True)
        goal = plan.rounds + max(max(node.peer.versions) for node in swarm.living())
        for node in swarm.alive_nodes():
            node.outer_steps = goal
            node.peer.min_peers = 1
        swarm.run(swarm.done, LIMIT_S)
        agreed_by = swarm.now + AGREED_S
        swarm.run(lambda: swarm.now >= agreed_by or self._agreed(), 2 * AGREED_S)
        check_end(swarm)

    def _agreed(self) -> bool:
        """Whether there is nothing left to wait for; looked at once in a while."""
        if self.swarm.events % 16:
            return False
        try:
            check_end(self.swarm)
        except Violation:
            return False
        return True

    def start(self, member: Member, newcomer: bool, min_peers: int = 1, **settings: object) -> None:
        """A process starts under this name."""
        self.members[member.name] = member
        self.swarm.start(
            [member.name], trains=member.trains, step_s=member.step_s, heartbeat_s=self.plan.heartbeat_s,
            clock=Clock(*member.clock), outer=self.outer, outer_steps=10**6, newcomer=newcomer, min_peers=min_peers,
            **settings,
        )  # fmt: skip

    def join(self, trains: bool) -> None:
        """A peer that nobody knows starts."""
        member = replace(self.plan.members[0], name=next(self.fresh), trains=trains)
        self.start(member, newcomer=bool(self.swarm.living()))

    def over(self, seconds: float, end: Callable[[], None]) -> None:
        """A fault ends after a while."""
        self.pending += 1

        def ended() -> None:
            self.pending -= 1
            end()

        self.swarm.later(seconds, ended)

    def befall(self, fault: Fault) -> None:
        """A fault happens."""
        swarm, nodes = self.swarm, self.swarm.alive_nodes()
        self.played += 1
        if not nodes:
            return self.join(trains=True)
        node, other = nodes[fault.who % len(nodes)], nodes[(fault.who // 7) % len(nodes)]
        swarm.note(node.name, f"fault: {fault}")
        match fault.kind:
            case "crash" | "restart":
                swarm.kill(node.name)
                if fault.kind == "restart" or len(nodes) == 1:
                    self.over(fault.seconds if fault.who % 3 else 0.0, partial(self.restart, node))
            case "leave" if len(nodes) > 1:
                swarm.spawn(node, node.leave())
            case "join" | "host" if len(nodes) < 8:
                self.join(trains=fault.kind == "join")
            case "freeze" | "suspend":
                self.freeze(node, fault)
            case "reset" if node is not other:
                swarm.disconnect(node, other, swarm.link(node, other))
            case "stall" if node is not other:
                swarm.stall(node, other, min(fault.seconds, 40.0))
                self.over(min(fault.seconds, 40.0), lambda: None)
            case "split" | "hold":
                self.split(fault)

    def restart(self, node: BareNode) -> None:
        """A process that died starts again under its name, from its last checkpoint."""
        if node.name not in {living.name for living in self.swarm.living()}:
            self.start(self.members[node.name], newcomer=bool(self.swarm.living()), saved=node.saved)

    def freeze(self, node: BareNode, fault: Fault) -> None:
        """SIGSTOP, or a laptop lid: then the clock stands still, too."""
        self.swarm.freeze(node.name, fault.seconds)
        self.over(fault.seconds, lambda: None)
        if fault.kind == "suspend":
            node.clock.offset_s -= fault.seconds * node.clock.rate

    def split(self, fault: Fault) -> None:
        """Two sides that cannot reach each other for a while; both go on, if nothing else happens to them."""
        swarm, r = self.swarm, random.Random(f"{self.plan.seed} {fault}")
        names = [node.name for node in swarm.living()]
        side = {name for name in names if r.random() < 0.5}
        sides = ["".join(side), "".join(set(names) - side)]
        swarm.note("", f"splits into {sorted(side)} and the others")
        swarm.split(*sides, held=fault.kind == "hold")
        quiet = not self.pending
        played = self.played
        before = {n: sum(n.peer.versions) for n in swarm.alive_nodes() if n.peer.state in ("training", "exchanging")}

        def heal() -> None:
            swarm.note("", "the sides can reach each other again")
            if quiet and played == self.played and fault.seconds >= SPLIT_PROGRESS_S:
                for node, versions in before.items():
                    if swarm.alive(node) and sum(node.peer.versions) <= versions:
                        raise Violation(f"{node.name} made no progress in {fault.seconds} s on its side of a split")
            swarm.split(heal_s=DISCOVERY_S)
            self.over(DISCOVERY_S, lambda: None)

        self.over(fault.seconds, heal)
