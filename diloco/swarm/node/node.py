"""The swarm node: one peer of a run, as its training loop uses it.

    training loop > Node > core > actions > Anchors (tensors), ControlMesh and rpc (streams)
    other peers > ControlMesh, Server > core

All of these are coroutines of one event loop, which drives the core, so nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from msgspec.structs import replace as with_fields

from diloco.core import events
from diloco.core.facts import CONTROL
from diloco.core.rules import lifecycle, pace
from diloco.errors import SwarmError
from diloco.messages.control import Answer
from diloco.messages.fields import Units
from diloco.messages.heads import Line
from diloco.messages.snapshot import Snapshot
from diloco.outer.replica import Replica
from diloco.ranges import NONE
from diloco.swarm.context import Context, OnEvent
from diloco.swarm.node.anchors import Anchors
from diloco.swarm.node.carriers import Carriers
from diloco.swarm.node.leases import LeasedData
from diloco.swarm.node.options import NodeOptions, make_context
from diloco.swarm.node.position import Position, dylu_steps, nothing
from diloco.swarm.node.recorder import PeerRecord, Recorder, record_of
from diloco.swarm.rpc import contribution
from diloco.swarm.rpc.inner_state import InnerLayout, InnerState, fetch_inner
from diloco.swarm.rpc.server import Server
from diloco.swarm.wire.streams import BULK
from diloco.swarm.wire.tasks import in_thread
from diloco.swarm.wire.transport import Transport

__all__ = ["Connect", "Node", "OnEvent"]

DISCOVERY_S = CLOSE_S = 5.0
READ_S = 10.0  # time for others to read the last messages of a leaving peer

Connect = Callable[[NodeOptions], Awaitable[Transport]]
"""Opens the transport of a node; raises `SwarmError` when nobody is there."""


class Node:
    """One peer in the swarm; `open` makes it.

    On failure: the core handles peers that vanish, and reports them as events. The error of a
    failed task of the node is raised in every coroutine that waits for the swarm, now and later.
    `interrupt` ends all waiting for others.
    """

    def __init__(self, options: NodeOptions, context: Context) -> None:
        self.context, self.core, self.replica = context, context.core, context.replica
        self.traffic, self.addresses = context.traffic, context.transport.addresses
        self.advice = context.transport.advice  # for the user, if others cannot connect
        self.leased = LeasedData()
        self.anchors = Anchors(context)
        # without `saved`, which is as large as the model and no longer needed
        self._options = replace(options, saved=None)
        self.recorder = Recorder(context.core, options.run.manifest_text)
        self.recorder.on_failure = lambda why: context.on_event("recorder_failed", {"why": why})
        self.recorder.way = lambda peer: context.transport.way(peer)
        context.watch, context.carry_out = self.recorder.note, self.carry_out
        context.packed_snapshot, context.read_part = self.recorder.packed, self.anchors.read_part
        self._carriers = Carriers(context, options.run)
        self._server = Server(context)
        self._until, self._spawn = context.tasks.until, context.tasks.spawn
        self._captures: list[Line] = []
        self._loads: dict[int, None] = {}
        self._queue: Units | None = None
        self._planned = context.core.facts.planned
        self._exited, self._interrupted_by = False, -1
        self._warm_steps: int | None = None  # inner steps of a cold peer's first cycle; else None

    @classmethod
    async def open(
        cls, options: NodeOptions, replica: Replica, on_event: OnEvent, connect: Connect
    ) -> Node:
        """Make a node that has greeted its seeds; `SwarmError` if none answers or admits it."""
        options.gate.on_refused = lambda peer, why: on_event("refused", {"peer": peer, "why": why})
        transport = await connect(options)
        try:
            node = cls(options, await make_context(options, replica, transport, on_event))
        except BaseException:
            await transport.close()
            raise
        try:
            await node._join()
        except BaseException:
            await node.close()
            raise
        return node

    async def _join(self) -> None:
        context, transport = self.context, self.context.transport
        if not transport.reachable:
            context.note("unreachable", advice=transport.advice or "swarm.reachable=no")
        await transport.handle(BULK, self._server.serve)
        answered = await self._carriers.start()
        if self._carriers.refusal is not None:
            raise SwarmError(self._carriers.refusal)
        if transport.seeds and not answered:
            given = f"swarm.initial_peers={list(self._options.network.initial_peers)}"
            run = self._options.run.id
            raise SwarmError(f"{given} answer, but no diloco peer of run.id={run} is there")
        for work in (transport.failed(), self._tick(), self._discover()):
            context.tasks.spawn(work)

    async def _discover(self) -> None:
        """Wait until this newcomer has met every peer that it can reach."""
        carriers, transport = self._carriers, self.context.transport
        members = self.core.facts.members
        if transport.store is not None:
            while not carriers.all_greeted():
                await asyncio.sleep(self._options.network.heartbeat_s)
        elif transport.seeds:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DISCOVERY_S):
                    await self._until(lambda: carriers.all_greeted() and len(members) > 0)
        self.context.do(events.Discovered())

    async def _tick(self) -> None:
        while True:
            self.context.tell_moved()
            self.context.do(events.Tick())
            self.anchors.follow()
            self.recorder.sample(self.context.now())
            self._carriers.expel()
            await asyncio.sleep(self._options.network.heartbeat_s)

    async def close(self) -> None:
        """End all tasks, streams and the transport; report threads that still work as an event."""
        context = self.context
        self.anchors.end_snapshot()
        late = await context.tasks.close(CLOSE_S)
        if late:
            context.note("closed_late", waited_s=CLOSE_S, tasks=late)
        await self._carriers.close()
        await context.transport.close()

    def carry_out(self, actions: Sequence[events.Action]) -> None:
        """Carry out actions of the core; those of the training loop wait for its `exchange`."""
        for action in actions:
            match action:
                case events.Capture(line):
                    self._captures.append(line)
                case events.Load(fragment):
                    self._loads[fragment] = None
                case events.SendPayload():
                    self._spawn(self._carriers.of(action.peer).send(action))
                case events.AskDonor(peer, get):
                    self._spawn(self._carriers.of(peer).fetch(peer, get))
                case events.Merge():
                    self._spawn(self.anchors.merge(action))
                case events.Apply():
                    self._spawn(self.anchors.apply(action))
                case events.Replace():
                    self._spawn(self.anchors.replace(action))
                case _:
                    self._carry_out(action)
        planned, queue = self.core.facts.planned, self.core.facts.data.queue
        if planned != self._planned:
            self._planned = planned
            self.replica.plan(planned[-1] or None)
        if queue is not self._queue:
            self._queue = queue
            self.leased.set_queue(queue)

    def _carry_out(self, action: events.Action) -> None:
        match action:
            case events.Broadcast(message):
                self._carriers.broadcast(message)
            case events.Send(peer, Answer(says="want") as answer):
                at = contribution.received(self.context, answer)
                self._carriers.of(peer).tell(peer, with_fields(answer, at=at))
            case events.Send(peer, message):
                self._carriers.of(peer).tell(peer, message)
            case events.Disconnect(peer):
                self._carriers.disconnect(peer)
            case events.Note(kind, fields):
                self.context.note(kind, **fields)
            case events.Wake(at):
                asyncio.get_running_loop().call_later(at - self.context.now(), self._wake)
            case events.Exit():
                self._exited = True

    def _wake(self) -> None:
        if not self.context.tasks.closed:
            self.context.do(events.Tick())

    # -- calls of the training loop ----------------------------------------------------------------

    async def wait_until_ready(self) -> bool:
        """Wait until this peer has the others' state; return True if the run has outer steps.

        False if `interrupt` came first. Raises `SwarmError` if the swarm refuses this peer. Single
        peers refuse it while they leave, or as a penalty, so a refusal counts only if no other peer
        admits it.
        """
        facts, carriers = self.core.facts, self._carriers

        def refused() -> str | None:
            return None if len(facts.members) else carriers.refusal

        await self._until(lambda: refused() is not None or self._interrupted or facts.life.ready)
        if (reason := refused()) is not None:
            raise SwarmError(reason)
        return not self._interrupted and self._fewest_steps() > 0

    async def fetch_inner(self, layout: InnerLayout) -> InnerState | None:
        """Fetch a donor's inner optimizer state; None if no peer has any, or after `interrupt`."""
        work = fetch_inner(self.context, layout, self.replica.rng)
        fetching = self.context.tasks.start(work)
        await self._until(lambda: fetching.done() or self._interrupted)
        if fetching.done():
            return fetching.result()
        fetching.cancel()
        return None

    async def begin(self, cold: bool = False, steps_per_s: float = 0.0) -> Position:
        """Wait until this peer has the others' state, load the anchors, and join the rounds.

        A `cold` peer only loads the anchors, and joins after its first cycle: until then it trains
        beside the swarm, which does not wait for it.
        """
        await self.wait_until_ready()
        if self._interrupted:
            return Position(self._interrupted_by)
        self.plan_cycle(self.replica.settings.sync_every)
        await self.load_anchors()
        self._warm_steps = 0 if cold else None
        if cold:
            return self._position()
        self.context.do(events.Begun())
        return await self.exchange(steps_per_s)

    async def after_step(
        self, tokens: int, steps_per_s: float = 0.0, prepare: Callable[[], None] = nothing
    ) -> Position:
        """Count an inner step of so many tokens; exchange if one is due.

        Before an exchange, `prepare` runs in a thread. Raises `DivergedError` before non-finite
        values are sent.
        """
        units = self.leased.trained() if self.leased.wanted else NONE
        self.context.do(events.Stepped(tokens, units, steps_per_s))
        if self._warm_steps is None:
            return await self.exchange(steps_per_s, prepare)
        self._warm_steps += 1
        if self._warm_steps < self.core.facts.loop.cycle:
            return self._position()
        await in_thread(prepare)
        return (await self.begin(steps_per_s=steps_per_s))._replace(exchanged=1)

    async def exchange(
        self, steps_per_s: float = 0.0, prepare: Callable[[], None] = nothing
    ) -> Position:
        """Send and load what is due until the next inner step may start; see `Position`."""
        if self._interrupted or (self.core.runs and not self._is_due()):
            return self._position()
        await in_thread(prepare)
        wait_s = outer_s = 0.0
        while not self._interrupted:
            begun_at = self.context.now()
            if self._is_due():
                while self._captures:
                    await self.anchors.capture(self._captures.pop(0))
                while self._loads:
                    fragment = next(iter(self._loads))
                    del self._loads[fragment]
                    await self.anchors.load(fragment)
                outer_s += self.context.now() - begun_at
            elif self.core.runs:
                break
            else:
                await self._until(lambda: self._interrupted or self._is_due() or self.core.runs)
                wait_s += self.context.now() - begun_at
        if (settings := self.replica.settings).dylu:
            fastest = self.core.fastest_steps_per_s(steps_per_s)
            self.plan_cycle(dylu_steps(steps_per_s, fastest, settings.sync_every))
        return self._position()._replace(exchanged=1, wait_s=wait_s, outer_s=outer_s)

    def _is_due(self) -> bool:
        return bool(self._captures or self._loads)

    def _position(self) -> Position:
        return Position(self._interrupted_by) if self._interrupted else self._here()

    def _here(self) -> Position:
        return Position(-1, *self.clock(), self.core.discarded(), *self.place())

    @property
    def _interrupted(self) -> bool:
        return self._interrupted_by >= 0

    def place(self) -> tuple[int, int, int]:
        """Inner steps since the outer step that training started from, inner steps per cycle, and
        tokens in no contribution yet.
        """
        facts, loop = self.core.facts, self.core.facts.loop
        if self._warm_steps is not None:
            return self._warm_steps, loop.cycle, facts.control.learned.tokens
        overlaps = loop.position <= facts.settings.overlap
        overdue = facts.fragments[-1].learned.steps_left is not None and overlaps
        inner_step = loop.position + (loop.cycle if overdue else 0)
        return inner_step, loop.cycle, facts.control.learned.tokens

    def clock(self) -> tuple[int, int]:
        """Fewest outer steps of all fragments, and applied tokens: of the loaded anchors with a
        barrier and in a cold peer's first cycle, else of the newest anchors here.
        """
        if self.replica.settings.barrier or self._warm_steps is not None:
            loaded = self.anchors.loaded
            return min(number for number, _ in loaded), loaded[CONTROL][1]
        return self._fewest_steps(), self.core.facts.control.tip.head.work

    def _fewest_steps(self) -> int:
        return min(f.tip.head.number for f in self.core.facts.fragments)

    async def pause(self) -> None:
        """Tell others that no inner steps come until `resume`, as training evaluates or saves."""
        self.context.do(events.Paused())

    async def resume(
        self,
        exchanges: bool = False,
        steps_per_s: float = 0.0,
        prepare: Callable[[], None] = nothing,
    ) -> Position:
        """Continue training. The tensors of the last `Anchors.snapshot` may move again.

        With `exchanges`, first catch up with the swarm.
        """
        self.anchors.end_snapshot()
        self.context.do(events.Paused(False))
        exchanges = exchanges and self._warm_steps is None
        return await self.exchange(steps_per_s, prepare) if exchanges else self._position()

    def plan_cycle(self, steps: int) -> None:
        """Set the inner steps of the next cycles (DyLU)."""
        self.context.do(events.Wanted(self.leased.wanted, steps))

    def interrupt(self, number: int = 0) -> None:
        """End the waits of the coroutines above, now and later, because of that signal."""
        self._interrupted_by = number
        self.context.tasks.notify()

    def end_alone_after(self, seconds: float) -> None:
        """Begin alone if no peer that this one knew has come after so many seconds."""
        asyncio.get_running_loop().call_later(seconds, self.context.do, events.Alone())

    def record(self) -> PeerRecord:
        """Return the state of this peer's part of the swarm."""
        return record_of(self.core, self.addresses)

    def observe(self) -> Snapshot | None:
        """Return a snapshot of the swarm; None when it cannot be put together."""
        return self.recorder.snapshot(self.context.now())

    async def finish(self) -> None:
        """Wait until this peer's contributions are in a version, for four rounds at most."""
        facts, is_open = self.core.facts, self.core.is_open
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(pace.patience_s(facts, f) for f in facts.fragments)):
                await self._until(
                    lambda: self._interrupted or not any(map(is_open, facts.fragments))
                )

    async def load_anchors(self) -> Position:
        """Load the anchors into the local parameters."""
        for fragment in range(len(self.replica.fragments)):
            self._loads.pop(fragment, None)
            await self.anchors.load(fragment)
        return self._here()

    async def leave(self, finished: bool) -> None:
        """Send what was learned, unless `finished`; wait until others have it, and the heads."""
        self.anchors.end_snapshot()
        self.context.do(events.Leave(finished))
        latest = lifecycle.latest_exit(self.core.facts) + CLOSE_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(latest - self.context.now()):
                while not self._exited:
                    while self._captures:
                        await self.anchors.capture(self._captures.pop(0))
                    await self._until(lambda: self._exited or bool(self._captures))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READ_S):
                await self._until(lambda: self._server.serving == 0)
