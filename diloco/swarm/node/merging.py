"""The syncer's side: the next version of a fragment is made out of what was collected, judged and published."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from diloco.outer.replica import OuterStep
from diloco.outer.robust import Judgement
from diloco.protocol.messages.bulk import Record
from diloco.protocol.peer import CONTROL_FRAGMENT
from diloco.protocol.syncer import Close, Syncer
from diloco.swarm.conversations.context import Context
from diloco.swarm.conversations.framing import UpdateRecord
from diloco.swarm.node.anchors import Anchors
from diloco.swarm.node.spot import SpotChecks
from diloco.swarm.wire.malloc import short_lived
from diloco.swarm.wire.threads import in_thread

__all__ = ["Merging"]

Judged = tuple[list[str], Judgement]


class Merging:
    """Makes the versions of the fragments that this peer holds. The arithmetic runs in a thread.

    Should the lease be lost meanwhile, the anchor has moved all the same: the version belongs to the side that lost,
    and the fragment is fetched from its new syncer.
    """

    def __init__(self, context: Context, anchors: Anchors, checks: SpotChecks) -> None:
        self._context = context
        self._protocol = context.protocol
        self._replica = context.replica
        self._anchors = anchors
        self._checks = checks

    async def merge(self, close: Close) -> None:
        """Make the next version, unless the lease was lost or a later version was adopted before it began."""
        fragment = close.fragment
        syncer = self._protocol.syncers.get(fragment)
        async with self._context.locks[fragment].writing():
            if syncer is None or not self._holds(syncer) or syncer.version != close.base_version:
                return
            with self._replica.merging(fragment):
                published = await self._merge(close, syncer)
        if not published:
            lease = self._protocol.leases.get(fragment)
            await self._anchors.catch_up(fragment, () if lease is None else (lease.holder,))

    def _holds(self, syncer: Syncer) -> bool:
        """Whether this peer is still syncer under the same lease; asked again after whatever was awaited."""
        return self._protocol.syncers.get(syncer.fragment) is syncer

    async def _merge(self, close: Close, syncer: Syncer) -> bool:
        """False when the lease was lost meanwhile."""
        fragment, before = close.fragment, self._protocol.digests[close.fragment]
        judged: Judged | None = None
        await self._anchors.about_to_move(fragment)
        if self._holds(syncer) and self._replica.stages:
            close, judged = await self._judge(close, syncer)
        if not self._holds(syncer):
            return False
        update = short_lived(self._replica.update_nbytes(fragment))
        cursor = self._protocol.data_cursor(fragment, close.contributors)  # of this version, should the lease be lost
        digest = await in_thread(self._arithmetic(close, judged, update))
        clock = self._protocol.applied_tokens + (close.tokens if fragment == CONTROL_FRAGMENT else 0)
        lost = not self._holds(syncer)
        header = Record(
            fragment=fragment,
            term=syncer.term,
            version=close.base_version + 1,
            digest_before=before,
            digest=digest,
            contributors=dict(close.contributors),
            applied_tokens=clock,
            **(cursor if lost else self._protocol.data_cursor(fragment, close.contributors)),
        )
        if lost:
            self._protocol.hear_data_cursor(header)
            self._anchors.moved(fragment, header.version, digest, clock, contributors=close.contributors)
            return False
        self._context.records[fragment] = UpdateRecord(header, update)
        now = self._context.now()
        self._context.do(self._protocol.published(fragment, digest, close.contributors, now))
        return True

    def _arithmetic(self, close: Close, judged: Judged | None, update: Tensor) -> Callable[[], str]:
        """Work for a thread: the outer step, chunk by chunk. It fills `update` and returns the anchor's new digest."""
        replica, fragment = self._replica, close.fragment
        step = OuterStep(close.base_version, len(close.contributors), close.delay, close.flush)

        def work() -> str:
            at = 0
            for chunk, (start, stop) in enumerate(replica.chunks[fragment]):
                out = update[at : at + replica.down.nbytes(stop - start)]
                if judged is None:
                    replica.merge_chunk_(fragment, chunk, step, out)
                else:
                    replica.merge_staged_(fragment, chunk, step, *judged, out)
                at += out.numel()
            replica.clear_staged(fragment)
            return replica.digest(fragment)

        return work

    # -- judgement ----------------------------------------------------------------------------------------------------

    async def _judge(self, close: Close, syncer: Syncer) -> tuple[Close, Judged]:
        """What each contribution counts, and the close without those that are left out."""
        judged = await in_thread(self._replica.judge, close.fragment, syncer.weights(close.contributors))
        close = self._without_opposed(close, syncer, *judged)
        if not self._replica.settings.spot_check:
            return close, judged
        failing = await self._checks.failing(self._context, close, syncer, *judged)
        if not failing or not self._holds(syncer):
            return close, judged
        close = syncer.leave_out(close, failing)  # and the others are judged as if these had not come
        judged = await in_thread(self._replica.judge, close.fragment, syncer.weights(close.contributors))
        return self._without_opposed(close, syncer, *judged), judged

    def _without_opposed(self, close: Close, syncer: Syncer, peers: Sequence[str], judged: Judgement) -> Close:
        """The close without the contributions that are left out. An event names their peers, another those clipped."""
        left_out = [peers[i] for i in judged.left_out]
        clipped = [peers[i] for i in judged.clipped if peers[i] not in left_out]
        named = {"fragment": close.fragment, "version": close.base_version + 1}
        if clipped:
            self._context.note("clipped", **named, peers=clipped)
        if not left_out:
            return close
        self._context.note("left_out", **named, peers=left_out, why="they point against the others' contributions")
        return syncer.leave_out(close, left_out)
