"""The parts of an anchor, from several donors at a time; and the copies of an anchor that its donors read from.

1. A newcomer asked one donor for a fragment (see `anchor`). The donor sends the list of the digests of its parts.
2. The newcomer believes the list if together the digests give the one that the syncer published. Parts that an earlier
   attempt left, or that an anchor here already has right, are kept.
3. On this stream, and on one to each of some other peers that announce the version, it asks for a part, then for the
   next. The donor sends its state header and the part. Each part is checked as it arrives. `PartPlan` decides which
   donor is asked for which part. The newcomer ends the streams.

Memory: one fp32 vector of the fragment for the newcomer, into which the parts are received. A donor has one for each
version that somebody still reads, however many do, and of a few versions at most (`limits`).
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from weakref import WeakValueDictionary

from torch import Tensor

from diloco.errors import PayloadError
from diloco.outer.digest import part_digest, part_digests, part_ranges
from diloco.outer.fragments import CHUNK
from diloco.protocol.download import MAX_DONORS, PartPlan
from diloco.protocol.limits import COPIES, MIN_BYTES_PER_S, PATIENCE_S
from diloco.protocol.messages import expect
from diloco.protocol.messages.bulk import PartList, PartRequest, StateHeader, StateRequest
from diloco.protocol.rendezvous import score
from diloco.swarm.conversations.context import Context
from diloco.swarm.conversations.framing import (
    FragmentState,
    anchor_codec,
    receive_vector,
    send_records,
    send_state,
    send_vector,
)
from diloco.swarm.conversations.tasks import in_thread
from diloco.swarm.wire.streams import BROKEN, Stream

__all__ = ["AnchorDonor", "Download", "PartialAnchor", "announcing", "copy_state"]

PIECE = CHUNK // MAX_DONORS  # elements written at a time: on a shared thin link the next donor's piece is not late
RECRUIT_S = 1.0  # a newcomer hears of its first donor before it hears of the others
PART_IDLE_S = 120.0  # the asker may first have to see whether another donor sends the part that is missing


@dataclass(frozen=True)
class PartialAnchor:
    """An anchor (numel,) of which some parts are right: `held` has their digests, and None for the others."""

    anchor: Tensor
    held: list[str | None]


def announcing(context: Context, fragment: int, version: int) -> list[str]:
    """Peers that announce this version and stay, in an order that differs between the peers that ask."""
    able = [
        member.peer
        for member in context.protocol.members.all()
        if member.status.versions[fragment] == version and member.status.state != "leaving"
    ]
    return sorted(able, key=lambda peer: score(f"{context.protocol.me} {peer}", fragment))


class Download:
    """One anchor on its way, in one task per donor.

    Args:
        donor, stream: the peer that sent the list, and the open stream to it, which the caller closes.
        partial: what is here already. The parts are received into its anchor.
        dishonest_donors: peers that are not asked; those found here are added.

    A donor that fails is an event (`fetch_failed`, `refused`, `lying_donor`). `run` raises only when none is left.
    """

    def __init__(
        self,
        context: Context,
        donor: str,
        stream: Stream,
        listed: PartList,
        partial: PartialAnchor,
        dishonest_donors: set[str],
    ) -> None:
        self._context, self._donor, self._list = context, donor, listed
        self._streams = {donor: stream}  # open, and not used yet
        self._anchor = partial.anchor
        self._dishonest = dishonest_donors
        self._plan = PartPlan(listed.parts, partial.held)
        self._ranges = part_ranges(self._anchor.numel())

    @property
    def partial(self) -> PartialAnchor:
        """What has arrived so far."""
        return PartialAnchor(self._anchor, self._plan.held())

    async def run(self) -> FragmentState:
        """Returns the whole anchor; raises `ConnectionError` when no donor is left that has this version of it."""
        plan, tasks = self._plan, list[asyncio.Task[None]]()
        try:
            while not plan.complete:
                tasks += [self._context.tasks.start(self._ask(donor)) for donor in plan.recruit(self._donors())]
                if not tasks:
                    raise ConnectionError(f"nobody has version {self._list.version} any more")
                await self._context.tasks.pause(RECRUIT_S)
                for task in [task for task in tasks if task.done()]:
                    tasks.remove(task)
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
        listed = self._list
        header = StateHeader(
            fragment=listed.fragment, digest=listed.digest, record=listed.record, shares=listed.shares,
            lines=listed.lines,
        )  # fmt: skip
        return FragmentState(header, self._anchor, donor=self._donor)

    def _donors(self) -> list[str]:
        able = [self._donor, *announcing(self._context, self._list.fragment, self._list.version)]
        return [donor for donor in able if donor not in self._dishonest]

    async def _ask(self, donor: str) -> None:
        """Fetch parts from one donor, until every part is here or the donor fails."""
        context, plan, fragment = self._context, self._plan, self._list.fragment
        try:
            async with self._stream_to(donor) as stream:
                await self._fetch_parts(donor, stream)
        except PayloadError as error:
            plan.exclude(donor)
            context.note("refused", peer=donor, fragment=fragment, why=str(error))
        except BROKEN as error:
            plan.lost(donor)
            context.note("fetch_failed", fragment=fragment, donor=donor, why=str(error) or type(error).__name__)
            traceback.clear_frames(error.__traceback__)  # otherwise they keep the anchor until the collector runs

    @asynccontextmanager
    async def _stream_to(self, donor: str) -> AsyncIterator[Stream]:
        first = self._streams.pop(donor, None)
        if first is None:
            async with self._context.open(donor) as stream:
                yield stream
        else:
            with closing(first):
                yield first

    async def _fetch_parts(self, donor: str, stream: Stream) -> None:
        context, plan = self._context, self._plan
        while not plan.complete:
            part = plan.next_part(donor)
            if part is None:
                await context.tasks.pause(RECRUIT_S)  # another donor may give its part back
                continue
            start, stop = self._ranges[part]
            values = self._anchor[start:stop]
            await fetch_part(context, stream, self._list, part, values)
            if not plan.arrived(donor, await in_thread(part_digest, values)):
                plan.exclude(donor)
                self._dishonest.add(donor)
                context.note("lying_donor", peer=donor, fragment=self._list.fragment, part=part)
                return
            context.tasks.notify()


async def fetch_part(context: Context, stream: Stream, listed: PartList, part: int, out: Tensor) -> None:
    """Fill `out` (fp32) with a part, which may hold anything after a failure.

    Raises `PayloadError` when the donor refuses, has another anchor now, or sends values that no anchor has.
    """
    hash_ = context.protocol.manifest_hash
    await stream.send(PartRequest(manifest_hash=hash_, fragment=listed.fragment, digest=listed.digest, part=part))
    header = expect(await stream.receive(), StateHeader)
    if (header.fragment, header.digest) != (listed.fragment, listed.digest):
        there = f"{'another anchor of ' * (header.version == listed.version)}version {header.version}"
        raise PayloadError(f"version {listed.version} is asked for, and {there} is there")
    await receive_vector(stream, out, PIECE, anchor_codec(context.replica, header.version))


async def copy_state(context: Context, fragment: int) -> FragmentState:
    """A copy of a fragment's anchor as it is now, which may move on while a slow peer reads."""
    async with context.locks[fragment].reading():
        anchor = await in_thread(context.replica.anchors[fragment].clone)
        here = context.protocol.fragments[fragment]
        if here.record is None and here.version > 0:
            raise PayloadError(f"version {here.version} of fragment {fragment} has no certificate")
        header = StateHeader(
            fragment=fragment, digest=here.digest, record=here.record,
            shares=here.shares, lines=here.further_lines(),
        )  # fmt: skip
    return FragmentState(header, anchor)


