"""Plays a scenario of faults on a crowd of production peers.

start -> faults at their seconds -> all is healed -> everybody is in step -> all rest -> all are
done
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

from diloco.core.events import Merge
from diloco.sim.virtual_time import VirtualLoop
from diloco.swarm.node.node import Node
from tests.harness.fuzz.crowd import Crowd
from tests.harness.fuzz.faults import FLAP_S, SPLIT_PROGRESS_S, TEARING, Fault, Scenario, pairs
from tests.harness.fuzz.invariants import SETTLE_S, Watch
from tests.harness.fuzz.lives import Life, PeerSpec
from tests.harness.fuzz.virtual import virtual_swarm

# in which every peer makes progress once everything is healed: penalties and lost calls have to end
PROGRESS_S = 150.0
ROUNDS = 2  # which everybody makes once everything is healed
# of an element; it must be less than what an honest version moves, else it is taken for a lie
DAMAGE = 0.01
SLOW = 5.0  # times as long an inner step takes
MAX_PEERS = 7


@dataclass(frozen=True)
class Outcome:
    """How a scenario went. The story has a line per event of a node."""

    turns: int
    seconds: float
    versions: tuple[int, ...]
    violation: str | None
    story: tuple[str, ...] = ()


def on_stage(plan: Scenario) -> AbstractContextManager[VirtualLoop]:
    """The virtual time of a scenario."""
    return virtual_swarm() if plan.pieces else virtual_swarm(64, 64)


def play(plan: Scenario, trace: Callable[[str], None] = lambda line: None) -> Outcome:
    """Run a scenario. The trace is called with each line of the story at its time."""
    with on_stage(plan) as loop:
        stage = _Stage(loop, plan)
        stage.crowd.tell = trace
        violation = stage.crowd.violation_of(stage.play())
        lives = [life for life in stage.crowd.ended if life.node and life.ready]
        versions = tuple(min(f.tip.head.number for f in life.fragments) for life in lives)
        return Outcome(loop.turns, loop.seconds, versions, violation, tuple(stage.crowd.story))


def shrink(plan: Scenario) -> Scenario:
    """The scenario without the faults that its violation does not need."""
    for fault in plan.faults:
        smaller = replace(plan, faults=tuple(f for f in plan.faults if f is not fault))
        if play(smaller).violation is not None:
            plan = smaller
    return plan


class _Stage:
    """A scenario on its way."""

    def __init__(self, loop: VirtualLoop, plan: Scenario) -> None:
        self.plan, self.loop = plan, loop
        self.crowd = Crowd.of(loop, plan)
        self.watch = Watch(self.crowd)
        self.crowd.on_end = lambda life: self.watch.leaves(life) if life.ended == "left" else None
        self.random = random.Random(f"stage {plan.seed}")
        if plan.executor_s:
            r = random.Random(f"threads {plan.seed}")
            loop.executor_s = lambda: plan.executor_s * r.random() ** 3
        self.pending = 0  # faults that did not end yet
        self.begun = 0  # faults
        self.fresh = iter("stuvwxyz" * 4)

    async def play(self) -> None:
        """From the first hello to the last check."""
        crowd = self.crowd
        for number, member in enumerate(self.plan.members):
            crowd.start(member, len(self.plan.members) if self.plan.together else 1)
            if number == 0:
                await crowd.until(crowd.all_ready, 10.0, "the first peer listens")
        for fault in self.plan.faults:
            await asyncio.sleep(max(0.0, fault.at_s - self.loop.seconds))
            for _ in range(fault.turns):
                await asyncio.sleep(0)
            self._befall(fault)
        await self.crowd.until(lambda: not self.pending, 300.0, "all faults end")
        await asyncio.sleep(SETTLE_S)
        if self.plan.together and not any(life.work for life in crowd.members()):
            # some died before the swarm began, which waits for so many
            for _ in range(len(self.plan.members) - len(crowd.members())):
                self._join(trains=True)
        if not any(life.member.trains for life in crowd.members()):
            self._join(trains=True)
        if not any(life.member.reachable for life in crowd.members()):
            self._join(trains=False)
        crowd.note("", "everything is healed")
        await self._get_on()
        await self.watch.rest()
        await self.watch.finish()

    async def _get_on(self) -> None:
        """Every living peer gets versions, and what every trainer learns gets into them."""
        crowd = self.crowd
        await self.crowd.until(self._all_are_in, PROGRESS_S, "every peer is in the swarm")
        await self.crowd.until(self._all_have_met, PROGRESS_S, "every peer has heard every other")
        self.watch.find_holes()
        for _ in range(ROUNDS):
            for life, work, stamps in [(one, one.work, _stamps(one)) for one in crowd.members()]:
                moved = partial(self._moved, life, work)
                await crowd.until(moved, PROGRESS_S, f"{life.owner} makes progress")
                in_step = partial(self._in_step, life, stamps)
                await crowd.until(in_step, PROGRESS_S, f"{life.owner} is in step")

    def _all_are_in(self) -> bool:
        staying = [life for life in self.crowd.living() if not life.leaving]
        return all(life.ready and life.node is not None for life in staying)

    def _all_have_met(self) -> bool:
        cores = [life.node.core.facts for life in self.crowd.members() if life.node is not None]
        names = {core.me for core in cores}
        met = ({core.me, *(member.peer for member in core.members.all())} for core in cores)
        return all(names <= one for one in met)

    def _moved(self, life: Life, before: int) -> bool:
        return life not in self.crowd.members() or life.work > before

    def _in_step(self, life: Life, before: list[int]) -> bool:
        """Whether a new contribution of it to each fragment is in the model, or was judged."""
        gone = life not in self.crowd.members() or not life.member.trains
        return gone or all(now > then for now, then in zip(_stamps(life), before, strict=True))

    # -- faults ------------------------------------------------------------------------------------

    def _befall(self, fault: Fault) -> None:
        """A fault happens."""
        crowd, living = self.crowd, self.crowd.living()
        self.begun += 1
        if not living:
            return self._join(trains=True)
        life, other = living[fault.who % len(living)], living[(fault.who // 7) % len(living)]
        crowd.note(life.name, f"FAULT {fault}")
        crowd.torn = crowd.torn or fault.kind in TEARING
        match fault.kind:
            case "crash" | "restart":
                crowd.crash(life.name)
                whole = [each for each in living if each is not life and not each.flips]
                if fault.kind == "restart" or not whole:
                    self._over(fault.seconds if fault.who % 3 else 0.1, lambda: self._restart(life))
            case "leave" if len(living) > 1:
                crowd.leave(life.name)
            case "join" | "host" if len(living) < MAX_PEERS:
                self._join(trains=fault.kind == "join")
            case "freeze" | "suspend":
                self._freeze(life, fault)
            case "hang" | "slow":
                self._hinder(life, fault)
            case "flip" | "stuck" if life.node is not None:
                self._damage(life, life.node, fault)
            case _:
                self._break_links(life, other, fault)

    def _break_links(self, life: Life, other: Life, fault: Fault) -> None:
        network = self.crowd.network
        match fault.kind:
            case "reset" if life is not other:
                network.reset(life.name, other.name)
            case "stall" if life is not other:
                network.cut(life.name, other.name)
                self._over(fault.seconds, lambda: network.mend(life.name, other.name))
            case "garble":
                network.garbling.add(life.name)
            case "split" | "hold" | "lone" | "halves" | "thirds" | "one_way" | "flap" | "election":
                self._split(fault)

    def _over(self, seconds: float, end: Callable[[], None]) -> None:
        """A fault ends after a while."""
        self.pending += 1

        def ended() -> None:
            self.pending -= 1
            end()

        self.loop.at(self.loop.seconds + seconds, ended)

    def _join(self, trains: bool) -> None:
        """A peer that nobody knows starts."""
        first = self.plan.members[0]
        like = PeerSpec(next(self.fresh), trains, first.reachable, first.step_s, first.latency_s)
        self.crowd.start(like)

    def _restart(self, life: Life) -> None:
        """A process that died starts again under its name, from a checkpoint of any age."""
        if self.crowd.lives[life.name] is life:
            checkpoint = self.random.choice(life.checkpoints) if life.checkpoints else None
            self.crowd.start(life.member, checkpoint=checkpoint)

    def _hinder(self, life: Life, fault: Fault) -> None:
        """A training loop makes no inner steps for a while, or slow ones."""
        member = life.member
        life.hangs = fault.kind == "hang"
        life.member = replace(member, step_s=member.step_s * (1.0 if life.hangs else SLOW))

        def ends() -> None:
            life.hangs, life.member = False, member

        self._over(fault.seconds, ends)

    def _damage(self, life: Life, node: Node, fault: Fault) -> None:
        """A bit of an anchor flips; or merges hang until the peer is killed and starts again."""
        if fault.kind == "flip":
            f = node.core.facts.fragments[fault.who % len(node.replica.anchors)]
            if not f.inbox.moving:  # else it is looked at, and moves all the same
                node.replica.anchors[f.index][0] += DAMAGE
                life.flips += 1
                self.watch.damaged(life, f.index)
            return

        async def hangs(action: Merge) -> None:
            while not life.ended:
                await asyncio.sleep(1.0)

        def ends() -> None:
            if not life.ended:
                self.crowd.crash(life.name)
            self._restart(life)

        node.anchors.merge = hangs  # type: ignore[method-assign]
        self._over(4 * fault.seconds, ends)

    def _freeze(self, life: Life, fault: Fault) -> None:
        """SIGSTOP; or a laptop lid, and then the clock stands still, too."""
        self.loop.freeze(life.owner)

        def thaw() -> None:
            if fault.kind == "suspend":
                self.loop.set_back(life.owner, fault.seconds)
            self.loop.thaw(life.owner)

        self._over(fault.seconds, thaw)

    def _split(self, fault: Fault) -> None:
        """Sides cannot reach each other for a while; they go on if nothing else happens."""
        crowd, r = self.crowd, random.Random(f"{self.plan.seed} {fault}")
        cut = pairs(fault.kind, sorted(crowd.lives), r)
        crowd.note("", f"cannot reach each other: {' '.join(map('-'.join, cut))}")
        if fault.kind == "election":
            dies = r.choice(crowd.living())
            crowd.crash(dies.name)
            self._over(fault.seconds, lambda: self._restart(dies))
        if fault.kind != "flap":
            return self._part(fault, cut, fault.kind == "one_way", fault.kind != "election")
        again = replace(fault, seconds=FLAP_S)
        for number in range(int(fault.seconds / 2 / FLAP_S)):
            self._over(2 * FLAP_S * number, lambda: self._part(again, cut, checked=False))

    def _part(
        self, fault: Fault, cut: list[tuple[str, str]], one_way: bool = False, checked: bool = True
    ) -> None:
        crowd = self.crowd
        for one, other in cut:
            crowd.network.cut(one, other, one_way)
            if fault.kind != "hold":
                crowd.network.reset(one, other)
        nodes = [(life, life.node.core.facts) for life in crowd.members() if life.node is not None]
        # Who has not met enough peers to begin with waits for them, and others for it.
        checked = checked and not self.pending and all(facts.life.ready for _, facts in nodes)
        alone = self.begun if checked else -1
        authors = [life.name for life, facts in nodes if facts.identity.may_author]
        parted = {*map(frozenset, cut)}
        before = [
            (life, life.work)
            for life, facts in nodes
            # who has a damaged anchor may wait for somebody with a good one
            if facts.trains_now and not life.hangs and not life.flips
            if any(frozenset((life.name, one)) not in parted for one in authors)
        ]

        def heal() -> None:
            crowd.note("", "the sides can reach each other again")
            if alone == self.begun and fault.seconds >= SPLIT_PROGRESS_S:
                stuck = [life.owner for life, work in before if not self._moved(life, work)]
                crowd.failures += [f"{one} made no progress beside a split" for one in stuck]
            for one, other in cut:
                crowd.network.mend(one, other)

        self._over(fault.seconds, heal)


def _stamps(life: Life) -> list[int]:
    return [f.tip.book.of(life.name)[0] for f in life.fragments]
