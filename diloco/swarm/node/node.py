"""The swarm node: what a training loop asks of its presence in the swarm.

All of it are coroutines of one event loop. `runtime.NodeThread` has a thread with such a loop beside the training loop;
a simulator can have many nodes in one loop of virtual time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from diloco.errors import SwarmError
from diloco.swarm.conversations.bulk import Seconds
from diloco.swarm.conversations.inner_state import InnerState, Layout, fetch_inner
from diloco.swarm.node.presence import Connect, OnEvent, Presence
from diloco.swarm.node.rounds import Count, Exchanged
from diloco.swarm.node.saved import Saved
from diloco.swarm.wire.deadline import within

__all__ = ["Connect", "Exchanged", "Node", "OnEvent"]

logger = logging.getLogger(__name__)

LEAVE_FLOOR_S = 10.0
FIRST_UNITS_S = 2.0


class Node(Presence):
    """One peer in the swarm. On failure as `Presence`; whatever waits for others ends with `interrupt`."""

    async def joins_late(self) -> bool:
        """Wait until this peer agrees with the swarm; whether outer steps were taken before. False when `interrupt`
        came first.
        """

        def refused_or_may_train() -> bool:
            return self._refusal is not None or self._interrupted or self.protocol.may_train()

        await self.until(refused_or_may_train)
        if self._refusal is not None:
            raise SwarmError(self._refusal)
        return not self._interrupted and self.protocol.swarm_clock()[0] > 0

    async def fetch_inner(self, layout: Layout) -> InnerState | None:
        """The inner optimizer's state of a peer that trains; None when nobody has any, or `interrupt` came first.

        Nobody waits for this peer meanwhile: it is `starting` again, and follows the others' versions.
        """
        self.protocol.warming = True
        await self.enter("starting")
        fetching = asyncio.ensure_future(fetch_inner(self, self._client, layout))
        fetching.add_done_callback(lambda _: self.notify())
        try:
            await self.until(lambda: self._interrupted or fetching.done())
            return fetching.result() if fetching.done() else None
        finally:
            fetching.cancel()
            self.protocol.warming = False

    async def begin(self, cold: bool = False) -> int | None:
        """Wait until this peer agrees with the swarm, then enter `training`.

        Returns where in its cycle it begins; None when `interrupt` came first. The local parameters are the anchors'
        afterwards. A `cold` peer trains beside the swarm, which waits for nothing from it, until `take_part`.
        """
        await self.joins_late()
        if self._interrupted:
            return None
        await self._first_units()
        position = 0 if cold else self.protocol.first_position(self.now())
        self.protocol.warming = cold
        await self.enter("starting" if cold else "training")
        await self.rounds.load()
        return position

    async def take_part(self, tokens: int) -> Exchanged | None:
        """A cold peer's first round, of so many tokens, is over and left out; it begins anew with the others."""
        begun_at, base_version = self.now(), min(self.rounds.loaded)
        self.protocol.warming = False
        await self.enter("starting")
        position = await self.begin()
        if position is None:
            return None
        self.note("discarded", tokens=tokens, base_version=base_version)
        seconds = Seconds(wait=self.now() - begun_at)
        return Exchanged(min(self.rounds.loaded), self.protocol.applied_tokens, tokens, seconds, position)

    async def send(self, counts: Mapping[int, Count]) -> None:
        """Begin to exchange fragments, given the inner steps and tokens of each since it was sent last."""
        if self.protocol.lockstep:
            await self.enter("exchanging")
        await self.rounds.send(counts)
        self._ask_for_units()

    async def receive(self, fragments: Sequence[int]) -> Exchanged | None:
        """Wait for the updates of these fragments, and load them into the parameters; `send` came before.

        A peer that came too late for its round first gets in step with the others again. Returns None when `interrupt`
        ended it; nothing is under way then.
        """
        begun_at = self.now()
        if not self.rounds.arrived(fragments):
            await self.enter("exchanging")
            await self.until(lambda: self._interrupted or self.rounds.arrived(fragments))
        waited_s = self.now() - begun_at
        position = 0
        if self.protocol.lockstep and not self._interrupted and self.rounds.out_of_step():
            position = await self._get_in_step()
        if self._interrupted:
            await self.rounds.cancel()
            return None
        discarded, seconds = self.rounds.take(fragments)
        await self.rounds.catch_up_left_out()
        if not self.protocol.lockstep and self.rounds.out_of_step():
            await self.rounds.cancel()
            position = max(1, await self._get_in_step())
        begun_at, in_step_s = self.now(), self.now() - begun_at - waited_s
        await self.rounds.load(fragments if position == 0 else None, self.replica.settings.mixing)
        # Only what the training loop waited for counts as its time; with overlap that is less than the exchange took.
        comm_s = min(seconds.comm, waited_s)
        spent = Seconds(comm_s, waited_s - comm_s + in_step_s, self.now() - begun_at)
        return Exchanged(min(self.rounds.loaded), self.protocol.applied_tokens, discarded, spent, position)

    async def _get_in_step(self) -> int:
        """Begin a round anew with the others, at a barrier from their anchors; returns at which inner step they are."""
        self.note("out_of_step", versions=list(self.protocol.versions))
        if self.protocol.lockstep:
            await self.enter("starting")
            await self.until(lambda: self._interrupted or self.protocol.may_train())
        self.rounds.in_step()
        return self.protocol.first_position(self.now())

    async def turn(self, counts: Mapping[int, Count]) -> Exchanged | None:
        """Receive what was sent a round ago, and send this round's; the next begins from the anchor that is here then.

        Returns None when `interrupt` ended it.
        """
        begun_at, flying = self.now(), self.rounds.flying
        await self.until(lambda: self._interrupted or self.rounds.arrived(flying))
        waited_s, begun_at = self.now() - begun_at, self.now()
        if self._interrupted:
            await self.rounds.cancel()
            return None
        discarded, _ = self.rounds.take(flying) if flying else (0, None)
        await self.rounds.turn(counts)
        self._ask_for_units()
        seconds = Seconds(comm=0.0, wait=waited_s, outer=self.now() - begun_at)
        return Exchanged(min(self.rounds.loaded), self.protocol.applied_tokens, discarded, seconds)

    async def exchange(self, steps: int, tokens: int) -> Exchanged | None:
        """Send all fragments and receive them."""
        fragments = range(len(self.replica.fragments))
        await self.send(dict.fromkeys(fragments, (steps, tokens)))
        return await self.receive(fragments)

    async def show_anchors(self) -> None:
        """The parameters become the anchors for a while, of which the protocol takes no notice."""
        await self.rounds.show()

    async def snapshot(self) -> Saved:
        """What a checkpoint holds. At a barrier nothing moves meanwhile and the tensors are live, so write them before
        going on; else they are copies.
        """
        return await self.rounds.snapshot(copies=not self.protocol.lockstep or self.protocol.warming)

    async def settle(self) -> int:
        """At the very end, the local parameters become the anchors; returns their version."""
        await self.rounds.load()
        return min(self.rounds.loaded)

    def interrupt(self) -> None:
        """End the waiting of `begin` and `exchange`, now and later."""
        self._interrupted = True
        self.notify()

    async def leave(self, finished: bool) -> None:
        """Say goodbye: hand fragments over, or, at the end of the run, let everybody have the last update first."""
        await self.rounds.cancel()
        self.reserve.expect(0)
        await self.enter("done" if finished else "leaving")
        patience_s = LEAVE_FLOOR_S + 3 * self.rounds.longest_exchange_s
        if finished:
            await self._until_or(self.protocol.ended_as_one, patience_s, "the others to finish")
        else:

            def handed_over() -> bool:
                others = [m for m in self.protocol.members.all() if m.holds]
                able = any(not m.status.gone for m in others)
                return not able or not self.protocol.leases.held_by(self.protocol.me)

            await self._until_or(handed_over, patience_s, "fragments to be taken over")
        await self._until_or(lambda: self._server.serving == 0, LEAVE_FLOOR_S, "peers to read the last update")

    async def _first_units(self) -> None:
        """What the first batches come from. Without an answer in time, training begins with data of its own order."""
        self._ask_for_units()
        try:
            await within(FIRST_UNITS_S, self.until(lambda: self._interrupted or not self._asking))
        except asyncio.TimeoutError:
            logger.debug("no units yet")
