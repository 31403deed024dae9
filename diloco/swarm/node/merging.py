"""The syncer's side: the next version of a fragment is made out of what was collected, judged and published."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from diloco.outer.aggregate import Aggregate, Merged, Weighted
from diloco.outer.optimizer import OuterStep
from diloco.outer.state import OuterState
from diloco.protocol.fragment import CONTROL_FRAGMENT, Fragment
from diloco.protocol.heads import lines_digest, shares_digest, sign_head
from diloco.protocol.messages.heads import Head, Record
from diloco.protocol.offers import Close
from diloco.protocol.shares import clock_of
from diloco.protocol.syncer import Syncer
from diloco.swarm.conversations.context import Context
from diloco.swarm.conversations.framing import UpdateRecord
from diloco.swarm.conversations.tasks import in_thread
from diloco.swarm.node.anchors import Anchors
from diloco.swarm.wire.malloc import short_lived

__all__ = ["Merging"]

MOST_SAME = 256  # pairs of peers that are named


class Merging:
    """Makes the versions of the fragments that this peer holds. The arithmetic runs in a thread.

    Should the lease be lost meanwhile, the anchor has moved all the same: the version belongs to the side that lost,
    and the fragment is fetched from its new syncer.
    """

    def __init__(self, context: Context, anchors: Anchors) -> None:
        self._context = context
        self._protocol = context.protocol
        self._replica = context.replica
        self._anchors = anchors
        self._same: set[tuple[str, str]] = set()  # pairs of peers that were named

    async def merge(self, close: Close) -> None:
        """Make the next version, unless the lease was lost or another anchor was adopted before it began."""
        fragment = self._protocol.fragments[close.fragment]
        syncer = fragment.syncer
        async with self._context.locks[close.fragment].writing():
            if syncer is None or not self._context.holds(syncer) or not syncer.closes(close):
                return
            published = await self._merge(close, syncer, self._replica.aggregates[close.fragment])
        if not published:
            donors = () if fragment.lease is None else (fragment.lease.holder,)
            await self._anchors.catch_up(close.fragment, donors)

    async def _merge(self, close: Close, syncer: Syncer, aggregate: Aggregate) -> bool:
        """False when the lease was lost meanwhile. `aggregate` stays what it is, even if the lease comes back."""
        fragment, accounts = self._protocol.fragments[close.fragment], self._protocol.accounts
        index = fragment.index
        await self._anchors.about_to_move(index, close.contributors)
        if not self._context.holds(syncer):
            return False
        update, state = short_lived(self._replica.update_nbytes(index)), self._replica.states[index]
        cursor = accounts.data_cursor(index, close.contributors)  # of this version, should the lease be lost
        weights, discounts = syncer.counted(close.contributors)
        those = [Weighted(peer, syncer.payload(peer), weights[peer], discounts[peer]) for peer in weights]
        step = state.step(close.base_version, len(those), close.delay)
        merged, digest = await in_thread(self._make, aggregate, those, step, state, update)
        self._note_same(close, merged.alike)
        close = self._without_opposed(close, syncer, merged)
        lost = not self._context.holds(syncer)
        if not lost:
            cursor = accounts.data_cursor(index, close.contributors)
        record = self._certificate(fragment, close, syncer, merged.step, digest, cursor)
        if lost:
            accounts.hear_data_cursor(record.head)
            self._anchors.moved(index, record.version, digest, contributors=record.contributors, record=record)
            return False
        self._context.keep_record(UpdateRecord(record, update))
        now = self._context.now()
        self._context.do(self._protocol.published(index, digest, close.contributors, now, record))
        return True

    def _make(
        self, aggregate: Aggregate, those: Sequence[Weighted], step: OuterStep, state: OuterState, update: Tensor
    ) -> tuple[Merged, str]:
        """The version, and the digest of the anchor, which has moved."""
        merged = aggregate.merge(those, step, state, self._protocol.me, update)
        return merged, self._replica.apply_update_(aggregate.fragment.index, merged.update, merged.step)

    def _certificate(
        self, fragment: Fragment, close: Close, syncer: Syncer, step: OuterStep, digest: str, cursor: dict[str, Any]
    ) -> Record:
        """What this peer answers for as the author of a version, with the lines of its contributors."""
        protocol, accounts, version = self._protocol, self._protocol.accounts, close.base_version + 1
        lines = [line for peer in sorted(close.contributors) if (line := syncer.line(peer)) is not None]
        shares = accounts.shares_after(fragment, version, close.contributors)
        control = fragment.index == CONTROL_FRAGMENT
        head = Head(
            fragment=fragment.index, term=syncer.term, version=version, author=protocol.me,
            digest_before=fragment.digest, digest=digest, lines=lines_digest(lines), shares=shares_digest(shares),
            skipped=fragment.skipped,
            pushes=step.pushes, delay=step.delay,
            applied_tokens=clock_of(shares) if control else 0,
            **cursor,
        )  # fmt: skip
        return Record(head=sign_head(protocol.signer, protocol.run_id, head), lines=lines)

    def _note_same(self, close: Close, pairs: Sequence[tuple[str, str, float]]) -> None:
        """Name two peers that learn the same, once each pair."""
        for one, other, cosine in pairs:
            if (one, other) in self._same or len(self._same) >= MOST_SAME:
                continue
            self._same.add((one, other))
            names = [self._name(peer) for peer in (one, other)]
            said = {"peers": [one, other], "names": names, "cosine": round(cosine, 6)}
            self._context.note("same_data", fragment=close.fragment, version=close.base_version + 1, **said)

    def _name(self, peer: str) -> str:
        member = self._protocol.members.get(peer)
        return self._protocol.name if member is None else member.name

    def _without_opposed(self, close: Close, syncer: Syncer, merged: Merged) -> Close:
        """The close without the contributions that are left out. An event names their peers, another those clipped."""
        clipped = [peer for peer in merged.clipped if peer not in merged.left_out]
        named = {"fragment": close.fragment, "version": close.base_version + 1}
        if clipped:
            self._context.note("clipped", **named, peers=clipped)
        if not merged.left_out:
            return close
        why = "they point against the others' contributions"
        self._context.note("left_out", **named, peers=list(merged.left_out), why=why)
        return syncer.leave_out(close, merged.left_out)