class AnchorDonor:
    """The donor's side. A peer that asks for parts gets them all from the same version.

    On failure: a reader that takes longer than the slowest honest link is cut off, and one for whose copy there is no
    room is refused with the reason (`PayloadError`). Either asks another donor, or this one later.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._kept: WeakValueDictionary[tuple[int, str], FragmentState] = WeakValueDictionary()
        self._copying = [asyncio.Lock() for _ in context.replica.fragments]

    async def answer(self, stream: Stream, request: StateRequest) -> None:
        """Send the records that are missing, or offer the parts of a state, or send it whole."""
        context, fragment = self._context, request.fragment
        self._check(request)
        await context.tasks.until(lambda: not context.protocol.merging(fragment))
        records = context.records_since(fragment, request.have_version)
        if records:
            await send_records(stream, records, context.replica)
        else:
            nbytes = 4 * context.replica.fragments[fragment].numel
            async with asyncio.timeout(PATIENCE_S + 4 * nbytes / MIN_BYTES_PER_S):
                if request.in_parts:
                    await self._offer(stream, fragment)
                else:
                    await send_state(stream, await self.freeze(fragment), context.replica)

    async def _offer(self, stream: Stream, fragment: int) -> None:
        """List the parts of the anchor as it is now, and send those that are asked for."""
        frozen = await self.freeze(fragment)
        digests = await in_thread(part_digests, frozen.anchor)
        header = frozen.header
        listed = PartList(
            fragment=fragment, digest=header.digest, record=header.record, shares=header.shares, lines=header.lines,
            parts=list(digests),
        )  # fmt: skip
        await stream.send(listed)
        await self.answer_part(stream, expect(await stream.receive(), PartRequest), frozen)

    async def answer_part(self, stream: Stream, request: PartRequest, frozen: FragmentState | None = None) -> None:
        """Send the part that is asked for, and the next, until the asker ends the stream."""
        while True:
            self._check(request)
            if frozen is None:
                frozen = await self.freeze(request.fragment, request.digest)
            header = frozen.header.model_copy(update={"shares": {}, "lines": []})  # they came with the list of parts
            ranges = part_ranges(frozen.anchor.numel())
            if request.fragment != header.fragment or request.part >= len(ranges):
                raise PayloadError(f"part {request.part} of fragment {request.fragment} is not in this conversation")
            await stream.send(header)
            if request.digest == header.digest:
                start, stop = ranges[request.part]
                codec = anchor_codec(self._context.replica, header.version)
                await send_vector(stream, frozen.anchor[start:stop], PIECE, codec)
            request = expect(await stream.receive(PART_IDLE_S), PartRequest)

    async def freeze(self, fragment: int, digest: str = "") -> FragmentState:
        """The anchor with that digest, if somebody still reads it; otherwise as it is now."""
        async with self._copying[fragment]:  # two that ask for the same version share a copy
            frozen = self._kept.get((fragment, digest))
            if frozen is None:
                frozen = self._kept.get((fragment, self._context.protocol.fragments[fragment].digest))
            if frozen is None:
                if sum(kept == fragment for kept, _ in self._kept) >= COPIES:
                    raise PayloadError(f"{COPIES} versions of fragment {fragment} are being read here; try again later")
                frozen = await copy_state(self._context, fragment)
                self._kept[fragment, frozen.header.digest] = frozen
            return frozen

    def _check(self, request: StateRequest | PartRequest) -> None:
        """`PayloadError` when a request is not of this run."""
        self._context.check_run(request.manifest_hash)
        if request.fragment >= len(self._context.replica.fragments):
            raise PayloadError(f"fragment {request.fragment} does not exist")
