"""The swarm node: one peer of a run, and what its training loop asks of it.

    training loop > Node > core > actions > Anchors (tensors), ControlMesh and rpc (streams)
    other peers > ControlMesh, Server > core

All of these are coroutines of one event loop, which drives the core, so nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec.structs import replace as changed

from diloco.core.events import (
    Action,
    Apply,
    Ask,
    Asked,
    Broadcast,
    Broke,
    Capture,
    Delivered,
    Disconnect,
    Discovered,
    Exit,
    Leave,
    Load,
    Merge,
    Note,
    Paused,
    Push,
    Replace,
    Send,
    Stepped,
    Tick,
    Wake,
    Wanted,
)
from diloco.core.units import NONE
from diloco.errors import PayloadError, SwarmError
from diloco.messages.base import Message
from diloco.messages.bulk import Get
from diloco.messages.bulk import Push as PushRequest
from diloco.messages.control import Answer
from diloco.messages.fields import Units
from diloco.messages.heads import Line
from diloco.outer.replica import Replica
from diloco.swarm.conversations.tasks import in_thread
from diloco.swarm.newnode.anchors import Anchors
from diloco.swarm.newnode.context import Context, OnEvent
from diloco.swarm.newnode.leases import LeasedData
from diloco.swarm.newnode.mesh import ControlMesh
from diloco.swarm.newnode.options import NodeOptions, make_context
from diloco.swarm.newnode.saved import Saved
from diloco.swarm.rpc import contribution, state
from diloco.swarm.rpc.server import Server
from diloco.swarm.wire.streams import BROKEN, BULK, Stream
from diloco.swarm.wire.transport import Transport

__all__ = ["Connect", "Exchanged", "Node", "OnEvent"]

DISCOVERY_S = 5.0
CLOSE_S = 5.0
READ_S = 10.0  # in which others read what this peer still sends when it leaves

Connect = Callable[[NodeOptions], Awaitable[Transport]]
"""Opens the transport of a node; raises `SwarmError` when nobody is there."""


@dataclass(frozen=True)
class Exchanged:
    """Where the model is after an exchange, and where the time went (seconds).

    `version` are the fewest outer steps of all fragments, `applied_tokens` the swarm clock at the anchors here,
    `discarded_tokens` this peer's own that are not in them and never will be.
    """

    version: int
    applied_tokens: int
    discarded_tokens: int
    wait_s: float
    outer_s: float


class Node:
    """One peer in the swarm; `open` makes it.

    On failure: peers that vanish are dealt with by the core and become events. A task of the node that fails re-raises
    in every coroutine that waits for the swarm, now and later. `interrupt` ends all waiting for others.
    """

    def __init__(self, options: NodeOptions, context: Context) -> None:
        """Compose a node out of its parts; `open` connects it."""
        self.context, self.core, self.replica = context, context.core, context.replica
        self.traffic, self.addresses = context.traffic, context.transport.addresses
        self.advice = context.transport.advice  # what would let others connect to this peer, where they cannot
        self.leased = LeasedData()
        self.anchors = Anchors(context)
        self._options = replace(options, saved=None)  # it may be as large as the model, and mapped from a file
        self._mesh = ControlMesh(context, options.run)
        self._server = Server(context, len(context.replica.fragments), self._answers())
        self._captures: list[Line] = []
        self._loads: list[int] = []
        self._queue: Units | None = None
        self._exited = self._interrupted = False
        context.carry_out = self.carry_out

    # -- opening and closing ------------------------------------------------------------------------------------------

    @classmethod
    async def open(cls, options: NodeOptions, replica: Replica, on_event: OnEvent, connect: Connect) -> Node:
        """A node that listens, is connected, and has said hello to its seeds. A failure leaves nothing open.

        Raises `SwarmError` when the swarm cannot be reached or refuses this peer.
        """
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
        answered = await self._mesh.start()
        if self._mesh.refusal is not None:
            raise SwarmError(self._mesh.refusal)
        if transport.seeds and not answered:
            raise SwarmError(
                f"swarm.initial_peers={list(self._options.network.initial_peers)} answer, but no diloco peer of "
                f"run.id={self._options.run.id} is there"
            )
        context.tasks.spawn(transport.failed())
        context.tasks.spawn(self._tick())
        context.tasks.spawn(self._discover())

    async def _discover(self) -> None:
        """A newcomer hears every peer that it can reach before it begins."""
        if self.context.transport.seeds:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DISCOVERY_S):
                    members = self.core.facts.members
                    await self.context.tasks.until(lambda: self._mesh.all_greeted() and len(members) > 0)
        self.context.do(Discovered())

    async def _tick(self) -> None:
        while True:
            self.context.do(Tick())
            self.anchors.follow()
            self.expel()
            await asyncio.sleep(self._options.network.heartbeat_s)

    def expel(self) -> None:
        """Drop the peers that are no longer admitted; fail when this peer is not."""
        self._mesh.expel()

    async def close(self) -> None:
        """End every task and every stream, and the transport. Threads that still work are named in an event."""
        context = self.context
        self.anchors.end_snapshot()
        late = await context.tasks.close(CLOSE_S)
        if late:
            context.note("closed_late", waited_s=CLOSE_S, tasks=late)
        await self._mesh.close()
        await context.transport.close()

    # -- what the core asks for ---------------------------------------------------------------------------------------

    def carry_out(self, actions: Sequence[Action]) -> None:
        """Do what the core asked for."""
        for action in actions:
            self._carry_out(action)
        queue = self.core.facts.queue
        if queue is not self._queue:
            self._queue = queue
            self.leased.have(queue)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Broadcast() | Send() | Disconnect():
                self._say(action)
            case Push() | Ask() | Merge() | Apply() | Replace():
                self.context.tasks.spawn(self._work(action))
            case Note(kind, fields):
                self.context.note(kind, **fields)
            case Wake(at):
                asyncio.get_running_loop().call_at(at, self._wake)
            case Capture(line):
                self._captures.append(line)
            case Load(fragment):
                self._loads.append(fragment)
            case Exit():
                self._exited = True

    def _say(self, action: Broadcast | Send | Disconnect) -> None:
        match action:
            case Broadcast(message):
                self._mesh.broadcast(message)
            case Send(peer, Answer(says="want") as answer):
                at = self.context.received.at(answer.fragment, answer.peer, answer.stamp)
                self._mesh.tell(peer, changed(answer, at=at))
            case Send(peer, message):
                self._mesh.tell(peer, message)
            case Disconnect(peer):
                self._mesh.disconnect(peer)

    async def _work(self, action: Push | Ask | Merge | Apply | Replace) -> None:
        match action:
            case Push():
                await self._push(action)
            case Ask(peer, get):
                await self._ask(peer, get)
            case Merge():
                await self.anchors.merge(action)
            case Apply():
                await self.anchors.apply(action)
            case Replace():
                await self.anchors.replace(action)

    def _wake(self) -> None:
        if not self.context.tasks.closed:
            self.context.do(Tick())

    async def _push(self, action: Push) -> None:
        try:
            async with self.context.open(action.peer) as stream:
                await contribution.send(stream, action)
        except (*BROKEN, PayloadError) as error:
            why = str(error) or type(error).__name__
            self.context.note("contribution_broke", fragment=action.line.fragment, author=action.peer, why=why)
            self.context.do(Broke(action.peer, action.line))

    async def _ask(self, peer: str, get: Get) -> None:
        fetch = self.core.facts.fragments[get.fragment].fetch
        goal = fetch.goal if fetch else None

        async def answer() -> Any:
            async with self.context.open(peer) as stream:
                return await state.ask(stream, get, self.replica, goal, in_thread)

        self.context.do(await state.asked(peer, get, answer(), self.context.note))

    # -- what others may ask ------------------------------------------------------------------------------------------

    def _answers(self) -> dict[type[Message], Callable[[Stream, Any], Awaitable[None]]]:
        return {Get: self._give, PushRequest: self._receive}

    async def _give(self, stream: Stream, get: Get) -> None:
        if get.fragment >= len(self.replica.fragments):
            raise PayloadError(f"fragment {get.fragment} does not exist")
        await state.serve(stream, self.context.ask(Asked(stream.peer, get)), self.replica, self.anchors)

    async def _receive(self, stream: Stream, push: PushRequest) -> None:
        if not self.core.wants(push.line):
            raise PayloadError(f"no contribution of {push.line.peer} to fragment {push.line.fragment} is wanted")
        payload = await contribution.receive(stream, push, self.replica, self.context.received, in_thread)
        self.context.do(Delivered(stream.peer, push.line, payload))

    # -- training -----------------------------------------------------------------------------------------------------

    async def begin(self, cycle: int = 0) -> bool:
        """Wait until this peer has what the others have, with the parameters at the anchors; False if `interrupt` came
        first. Raises `SwarmError` when the swarm refuses this peer.
        """
        self.context.do(Wanted(self.leased.wanted, cycle))

        def refused() -> str | None:
            return None if len(self.core.facts.members) else self._mesh.refusal

        await self.context.tasks.until(lambda: refused() is not None or self._interrupted or self.core.facts.ready)
        if (reason := refused()) is not None:
            raise SwarmError(reason)
        if self._interrupted:
            return False
        for fragment in range(len(self.replica.fragments)):
            await self.anchors.load(fragment)
        self._loads.clear()
        return await self.exchange() is not None

    async def stepped(self, tokens: int, steps_per_s: float = 0.0) -> bool:
        """The training loop made an inner step of so many tokens; whether an `exchange` has to come before the next."""
        units = self.leased.trained() if self.leased.wanted else NONE
        self.context.do(Stepped(tokens, units, steps_per_s))
        return bool(self._captures or self._loads) or not self.core.runs

    async def exchange(self) -> Exchanged | None:
        """Send what is due and load what is new, until the next inner step may be made; None if `interrupt` came
        first. Raises `DivergedError` before anything is sent that is not finite.
        """
        tasks, wait_s, outer_s = self.context.tasks, 0.0, 0.0
        while not self._interrupted:
            begun_at = self.context.now()
            if self._captures or self._loads:
                while self._captures:
                    await self.anchors.capture(self._captures.pop(0))
                while self._loads:
                    await self.anchors.load(self._loads.pop(0))
                outer_s += self.context.now() - begun_at
            elif self.core.runs:
                return Exchanged(*self.clock(), self.core.discarded(), wait_s, outer_s)
            else:
                await tasks.until(lambda: bool(self._interrupted or self._captures or self._loads or self.core.runs))
                wait_s += self.context.now() - begun_at
        return None

    def clock(self) -> tuple[int, int]:
        """Fewest outer steps of all fragments, and applied tokens, at the anchors here."""
        return min(f.tip.head.number for f in self.core.facts.fragments), self.core.facts.control.tip.head.work

    async def pause(self) -> None:
        """The training loop takes no inner steps until the next one: it evaluates, or it saves."""
        self.context.do(Paused())

    def plan_cycle(self, steps: int) -> None:
        """The next cycles have so many inner steps (DyLU)."""
        self.context.do(Wanted(self.leased.wanted, steps))

    async def snapshot(self, copies: bool) -> Saved:
        """What a checkpoint holds; without `copies` the tensors are the live ones until `end_snapshot`."""
        return await self.anchors.snapshot(copies)

    def interrupt(self) -> None:
        """End the waiting of the coroutines above, now and later."""
        self._interrupted = True
        self.context.tasks.notify()

    async def leave(self, finished: bool) -> None:
        """Send what was learned, unless the run is over, and wait until others have that and this peer's heads."""
        self.anchors.end_snapshot()
        self.context.do(Leave(finished))
        until = self.core.facts.leave_by + CLOSE_S
        while not self._exited and self.context.now() < until:
            while self._captures:
                await self.anchors.capture(self._captures.pop(0))
            await self.context.tasks.pause(1.0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READ_S):
                await self.context.tasks.until(lambda: self._server.serving == 0)
