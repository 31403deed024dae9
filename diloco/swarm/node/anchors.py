"""Tensor work of a node: encoding pseudo-gradients, moving and loading anchors, merging versions,
copying checkpoints.

Work on whole fragments runs in a thread. A coroutine that reads or moves an anchor holds the
fragment's lock until the thread has ended and the core has its event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor

from diloco.core import events
from diloco.core.events import Applied
from diloco.core.history import state_of
from diloco.errors import DivergedError, PayloadError
from diloco.messages.heads import Line
from diloco.outer import aggregate as merging
from diloco.outer.digest import part_digests, part_ranges
from diloco.outer.optimizer import OuterStep
from diloco.swarm.context import Context
from diloco.swarm.node.saved import Saved
from diloco.swarm.rpc.updates import Update, payload_digest, update_digest
from diloco.swarm.wire.tasks import in_thread

MOST_SAME = 64  # pairs of peers with the same data that are reported


class Anchors:
    """Reads and writes anchors. `loaded`: by fragment, number and work of the head last loaded."""

    def __init__(self, context: Context) -> None:
        self._context, self._replica, self._core = context, context.replica, context.core
        # by fragment: head and values of an older anchor, parts of which others still fetch
        self._copies: dict[int, tuple[str, Tensor]] = {}
        self._saving = ExitStack()  # locks held until the checkpoint is written
        self._same_data: set[tuple[str, str]] = set()
        self.loaded = [(f.tip.head.number, f.tip.head.work) for f in context.core.facts.fragments]

    # -- pseudo-gradients and local parameters -----------------------------------------------------

    async def capture(self, line: Line) -> None:
        """Encode a pseudo-gradient; with an overlap, training continues once it is copied."""
        replica, fragment = self._replica, line.fragment
        can_copy = replica.settings.overlap and replica.local.can_copy(replica.fragments[fragment])
        if can_copy and await in_thread(replica.copy_local, fragment):
            self._context.tasks.spawn(self._encode(line))
        else:
            await self._encode(line)

    async def _encode(self, line: Line) -> None:
        async with self._context.locks[line.fragment].reading():
            payload, norm, root = await in_thread(self._encoded, line.fragment)
        self._context.do(events.Captured(line, payload, norm, root))

    def _encoded(self, fragment: int) -> tuple[Tensor, float, str]:
        payload = self._replica.capture(fragment)
        try:
            norm = self._replica.payload_norm(fragment, payload)
        except PayloadError as error:  # other peers would refuse it, too
            remedy = "lower inner.lr or outer.lr; the last checkpoint is good"
            raise DivergedError(f"training diverged: {error}; {remedy}") from None
        return payload, norm, payload_digest(payload)

    async def load(self, fragment: int) -> None:
        """Load the anchor into the local parameters, or mix them if training went on."""
        f = self._core.facts.fragments[fragment]
        mixing = 0.0 if f.learned.steps_left is None or f.stale else self._replica.settings.mixing
        async with self._context.locks[fragment].reading():
            await in_thread(self._replica.load_local_, [fragment], mixing)
            self.loaded[fragment] = (f.tip.head.number, f.tip.head.work)
            self._context.do(events.Loaded(fragment, f.tip.head.id))

    async def show(self) -> None:
        """Load the anchors into the parameters without counting them as loaded."""
        for fragment, lock in enumerate(self._context.locks):
            async with lock.reading():
                await in_thread(self._replica.show_anchor_, fragment)

    # -- versions ----------------------------------------------------------------------------------

    async def merge(self, action: events.Merge) -> None:
        """Make the update of the next version."""
        fragment, replica = action.fragment, self._replica
        # `merge` moves the master, which a checkpoint may be reading
        async with self._context.locks[fragment].writing():
            replica.hold(fragment)
            aggregate, state = replica.aggregates[fragment], replica.states[fragment]
            step = OuterStep(action.number - 1, len(action.shares), action.pushes, action.delay)
            weighted = [
                merging.Weighted(
                    share.line.peer, share.payload, share.line.norm, share.weight, share.discount
                )
                for share in action.shares
            ]
            made = await in_thread(aggregate.merge, weighted, step, state, self._core.facts.me)
            update = await in_thread(Update.of, made.update)
            self._note_merged(action, made)
            left_out = frozenset(made.left_out)
            digest = update_digest(update.digests)
            self._context.do(events.Merged(fragment, action.base, update, digest, left_out))
            # the core dropped this version, and the next one must not contain it, too
            if not self._core.facts.fragments[fragment].inbox.moves_own:
                await self._restart(fragment)

    def _note_merged(self, action: events.Merge, made: merging.MergeResult) -> None:
        note, fields = self._context.note, {"fragment": action.fragment, "version": action.number}
        if clipped := [peer for peer in made.clipped if peer not in made.left_out]:
            note("clipped", **fields, peers=clipped)
        if made.left_out:
            why = "they point against the others' contributions"
            note("left_out", **fields, peers=list(made.left_out), why=why)
        for *pair, cosine in made.alike:
            if tuple(pair) not in self._same_data and len(self._same_data) < MOST_SAME:
                self._same_data.add((pair[0], pair[1]))
                names = [self._core.name(peer) for peer in pair]
                note("same_data", **fields, peers=pair, names=names, cosine=round(cosine, 6))

    async def apply(self, action: events.Apply) -> None:
        """Move an anchor by an update, if the result has the digests of the head."""
        # let contributions that have arrived reach the core first
        await asyncio.sleep(0)
        async with self._context.locks[action.fragment].writing():
            self._context.do(await self._apply(action))

    async def _apply(self, action: events.Apply) -> Applied:
        fragment, head, replica = action.fragment, action.head, self._replica
        if not action.own:
            try:
                norm, parts = await in_thread(replica.foresee, fragment, action.update.payload)
            except PayloadError:
                norm, parts = float("inf"), ()
            if not norm <= action.limit:
                return Applied(fragment, head.id, why="far")
            if state_of(action.book, parts) != head.state:
                here = await in_thread(part_digests, replica.anchors[fragment])
                damaged = here != self._core.facts.fragments[fragment].tip.parts
                return Applied(fragment, head.id, why="digest", damaged=damaged)
        await self._keep_copies(fragment)
        step = OuterStep(head.number - 1, len(head.counted), action.pushes, head.delay)
        await in_thread(replica.apply_update_, fragment, action.update.payload, step)
        if action.own:
            parts = await in_thread(part_digests, replica.anchors[fragment])
        else:
            await self._restart(fragment)
        return Applied(fragment, head.id, parts)

    async def replace(self, action: events.Replace) -> None:
        """Replace an anchor by fetched parts, whose digests were checked."""
        await asyncio.sleep(0)
        fragment, anchor = action.fragment, self._replica.anchors[action.fragment]
        async with self._context.locks[fragment].writing():
            await self._keep_copies(fragment)
            await in_thread(_fill, anchor, action.parts)
            await self._restart(fragment)
            parts = await in_thread(part_digests, anchor)
            self._context.do(Applied(fragment, action.head.id, parts))

    async def _restart(self, fragment: int) -> None:
        if fragment in self._replica.aggregates:
            await in_thread(self._replica.aggregates[fragment].restart)

    async def _keep_copies(self, fragment: int) -> None:
        """Before an anchor moves, copy it for peers that fetch it, and keep training's base."""
        core = self._core.facts
        f, copy = core.fragments[fragment], self._copies.get(fragment)
        pinned = f.outbox.kept(self._context.now())
        kept = pinned.head.id if pinned else ""
        if kept == f.tip.head.id:
            self._copies[fragment] = (kept, await in_thread(self._replica.anchors[fragment].clone))
        elif copy and copy[0] != kept:
            del self._copies[fragment]
        if core.trains_now and f.learned.steps_left is None and f.learned.base == f.tip.head.id:
            await in_thread(self._replica.keep_base, fragment)

    async def read_part(self, fragment: int, head: str, part: int) -> Tensor | None:
        """Read a part (fp32) of the anchor of a head; None if that anchor is gone."""
        f, copy = self._core.facts.fragments[fragment], self._copies.get(fragment)
        start, stop = part_ranges(self._replica.fragments[fragment].numel)[part]
        if copy and copy[0] == head:
            return copy[1][start:stop]
        async with self._context.locks[fragment].reading():
            is_here = f.tip.head.id == head
            return self._replica.anchors[fragment][start:stop].clone() if is_here else None

    def follow(self) -> None:
        """Keep momentum and window of fragments that this peer authors, or would inherit."""
        core = self._core.facts
        heirs = [f.index for f in core.fragments if core.me in (core.author_of(f), core.second(f))]
        for f in core.fragments:
            if (
                f.index in self._replica.aggregates
                and core.author_of(f) != core.me
                and not f.round.merge
            ):
                self._replica.release(f.index)
        self._replica.follow(heirs)

    # -- checkpoints -------------------------------------------------------------------------------

    async def snapshot(self, copies: bool) -> Saved:
        """Return anchors with tips, outer states and residuals, consistent within each fragment.

        Without `copies` the tensors are the live ones, locked until `end_snapshot`: there may be no
        memory for copies.
        """
        self.end_snapshot()
        try:
            return await self._snapshot(copies)
        except BaseException:
            self.end_snapshot()
            raise

    async def _snapshot(self, copies: bool) -> Saved:
        core, replica = self._core.facts, self._replica
        anchors, tips, outer = [], [], {}
        for fragment, lock in enumerate(self._context.locks):
            await lock.start_reading()
            self._saving.callback(lock.stop_reading)
            aggregate = replica.aggregates.get(fragment)
            state = replica.states.get(fragment)  # with copies, the entry may be dropped below
            vectors = [replica.anchors[fragment]]
            if aggregate and state:
                # The master already contains a version that is made and not yet applied.
                ahead = core.fragments[fragment].inbox.moves_own
                vectors += [vectors[0] if ahead else aggregate.master, *state.vectors]
            anchor, *rest = await in_thread(_clones, vectors) if copies else vectors
            anchors.append(anchor)
            tips.append(replace(core.fragments[fragment].tip))
            if aggregate and state:
                outer[fragment] = (rest[0], replace(state, vectors=tuple(rest[1:])))
            if copies:
                self.end_snapshot()
        # a capture under way changes residuals
        await self._context.tasks.until(lambda: not replica.capturing)
        residuals = dict(replica.residuals)
        if copies:
            values = await in_thread(_clones, list(residuals.values()))
            residuals = dict(zip(residuals, values, strict=True))
        others = self._core.others_at()
        return Saved(anchors, tips, core.loop.processed, core.loop.stamp, outer, residuals, others)

    def end_snapshot(self) -> None:
        """Let the tensors of the last snapshot move again."""
        self._saving.close()


def _fill(anchor: Tensor, parts: Sequence[Tensor]) -> None:
    for (start, stop), values in zip(part_ranges(anchor.numel()), parts, strict=True):
        anchor[start:stop].copy_(values)


def _clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [tensor.clone() for tensor in tensors]
