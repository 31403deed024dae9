"""The swarm node: one peer of a run, and what its training loop asks of it.

    training loop > Node > Rounds (contributes) > conversations > wire
    other peers > ControlMesh, BulkServer > protocol core > Actions > Merging (makes versions), Anchors (adopts them)

All of these are coroutines of one event loop, which drives the protocol core, so nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from diloco.errors import SwarmError
from diloco.outer.replica import Replica
from diloco.protocol.membership import STALL_FACTOR
from diloco.protocol.patience import PAUSE_LIMIT_S
from diloco.protocol.snapshot import Snapshot
from diloco.protocol.states import State
from diloco.swarm.conversations.answer import BulkServer
from diloco.swarm.conversations.context import Context, OnEvent
from diloco.swarm.conversations.inner_state import InnerState, Layout, fetch_inner
from diloco.swarm.conversations.units import LeasedData, UnitSupply
from diloco.swarm.node.actions import Actions
from diloco.swarm.node.anchors import Anchors
from diloco.swarm.node.merging import Merging
from diloco.swarm.node.mesh import ControlMesh
from diloco.swarm.node.options import NodeOptions, make_context
from diloco.swarm.node.own_tokens import OwnTokens
from diloco.swarm.node.rounds import Count, Exchanged, Rounds, Seconds
from diloco.swarm.node.saved import Saved
from diloco.swarm.wire.streams import BULK
from diloco.swarm.wire.transport import Transport

__all__ = ["Connect", "Exchanged", "Node", "OnEvent"]

DISCOVERY_S = 20.0
LEAVE_FLOOR_S = 10.0
UNMEASURED_S = 20.0  # stands for the longest exchange of a peer that has ended none
FIRST_UNITS_S = 2.0
CLOSE_S = 5.0
PAUSE_FLOOR_S = 10.0  # well below the time after which a peer without progress counts as stalled

Connect = Callable[[NodeOptions], Awaitable[Transport]]
"""Opens the transport of a node; raises `SwarmError` when nobody is there."""


class Node:
    """One peer in the swarm; `open` makes it.

    On failure: peers that vanish are dealt with by the protocol and become events. A task of the node that fails
    re-raises in every coroutine that waits for the swarm, now and later. `interrupt` ends all waiting for others.
    """

    def __init__(self, options: NodeOptions, context: Context) -> None:
        """Compose a node out of its parts; `open` connects it."""
        saved = options.saved
        self.context = context
        self.protocol, self.replica, self.traffic = context.protocol, context.replica, context.traffic
        self.addresses = context.transport.addresses
        self.advice = context.transport.advice  # what would let others connect to this peer, where they cannot
        self._options = replace(options, saved=None)  # it may be as large as the model, and mapped from a file
        self._units = UnitSupply(context)
        self._server = BulkServer(context, options.inner_state)
        self._mesh = ControlMesh(context, options.run)
        self._anchors = Anchors(context, OwnTokens(saved.applied if saved else None))
        merging = Merging(context, self._anchors)
        self._actions = Actions(context, self._mesh, self._anchors, merging, self._server)
        self.rounds = Rounds(context, self._anchors, self._units)
        self._interrupted = False
        self._paused_at = math.inf

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
        context.tasks.spawn(self._heartbeat())
        if transport.seeds:
            context.tasks.spawn(self._discover())

    async def close(self) -> None:
        """End every task and every stream, and the transport. Threads that still work are named in an event."""
        context = self.context
        self._anchors.end_snapshot()
        late = await context.tasks.close(CLOSE_S)
        if late:
            context.note("closed_late", waited_s=CLOSE_S, tasks=late)
        await self._mesh.close()
        await context.transport.close()

    # -- what it does by itself ---------------------------------------------------------------------------------------

    async def _discover(self) -> None:
        """A newcomer hears every peer that it can reach before it takes any fragment for vacant."""
        await self._until_or(
            lambda: self._mesh.all_greeted() and len(self.protocol.members) > 0, DISCOVERY_S, "hellos of the swarm"
        )
        self.context.do(self.protocol.discovered(self.context.now()))

    async def _heartbeat(self) -> None:
        context, protocol = self.context, self.protocol
        while True:
            if context.now() - self._paused_at >= PAUSE_FLOOR_S:
                # A slow pace: from it syncers derive when they take this peer for stalled.
                self._paused_at, said = math.inf, protocol.status()
                protocol.progress(said.inner_step, said.target_steps, STALL_FACTOR / PAUSE_LIMIT_S, said.tokens)
            context.do(protocol.heartbeat(context.now(), (self.traffic.bytes_sent, self.traffic.bytes_received)))
            self._stand_by()
            self._units.refill()
            self._actions.expel()
            await asyncio.sleep(self._options.network.heartbeat_s)

    async def _until_or(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self.context.tasks.until(condition)
        except TimeoutError:
            peers = [member.name for member in self.protocol.members.all()]
            self.context.note("gave_up_waiting", what=what, timeout_s=round(timeout_s, 1), peers=peers)

    # -- what others may ask ------------------------------------------------------------------------------------------

    @property
    def leased(self) -> LeasedData:
        """The data that is leased to this peer; its methods may be called from the training loop's thread."""
        return self._units.data

    async def observe(self) -> Snapshot | None:
        """What this peer knows of the swarm; None when a bug prevents to put it together (`recorder_failed`)."""
        return self.context.recorder.snapshot(self.context.now())

    async def enter(self, state: State) -> None:
        """Tell the swarm what this peer is doing. The tensors of the last `snapshot` may move again."""
        self._paused_at = math.inf
        self._anchors.end_snapshot()
        self.context.do(self.protocol.enter(state, self.context.now()))

    def interrupt(self) -> None:
        """End the waiting of the coroutines below, now and later."""
        self._interrupted = True
        self.context.tasks.notify()

    # -- beginning ----------------------------------------------------------------------------------------------------

    async def joins_late(self) -> bool:
        """Wait until this peer agrees with the swarm; whether outer steps were taken before.

        False when `interrupt` came first. Raises `SwarmError` when the swarm refuses this peer: a peer that is leaving
        refuses, too, or one that penalises it for a while, so the word of one counts where no other lets it in.
        """

        def refused() -> str | None:
            return None if self.protocol.members.all() else self._mesh.refusal

        await self.context.tasks.until(lambda: refused() is not None or self._interrupted or self.protocol.may_train())
        if (reason := refused()) is not None:
            raise SwarmError(reason)
        return not self._interrupted and self.protocol.swarm_clock()[0] > 0

    async def fetch_inner(self, layout: Layout) -> InnerState | None:
        """The inner optimizer's state of a peer that trains; None when nobody has any, or `interrupt` came first.

        Nobody waits for this peer meanwhile: it is `starting` again, and follows the others' versions.
        """
        self.protocol.warming = True
        try:
            await self.enter("starting")
            return await self.context.tasks.unless(lambda: self._interrupted, fetch_inner(self.context, layout))
        finally:
            self.protocol.warming = False

    async def begin(self, cold: bool = False) -> int | None:
        """Wait until this peer agrees with the swarm, then enter `training`.

        Returns where in its cycle it begins; None when `interrupt` came first. The local parameters are the anchors'
        afterwards. A `cold` peer trains beside the swarm, which waits for nothing from it, until `end_warmup`.
        """
        await self.joins_late()
        if self._interrupted:
            return None
        self._units.refill()  # without an answer in time, training begins with data of its own order
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_UNITS_S):
                await self.context.tasks.until(lambda: self._interrupted or not self._units.asking)
        position = 0 if cold else self.protocol.first_position(self.context.now())
        self.protocol.warming = cold
        await self.enter("starting" if cold else "training")
        await self._anchors.load()
        return position

    async def end_warmup(self, tokens: int) -> Exchanged | None:
        """The first round of a cold peer, of so many tokens, is over and left out. It begins anew with the others.

        Returns None when `interrupt` came first.
        """
        begun_at, base_version = self.context.now(), self._version
        self.protocol.warming = False
        await self.enter("starting")
        position = await self.begin()
        if position is None:
            return None
        self.context.note("discarded", tokens=tokens, base_version=base_version)
        return self._exchanged(tokens, Seconds(wait=self.context.now() - begun_at), position)

    # -- exchanging ---------------------------------------------------------------------------------------------------

    async def send(self, counts: Mapping[int, Count]) -> None:
        """Begin to exchange fragments, given the inner steps and tokens of each since it was sent last."""
        if self.protocol.lockstep:
            await self.enter("exchanging")
        await self.rounds.send(counts)
        self._units.refill()

    async def receive(self, fragments: Sequence[int]) -> Exchanged | None:
        """Wait for the updates of these fragments, and load them into the parameters; `send` came before.

        A peer that came too late for its round gets in step with the others first. Returns None when `interrupt` ended
        it; nothing is under way then.
        """
        begun_at = self.context.now()
        if not self.rounds.arrived(fragments):
            await self.enter("exchanging")
            await self.context.tasks.until(lambda: self._interrupted or self.rounds.arrived(fragments))
        waited_s, position = self.context.now() - begun_at, 0
        if self.protocol.lockstep and not self._interrupted and self.rounds.out_of_step():
            position = await self._get_in_step()
        if self._interrupted:
            await self.rounds.cancel()
            return None
        discarded, seconds = self.rounds.take(fragments)
        await self.rounds.catch_up(self.rounds.left_out)
        if not self.protocol.lockstep and self.rounds.out_of_step():
            await self.rounds.cancel()
            position = max(1, await self._get_in_step())
        loading_since = self.context.now()
        in_step_s = loading_since - begun_at - waited_s
        await self._anchors.load(fragments if position == 0 else None, self.replica.settings.mixing)
        # Only what the training loop waited for counts as its time; with overlap that is less than the exchange took.
        comm_s = min(seconds.comm, waited_s)
        spent = Seconds(comm_s, waited_s - comm_s + in_step_s, self.context.now() - loading_since)
        return self._exchanged(discarded, spent, position)

    async def _get_in_step(self) -> int:
        """Begin a round anew with the others, at a barrier from their anchors; returns at which inner step they are."""
        self.context.note("out_of_step", versions=list(self.protocol.versions))
        if self.protocol.lockstep:
            await self.enter("starting")
            await self.context.tasks.until(lambda: self._interrupted or self.protocol.may_train())
        self.rounds.in_step()
        return self.protocol.first_position(self.context.now())

    @property
    def outrun(self) -> list[int]:
        """Fragments of which the others made a version without this peer, and that it is not exchanging now.

        Where all exchange at one barrier, or a quorum is enough, an exchange finds it out.
        """
        outer, protocol, flying = self.replica.settings, self.protocol, self.rounds.flying
        if not outer.barrier or outer.lockstep:
            return []
        rest = [(one, base) for one, (base, _) in enumerate(self._anchors.loaded) if one not in flying]
        return [one for one, base in rest if protocol.versions[one] > base or protocol.behind(one)]

    async def follow(self, fragments: Sequence[int], tokens: int) -> Exchanged:
        """Go on from the newest anchors of these fragments; of what was learned, so many tokens are discarded."""
        begun_at, base_version = self.context.now(), self._version
        if tokens:
            self.context.note("discarded", tokens=tokens, base_version=base_version)
        await self.rounds.catch_up(fragments)
        await self._anchors.load(fragments)
        return self._exchanged(tokens, Seconds(outer=self.context.now() - begun_at))

    @property
    def _version(self) -> int:
        """The lowest version that the local parameters started from."""
        return min(version for version, _ in self._anchors.loaded)

    def _exchanged(self, discarded: int, seconds: Seconds, position: int = 0) -> Exchanged:
        barrier = self.replica.settings.barrier  # without one the others went on while this peer exchanged
        clock = (self._anchors.steps, self.protocol.applied_tokens) if barrier else self.protocol.swarm_clock()
        return Exchanged(*clock, discarded, seconds, position)

    # -- between two rounds -------------------------------------------------------------------------------------------

    def _stand_by(self) -> None:
        """Be backup of what would come to this peer now, and of nothing else.

        Where versions do not wait for this peer, it fetches them as they are published: an update that it misses would
        be missing from the momentum. Its anchor then moves while it trains.
        """
        protocol, replica = self.protocol, self.replica
        if protocol.state == "starting":
            return  # a newcomer's link is busy with what it needs to begin
        inherits = {fragment for fragment, heir in protocol.heirs().items() if heir == protocol.me}
        replica.follow(inherits)
        keeps_up = protocol.trains and replica.settings.staleness_limit > 0
        protocol.followed = inherits & set(replica.states) if keeps_up else set()

    async def pause(self) -> None:
        """The training loop takes no inner steps until the next `enter`: it evaluates, or it saves."""
        self._paused_at = self.context.now()

    @property
    def left_behind(self) -> bool:
        """Whether, at a barrier, the others have gone on from anchors that are newer than the local parameters."""
        newer = map(self.protocol.behind, range(len(self.replica.fragments)))
        return self.protocol.lockstep and (any(newer) or self._version < min(self.protocol.versions))

    async def show_anchors(self) -> None:
        """The parameters become the anchors for a while, of which the protocol takes no notice."""
        await self._anchors.show()

    async def snapshot(self) -> Saved:
        """What a checkpoint holds.

        At a barrier the tensors are the live ones, and nobody changes them until the next `enter`, `leave` or `close`:
        write them before. Otherwise they are copies.
        """
        return await self._anchors.snapshot(copies=not self.protocol.lockstep or self.protocol.warming)

    # -- leaving ------------------------------------------------------------------------------------------------------

    async def load_anchors(self) -> int:
        """At the very end, the local parameters become the anchors; returns how many outer steps led to them."""
        await self._anchors.load()
        return self._anchors.steps

    async def leave(self, finished: bool) -> None:
        """Say goodbye: hand fragments over, or, at the end of the run, let everybody have the last update first."""

        def handed_over() -> bool:
            able = (m.holds and not m.status.gone for m in self.protocol.members.all())
            return not any(able) or not self.protocol.leases.held_by(self.protocol.me)

        def made() -> bool:
            return not any(map(self.protocol.merging, range(len(self.replica.fragments))))

        await self.rounds.cancel()
        self.leased.expect(0)
        if not finished:
            self.protocol.retired = True  # heirs claim as soon as they hear that this peer leaves
            self._anchors.end_snapshot()  # a version that is being made waits for it
            await self._until_or(made, LEAVE_FLOOR_S, "the last versions of its fragments")
        await self.enter("done" if finished else "leaving")
        patience_s = LEAVE_FLOOR_S + 3 * (self.rounds.longest_exchange_s or UNMEASURED_S)
        if finished:
            await self._until_or(self.protocol.ended_as_one, patience_s, "the others to finish")
        else:
            await self._until_or(handed_over, patience_s, "fragments to be taken over")
        await self._until_or(lambda: self._server.serving == 0, LEAVE_FLOOR_S, "peers to read the last update")
