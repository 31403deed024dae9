"""Merging as syncer, exchanging as contributor.

Each method is one conversation, driven by the protocol core and reported back to it. All of them run in the node's
event loop; work on whole fragments runs in a thread beside it, on tensors that nobody else touches meanwhile (a
fragment that merges takes no chunks, and a peer that exchanges trains no further).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from diloco.errors import DivergedError, PayloadError
from diloco.outer.replica import OuterStep
from diloco.outer.robust import Judgement
from diloco.protocol.exchange import Exchange, Step
from diloco.protocol.fragment import CONTROL_FRAGMENT, Lease
from diloco.protocol.messages.bulk import Record
from diloco.protocol.syncer import Close, Syncer
from diloco.swarm.conversations.answer import Host
from diloco.swarm.conversations.bulk import BulkClient, FetchedRecord, Seconds
from diloco.swarm.node.anchors import Anchors
from diloco.swarm.wire.malloc import short_lived
from diloco.swarm.wire.streams import BROKEN

__all__ = ["Exchanged", "Rounds"]

COUNTED_VERSIONS = 1024  # after which it is forgotten what became of a contribution
RETRY_S = 1.0  # before the same syncer is tried again after its stream broke


@dataclass(frozen=True)
class Exchanged:
    """Outcome of one exchange: where the model is now, and tokens of this peer that are not in it.

    `version` is the lowest of all fragments that the local parameters started from. `position` is where in its cycle
    this peer goes on, after it had to get in step with the others anew.
    """

    version: int
    applied_tokens: int
    discarded_tokens: int
    seconds: Seconds
    position: int = 0


class Flight(NamedTuple):
    """An exchange of one fragment that is over."""

    exchange: Exchange
    seconds: Seconds


Count = tuple[int, int]
"""Inner steps and tokens."""


class Rounds(Anchors):
    """The conversations of one node. A peer that vanishes in the middle of one is an event; the next one is tried."""

    def __init__(self, host: Host, client: BulkClient) -> None:
        super().__init__(host, client)
        self.longest_exchange_s = 0.0
        self._flights: dict[int, asyncio.Task[Flight]] = {}
        self._another_history = False
        self._left_out: list[int] = []
        self._late = 0  # exchanges in a row in which something came too late

    def out_of_step(self) -> bool:
        """Whether this peer's rounds are not the others': they wait for nothing from it, or it comes late each time."""
        if self.protocol.lockstep:
            return self._another_history or not self.protocol.in_step(self._host.now())
        # Late for every fragment, it is expected for none, so nobody waits for what it gives up.
        return self._settings.quorum is None and self._late >= len(self.replica.fragments)

    def in_step(self) -> None:
        """This peer begins anew where the others are."""
        self._another_history, self._late = False, 0

    @property
    def flying(self) -> list[int]:
        """Fragments whose exchange is under way, or over and not taken."""
        return sorted(self._flights)

    async def catch_up_left_out(self) -> None:
        """Who came too late adopted the version that it missed, and others may be there since: to begin from an old one
        would be too late again.
        """
        for fragment in self._left_out:
            if self.protocol.behind(fragment):
                donors = self.protocol.members.donors(fragment, self.protocol.versions[fragment] + 1)
                await self.catch_up(fragment, donors, outer=False)

    async def merge(self, close: Close) -> None:
        """Make the next version out of what was collected, unless the syncer caught up with a later one meanwhile."""
        syncer = self.protocol.syncers.get(close.fragment)
        async with self._moving[close.fragment]:
            if syncer is None or self.protocol.syncers.get(close.fragment) is not syncer:
                return
            if syncer.version != close.base_version:
                return
            self._about_to_move(close.fragment)
            with self.replica.merging(close.fragment):
                done = await self._merge(close, syncer)
        if not done:
            lease = self.protocol.leases.get(close.fragment)
            donors = () if lease is None else (lease.holder,)
            await self.catch_up(close.fragment, donors, outer=False)

    async def _merge(self, close: Close, syncer: Syncer) -> bool:
        """False when the lease was lost while the anchor was moved."""
        fragment, before = close.fragment, self.protocol.digests[close.fragment]
        judged: tuple[list[str], Judgement] | None = None
        if self.replica.stages:
            close, judged = await self._judge(close, syncer)
            if self.protocol.syncers.get(fragment) is not syncer:
                return False
        update = short_lived(self.replica.update_nbytes(fragment))
        step = OuterStep(close.base_version, len(close.contributors), close.delay, close.flush)
        cursor = self.protocol.accounts.data_cursor(
            fragment, close.contributors
        )  # belongs to this version, even if the lease is lost

        def work() -> str:
            at = 0
            for chunk, (start, stop) in enumerate(self.replica.chunks[fragment]):
                out = update[at : at + self.replica.down.nbytes(stop - start)]
                if judged is None:
                    self.replica.merge_chunk_(fragment, chunk, step, out)
                else:
                    self.replica.merge_staged_(fragment, chunk, step, *judged, out)
                at += out.numel()
            self.replica.clear_staged(fragment)
            return self.replica.digest(fragment)

        digest = await asyncio.to_thread(work)
        clock = self.protocol.applied_tokens + (close.tokens if fragment == CONTROL_FRAGMENT else 0)
        lost = self.protocol.syncers.get(fragment) is not syncer
        header = Record(
            fragment=fragment,
            term=syncer.term,
            version=close.base_version + 1,
            digest_before=before,
            digest=digest,
            contributors=dict(close.contributors),
            applied_tokens=clock,
            **(cursor if lost else self.protocol.accounts.data_cursor(fragment, close.contributors)),
        )
        if lost:  # a version of the side that lost
            self.protocol.accounts.hear_data_cursor(header)
            self._moved(fragment, header.version, digest, contributors=close.contributors)
            return False
        self._host.records[fragment] = FetchedRecord(header, update)
        self._host.do(self.protocol.published(fragment, digest, close.contributors, self._host.now()))
        return True

    async def _judge(self, close: Close, syncer: Syncer) -> tuple[Close, tuple[list[str], Judgement]]:
        """What each contribution counts, and the close without those that are left out."""
        fragment = close.fragment
        judged = await asyncio.to_thread(self.replica.judge, fragment, syncer.weights(close.contributors))
        close = self._without_opposed(close, syncer, *judged)
        if not self._settings.spot_check:
            return close, judged
        failing = await self._host.checks.failing(self._host, close, syncer, *judged)
        if not failing or self.protocol.syncers.get(fragment) is not syncer:
            return close, judged
        close = syncer.leave_out(close, failing)  # and the others are judged as if these had not come
        judged = await asyncio.to_thread(self.replica.judge, fragment, syncer.weights(close.contributors))
        return self._without_opposed(close, syncer, *judged), judged

    def _without_opposed(self, close: Close, syncer: Syncer, peers: Sequence[str], judged: Judgement) -> Close:
        """The close without contributions that are left out; an event says whose, and whose are clipped."""
        left_out = [peers[i] for i in judged.left_out]
        clipped = [peers[i] for i in judged.clipped if peers[i] not in left_out]
        if clipped:
            self._host.note("clipped", fragment=close.fragment, version=close.base_version + 1, peers=clipped)
        if not left_out:
            return close
        why = "they point against the others' contributions"
        self._host.note("left_out", fragment=close.fragment, version=close.base_version + 1, peers=left_out, why=why)
        return syncer.leave_out(close, left_out)

    def _of_another_history(self, exchange: Exchange) -> bool:
        """Whether what was learned cannot be merged, because the syncer's anchor of that version is another one."""
        lease, fragment = self._live_lease(exchange.fragment), exchange.fragment
        if lease is None or lease.holder == self.protocol.me:
            return False
        same_version = lease.version == exchange.base_version == self.protocol.versions[fragment]
        return same_version and lease.digest != self.protocol.digests[fragment]

    # -- exchanges ----------------------------------------------------------------------------------------------------

    async def send(self, counts: Mapping[int, Count], captured: bool = False) -> None:
        """Begin to exchange these fragments, whose inner steps and tokens since the last time are given.

        When training goes on meanwhile, or the codec's loss is kept, the pseudo-gradients are captured first.
        """
        for fragment, (steps, tokens) in counts.items():
            limit = self._settings.staleness_limit
            exchange = Exchange(
                fragment, self.loaded[fragment], steps, tokens, self.protocol.manifest_hash, staleness_limit=limit
            )
            if fragment == CONTROL_FRAGMENT:
                exchange.units = self._host.reserve.send()
            elif self._settings.spot_check:
                exchange.units = self._host.reserve.trained_on
            if not captured and (self._settings.overlap or self._settings.error_feedback):
                async with self._moving[fragment]:
                    await asyncio.to_thread(self.replica.capture, fragment)
            flight = asyncio.ensure_future(self._fly(exchange))
            flight.add_done_callback(self._ended)
            self._flights[fragment] = flight

    async def _fly(self, exchange: Exchange) -> Flight:
        begun_at = self._host.now()
        seconds = await self._exchange_fragment(exchange)
        self.replica.release_capture(exchange.fragment)
        self.longest_exchange_s = max(self.longest_exchange_s, self._host.now() - begun_at)
        return Flight(exchange, seconds)

    def _ended(self, task: asyncio.Task[object]) -> None:
        if not task.cancelled():
            task.exception()  # whoever waits for the task raises it; in a node that failed already, nobody does
        self._host.notify()

    async def turn(self, counts: Mapping[int, Count]) -> None:
        """A round that is over becomes the next contribution, and the next round begins; the update is a round late.

        Nothing of these fragments is under way any more.
        """
        peers = self.protocol.num_trainers()
        for fragment in counts:
            async with self._moving[fragment]:
                await asyncio.to_thread(self.replica.capture, fragment)
                await asyncio.to_thread(self.replica.load_late_, fragment, peers)
                self.loaded[fragment] = self.protocol.versions[fragment]
        await self.send(counts, captured=True)

    def arrived(self, fragments: Sequence[int]) -> bool:
        """Whether the exchanges of these fragments are over; raises what one of them failed with."""
        return all(self._flights[f].done() and self._flights[f].result() is not None for f in fragments)

    def take(self, fragments: Sequence[int]) -> tuple[int, Seconds]:
        """End the exchanges of these fragments, which are over: discarded tokens, and where the time went."""
        flights = [self._flights.pop(fragment).result() for fragment in fragments]
        discarded, self._lost_tokens = self._lost_tokens, 0
        self._left_out = [exchange.fragment for exchange, _ in flights if exchange.discarded]
        for exchange, _ in flights:
            self._late = self._late + 1 if exchange.discarded else 0
        for exchange, _ in flights:
            if exchange.fragment != CONTROL_FRAGMENT:
                continue
            self._settle(exchange)
            if not exchange.discarded:
                self._applied[exchange.base_version] = exchange.tokens
                self._applied.pop(exchange.base_version - COUNTED_VERSIONS, None)
            else:
                discarded += exchange.tokens
                self._left_out_tokens[exchange.base_version] = exchange.tokens
                self._left_out_tokens.pop(exchange.base_version - COUNTED_VERSIONS, None)
                self._host.note("discarded", tokens=exchange.tokens, base_version=exchange.base_version)
        return discarded, max((f.seconds for f in flights), key=lambda s: s.comm + s.wait)  # they travel side by side

    def _settle(self, exchange: Exchange) -> None:
        """The units are not this peer's any more: when it asks for more, those that were discarded go to others."""
        if exchange.units:
            self._host.reserve.settle(exchange.units)
            self._host.do(self.protocol.has_units(self._host.reserve.all, self._host.now()))
            units = [list(unit) for unit in exchange.units]
            self._host.note("units", base_version=exchange.base_version, discarded=exchange.discarded, units=units)

    async def cancel(self) -> None:
        """Give up what is under way."""
        flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()
        if flights:
            await asyncio.wait(flights)
        for fragment in self._flights:
            self.replica.release_capture(fragment)
        self._flights = {}

    async def _exchange_fragment(self, exchange: Exchange) -> Seconds:
        protocol, fragment, seconds, retry_at = self.protocol, exchange.fragment, Seconds(), 0.0
        if self._of_another_history(exchange):
            self._host.note("another_history", fragment=fragment, version=exchange.base_version)
            exchange.discarded = self._another_history = True
            lease = protocol.leases.get(fragment)
            await self.catch_up(fragment, () if lease is None else (lease.holder,), outer=False, whole=True)
            return seconds
        while True:
            lease = self._live_lease(fragment)
            merged = protocol.accounts.merged(fragment).get(protocol.me, -1)
            match exchange.next_step(lease, protocol.versions[fragment], self._host.now(), retry_at, merged):
                case Step.DONE:
                    return seconds
                case Step.WAIT:
                    await self._host.pause(RETRY_S)
                case Step.CATCH_UP:
                    donors = protocol.members.donors(fragment, exchange.base_version + 1)
                    await self.catch_up(fragment, donors, outer=False)
                    await self._host.pause(RETRY_S)
                case Step.CONTRIBUTE:
                    assert lease is not None
                    retry_at = self._host.now() + RETRY_S
                    if lease.holder == protocol.me:
                        with _own(exchange.base_version + 1):
                            await self._contribute_own(exchange, lease, seconds)
                    else:
                        await self._contribute(exchange, lease, seconds)

    def _live_lease(self, fragment: int) -> Lease | None:
        return self.protocol.live_lease(fragment)

    async def _contribute_own(self, exchange: Exchange, lease: Lease, seconds: Seconds) -> None:
        fragment, me, syncer = lease.fragment, self.protocol.me, self.protocol.syncers[lease.fragment]
        verdict = self.protocol.offer(me, exchange.header(lease))
        if not verdict.accepted:
            exchange.refused(verdict, lease)
            await self._host.pause(RETRY_S)
            return
        base_version = self.protocol.versions[fragment]
        if verdict.first_chunk == len(self._chunks(fragment)):
            folded = True  # before something interrupted the waiting
        elif syncer.folds_whole:
            async with self._moving[fragment]:
                base_version = self.protocol.versions[fragment]
                payloads = [self.replica.encode(fragment, chunk) for chunk in self._chunks(fragment)]
                folded = self.fold_whole(syncer, me, exchange.base_version, payloads)
        else:
            folded = await self._fold_own(syncer, exchange.base_version, verdict.first_chunk)
        if folded:
            self._host.do(self.protocol.arrived(me, fragment, self._host.now()))
        elif syncer.folds_whole:
            await self._host.pause(RETRY_S)
            return
        waiting_since = self._host.now()
        await self._host.until(
            lambda: self.protocol.versions[fragment] > base_version or self.protocol.syncers.get(fragment) is not syncer
        )
        seconds.wait += self._host.now() - waiting_since
        if syncer.version == base_version + 1:
            exchange.recorded(syncer.last_contributors, me)

    async def _fold_own(self, syncer: Syncer, base_version: int, first_chunk: int) -> bool:
        """Own chunks, one by one; False when the version closed meanwhile."""
        me, fragment = self.protocol.me, syncer.fragment
        for chunk in range(first_chunk, len(self.replica.chunks[fragment])):
            if not syncer.wants(me, chunk, base_version):
                return False
            self.take_chunk(syncer, me, chunk, self.replica.encode(fragment, chunk))
            await asyncio.sleep(0)  # lets the others' chunks in
        return True

    def _chunks(self, fragment: int) -> range:
        return range(len(self.replica.chunks[fragment]))

    def take_chunk(self, syncer: Syncer, peer: str, chunk: int, payload: Tensor) -> None:
        """A chunk that the syncer wants is folded in, or kept until the version closes; `PayloadError` changes
        nothing.
        """
        if self.replica.stages:
            self.replica.stage(syncer.fragment, chunk, peer, payload)
        else:
            self.replica.fold(syncer.fragment, chunk, payload, syncer.weight(peer))
        syncer.folded(peer)

    def fold_whole(self, syncer: Syncer, peer: str, base_version: int, payloads: Sequence[Tensor]) -> bool:
        """A contribution that was collected first; False when the syncer does not want it any more.

        Everything is checked before anything is folded: `PayloadError` changes nothing.
        """
        if not syncer.wants(peer, 0, base_version):
            return False
        fragment = syncer.fragment
        norms = [self.replica.norm_of(fragment, chunk, payload) for chunk, payload in enumerate(payloads)]
        weight, discount = syncer.weight(peer), syncer.discount(peer)
        for chunk, (payload, norm) in enumerate(zip(payloads, norms, strict=True)):
            self.replica.fold(fragment, chunk, payload, weight, discount, norm)
            syncer.folded(peer)
        return True

    async def _contribute(self, exchange: Exchange, lease: Lease, seconds: Seconds) -> None:
        sending = asyncio.ensure_future(self._client.contribute(lease, exchange.header(lease), seconds))

        def moot() -> bool:
            current = self._live_lease(lease.fragment)
            return sending.done() or current is None or (current.holder, current.term) != (lease.holder, lease.term)

        sending.add_done_callback(self._ended)
        await self._host.until(moot)
        try:
            if not sending.done():
                sending.cancel()
                exchange.broke(lease)
                return
            verdict, update = sending.result()
            if not verdict.accepted:
                exchange.refused(verdict, lease)
            if isinstance(update, FetchedRecord):
                exchange.recorded(update.header.contributors, self.protocol.me)
                await self._adopt_record(update)
            elif update is not None:
                exchange.merged()
                await self._adopt_state(update)
        except (*BROKEN, PayloadError) as error:
            self._host.note(
                "contribution_broke",
                fragment=lease.fragment,
                syncer=lease.holder,
                why=str(error) or type(error).__name__,
            )
            exchange.broke(lease)


@contextmanager
def _own(version: int) -> Iterator[None]:
    """What would be refused of others is a sign of divergence in what this peer has learned itself."""
    try:
        yield
    except PayloadError as error:
        remedy = "lower inner.lr or outer.lr; the last checkpoint is good"
        raise DivergedError(f"training diverged: {error}, in outer step {version}; {remedy}") from None
