"""A swarm of production peers, one of which says numbers at their bounds: what its schemas allow, and no run needs.

    honest peers, and a liar -> every message of the liar may be changed (`extremes`) -> the liar dies -> last checks

The liar is a production peer as well. So its words stand where they may stand, and name the right run, terms and
digests; only the numbers are wrong. It also asks everybody for everything, and the honest peers ask it.

What must hold: no task of an honest peer fails and nothing in it that only watchers need does (`recorder_failed`), no
honest peer holds the lies against another one (`penalty`), its snapshot can be read, and once the liar is gone every
honest peer makes progress.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

from rich.console import Console

from diloco.cli.panels import render
from diloco.errors import PayloadError
from diloco.protocol import messages
from diloco.protocol.heads import lines_digest, shares_digest, sign_head, sign_line
from diloco.protocol.messages import Message
from diloco.protocol.messages.bulk import (
    Anchor,
    Contribution,
    InnerRequest,
    PartRequest,
    Signed,
    StateRequest,
    UnitRequest,
)
from diloco.protocol.messages.heads import Record
from diloco.protocol.messages.watching import DialBack, ManifestRequest, Probe, SnapshotRequest
from diloco.protocol.peer import Peer
from diloco.protocol.snapshot import unpack
from diloco.rundir.reporting import swarm_figures
from diloco.sim.virtual_time import DeadlockError, VirtualLoop, virtual_time
from diloco.swarm.conversations.probe import probe
from diloco.swarm.conversations.watch import request_manifest, request_snapshot
from diloco.swarm.node.node import Node
from diloco.swarm.wire import streams
from diloco.swarm.wire.streams import BROKEN
from diloco.testing.fuzz.crowd import Crowd, Life, Member, small_pieces
from diloco.testing.fuzz.extremes import NUM_VALUES, Target, changed, targets
from diloco.testing.fuzz.faults import scenario
from diloco.testing.fuzz.invariants import Violation
from diloco.testing.fuzz.stage import PROGRESS_S, Outcome, quiet_process

__all__ = ["Lie", "lie_of", "num_lies", "play_lie"]

LIAR = "liar"
SAID_BY_SYNCERS = ("claim", "part_list", "published", "record", "state", "unit_grant", "verdict")
MEETS_S, NEWCOMER_S, LEAVES_S, ENDS_S = 8.0, 18.0, 26.0, 38.0  # when the liar comes, one joins, one leaves, it dies
ASKS_EVERY_S = 3.0
LOOKS_EVERY_S = 5.0
OTHERS = 0.1  # probability that the liar changes another message, too, in some of the runs


@dataclass(frozen=True)
class Lie:
    """What decides a run: its settings come from the scenario of that seed."""

    seed: int
    target: Target
    first: bool  # the liar begins the run, and is syncer of everything at first
    more: bool  # it changes other messages now and then, too

    def __str__(self) -> str:
        extra = ", and now and then other fields" * self.more
        return f"seed {self.seed}: {self.target}{extra}; the liar comes {'first' if self.first else 'later'}"


def num_lies() -> int:
    """How many seeds it takes until every field has had each of its extreme values."""
    return len(targets()) * NUM_VALUES


def lie_of(seed: int) -> Lie:
    """The lie of a seed; seeds in a row have different fields."""
    r = random.Random(f"lie {seed}")
    kind, path = targets()[seed % len(targets())]
    value = (seed // len(targets()) + seed % len(targets())) % NUM_VALUES
    first = kind in SAID_BY_SYNCERS or r.random() < 0.3
    return Lie(seed, Target(kind, path, value), first, more=r.random() < 0.3)


def play_lie(lie: Lie, trace: Callable[[str], None] | None = None) -> Outcome:
    """Play a lie; its violation is None when all went well."""
    plan = scenario(lie.seed)
    violation = None
    with quiet_process(), virtual_time() as loop, small_pieces() if plan.pieces else small_pieces(64, 64):
        stage = _Stage(loop, lie)
        if trace is not None:
            stage.crowd.tell = trace
        try:
            with stage.lying():
                loop.run_until_complete(stage.play())
        except (Violation, DeadlockError) as error:
            violation = str(error)
        return Outcome(loop.turns, loop.seconds, (stage.told,), violation, tuple(stage.crowd.story))


class _Crowd(Crowd):
    """A crowd in which nobody minds what becomes of the liar."""

    def _over(self, life: Life) -> None:
        if life.name != LIAR:
            return super()._over(life)
        assert life.task is not None
        if not life.task.cancelled():
            life.task.exception()
        life.ended = life.ended or "over"
        self.ended.append(life)
        self.network.crash(LIAR)


class _Stage:
    """A lie on its way. `told` counts the messages that were changed."""

    def __init__(self, loop: VirtualLoop, lie: Lie) -> None:
        plan = scenario(lie.seed)
        self.loop, self.lie, self.told = loop, lie, 0
        self.random = random.Random(f"liar {lie.seed}")
        self._headers: dict[str, Contribution] = {}  # that the liar said, by the digest of its anchor
        outer = {"fragments": 1, **dict(plan.outer)}
        self.crowd = _Crowd(
            loop, lie.seed, outer, units=plan.units, heartbeat_s=1.0, inner_state="cold" if plan.cold else "donor",
            closed=plan.closed,
        )  # fmt: skip
        self.crowd.goal = 2**62
        self.crowd.on_life = self._on_life
        if plan.executor_s:
            loop.executor_s = lambda: 0.3 * self.random.random() ** 3

    @contextmanager
    def lying(self) -> Iterator[None]:
        """Inside, what the liar says is changed on its way to the wire."""
        honest = messages.encode

        def encode(message: Message) -> bytes:
            owner = self.loop.owner
            return honest(self._changed(message) if owner is not None and owner.startswith(f"{LIAR}.") else message)

        streams.encode = encode  # type: ignore[attr-defined]
        try:
            yield
        finally:
            streams.encode = honest  # type: ignore[attr-defined]

    def _changed(self, message: Message) -> Message:
        r, lie = self.random, changed(message, self.lie.target, self.random)
        if lie is message and self.lie.more and r.random() < OTHERS:
            paths = [path for kind, path in targets() if kind == message.kind]
            if paths:
                lie = changed(message, Target(message.kind, r.choice(paths), r.randrange(NUM_VALUES)), r)
        self.told += lie is not message
        liar = self.crowd.lives[LIAR].node
        return lie if liar is None else self._signed(message, lie, liar.protocol)

    def _signed(self, message: Message, lie: Message, liar: Peer) -> Message:
        """The lie with the liar's signatures: of its own lines, which say what their headers said, and of its heads."""
        match lie:
            case Contribution():
                assert isinstance(message, Contribution)
                self._headers[message.base_digest] = lie
            case Signed() if lie.line.base.hex() in self._headers:
                header = self._headers[lie.line.base.hex()]
                line = lie.line
                if lie is message:
                    line = line._replace(
                        base_version=header.base_version, base=bytes.fromhex(header.base_digest), steps=header.steps,
                        tokens=header.tokens, total=header.total,
                    )  # fmt: skip
                return Signed(line=sign_line(liar.signer, liar.run_id, header.fragment, line))
            case Record() if lie is not message:
                return _certified(lie, liar)
            case Anchor() if lie is not message and lie.record is not None:
                named = {"shares": shares_digest(lie.shares)} if lie.shares else {}
                return lie.model_copy(update={"record": _certified(lie.record, liar, **named)})
        return lie

    # -- the story ----------------------------------------------------------------------------------------------------

    async def play(self) -> None:
        """From the first hello to the progress of the honest peers without the liar."""
        crowd, honest = self.crowd, Member("a", step_s=0.5)
        liar = replace(honest, name=LIAR)
        crowd.start(liar if self.lie.first else honest)
        await self._until(lambda: all(life.ready for life in crowd.living()), 10.0, "the first peer listens")
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
        await self._until(lambda: all(life.ready for life in crowd.living()), PROGRESS_S, "all are in the swarm")
        before = {life.name: _progress(life) for life in crowd.members()}
        for name in before:
            await self._until(lambda n=name: self._moved(n, before[n]), PROGRESS_S, f"{name} makes progress")  # type: ignore[misc]
        self._look()

    def _moved(self, name: str, before: int) -> bool:
        life = self.crowd.lives[name]
        return life.leaving or _progress(life) > before

    async def _at(self, second: float) -> None:
        while self.loop.seconds < second:
            await asyncio.sleep(min(LOOKS_EVERY_S, second - self.loop.seconds))
            self._look()

    async def _until(self, condition: Callable[[], bool], patience_s: float, what: str) -> None:
        deadline = self.loop.seconds + patience_s
        while not condition():
            self._check()
            if self.loop.seconds > deadline:
                raise Violation(f"waited {patience_s:g} s until {what}, in vain: {self._states()}")
            await asyncio.sleep(0.5)

    def _states(self) -> dict[str, object]:
        nodes = {life.owner: life.node for life in self.crowd.living()}
        return {name: node and (node.protocol.state, node.protocol.versions) for name, node in nodes.items()}

    # -- what must hold -----------------------------------------------------------------------------------------------

    def _check(self) -> None:
        wrong = list(self.crowd.failures)
        wrong += [f"{life.name} {life.ended}" for life in self.crowd.ended if "a handler of" in life.ended]
        for line in self.crowd.story:
            _, name, *words = line.split()
            if name != LIAR and words[:1] == ["recorder_failed"]:
                wrong.append(line)
            if name != LIAR and words[:1] == ["penalty"] and f"'peer': '{LIAR}'" not in line:
                wrong.append(line)
        if wrong:
            raise Violation("; ".join(wrong[:3]))

    def _look(self) -> None:
        """Watchers look at every honest peer."""
        self._check()
        for life in self.crowd.members():
            if life.name == LIAR or life.node is None:
                continue
            try:
                snapshot = unpack(b"".join(life.node.context.recorder.packed(self.loop.seconds)))
            except PayloadError as error:
                self._check()  # the story may say more
                raise Violation(f"the snapshot of {life.name}: {error}") from None
            console = Console(file=StringIO(), width=100)
            console.print(render(snapshot, console))
            json.dumps(swarm_figures(snapshot), allow_nan=False)
        self._check()

    # -- questions ----------------------------------------------------------------------------------------------------

    def _on_life(self, life: Life) -> None:
        self.loop.at(self.loop.seconds, self._begin, life)  # a trainer's node is opened from the trainer's thread

    def _begin(self, life: Life) -> None:
        if not life.ended and life.node is not None:
            work = self._pester if life.name == LIAR else self._ask_liar
            with self.loop.owned_by(life.owner):
                life.node.context.tasks.spawn(work(life.node))

    async def _pester(self, node: Node) -> None:
        """The liar asks everybody for everything."""
        protocol = node.protocol
        run: dict[str, Any] = {"manifest_hash": protocol.manifest_hash}
        while True:
            await asyncio.sleep(ASKS_EVERY_S)
            fragment = self.random.randrange(len(protocol.fragments))
            requests: list[Message] = [
                StateRequest(**run, fragment=fragment),
                StateRequest(**run, fragment=fragment, have_version=max(0, protocol.versions[fragment] - 1)),
                StateRequest(**run, fragment=fragment, in_parts=True),
                PartRequest(**run, fragment=fragment, digest=protocol.digests[fragment], part=0),
                InnerRequest(**run), UnitRequest(**run, wanted=1, has=[]), ManifestRequest(), SnapshotRequest(),
                Probe(sends=0, wants=1), DialBack(addresses=[]),
            ]  # fmt: skip
            others = [member.peer for member in protocol.members.all()]
            if others:
                request = self.random.choice(requests)
                node.context.tasks.spawn(_suppressing(self._say(node, self.random.choice(others), request)))

    async def _say(self, node: Node, peer: str, request: Message) -> None:
        async with node.context.open(peer) as stream:
            await stream.send(request)
            await stream.receive(5.0)
            await asyncio.sleep(self.random.choice([0.0, 1.0]))

    async def _ask_liar(self, node: Node) -> None:
        """An honest peer, as a newcomer or a watcher would, asks the liar what it is."""
        transport, context = node.context.transport, node.context
        while True:
            await asyncio.sleep(2 * ASKS_EVERY_S)
            if LIAR not in node.protocol.members:
                continue
            asked: list[Callable[[], Awaitable[Any]]] = [
                lambda: probe(transport, LIAR, 64),
                lambda: request_manifest(transport, LIAR),
                lambda: request_snapshot(transport, LIAR),
            ]
            with suppress(*BROKEN, PayloadError):
                await context.tasks.start(_awaited(self.random.choice(asked)))


async def _awaited(ask: Callable[[], Awaitable[Any]]) -> None:
    await ask()


async def _suppressing(work: Awaitable[None]) -> None:
    with suppress(*BROKEN, PayloadError):
        await work


def _certified(record: Record, liar: Peer, **fields: Any) -> Record:
    """A certificate that is right by itself, if it is the liar's."""
    if record.head.author != liar.me:
        return record
    sign, run = liar.signer, liar.run_id
    lines = [sign_line(sign, run, record.fragment, x) if x.peer == liar.me else x for x in record.lines]
    head = record.head.model_copy(update={**fields, "lines": lines_digest(lines)})
    return record.model_copy(update={"head": sign_head(sign, run, head), "lines": lines})


def _progress(life: Life) -> int:
    return 0 if life.node is None else sum(life.node.protocol.versions)
