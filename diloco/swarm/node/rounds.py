"""The contributor's side: pseudo-gradients are sent to their syncers, and updates come back.

Each exchange of a fragment is a task, a *flight*: the training loop may go on meanwhile. `protocol.exchange` decides
what a flight does next; here it is done, and what came of it is reported back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from diloco.errors import PayloadError
from diloco.protocol.belief import donors
from diloco.protocol.exchange import Exchange, Step
from diloco.protocol.fragment import CONTROL_FRAGMENT, Lease
from diloco.protocol.messages.bulk import Contribution
from diloco.protocol.succession import missed
from diloco.swarm.conversations.context import Context
from diloco.swarm.conversations.contribution import Answered, contribute, keep, line_of
from diloco.swarm.conversations.framing import FragmentState
from diloco.swarm.conversations.tasks import in_thread
from diloco.swarm.conversations.units import UnitSupply
from diloco.swarm.node.anchors import Anchors
from diloco.swarm.wire.streams import BROKEN

__all__ = ["Count", "Exchanged", "Rounds", "Seconds"]

LATE_ROUNDS = 3  # in which a peer came too late, when an event warns of it
RETRY_S = 1.0  # before the same syncer is tried again after its stream broke

Count = tuple[int, int]
"""Inner steps and tokens."""


@dataclass
class Seconds:
    """Where the time of one exchange went."""

    comm: float = 0.0
    wait: float = 0.0
    outer: float = 0.0


@dataclass(frozen=True)
class Exchanged:
    """Outcome of one exchange: where the model is now, and how many of this peer's tokens are not in it.

    `version` is the lowest of all fragments that the local parameters started from; without a barrier it is the lowest
    that was published, and `applied_tokens` belongs to it. `position` is where in its cycle this peer goes on, after it
    had to get in step with the others anew.
    """

    version: int
    applied_tokens: int
    discarded_tokens: int
    seconds: Seconds
    position: int = 0


Flight = tuple[Exchange, Seconds]
"""An exchange of one fragment that is over."""


class Rounds:
    """Sends what was learned and receives updates. A syncer that vanishes is an event; its successor is tried next.

    What a flight fails with (`DivergedError`, for example) is raised by `arrived`.
    """

    def __init__(self, context: Context, anchors: Anchors, units: UnitSupply) -> None:
        self.longest_exchange_s = 0.0
        self._context = context
        self._protocol = context.protocol
        self._replica = context.replica
        self._settings = context.replica.settings
        self._anchors = anchors
        self._units = units
        self._flights: dict[int, asyncio.Task[Flight]] = {}
        self._copying = asyncio.Lock()  # held while there is a copy on the device: of one fragment at a time
        self._another_history = False
        self.left_out: list[int] = []  # fragments of the last exchange whose contributions came too late
        self._late = 0  # exchanges in a row in which a contribution came too late
        self._late_rounds = 0  # the same of the control fragment

    # -- in step with the others --------------------------------------------------------------------------------------

    def out_of_step(self) -> bool:
        """Whether this peer's rounds are not the others': they do not wait for it, or it comes late each time."""
        if self._protocol.lockstep:
            return self._another_history or not self._protocol.in_step(self._context.now())
        # Too late for every fragment in a row, it is expected for none, so nobody waits for what it gives up.
        return self._settings.quorum is None and self._late >= len(self._replica.fragments)

    def in_step(self) -> None:
        """This peer begins anew where the others are."""
        self._another_history, self._late = False, 0

    async def catch_up(self, fragments: Iterable[int]) -> None:
        """Fetch the newest versions of those fragments of which the others made one without this peer.

        A round that begins from an old version would come too late, and so would the next one.
        """
        for fragment in fragments:
            if self._protocol.behind(fragment):
                able = donors(self._protocol, fragment, self._protocol.fragments[fragment].version + 1)
                await self._anchors.catch_up(fragment, able)

    # -- flights ------------------------------------------------------------------------------------------------------

    @property
    def flying(self) -> list[int]:
        """Fragments whose exchange is under way, or over and not taken."""
        return sorted(self._flights)

    async def send(self, counts: Mapping[int, Count]) -> None:
        """Begin to exchange these fragments, given the inner steps and tokens of each since the last time.

        The pseudo-gradients are captured first. Where training goes on and the parameters are on an accelerator, they
        are copied there, and captured in the flight. There is a copy of one fragment at a time, so of several fragments
        this waits for the capture of all but the last.
        """
        for fragment, count in counts.items():
            if self._settings.overlap and self._replica.local.can_copy(self._replica.fragments[fragment]):
                await self._depart_with_copy(fragment, count)
                continue
            async with self._context.locks[fragment].reading():
                await in_thread(self._replica.capture, fragment)
            self._depart(fragment, count)

    async def _depart_with_copy(self, fragment: int, count: Count) -> None:
        """Return as soon as training may go on; what fails until then is raised by `arrived`."""
        self._depart(fragment, count, captures=True)
        flight = self._flights[fragment]
        await self._context.tasks.until(lambda: flight.done() or self._replica.is_taken(fragment))

    async def _capture(self, fragment: int) -> None:
        """Copy the local parameters, then encode, while training goes on.

        The anchor stays until that is done, and so no base has to be kept.
        """
        async with self._copying, self._context.locks[fragment].reading():
            if await in_thread(self._replica.copy_local, fragment):
                self._context.tasks.notify()
            await in_thread(self._replica.capture, fragment)
        self._context.tasks.notify()

    def _depart(self, fragment: int, count: Count, captures: bool = False) -> None:
        steps, tokens = count
        exchange = Exchange(
            fragment, *self._anchors.loaded[fragment], steps, tokens, self._protocol.manifest_hash,
            may_be_late=self._settings.carries_late, begun_at=self._context.now(),
        )  # fmt: skip
        if fragment == CONTROL_FRAGMENT:
            exchange.units = self._units.data.send()
        self._flights[fragment] = self._context.tasks.start(self._fly(exchange, captures))

    async def _fly(self, exchange: Exchange, captures: bool) -> Flight:
        begun_at, seconds = self._context.now(), Seconds()
        try:
            if captures:
                await self._capture(exchange.fragment)
            await self._exchange(exchange, seconds)
        finally:
            self._replica.release_capture(exchange.fragment)
        if exchange.fragment == CONTROL_FRAGMENT:  # at once: another history may win before this is taken
            own = self._anchors.own_tokens
            (own.was_left_out if exchange.discarded else own.was_applied)(exchange.base_version, exchange.tokens)
        self.longest_exchange_s = max(self.longest_exchange_s, self._context.now() - begun_at)
        return exchange, seconds

    def arrived(self, fragments: Sequence[int]) -> bool:
        """Whether the exchanges of these fragments are over; raises what one of them failed with."""
        return all(self._flights[f].done() and self._flights[f].result() is not None for f in fragments)

    def take(self, fragments: Sequence[int]) -> tuple[int, Seconds]:
        """End the exchanges of these fragments, which are over: discarded tokens, and where the time went."""
        flights = [self._flights.pop(fragment).result() for fragment in fragments]
        discarded = self._anchors.own_tokens.take_lost()
        self.left_out = [exchange.fragment for exchange, _ in flights if exchange.discarded]
        for exchange, _ in flights:
            self._late = self._late + 1 if exchange.discarded else 0
            if exchange.fragment == CONTROL_FRAGMENT:
                discarded += self._account(exchange)
        longest = max((seconds for _, seconds in flights), key=lambda s: s.comm + s.wait, default=Seconds())
        return discarded, longest  # of all, because they travel side by side

    def _account(self, exchange: Exchange) -> int:
        """Count the tokens of an exchange of the control fragment; returns those that were discarded."""
        if exchange.units:
            self._units.settled(exchange.units)
            units = [list(unit) for unit in exchange.units]
            self._context.note("units", base_version=exchange.base_version, discarded=exchange.discarded, units=units)
        self._late_rounds = self._late_rounds + 1 if exchange.discarded else 0
        if not exchange.discarded:
            return 0
        self._context.note("discarded", tokens=exchange.tokens, base_version=exchange.base_version)
        if self._late_rounds % LATE_ROUNDS == 0:
            why = "this peer learns in vain: it is too slow, or its link; see outer.dylu and outer.staleness_limit"
            self._context.note("always_late", rounds=self._late_rounds, why=why)
        return exchange.tokens

    async def cancel(self) -> None:
        """Give up what is under way. Nothing reads the parameters or moves an anchor for it afterwards."""
        flights, self._flights = self._flights, {}
        for flight in flights.values():
            flight.cancel()
        if flights:
            await asyncio.wait(list(flights.values()))
        for fragment in flights:  # one that never began to run has not released it
            self._replica.release_capture(fragment)

    # -- one exchange -------------------------------------------------------------------------------------------------

    async def _exchange(self, exchange: Exchange, seconds: Seconds) -> None:
        protocol, fragment, retry_at = self._protocol, exchange.fragment, 0.0
        while True:
            lease, version = protocol.live_lease(fragment), protocol.fragments[fragment].version
            merged = protocol.fragments[fragment].merged().get(protocol.me, -1)
            if protocol.lockstep:  # an anchor that was fetched may be of another history
                here = protocol.fragments[fragment]
                exchange.may_be_late = here.follows(exchange.base_version, exchange.base_digest)
            match exchange.next_step(lease, version, merged, self._context.now(), retry_at):
                case Step.DONE:
                    return
                case Step.WAIT:
                    await self._context.tasks.pause(RETRY_S)
                case Step.CATCH_UP:
                    able = donors(protocol, fragment, exchange.base_version + 1)
                    if not able and lease is not None and lease.version > version:
                        able = [lease.holder]  # statuses lag behind its publication
                    await self._anchors.catch_up(fragment, able)
                    if protocol.fragments[fragment].version == version:
                        await asyncio.sleep(RETRY_S)  # a failure is an event, so two flights would wake each other
                case Step.CONTRIBUTE:
                    assert lease is not None
                    retry_at = self._context.now() + RETRY_S
                    if lease.version == exchange.base_version and lease.digest != exchange.base_digest:
                        return await self._give_up(exchange, lease)
                    if lease.holder == protocol.me:
                        await self._contribute_here(exchange, lease, seconds)
                    else:
                        await self._contribute(exchange, lease, seconds)

    async def _give_up(self, exchange: Exchange, lease: Lease) -> None:
        """Adopt the other history, unless a thread here, as syncer of before, has made a version of this meanwhile."""
        fragment, base_version = exchange.fragment, exchange.base_version
        self._context.note("another_history", fragment=fragment, version=base_version)
        self._another_history = True
        if lease.holder != self._protocol.me:
            await self._anchors.catch_up(fragment, (lease.holder,), whole=True)
        exchange.discarded = self._protocol.fragments[fragment].merged().get(self._protocol.me, -1) < base_version

    async def _contribute(self, exchange: Exchange, lease: Lease, seconds: Seconds) -> None:
        """Contribute to a version that another peer makes, until it has lost the lease."""

        def moot() -> bool:
            now = self._protocol.live_lease(lease.fragment)
            return now is None or (now.holder, now.term) != (lease.holder, lease.term)

        sending = contribute(self._context, lease, self._header(exchange, lease))
        try:
            answered = await self._context.tasks.unless(moot, sending)
            if answered is None:
                exchange.broke(lease)
            else:
                await self._adopt(exchange, lease, answered, seconds)
        except (*BROKEN, PayloadError) as error:
            why = str(error) or type(error).__name__
            self._context.note("contribution_broke", fragment=lease.fragment, syncer=lease.holder, why=why)
            missed(self._protocol, lease.fragment, self._context.now())
            exchange.broke(lease)

    async def _adopt(self, exchange: Exchange, lease: Lease, answered: Answered, seconds: Seconds) -> None:
        if answered.verdict.accepted:
            seconds.comm, seconds.wait = answered.comm_s, answered.wait_s
        else:
            exchange.refused(answered.verdict, lease)
            if not (answered.verdict.late or answered.verdict.merged):
                missed(self._protocol, lease.fragment, self._context.now())
        if isinstance(answered.update, FragmentState):
            exchange.merged(answered.update.header.version)
            if exchange.fragment not in self._protocol.followed:  # else its updates are on their way, one by one
                await self._anchors.adopt_state(answered.update)
        elif answered.update is not None:
            contributors = {peer for record in answered.update for peer in record.header.contributors}
            exchange.recorded(contributors, self._protocol.me)
            await self._anchors.adopt_records(answered.update)

    # -- the syncer's own contribution --------------------------------------------------------------------------------

    async def _contribute_here(self, exchange: Exchange, lease: Lease, seconds: Seconds) -> None:
        """Contribute to a version that this peer makes itself."""
        protocol, fragment, me = self._protocol, exchange.fragment, self._protocol.me
        syncer, before = protocol.fragments[fragment].syncer, protocol.fragments[fragment].version
        assert syncer is not None, "the lease is held here"
        header = self._header(exchange, lease)
        verdict = protocol.offer(me, header, self._context.now())
        if not verdict.accepted:
            exchange.refused(verdict, lease)
            if not verdict.late:
                await self._context.tasks.pause(RETRY_S)
            return
        try:
            if syncer.line(me) is None:  # else it is here, and its flight was interrupted
                payload = self._replica.captured(fragment)
                before = await keep(self._context, syncer, header, payload, line_of(self._context, header))
        except PayloadError:
            await self._context.tasks.pause(RETRY_S)
            return
        waiting_since = self._context.now()
        await self._context.tasks.until(
            lambda: (
                protocol.fragments[fragment].version > before
                or not self._context.holds(syncer)
                or not syncer.keeps(me, exchange.base_version)
            )
        )
        seconds.wait += self._context.now() - waiting_since
        if syncer.version == before + 1:  # else it is late now
            exchange.recorded(syncer.last_contributors, me)

    def _header(self, exchange: Exchange, lease: Lease) -> Contribution:
        share = self._protocol.fragments[exchange.fragment].shares.get(self._protocol.me)
        return exchange.header(lease, self._context.now(), 0 if share is None else share.tokens)
