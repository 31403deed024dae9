"""A swarm of production peers, one of which says numbers at their bounds: what its schemas allow,
and no run needs.

    honest peers, and a liar -> every message of the liar may be changed (`extremes`) -> the liar
    dies -> last checks

The liar names the right run and heads, signs what it says, and asks everybody for everything. What
must hold: no task of an honest peer fails and nothing in it that only watchers need does
(`recorder_failed`), no honest peer holds the lies against another one (`penalty`, `refused_head`),
its snapshot can be read, and once the liar is gone every honest peer makes progress.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from typing import Any
from unittest.mock import patch

from msgspec.structs import replace as with_fields
from rich.console import Console

from diloco.core.history import sign, state_of
from diloco.dashboard.tables import render
from diloco.errors import PayloadError
from diloco.messages.base import Message
from diloco.messages.bulk import Get, PartHeader, RecordHeader
from diloco.messages.control import Offer
from diloco.messages.heads import Head, Line
from diloco.messages.snapshot import unpack_snapshot
from diloco.rundir.reporting import swarm_figures
from diloco.sim.virtual_time import VirtualLoop
from diloco.swarm.node.node import Node
from diloco.swarm.rpc.contribution import ContributionHeader
from diloco.swarm.rpc.inner_state import InnerRequest
from diloco.swarm.rpc.probe import Probe, probe
from diloco.swarm.rpc.watch import InfoRequest, request_manifest, request_snapshot
from diloco.swarm.wire import streams
from diloco.swarm.wire.streams import BROKEN
from tests.harness.fuzz.crowd import Crowd
from tests.harness.fuzz.extremes import NUM_VALUES, Target, changed, targets
from tests.harness.fuzz.faults import Scenario, scenario
from tests.harness.fuzz.lives import Life, PeerSpec, Violation
from tests.harness.fuzz.stage import PROGRESS_S, Outcome, on_stage

LIAR = "liar"
SAID_BY_AUTHORS = ("answer", "grant", "part", "record")
# when the liar comes, one joins, one leaves, it dies
MEETS_S, NEWCOMER_S, LEAVES_S, ENDS_S = 8.0, 18.0, 26.0, 38.0
ASKS_EVERY_S = 3.0
LOOKS_EVERY_S = 5.0
STRIDE = 7919  # a prime
ROUNDS = 10**6  # that are planned, so that peers say a plan
OTHERS = 0.1  # probability that the liar changes another message, too, in some of the runs


@dataclass(frozen=True)
class Lie:
    """What decides a run: its settings come from the scenario of that seed."""

    seed: int
    target: Target
    first: bool  # the liar begins the run, and is author of everything at first
    more: bool  # it changes other messages now and then, too

    def __str__(self) -> str:
        extra = ", and now and then other fields" * self.more
        when = "first" if self.first else "later"
        return f"seed {self.seed}: {self.target}{extra}; the liar comes {when}"


def num_lies() -> int:
    """How many seeds it takes until every field has had each of its extreme values."""
    return len(targets()) * NUM_VALUES


def lie_of(seed: int) -> Lie:
    """The lie of a seed; seeds in a row have fields of different messages."""
    r, number = random.Random(f"lie {seed}"), seed * STRIDE % len(targets())
    kind, path = targets()[number]
    value = (seed // len(targets()) + number) % NUM_VALUES
    first = kind in SAID_BY_AUTHORS or r.random() < 0.3
    return Lie(seed, Target(kind, path, value), first, more=r.random() < 0.3)


def play_lie(lie: Lie, trace: Callable[[str], None] = lambda line: None) -> Outcome:
    """Play a lie; its violation is None when all went well."""
    plan = scenario(lie.seed)
    with on_stage(plan) as loop:
        stage = _LieStage(loop, lie, replace(plan, outer=(("rounds", ROUNDS), *plan.outer)))
        stage.crowd.tell = trace
        with stage.lying():
            violation = stage.crowd.violation_of(stage.play())
        return Outcome(loop.turns, loop.seconds, (stage.told,), violation, tuple(stage.crowd.story))


class _Crowd(Crowd):
    """Nobody minds what becomes of the liar."""

    def _over(self, life: Life) -> None:
        if life.name == LIAR and not life.ended:
            life.ended = "over"
            self.network.crash(LIAR)
        super()._over(life)


class _LieStage:
    """A lie on its way. `told` counts the messages that were changed."""

    def __init__(self, loop: VirtualLoop, lie: Lie, plan: Scenario) -> None:
        self.loop, self.lie, self.told = loop, lie, 0
        self.random = random.Random(f"liar {lie.seed}")
        self._lines: dict[tuple[int, int], Line] = {}  # that the liar said, by fragment and stamp
        self.crowd = _Crowd.of(loop, replace(plan, heartbeat_s=1.0, loss=0.0))
        # A trainer's node is opened from the trainer's thread.
        self.crowd.on_life = lambda life: self.loop.at(self.loop.seconds, self._begin, life)
        if plan.executor_s:
            loop.executor_s = lambda: 0.3 * self.random.random() ** 3

    @contextmanager
    def lying(self) -> Iterator[None]:
        """Inside, what the liar says is changed on its way to the wire."""
        honest = streams.encode  # type: ignore[attr-defined]

        def encode(message: Message) -> bytes:
            lies = (self.loop.owner or "").startswith(f"{LIAR}.")
            return honest(self._changed(message) if lies else message)

        with patch.object(streams, "encode", encode):
            yield

    def _changed(self, message: Message) -> Message:
        r, lie = self.random, changed(message, self.lie.target, self.random)
        if lie is message and self.lie.more and r.random() < OTHERS:
            if paths := [path for kind, path in targets() if kind == message.kind]:
                target = Target(message.kind, r.choice(paths), r.randrange(NUM_VALUES))
                lie = changed(message, target, r)
        self.told += lie is not message
        return self._signed(message, lie)

    def _signed(self, message: Message, lie: Message) -> Message:
        """The lie, signed anew where the liar is its author; a line stays as it was."""
        match lie:
            case Offer() | ContributionHeader() if lie.line.peer == LIAR:
                assert isinstance(message, (Offer, ContributionHeader))
                name = message.line.fragment, message.line.stamp
                said = self._lines.setdefault(name, self._sign(lie.line))
                return with_fields(lie, line=said)
            case RecordHeader() if lie is not message:
                return with_fields(lie, head=self._certified(lie.head))
            case PartHeader() if lie is not message:
                head = with_fields(lie.head, state=state_of(lie.book, lie.digests))
                return with_fields(lie, head=self._certified(head))
        return lie

    def _certified(self, head: Head) -> Head:
        """A head that is right by itself, if it is the liar's; so are its own lines in it."""
        if head.author != LIAR:
            return head
        lines = tuple(
            (self._sign(line) if line.peer == LIAR else line, weight) for line, weight in head.lines
        )
        certified: Head = self._sign(with_fields(head, lines=lines))
        return certified

    def _sign(self, one: Any) -> Any:
        node = self.crowd.lives[LIAR].node
        return one if node is None else sign(one, node.context.transport, "run")

    # -- the story ---------------------------------------------------------------------------------

    async def play(self) -> None:
        """From the first hello to the progress of the honest peers without the liar."""
        crowd, honest = self.crowd, PeerSpec("a", step_s=0.5)
        liar = replace(honest, name=LIAR)
        crowd.start(liar if self.lie.first else honest)
        await self._until(crowd.all_ready, 10.0, "the first peer listens")
        for name in ("a", "b", "c") if self.lie.first else ("b", "c"):
            crowd.start(replace(honest, name=name, trains=name != "c" or self.lie.seed % 3 > 0))
        await self._at(MEETS_S)
        if not self.lie.first:
            crowd.start(liar)
        await self._at(NEWCOMER_S)
        crowd.start(replace(honest, name="n"))
        await self._at(LEAVES_S)
        crowd.leave("b")
        await self._at(ENDS_S)
        if not crowd.lives[LIAR].ended:
            crowd.crash(LIAR)
        crowd.note("", "the liar is gone")
        await self._until(crowd.all_ready, PROGRESS_S, "all are in the swarm")
        for life, before in [(life, life.work) for life in crowd.members()]:
            moves = partial(lambda life, before: life.leaving or life.work > before, life, before)
            await self._until(moves, PROGRESS_S, f"{life.name} makes progress")
        self._look()

    async def _at(self, second: float) -> None:
        while self.loop.seconds < second:
            await asyncio.sleep(min(LOOKS_EVERY_S, second - self.loop.seconds))
            self._look()

    async def _until(self, condition: Callable[[], bool], patience_s: float, what: str) -> None:
        await self.crowd.until(lambda: self._check() and condition(), patience_s, what, 0.5)

    # -- what must hold ----------------------------------------------------------------------------

    def _check(self) -> bool:
        ended = (f"{life.name} {life.ended}" for life in self.crowd.ended)
        wrong = [*self.crowd.failures, *(one for one in ended if "a handler of" in one)]
        for line in self.crowd.story:
            _, name, kind, *_ = [*line.split(), ""]
            accuses = kind == "penalty" or (kind == "refused_head" and "'author': ''" not in line)
            accuses = accuses and f": '{LIAR}'" not in line
            if name != LIAR and (accuses or kind == "recorder_failed"):
                wrong.append(line)
        if wrong:
            raise Violation("; ".join(wrong[:3]))
        return True

    def _look(self) -> None:
        """Watchers look at every honest peer."""
        self._check()
        for life in self.crowd.members():
            if life.name == LIAR or life.node is None:
                continue
            try:
                snapshot = unpack_snapshot(b"".join(life.node.recorder.packed(self.loop.seconds)))
            except PayloadError as error:
                self._check()  # the story may say more
                raise Violation(f"the snapshot of {life.name}: {error}") from None
            console = Console(file=StringIO(), width=100)
            console.print(render(snapshot, console))
            json.dumps(swarm_figures(snapshot), allow_nan=False)
        self._check()

    # -- questions ---------------------------------------------------------------------------------

    def _begin(self, life: Life) -> None:
        if not life.ended and life.node is not None:
            work = self._ask_everybody if life.name == LIAR else self._ask_liar
            with self.loop.owned_by(life.owner):
                life.node.context.tasks.spawn(work(life.node))

    async def _ask_everybody(self, node: Node) -> None:
        facts = node.core.facts
        while True:
            await asyncio.sleep(ASKS_EVERY_S)
            f = self.random.choice(facts.fragments)
            requests: list[Message] = [Get(f.index, key) for key in (f.tip.key, (0, ""))]
            requests += [Get(f.index, f.tip.key, f.tip.head.id, 0), InnerRequest()]
            requests += [InfoRequest("manifest"), InfoRequest("snapshot"), Probe()]
            if others := [member.peer for member in facts.members.all()]:
                request = self.random.choice(requests)
                node.context.tasks.spawn(self._ask(node, self.random.choice(others), request))

    async def _ask(self, node: Node, peer: str, request: Message) -> None:
        with suppress(*BROKEN, PayloadError):
            async with node.context.open(peer) as stream:
                await stream.send(request)
                await stream.receive(5.0)
                await asyncio.sleep(self.random.choice([0.0, 1.0]))

    async def _ask_liar(self, node: Node) -> None:
        """As a newcomer or a watcher would."""
        transport = node.context.transport
        questions: list[Any] = [probe, request_manifest, request_snapshot]
        while True:
            await asyncio.sleep(2 * ASKS_EVERY_S)
            if LIAR in node.core.facts.members:
                with suppress(*BROKEN, PayloadError):
                    await self.random.choice(questions)(transport, LIAR)
