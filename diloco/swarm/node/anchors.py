"""The anchors of a node: loaded into the parameters, fetched from donors, moved by update records, saved.

The protocol core asks for each of these, and is told what came of it. Work on whole fragments runs in a thread. Whoever
reads or moves an anchor holds the fragment's lock until the thread has ended and the protocol knows the new version.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from torch import Tensor

from diloco.errors import PayloadError
from diloco.outer.optimizer import OuterStep
from diloco.protocol.belief import disputants, doubt, passed, unbelieved
from diloco.protocol.forks import goes_on, proved_heavier, renumbered
from diloco.protocol.fragment import CONTROL_FRAGMENT, Fragment
from diloco.protocol.heads import shares_digest
from diloco.protocol.limits import LONGEST_DOUBT_S
from diloco.protocol.messages.bulk import Anchor
from diloco.protocol.messages.heads import Line, Record
from diloco.protocol.numbers import leaps_too_far
from diloco.protocol.penalties import Offence
from diloco.protocol.shares import Share
from diloco.protocol.states import STATES
from diloco.protocol.succession import missed
from diloco.protocol.syncer import Syncer
from diloco.swarm.conversations.anchor import AnchorFetcher
from diloco.swarm.conversations.certificates import Unbelieved, check_follows
from diloco.swarm.conversations.context import Context
from diloco.swarm.conversations.framing import FragmentState, UpdateRecord
from diloco.swarm.conversations.tasks import in_thread
from diloco.swarm.node.own_tokens import OwnTokens
from diloco.swarm.node.saved import Saved
from diloco.swarm.wire.streams import BROKEN

__all__ = ["Anchors"]

NAMED = 16  # peers whose addresses a checkpoint has


class Anchors:
    """Versions of all fragments, and how they move. A donor that vanishes or lies is an event; the next one is asked.

    `loaded` are the versions and digests of the anchors that the local parameters started from. `own_tokens` is what
    became of this peer's own.
    """

    def __init__(self, context: Context, own_tokens: OwnTokens) -> None:
        self._context = context
        self._protocol = context.protocol
        self._replica = context.replica
        self._outer = context.replica.settings
        self._refused: dict[tuple[int, str], tuple[float, float]] = {}  # until when, and for how long
        self._saving = ExitStack()  # locks that are held until the checkpoint is written
        self.fetcher = AnchorFetcher(context)
        self.own_tokens = own_tokens
        self.loaded = [self._here(fragment) for fragment in range(len(context.protocol.fragments))]

    # -- parameters ---------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """The fewest outer steps that led to what the local parameters started from."""
        loaded = zip(self.loaded, self._protocol.fragments, strict=True)
        return max(0, min(version - fragment.skipped for (version, _), fragment in loaded))

    async def load(self, fragments: Sequence[int] | None = None, mixing: float = 0.0) -> None:
        """The local parameters of these fragments (all by default) become the anchors as they are now."""
        for fragment in range(len(self.loaded)) if fragments is None else fragments:
            async with self._context.locks[fragment].reading():
                await in_thread(self._replica.load_local_, [fragment], mixing)
                self.loaded[fragment] = self._here(fragment)

    def _here(self, fragment: int) -> tuple[int, str]:
        return self._protocol.fragments[fragment].version, self._protocol.fragments[fragment].digest

    async def show(self) -> None:
        """The parameters become the anchors, but are not counted as loaded."""
        for fragment, lock in enumerate(self._context.locks):
            async with lock.reading():
                await in_thread(self._replica.show_anchor_, fragment)

    # -- checkpoints --------------------------------------------------------------------------------------------------

    async def snapshot(self, copies: bool) -> Saved:
        """Anchors, outer states and residuals with their versions, each fragment at one moment.

        Without `copies` the tensors are the live ones. They stay locked until `end_snapshot`, and a version that is due
        meanwhile waits: a checkpoint takes long to write, and there may be no memory for copies.
        """
        self.end_snapshot()
        try:
            return await self._snapshot(copies)
        except BaseException:
            self.end_snapshot()
            raise

    async def _snapshot(self, copies: bool) -> Saved:
        protocol, replica = self._protocol, self._replica
        anchors, versions, shares, records, outer = [], [], [], [], {}
        for fragment, lock in enumerate(self._context.locks):
            await lock.start_reading()
            self._saving.callback(lock.stop_reading)
            own, state = replica.aggregates.get(fragment), replica.states.get(fragment)
            vectors = [replica.anchors[fragment], *((own.master, *state.vectors) if own and state else ())]
            anchor, *rest = await in_thread(_clones, vectors) if copies else vectors
            anchors.append(anchor)
            versions.append(protocol.fragments[fragment].version)
            shares.append(protocol.fragments[fragment].shares)
            records.append(protocol.fragments[fragment].record)
            if fragment == CONTROL_FRAGMENT:
                clock, cursor = protocol.applied_tokens, protocol.accounts.dealer.cursor_at(versions[fragment])
            if own and state:
                outer[fragment] = (rest[0], replace(state, vectors=tuple(rest[1:])))
            if copies:
                self.end_snapshot()
        terms = [protocol.leases.term(fragment) for fragment in range(len(versions))]
        if copies:
            await self._context.tasks.until(lambda: not replica.capturing)  # which makes and changes them
        residuals = dict(replica.residuals)
        if copies:
            residuals = dict(zip(residuals, await in_thread(_clones, list(residuals.values())), strict=True))
        applied = self.own_tokens.applied
        others = protocol.others_at()[:NAMED]
        return Saved(anchors, versions, terms, clock, outer, residuals, cursor, shares, applied, records, others)

    def end_snapshot(self) -> None:
        """The tensors of the last snapshot may move again."""
        self._saving.close()

    # -- from donors --------------------------------------------------------------------------------------------------

    async def catch_up(self, fragment: int, donors: Sequence[str], whole: bool = False) -> None:
        """Fetch a fragment from the first donor that has what its header says.

        That are the records that are missing here, or the state when they do not fit, or when `whole` asks for it. A
        donor whose version is not believed is not asked again for a second, then for two, and so on. When no
        donor answers, the peers are asked that have the version that the syncer published last.
        """
        further = [one for one in self.fetcher.further_donors(fragment) if one not in donors]
        dishonest: set[str] = set()
        now, here = self._context.now(), self._protocol.fragments[fragment]
        for donor in [*donors, *further]:
            if now < self._refused.get((fragment, donor), (0.0, 0.0))[0]:
                continue
            whole_only = whole or self._protocol.blank or donor in further or donor in disputants(self._protocol, here)
            for have in [-1] if whole_only else [here.version, -1]:
                if donor in dishonest:
                    break
                try:
                    fetched = await self.fetcher.fetch(donor, fragment, have, dishonest)
                    if isinstance(fetched, FragmentState):
                        await self.adopt_state(fetched)
                    elif not await self.adopt_records(fetched):
                        self._protocol.catch_up_failed(fragment)
                    self._refused.pop((fragment, donor), None)
                    return
                except (*BROKEN, PayloadError) as error:
                    if isinstance(error, Offence | Unbelieved):
                        wait_s = min(LONGEST_DOUBT_S, 2 * self._refused.get((fragment, donor), (0.0, 0.5))[1])
                        self._refused[fragment, donor] = (self._context.now() + wait_s, wait_s)
                        dishonest.add(donor)
                        doubt(self._protocol, fragment, donor, error.version if isinstance(error, Unbelieved) else 0)
                    here.outweighed.add(donor)  # no version waits for it until the anchor moves
                    why = str(error) or type(error).__name__
                    kind = "unbelieved" if isinstance(error, Unbelieved) else "fetch_failed"
                    self._context.note(kind, fragment=fragment, donor=donor, why=why)
                    if not isinstance(error, PayloadError):
                        break
        missed(self._protocol, fragment, self._context.now())
        self._protocol.catch_up_failed(fragment)
        self._context.tasks.notify()

    # -- adoption -----------------------------------------------------------------------------------------------------

    async def adopt_records(self, records: Sequence[UpdateRecord]) -> bool:
        """Apply updates in a row, without those that came by another way meanwhile; whether any was left to apply.

        `PayloadError` as of `adopt_record`.
        """
        last, moved = records[-1].header, False
        here = self._protocol.fragments[last.fragment]
        for record in records:
            if record.header.version > here.version:
                moved = await self.adopt_record(record) or moved
        if not moved and here.version == last.version and here.digest != last.digest:
            raise PayloadError(f"a record to version {last.version} does not follow version {here.version}")
        return moved

    async def adopt_record(self, record: UpdateRecord) -> bool:
        """Apply an update to the anchor. One that does not lead to its digest is healed by fetching the state.

        False when it came by another way meanwhile. Raises `PayloadError` when it does not follow the anchor here.
        """
        header, fragment = record.header, record.header.fragment
        async with self._context.locks[fragment].writing():
            if self._protocol.fragments[fragment].version >= header.version:
                return False
            self._check_free(fragment)
            check_follows(self._protocol, header)
            digest = await self._context.tasks.complete(self._apply(record))
        if digest != header.digest:
            self._context.note(
                "digest_mismatch", fragment=fragment, version=header.version, got=digest, expected=header.digest
            )
            lease = self._protocol.leases.get(fragment)
            if lease is not None and lease.holder != self._protocol.me:
                await self.catch_up(fragment, (lease.holder,), whole=True)
        return True

    async def _apply(self, record: UpdateRecord) -> str:
        header = record.header
        if not header.lines:
            raise PayloadError(f"version {header.version} of fragment {header.fragment} moves without a contribution")
        await self.about_to_move(header.fragment, header.contributors)
        self._protocol.accounts.hear_data_cursor(header.head)
        step = OuterStep(header.version - 1, len(header.lines), header.head.pushes, header.head.delay)
        digest = await in_thread(self._replica.apply_update_, header.fragment, record.update, step)
        self.moved(header.fragment, header.version, digest, contributors=header.contributors, record=header)
        return digest

    async def adopt_state(self, state: FragmentState) -> None:
        """Take a fetched anchor over; `PayloadError` when it is not newer.

        One of another history is taken over if that goes on (see `protocol.forks`), by the syncer under a number above
        both.
        """
        header, here = state.header, self._protocol.fragments[state.header.fragment]
        async with self._context.locks[here.index].writing():
            self._check_free(here.index)
            if leaps_too_far(here.version, header.version):
                raise PayloadError(f"no run gets from version {here.version} to version {header.version}")
            other, syncer, now = header.digest != here.digest, here.syncer, self._context.now()
            if other and not self._goes_on(header, here, state.donor):
                kept = self._protocol.outweighs(here.index, state.donor, header.version, header.digest, now)
                self._context.do(kept)
                return
            if other and syncer is not None and header.version <= here.version:
                record = self._number(syncer, header, here.version + 1)
                state = replace(state, header=header.model_copy(update={"record": record}))
            if state.header.version < here.version + (syncer is not None):
                raise PayloadError(f"version {header.version} is not newer than what is here")
            await self._context.tasks.complete(self._replace(state))

    def _goes_on(self, theirs: Anchor, here: Fragment, donor: str) -> bool:
        if here.syncer is not None and theirs.record is not None:
            if unbelieved(self._protocol, theirs.record, donor) is not None:
                return proved_heavier(self._protocol, theirs)
        return goes_on(theirs, here, donor)

    async def renumber(self, fragment: int, above: int) -> None:
        """As syncer, give the anchor that is here a number above that one: its history goes on (see `forks`)."""
        here = self._protocol.fragments[fragment]
        async with self._context.locks[fragment].writing():
            own, syncer = self._replica.aggregates.get(fragment), here.syncer
            if own is None or syncer is None or here.version > above or self._protocol.merging(fragment):
                self._protocol.catch_up_failed(fragment)
                return
            record = self._number(syncer, here, above + 1)
            passed(self._protocol, fragment)
            own.restart()  # in the turn in which the protocol forgets the contributions too
            self._renumbered(here, record)
        self._context.note("renumbered", fragment=fragment, version=here.version, skipped=here.skipped)

    def _number(self, syncer: Syncer, anchor: Fragment | Anchor, number: int) -> Record:
        """As syncer, sign a higher number for an anchor."""
        self._context.records.pop(syncer.fragment, None)
        delay = self._replica.states[syncer.fragment].delay
        return renumbered(self._protocol, anchor, syncer.term, number, (0, delay))

    def _renumbered(self, here: Fragment, record: Record) -> None:
        """The anchor that is here has a higher number. The lock is held."""
        if self.loaded[here.index] == (here.version, here.digest):
            self.loaded[here.index] = (record.version, here.digest)
        self._protocol.accounts.hear_data_cursor(record.head)
        now = self._context.now()
        self._context.do(self._protocol.adopted(here.index, record.version, here.digest, now, record=record))

    async def _replace(self, state: FragmentState) -> None:
        header, fragment = state.header, state.header.fragment
        here, record = self._protocol.fragments[fragment], header.record
        known = here.digest, shares_digest(here.shares)
        if here.syncer is None and record is not None and (record.digest, record.head.shares) == known:
            self._renumbered(here, record)  # the same contributions, maybe under another number
            return
        base, _ = self.loaded[fragment]
        await self.about_to_move(fragment, [peer for peer, share in header.shares.items() if share.last_version > base])
        await in_thread(self._replica.anchors[fragment].copy_, state.anchor)
        if fragment == CONTROL_FRAGMENT:
            self._recount(header.shares)
            if record is not None:
                self._protocol.accounts.hear_data_cursor(record.head)
        self.moved(fragment, header.version, header.digest, shares=header.shares, record=record, lines=header.lines)

    async def about_to_move(self, fragment: int, contributors: Collection[str]) -> None:
        """Keep the base of what was learned from this anchor, where contributions may be late. The lock is held.

        At one barrier of all, nothing of it is needed once this peer is among the contributors.
        """
        outer, protocol = self._outer, self._protocol
        settled = outer.lockstep and (protocol.me in contributors or not STATES[protocol.state].in_round)
        if protocol.trains and outer.carries_late and not settled:
            await in_thread(self._replica.keep_base, fragment)

    def moved(
        self,
        fragment: int,
        version: int,
        digest: str,
        contributors: Mapping[str, int] | None = None,
        shares: Mapping[str, Share] | None = None,
        record: Record | None = None,
        lines: Iterable[Line] | None = None,
    ) -> None:
        """Tell the protocol that the anchor, whose lock is held, is at another version; its master begins there."""
        if self._protocol.fragments[fragment].syncer is not None:
            self._replica.aggregates[fragment].restart()
        else:
            self._replica.release(fragment)
        now = self._context.now()
        self._context.do(self._protocol.adopted(fragment, version, digest, now, contributors, shares, record, lines))

    def _check_free(self, fragment: int) -> None:
        if self._protocol.merging(fragment):
            raise PayloadError(f"the next version of fragment {fragment} is being made here")

    def _recount(self, shares: Mapping[str, Share]) -> None:
        """The anchor comes from elsewhere, maybe from the other half of a swarm that was split."""
        me, note = self._protocol.me, self._context.note
        last_version, tokens = (shares[me].last_version, shares[me].tokens) if me in shares else (0, 0)
        recount = self.own_tokens.recount(last_version - 1, tokens)
        why = "another history won"
        for base_version, tokens in recount.found.items():
            note("applied_after_all", tokens=tokens, base_version=base_version, why=why)
        if recount.lost:
            note("discarded", tokens=sum(recount.lost.values()), base_version=min(recount.lost), why=why)


def _clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]
