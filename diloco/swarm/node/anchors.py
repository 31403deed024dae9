"""The anchors of a node: loaded into the parameters, fetched from donors, moved by update records, saved.

Each method is driven by the protocol core and reported back to it. All of them run in the node's event loop; work on
whole fragments runs in a thread beside it, on tensors that nobody else touches meanwhile: who moves or reads an anchor
holds its lock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from torch import Tensor

from diloco.errors import PayloadError
from diloco.outer.replica import OuterStep
from diloco.protocol.fragment import CONTROL_FRAGMENT
from diloco.protocol.shares import Share
from diloco.swarm.conversations.answer import Host
from diloco.swarm.conversations.bulk import BulkClient, FetchedRecord, FetchedState
from diloco.swarm.conversations.download import fetch, further_donors
from diloco.swarm.node.saved import Saved
from diloco.swarm.wire.streams import BROKEN

__all__ = ["Anchors"]

logger = logging.getLogger(__name__)


class Anchors:
    """The base of `Rounds`. A donor that vanishes or lies is an event; the next one is asked."""

    def __init__(self, host: Host, client: BulkClient) -> None:
        self._host = host
        self._client = client
        self.protocol = host.protocol
        self.replica = host.replica
        self._settings = host.replica.settings
        self._moving = [asyncio.Lock() for _ in self.replica.fragments]  # who holds it reads or writes the anchor
        self.loaded = list(self.protocol.versions)  # which anchors the local parameters started from
        self._applied: dict[int, int] = {}  # base version -> tokens of this peer that are in the control fragment
        self._left_out_tokens: dict[int, int] = {}  # likewise, of those that were discarded
        self._lost_tokens = 0  # found to be discarded since they were last asked for, less those found to be applied

    async def load(self, fragments: Sequence[int] | None = None, mixing: float = 0.0) -> None:
        """The local parameters of these fragments (all by default) become the anchors as they are now."""
        for fragment in range(len(self._moving)) if fragments is None else fragments:
            async with self._moving[fragment]:
                await asyncio.to_thread(self.replica.load_local_, [fragment], mixing)
                self.loaded[fragment] = self.protocol.versions[fragment]

    async def show(self) -> None:
        """The parameters become the anchors, but are not counted as loaded."""
        for fragment, moving in enumerate(self._moving):
            async with moving:
                await asyncio.to_thread(self.replica.show_anchor_, fragment)

    async def snapshot(self, copies: bool) -> Saved:
        """Anchors, outer states and residuals with their versions, each fragment at one moment."""
        protocol, replica = self.protocol, self.replica

        def kept(tensor: Tensor) -> Tensor:
            return tensor.clone() if copies else tensor

        anchors, versions, shares, outer = [], [], [], {}
        for fragment, moving in enumerate(self._moving):
            async with moving:
                anchors.append(kept(replica.anchors[fragment]))
                versions.append(protocol.versions[fragment])
                shares.append(protocol.accounts.shares(fragment))
                if fragment == CONTROL_FRAGMENT:
                    clock, cursor = (
                        protocol.applied_tokens,
                        protocol.accounts.dealer.cursor_at(protocol.versions[fragment]),
                    )
                if fragment in replica.outer:
                    state = replica.outer[fragment]
                    outer[fragment] = (kept(state.master), kept(state.momentum))
        terms = [protocol.leases.term(fragment) for fragment in range(len(versions))]
        residuals = {fragment: kept(residual) for fragment, residual in replica.residuals.items()}
        return Saved(anchors, versions, terms, clock, outer, residuals, cursor, shares, dict(self._applied))

    def restore(self, applied: Mapping[int, int]) -> None:
        """`Saved.applied`, so that what a history that wins lacks of it is known after a restart, too."""
        self._applied = dict(applied)

    async def catch_up(self, fragment: int, donors: Sequence[str], outer: bool, whole: bool = False) -> None:
        """Fetch a fragment from the first donor that has what its header says: the record that is missing here, or,
        when that does not fit (or `whole` is asked for), the state, which others may send parts of.

        When none of them answers, whoever else has the version that the syncer published last is asked for that state.
        """
        further = [] if outer else [donor for donor in further_donors(self._host, fragment) if donor not in donors]
        liars: set[str] = set()
        for donor in [*donors, *further]:
            for have in [-1] if whole or donor in further else [self.protocol.versions[fragment], -1]:
                if donor in liars:
                    break
                try:
                    fetched = await fetch(self._host, self._client, donor, fragment, have, outer, liars)
                    if isinstance(fetched, FetchedRecord):
                        await self._adopt_record(fetched)
                    else:
                        await self._adopt_state(fetched)
                    return
                except (*BROKEN, PayloadError) as error:
                    why = str(error) or type(error).__name__
                    self._host.note("fetch_failed", fragment=fragment, donor=donor, why=why)
                    if not isinstance(error, PayloadError):
                        break
        self.protocol.catch_up_failed(fragment)
        self._host.notify()

    async def _adopt_record(self, record: FetchedRecord) -> None:
        """Apply an update to the anchor; one that does not lead where it says is healed by fetching the state.

        Raises `PayloadError` when it does not follow the anchor that is here.
        """
        header = record.header
        fragment = header.fragment
        async with self._moving[fragment]:
            self._check_free(fragment)
            here = (self.protocol.versions[fragment], self.protocol.digests[fragment])
            if here != (header.version - 1, header.digest_before):
                raise PayloadError(
                    f"a record to version {header.version} of fragment {fragment} does not follow version {here[0]}"
                )
            self._about_to_move(fragment)
            self.protocol.accounts.hear_data_cursor(header)
            step = OuterStep(header.version - 1, len(header.contributors))
            digest = await asyncio.to_thread(self.replica.apply_update_, fragment, record.update, step)
            self._moved(fragment, header.version, digest, contributors=header.contributors)
        if digest != header.digest:
            self._host.note(
                "digest_mismatch", fragment=fragment, version=header.version, got=digest, expected=header.digest
            )
            lease = self.protocol.leases.get(fragment)
            if lease is not None and lease.holder != self.protocol.me:
                await self.catch_up(fragment, (lease.holder,), outer=False, whole=True)

    async def _adopt_state(self, state: FetchedState) -> None:
        """Take a fetched anchor (and outer state) over; `PayloadError` when the bytes are not what the header says."""
        header = state.header
        fragment = header.fragment
        digest = header.digest if state.verified else await asyncio.to_thread(self.replica.digest_of, state.anchor)
        if digest != header.digest:
            raise PayloadError(f"the state of fragment {fragment} has another digest than its header")
        async with self._moving[fragment]:
            self._check_free(fragment)
            if header.version < self.protocol.versions[fragment] + (fragment in self.protocol.syncers):
                raise PayloadError(f"version {header.version} is not newer than what is here")
            self._about_to_move(fragment)
            self.replica.anchors[fragment].copy_(state.anchor)
            if state.master is not None and state.momentum is not None:
                self.replica.hold(fragment, state.master, state.momentum)
            outer = state.master is not None
            if fragment == CONTROL_FRAGMENT:
                self._recount(header.shares)
                self.protocol.accounts.hear_data_cursor(header)
            self._moved(fragment, header.version, digest, outer, shares=header.shares)

    async def stand_by(self, fragment: int) -> None:
        """Be backup of a fragment from its outer state as it is now; without an answer that fits, tried again later."""
        async with self._moving[fragment]:
            if self.protocol.versions[fragment] == 0:
                self.replica.stand_by(fragment)
                return
        lease = self.protocol.leases.get(fragment)
        if lease is None or lease.holder == self.protocol.me:
            return
        try:
            fetched = await self._client.fetch(lease.holder, fragment, -1, outer=True)
        except (*BROKEN, PayloadError) as error:
            logger.debug("fragment %d has no backup here yet: %r", fragment, error)
            return
        async with self._moving[fragment]:
            if not isinstance(fetched, FetchedState) or fetched.momentum is None:
                return
            if fragment not in self.protocol.syncers:
                self.replica.stand_by(fragment, fetched.header.version, fetched.momentum)

    def _about_to_move(self, fragment: int) -> None:
        """Where a contribution may be late, what was learned from this anchor still counts when it has moved on."""
        if self._settings.staleness_limit and self.protocol.trains:
            self.replica.keep_base(fragment)

    def _recount(self, shares: Mapping[str, Share]) -> None:
        """The anchor comes from elsewhere, maybe from the other half of a swarm that was split: what it lacks of this
        peer's tokens is discarded, and its last contribution there is applied, though this half had left it out.
        """
        newest = shares[me].last_version - 1 if (me := self.protocol.me) in shares else -1
        if (found := self._left_out_tokens.pop(newest, 0)) and newest not in self._applied:
            self._applied[newest] = found
            self._lost_tokens -= found
            self._host.note("applied_after_all", tokens=found, base_version=newest, why="another history won")
        lost = {base: tokens for base, tokens in self._applied.items() if base > newest}
        for base, tokens in lost.items():
            del self._applied[base]
            self._lost_tokens += tokens
        if lost:
            self._host.note("discarded", tokens=sum(lost.values()), base_version=min(lost), why="another history won")

    def _check_free(self, fragment: int) -> None:
        if self.protocol.merging(fragment):
            raise PayloadError(f"the next version of fragment {fragment} is being made here")

    def _moved(
        self,
        fragment: int,
        version: int,
        digest: str,
        outer: bool = False,
        contributors: Mapping[str, int] | None = None,
        shares: Mapping[str, Share] | None = None,
    ) -> None:
        """The anchor is at another version; so must be the outer state, which came with it or starts anew from it."""
        if fragment in self.protocol.syncers:
            self.replica.restart(fragment)
        elif not outer:
            self.replica.release(fragment)
        now = self._host.now()
        self._host.do(self.protocol.adopted(fragment, version, digest, now, contributors, shares))

    def moving(self, fragment: int) -> asyncio.Lock:
        """Who holds it may read or write the anchor and the sum of a fragment."""
        return self._moving[fragment]
