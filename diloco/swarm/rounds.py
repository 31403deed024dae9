"""What moves anchors: merging as syncer, exchanging as contributor, catching up as either.

Each method is one conversation, driven by the protocol core and reported back to it. All of them run in the node's
event loop; work on whole fragments runs in a thread beside it, on tensors that nobody else touches meanwhile (a
fragment that merges takes no chunks, and a peer that exchanges trains no further).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from diloco.errors import PayloadError
from diloco.protocol.exchange import Exchange, Step
from diloco.protocol.leases import Lease
from diloco.protocol.messages import Record
from diloco.protocol.peer import CONTROL_FRAGMENT
from diloco.protocol.syncer import Close
from diloco.swarm.bulk import BulkClient, FetchedRecord, FetchedState, Seconds
from diloco.swarm.control import UNREACHABLE
from diloco.swarm.memory import short_lived
from diloco.swarm.serve import Host

__all__ = ["Exchanged", "Rounds"]

RETRY_S = 1.0  # before the same syncer is tried again after its stream broke


@dataclass(frozen=True)
class Exchanged:
    """Outcome of one exchange: where the model is now, and whether this peer's contribution is in it."""

    version: int
    applied_tokens: int
    discarded: bool
    seconds: Seconds


class Rounds:
    """The conversations of one node. A peer that vanishes in the middle of one is an event; the next one is tried."""

    def __init__(self, host: Host, client: BulkClient) -> None:
        self._host = host
        self._client = client
        self.protocol = host.protocol
        self.replica = host.replica
        self.longest_exchange_s = 0.0

    async def merge(self, close: Close) -> None:
        fragment = close.fragment
        before, syncer = self.protocol.digests[fragment], self.protocol.syncers[fragment]
        update = short_lived(self.replica.update_nbytes(fragment))

        def work() -> str:
            at = 0
            for chunk, (start, stop) in enumerate(self.replica.chunks[fragment]):
                size = self.replica.down.nbytes(stop - start)
                self.replica.merge_chunk_(fragment, chunk, update[at : at + size])
                at += size
            return self.replica.digest(fragment)

        digest = await asyncio.to_thread(work)
        if self.protocol.syncers.get(fragment) is not syncer:
            lease = self.protocol.leases.get(fragment)
            donors = () if lease is None else (lease.holder,)
            await self.catch_up(fragment, donors, outer=False)  # the anchor was moved under a lease that is lost
            return
        clock = self.protocol.applied_tokens + (close.tokens if fragment == CONTROL_FRAGMENT else 0)
        header = Record(
            fragment=fragment,
            term=syncer.term,
            version=close.base_version + 1,
            digest_before=before,
            digest=digest,
            contributors=list(close.contributors),
            applied_tokens=clock,
        )
        self._host.records[fragment] = FetchedRecord(header, update)
        self._host.do(self.protocol.published(fragment, digest, close.tokens, close.contributors, self._host.now()))

    async def catch_up(self, fragment: int, donors: Sequence[str], outer: bool) -> None:
        """Fetch a fragment from the first donor that has what its header says."""
        have = self.protocol.versions[fragment]
        if self.protocol.leases.get(fragment) in self.protocol.leases.held_by(self.protocol.me):
            have = -1  # a master cannot follow records, only a state
        for donor in donors:
            try:
                fetched = await self._client.fetch(donor, fragment, have, outer)
                if isinstance(fetched, FetchedRecord):
                    await self._adopt_record(fetched)
                else:
                    await self._adopt_state(fetched)
                return
            except (*UNREACHABLE, PayloadError) as error:
                self._host.note("fetch_failed", fragment=fragment, donor=donor, why=str(error) or type(error).__name__)
        self.protocol.catch_up_failed(fragment)
        self._host.notify()

    async def _adopt_record(self, record: FetchedRecord) -> None:
        """Apply an update to the anchor; `PayloadError` when it does not lead to the digest that it names."""
        header = record.header
        fragment = header.fragment
        here = (self.protocol.versions[fragment], self.protocol.digests[fragment])
        if here != (header.version - 1, header.digest_before):
            raise PayloadError(
                f"a record to version {header.version} of fragment {fragment} does not follow version {here[0]}"
            )
        digest = await asyncio.to_thread(self.replica.apply_update_, fragment, record.update)
        self._host.do(self.protocol.adopted(fragment, header.version, digest, header.applied_tokens, self._host.now()))
        if digest != header.digest:
            self._host.note(
                "digest_mismatch", fragment=fragment, version=header.version, got=digest, expected=header.digest
            )
            self._host.spawn(self._heal(fragment))

    async def _heal(self, fragment: int) -> None:
        lease = self.protocol.leases.get(fragment)
        if lease is not None and lease.holder != self.protocol.me:
            await self.catch_up(fragment, (lease.holder,), outer=False)

    async def _adopt_state(self, state: FetchedState) -> None:
        """Take a fetched anchor (and outer state) over; `PayloadError` when the bytes are not what the header says."""
        header = state.header
        digest = await asyncio.to_thread(self.replica.digest_of, state.anchor)
        if digest != header.digest:
            raise PayloadError(f"the state of fragment {header.fragment} has another digest than its header")
        if header.version < self.protocol.versions[header.fragment]:
            raise PayloadError(f"version {header.version} is older than what is here")
        self.replica.restart(header.fragment, state.anchor)
        if state.master is not None:
            self.replica.hold(header.fragment, state.master, state.momentum)
        self._host.do(
            self.protocol.adopted(header.fragment, header.version, digest, header.applied_tokens, self._host.now())
        )

    # -- exchanges ----------------------------------------------------------------------------------------------------

    async def exchange(self, steps: int, tokens: int) -> Exchanged:
        begun_at = self._host.now()
        self._host.do(self.protocol.enter("exchanging", begun_at))
        exchanges = [
            Exchange(fragment, version, steps, tokens, self.protocol.manifest_hash)
            for fragment, version in enumerate(self.protocol.versions)
        ]
        seconds = await asyncio.gather(*(self._exchange_fragment(exchange) for exchange in exchanges))
        self.longest_exchange_s = max(self.longest_exchange_s, self._host.now() - begun_at)
        discarded = exchanges[CONTROL_FRAGMENT].discarded
        if discarded:
            self._host.note("discarded", tokens=tokens, base_version=exchanges[CONTROL_FRAGMENT].base_version)
        version = self.protocol.versions[CONTROL_FRAGMENT]
        longest = max(seconds, key=lambda s: s.comm + s.wait)  # the fragments travel side by side
        return Exchanged(version, self.protocol.applied_tokens, discarded, longest)

    async def _exchange_fragment(self, exchange: Exchange) -> Seconds:
        protocol, fragment, seconds, retry_at = self.protocol, exchange.fragment, Seconds(), 0.0
        while True:
            lease = self._live_lease(fragment)
            match exchange.next_step(lease, protocol.versions[fragment], self._host.now(), retry_at):
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
                    if lease.holder == protocol.me:
                        await self._contribute_own(exchange, lease, seconds)
                    else:
                        retry_at = self._host.now() + RETRY_S
                        await self._contribute(exchange, lease, seconds)

    def _live_lease(self, fragment: int) -> Lease | None:
        lease = self.protocol.leases.get(fragment)
        if lease is None or lease.holder not in (self.protocol.me, *(m.peer for m in self.protocol.members.all())):
            return None
        return lease

    async def _contribute_own(self, exchange: Exchange, lease: Lease, seconds: Seconds) -> None:
        fragment, me, syncer = lease.fragment, self.protocol.me, self.protocol.syncers[lease.fragment]
        verdict = self.protocol.offer(me, exchange.header(lease))
        if not verdict.accepted:
            exchange.refused(verdict, lease)
            await self._host.pause(RETRY_S)
            return
        for chunk in range(verdict.first_chunk, len(self.replica.chunks[fragment])):
            if not syncer.wants(me, chunk):
                return
            self.replica.fold_own(fragment, chunk, syncer.weight(me))
            syncer.folded(me)
            await asyncio.sleep(0)  # lets the others' chunks in
        self._host.do(self.protocol.arrived(me, fragment, self._host.now()))
        waiting_since = time.monotonic()
        await self._host.until(
            lambda: (
                self.protocol.versions[fragment] > exchange.base_version
                or self.protocol.syncers.get(fragment) is not syncer
            )
        )
        seconds.wait += time.monotonic() - waiting_since

    async def _contribute(self, exchange: Exchange, lease: Lease, seconds: Seconds) -> None:
        sending = asyncio.ensure_future(self._client.contribute(lease, exchange.header(lease), seconds))

        def moot() -> bool:
            current = self._live_lease(lease.fragment)
            return sending.done() or current is None or (current.holder, current.term) != (lease.holder, lease.term)

        sending.add_done_callback(lambda _: self._host.notify())
        await self._host.until(moot)
        try:
            if not sending.done():
                sending.cancel()
                exchange.broke(lease)
                return
            verdict, record = sending.result()
            if not verdict.accepted:
                exchange.refused(verdict, lease)
            if record is not None:
                exchange.recorded(record.header.contributors, self.protocol.me)
                await self._adopt_record(record)
        except (*UNREACHABLE, PayloadError) as error:
            self._host.note(
                "contribution_broke",
                fragment=lease.fragment,
                syncer=lease.holder,
                why=str(error) or type(error).__name__,
            )
            exchange.broke(lease)
