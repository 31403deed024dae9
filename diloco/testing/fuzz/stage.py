"""Plays a scenario of faults on a crowd of production peers.

start -> faults at their seconds -> all is healed -> everybody makes progress -> everybody is done -> last checks
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import torch

from diloco.sim.virtual_time import DeadlockError, VirtualLoop, virtual_time
from diloco.testing.fuzz.crowd import Crowd, Life, small_pieces
from diloco.testing.fuzz.faults import SPLIT_PROGRESS_S, TEARING, Fault, Scenario
from diloco.testing.fuzz.invariants import Violation, Watch, check_end
from diloco.testing.fuzz.splits import FLAP_S, SHAPES, pairs

__all__ = ["PROGRESS_S", "Outcome", "play", "quiet_process", "shrink"]

SETTLE_S = 5.0  # after the last fault ended
PROGRESS_S = 150.0  # in which every peer makes progress once everything is healed: penalties and lost calls have to end
AGREED_S = 60.0  # in which all believe in the same syncers
FINISH_S = 400.0  # in which everybody is done
MAX_PEERS = 7


@dataclass(frozen=True)
class Outcome:
    """How a scenario went: `violation` is None when every invariant held. The story has a line per event of a node."""

    turns: int
    seconds: float
    versions: tuple[int, ...]
    violation: str | None
    story: tuple[str, ...] = ()


def play(plan: Scenario, trace: Callable[[str], None] | None = None) -> Outcome:
    """Run a scenario. The trace is called with each line of the story at its time."""
    with quiet_process(), virtual_time() as loop:
        return _played(loop, plan, trace)


@contextmanager
def quiet_process() -> Iterator[None]:
    """Inside, nothing is logged, torch uses one thread, and what was imported is no garbage to look through."""
    _exempt_modules_from_collection(len(sys.modules))
    disabled, threads = logging.root.manager.disable, torch.get_num_threads()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        logging.disable(disabled)
        torch.set_num_threads(threads)


@cache
def _exempt_modules_from_collection(_num_modules: int) -> None:
    """The last check collects garbage. That takes a quarter of a second if it looks at all that torch has imported."""
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)  # the first optimizer imports as much again
    gc.collect()
    gc.freeze()


def _played(loop: VirtualLoop, plan: Scenario, trace: Callable[[str], None] | None) -> Outcome:
    stage = _Stage(loop, plan)
    if trace is not None:
        stage.crowd.tell = trace
    violation = None
    with small_pieces() if plan.pieces else small_pieces(64, 64):
        try:
            loop.run_until_complete(stage.play())
        except (Violation, DeadlockError) as error:
            violation = str(error)
    versions = tuple(min(life.node.protocol.versions) for life in stage.crowd.ended if life.node and life.ready)
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
        self.crowd = Crowd(
            loop, plan.seed, dict(plan.outer), units=plan.units, heartbeat_s=plan.heartbeat_s, loss=plan.loss,
            inner_state="cold" if plan.cold else "donor", closed=plan.closed,
        )  # fmt: skip
        self.watch = Watch(self.crowd)
        if plan.executor_s:
            r = random.Random(f"threads {plan.seed}")
            loop.executor_s = lambda: plan.executor_s * r.random() ** 3
        self.pending = 0  # faults that did not end yet
        self.begun = 0
        self.fresh = iter("stuvwxyz" * 4)

    async def play(self) -> None:
        """From the first hello to the last check."""
        crowd = self.crowd
        for number, member in enumerate(self.plan.members):
            crowd.start(member, len(self.plan.members) if self.plan.together else 1)
            if number == 0:
                await self._until(lambda: all(life.ready for life in crowd.living()), 10.0, "the first peer listens")
        for fault in self.plan.faults:
            await asyncio.sleep(max(0.0, fault.at_s - self.loop.seconds))
            for _ in range(fault.turns):
                await asyncio.sleep(0)
            self._befall(fault)
        await self._until(lambda: not self.pending, 300.0, "all faults end")
        await asyncio.sleep(SETTLE_S)
        missing = len(self.plan.members) - len(crowd.members()) if self.plan.together and not self._under_way() else 0
        for _ in range(missing):  # they died before the swarm began, which waits for so many
            self._join(trains=True)
        if not any(life.member.trains for life in crowd.members()):
            self._join(trains=True)
        crowd.note("", "everything is healed")
        await self._get_on()
        await self._finish()

    async def _get_on(self) -> None:
        """Every living peer makes progress, and all believe in the same living syncers."""
        crowd = self.crowd
        await self._until(self._all_are_in, PROGRESS_S, "every peer is in the swarm")
        await self._until(self._all_have_met, PROGRESS_S, "every peer has heard every other")
        before = {life.owner: _progress(life) for life in crowd.members()}
        for owner, versions in before.items():
            await self._until(lambda o=owner, v=versions: self._moved(o, v), PROGRESS_S, f"{owner} makes progress")  # type: ignore[misc]
        await self._until(self._agreed, AGREED_S, "all believe in the same syncers")

    async def _finish(self) -> None:
        crowd = self.crowd
        nodes = [life.node for life in crowd.members() if life.node is not None]
        crowd.goal = self.plan.rounds + max(node.protocol.steps for node in nodes)
        trainers = [life for life in crowd.members() if life.member.trains]
        await self._until(lambda: all(life.ended for life in trainers), FINISH_S, "every trainer is done")
        for life in crowd.living():
            crowd.leave(life.name)
        await self._until(lambda: not crowd.living(), 100.0, "every host has left")
        await asyncio.sleep(SETTLE_S)
        check_end(crowd, self.watch.lineage)

    def _under_way(self) -> bool:
        return any(_trains(life) or _progress(life) for life in self.crowd.members())

    def _all_are_in(self) -> bool:
        return all(life.ready and life.node is not None for life in self.crowd.living() if not life.leaving)

    def _all_have_met(self) -> bool:
        nodes = [life.node for life in self.crowd.members() if life.node is not None]
        names = {node.protocol.me for node in nodes}
        return all(names <= {node.protocol.me, *(m.peer for m in node.protocol.members.all())} for node in nodes)

    def _moved(self, owner: str, before: int) -> bool:
        life = next((life for life in self.crowd.members() if life.owner == owner), None)
        return life is None or _progress(life) > before

    def _agreed(self) -> bool:
        nodes = [life.node for life in self.crowd.members() if life.node is not None]
        names = {life.name for life in self.crowd.members()}
        for fragment in range(len(nodes[0].protocol.versions)):
            leases = {node.protocol.leases.get(fragment) for node in nodes}
            held = {(lease.holder, lease.term) for lease in leases if lease is not None}
            if None in leases or len(held) != 1 or not {holder for holder, _ in held} <= names:
                return False
        return True

    async def _until(self, condition: Callable[[], bool], patience_s: float, what: str) -> None:
        deadline = self.loop.seconds + patience_s
        while not condition():
            if self.crowd.failures:
                raise Violation("; ".join(self.crowd.failures))
            if self.loop.seconds > deadline:
                states = {life.owner: _state(life) for life in self.crowd.living()}
                raise Violation(f"waited {patience_s:g} s until {what}, in vain: {states}")
            await asyncio.sleep(0.25)

    # -- faults -------------------------------------------------------------------------------------------------------

    def _befall(self, fault: Fault) -> None:
        """A fault happens."""
        crowd, living = self.crowd, self.crowd.living()
        self.begun += 1
        if not living:
            return self._join(trains=True)
        life, other = living[fault.who % len(living)], living[(fault.who // 7) % len(living)]
        crowd.note(life.name, f"FAULT {fault}")
        crowd.torn = crowd.torn or fault.kind in (*TEARING, *SHAPES)
        match fault.kind:
            case "crash" | "restart":
                crowd.crash(life.name)
                if fault.kind == "restart" or len(living) == 1:
                    self._over(fault.seconds if fault.who % 3 else 0.1, lambda: self._restart(life))
            case "leave" if len(living) > 1:
                crowd.leave(life.name)
            case "join" | "host" if len(living) < MAX_PEERS:
                self._join(trains=fault.kind == "join")
            case "freeze" | "suspend":
                self._freeze(life, fault)
            case "reset" if life is not other:
                crowd.network.reset(life.name, other.name)
            case "stall" if life is not other:
                crowd.network.cut(life.name, other.name)
                self._over(fault.seconds, lambda: crowd.network.mend(life.name, other.name))
            case "split" | "hold":
                self._split(fault)
            case shape if shape in SHAPES:
                self._split_in_shape(fault)
            case "garble":
                crowd.network.garbling.add(life.name)

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
        self.crowd.start(
            replace(first, name=next(self.fresh), trains=trains, lie=1.0, clock=(1.0, 0.0), boundary_s=0.0)
        )

    def _restart(self, life: Life) -> None:
        """A process that died starts again under its name, from its last checkpoint."""
        if self.crowd.lives[life.name] is life:
            self.crowd.start(life.member, checkpoint=life.checkpoint)

    def _freeze(self, life: Life, fault: Fault) -> None:
        """SIGSTOP; or a laptop lid, and then the clock stands still, too."""
        self.loop.freeze(life.owner)

        def thaw() -> None:
            if fault.kind == "suspend":
                self.loop.set_back(life.owner, fault.seconds)
            self.loop.thaw(life.owner)

        self._over(fault.seconds, thaw)

    def _split(self, fault: Fault) -> None:
        """Two sides that cannot reach each other for a while; both go on, if nothing else happens to them."""
        crowd, r = self.crowd, random.Random(f"{self.plan.seed} {fault}")
        names = sorted(crowd.lives)
        side = {name for name in names if r.random() < 0.5}
        crowd.note("", f"splits into {sorted(side)} and the others")
        self._part(fault, [(one, other) for one in names if one in side for other in names if other not in side])

    def _split_in_shape(self, fault: Fault) -> None:
        """Sides of many shapes (`splits`)."""
        crowd, r = self.crowd, random.Random(f"{self.plan.seed} {fault}")
        cut = pairs(fault.kind, sorted(crowd.lives), r)
        crowd.note("", f"cannot reach each other: {' '.join(f'{one}-{other}' for one, other in cut)}")
        if fault.kind == "election":
            dies = r.choice(crowd.living())
            crowd.crash(dies.name)
            self._over(fault.seconds, lambda: self._restart(dies))
        if fault.kind != "flap":
            return self._part(fault, cut, one_way=fault.kind == "one_way", checked=fault.kind != "election")
        again = replace(fault, seconds=FLAP_S)
        for number in range(int(fault.seconds / 2 / FLAP_S)):
            self._over(2 * FLAP_S * number, lambda: self._part(again, cut, checked=False))

    def _part(self, fault: Fault, cut: list[tuple[str, str]], one_way: bool = False, checked: bool = True) -> None:
        crowd = self.crowd
        for one, other in cut:
            crowd.network.cut(one, other, one_way)
            if fault.kind != "hold":
                crowd.network.reset(one, other)
        alone = self.begun if checked and not self.pending else -1
        before = {life.owner: _progress(life) for life in crowd.members() if _trains(life)}

        def heal() -> None:
            crowd.note("", "the sides can reach each other again")
            if alone == self.begun and fault.seconds >= SPLIT_PROGRESS_S:
                for owner, versions in before.items():
                    if not self._moved(owner, versions):
                        crowd.failures.append(f"{owner} made no progress in {fault.seconds} s on its side of a split")
            for one, other in cut:
                crowd.network.mend(one, other)

        self._over(fault.seconds, heal)


def _progress(life: Life) -> int:
    return sum(life.node.protocol.versions) if life.node is not None else 0


def _trains(life: Life) -> bool:
    return life.node is not None and life.node.protocol.state in ("training", "exchanging")


def _state(life: Life) -> object:
    if life.node is None or not life.ready:
        return "not in the swarm"
    return life.node.protocol.state, life.node.protocol.versions
