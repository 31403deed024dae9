"""The answering side of bulk streams: contributions to fragments held here, state and manifest for whoever asks."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from diloco.errors import PayloadError
from diloco.outer.digest import part_digests, part_ranges
from diloco.outer.replica import Replica
from diloco.protocol.actions import Action
from diloco.protocol.limits import Limiter
from diloco.protocol.messages import Message, Refusal, expect
from diloco.protocol.messages.base import MAX_RANGES, Place
from diloco.protocol.messages.bulk import (
    Contribution,
    InnerRequest,
    PartList,
    PartRequest,
    Receipt,
    StateHeader,
    StateRequest,
    UnitGrant,
    UnitRequest,
)
from diloco.protocol.messages.watching import DialBack, ManifestReply, ManifestRequest, Probe, SnapshotRequest
from diloco.protocol.peer import Peer
from diloco.protocol.penalties import Offence, offences
from diloco.protocol.syncer import Syncer
from diloco.swarm.conversations.bulk import FetchedRecord, refuse, send_part, send_record, send_state
from diloco.swarm.conversations.inner_state import SharedSnapshot, Snapshot, send_inner
from diloco.swarm.conversations.probe import ProbeServer
from diloco.swarm.conversations.units import Reserve
from diloco.swarm.conversations.watch import Recorder, send_snapshot
from diloco.swarm.node.spot import SpotChecks
from diloco.swarm.wire.gate import Gate
from diloco.swarm.wire.streams import BROKEN, Stream

__all__ = ["BulkServer", "Host"]

logger = logging.getLogger(__name__)

PART_IDLE_S = 120.0  # an asker may have to wait for a part from another donor before it knows whether it needs us again


class RoundsOf(Protocol):
    """What the answering side needs of the side that moves anchors."""

    def moving(self, fragment: int) -> asyncio.Lock: ...
    def take_chunk(self, syncer: Syncer, peer: str, chunk: int, payload: Tensor) -> None: ...
    def fold_whole(self, syncer: Syncer, peer: str, base_version: int, payloads: Sequence[Tensor]) -> bool: ...


class Host(Protocol):
    """What the conversations need of the node that they belong to."""

    protocol: Peer
    replica: Replica
    records: dict[int, FetchedRecord]
    manifest_text: str
    inner_state: Snapshot
    reserve: Reserve
    recorder: Recorder
    gate: Gate
    checks: SpotChecks

    @property
    def rounds(self) -> RoundsOf: ...
    def now(self) -> float: ...
    def note(self, kind: str, **fields: object) -> None: ...
    def do(self, actions: list[Action]) -> None: ...
    def notify(self) -> None: ...
    def spawn(self, work: Coroutine[Any, Any, Any]) -> None: ...
    async def until(self, condition: Callable[[], bool]) -> None: ...
    async def pause(self, timeout_s: float) -> None: ...


@dataclass(eq=False)
class Still:
    """A fragment's anchor as it was when somebody asked for parts of it."""

    header: StateHeader
    anchor: Tensor


class BulkServer:
    """Answers one bulk stream at a time per call; a peer that sends something invalid is refused with the reason.

    Who asks for parts of an anchor gets them all from the same version. That takes one copy of the fragment for as
    long as anybody reads it, however many do.
    """

    def __init__(self, host: Host, probes: ProbeServer) -> None:
        self._host = host
        self._probes = probes
        self._stills: WeakValueDictionary[tuple[int, str], Still] = WeakValueDictionary()
        self._inner = SharedSnapshot()
        self._limiter = Limiter(len(host.replica.fragments))
        self.serving = 0

    async def serve(self, stream: Stream) -> None:
        """Handle one incoming stream until it ends."""
        why = self._limiter.opened(stream.peer, self._host.now())
        if why is not None:
            logger.debug("a bulk stream of %s is over a limit: %s", stream.peer, why)
            await _quietly(stream.send(Refusal(reason=why)))  # and no more: to wait here is what it may not do
            stream.close()
            return
        self.serving += 1
        try:
            with offences():
                request = await stream.receive()
            penalty = self._host.protocol.penalties.refusal(stream.peer, self._host.now())
            if penalty is not None:
                await refuse(stream, penalty)
                return
            await self._answer(stream, request)
            await stream.drained()
        except PayloadError as error:
            self._host.note("refused", peer=stream.peer, why=str(error))
            if isinstance(error, Offence):
                self._host.do(self._host.protocol.offence(stream.peer, str(error), self._host.now()))
            await _quietly(refuse(stream, str(error)))
        except BROKEN as error:
            logger.debug("a bulk stream of %s broke: %r", stream.peer, error)
            # An error and its frames are a cycle, which would keep the copy of a fragment for long.
            traceback.clear_frames(error.__traceback__)
        finally:
            self.serving -= 1
            self._limiter.closed(stream.peer)
            stream.close()

    async def _answer(self, stream: Stream, request: Message) -> None:
        if request.place is not Place.REQUEST:
            raise Offence(f"a bulk stream cannot begin with {type(request).__name__}")
        objection = self._host.gate.objection(stream.peer, request)
        if objection is not None:
            raise PayloadError(objection)
        match request:
            case Contribution():
                await self._contribution(stream, request)
            case StateRequest():
                await self._state(stream, request)
            case PartRequest():
                await self._part_by_part(stream, request)
            case InnerRequest():
                self._check_run(request)
                await send_inner(stream, await self._inner.get(self._host.inner_state))
            case UnitRequest():
                await self._units(stream, request)
            case ManifestRequest():
                await stream.send(ManifestReply(text=self._host.manifest_text))
            case SnapshotRequest():
                host = self._host
                await send_snapshot(stream, host.recorder, host.protocol, host.manifest_text, host.now())
            case Probe() | DialBack():
                await self._probes.answer(stream, request)
            case _:
                raise PayloadError(f"{type(request).__name__} is not answered here")

    async def _units(self, stream: Stream, request: UnitRequest) -> None:
        granted = None
        if request.manifest_hash == self._host.protocol.manifest_hash:
            granted = self._host.protocol.accounts.lease_units(stream.peer, request.wanted, request.has)
        if granted is None:  # no event: right after a takeover, it asks here once too often
            await refuse(stream, "no units for this peer here")
            return
        await stream.send(UnitGrant(units=[list(unit) for unit in granted[:MAX_RANGES]]))

    async def _contribution(self, stream: Stream, header: Contribution) -> None:
        host, fragment = self._host, header.fragment
        claim = host.protocol.implausible(stream.peer, header, host.now())
        if claim is not None:
            raise Offence(claim)
        verdict = host.protocol.offer(stream.peer, header)
        record = host.records.get(fragment)
        late = record is not None and record.header.version == header.base_version + 1
        if not verdict.accepted:
            late = late and verdict.version > header.base_version
            await stream.send(verdict.model_copy(update={"record_follows": late}))
            if record is not None and late:
                await send_record(stream, record, host.replica)
            return
        await stream.send(verdict)
        syncer = host.protocol.syncers[fragment]
        base_version = host.protocol.versions[fragment]
        if verdict.first_chunk == len(host.replica.chunks[fragment]):
            pass  # it is here already, from a stream that broke later
        elif syncer.folds_whole:
            base_version = await self._collect(stream, syncer, header.base_version)
        else:
            await self._fold(stream, syncer, header, verdict.first_chunk)
        host.do(host.protocol.arrived(stream.peer, fragment, host.now()))
        await stream.send(Receipt())

        def settled() -> bool:
            published = host.protocol.versions[fragment] > base_version
            return published or host.protocol.syncers.get(fragment) is not syncer

        await host.until(settled)
        record = host.records.get(fragment)
        if record is not None and record.header.version == header.base_version + 1:
            await send_record(stream, record, host.replica)
        elif syncer.folds_whole and host.protocol.syncers.get(fragment) is syncer:
            await self._send_state(stream, fragment)
        else:
            raise PayloadError(f"fragment {fragment} has another syncer now")

    async def _collect(self, stream: Stream, syncer: Syncer, learned_from: int) -> int:
        """Receive a contribution whole and fold it in at once; returns the version that it did not see."""
        host, fragment = self._host, syncer.fragment
        payloads = []
        for chunk in range(len(host.replica.chunks[fragment])):
            payloads.append(torch.empty(host.replica.payload_nbytes(fragment, chunk), dtype=torch.uint8))
            await stream.receive_payload(payloads[-1])
        async with host.rounds.moving(fragment):
            version = host.protocol.versions[fragment]
            if host.protocol.syncers.get(fragment) is not syncer:
                raise PayloadError(f"fragment {fragment} has another syncer now")
            with offences():
                folded = host.rounds.fold_whole(syncer, stream.peer, learned_from, payloads)
            if not folded:
                raise PayloadError(f"too many versions of fragment {fragment} were published meanwhile")
            return version

    async def _fold(self, stream: Stream, syncer: Syncer, header: Contribution, first_chunk: int) -> None:
        """Receive a contribution and fold it in chunk by chunk."""
        host, fragment = self._host, syncer.fragment
        for chunk in range(first_chunk, len(host.replica.chunks[fragment])):
            payload = torch.empty(host.replica.payload_nbytes(fragment, chunk), dtype=torch.uint8)
            await stream.receive_payload(payload)
            wanted = syncer.wants(stream.peer, chunk, header.base_version)
            if host.protocol.syncers.get(fragment) is not syncer or not wanted:
                raise PayloadError(f"version {header.base_version + 1} of fragment {fragment} closed meanwhile")
            with offences():
                host.rounds.take_chunk(syncer, stream.peer, chunk, payload)

    async def _state(self, stream: Stream, request: StateRequest) -> None:
        host, fragment = self._host, request.fragment
        self._check(request)
        await host.until(lambda: not host.protocol.merging(fragment))
        record = host.records.get(fragment)
        if record is not None and record.header.version == request.have_version + 1 and not request.outer:
            await send_record(stream, record, host.replica)
            return
        if request.in_parts and not request.outer:
            await self._offer(stream, fragment)
        else:
            await self._send_state(stream, fragment, outer=request.outer)

    def _check(self, request: StateRequest | PartRequest) -> None:
        self._check_run(request)
        if request.fragment >= len(self._host.replica.fragments):
            raise PayloadError(f"fragment {request.fragment} does not exist")

    def _check_run(self, request: StateRequest | PartRequest | InnerRequest) -> None:
        if request.manifest_hash != self._host.protocol.manifest_hash:
            raise PayloadError(f"the manifest {request.manifest_hash[:12]} is not the one here")

    async def _offer(self, stream: Stream, fragment: int) -> None:
        """List the parts of the anchor as it is now, and send those that are asked for."""
        still = await self._still(fragment)
        parts = await asyncio.to_thread(part_digests, still.anchor)
        named = still.header.model_dump(exclude={"kind", "outer"})
        await stream.send(PartList(**named, parts=list(parts)))
        await self._part_by_part(stream, expect(await stream.receive(), PartRequest), still)

    async def _part_by_part(self, stream: Stream, request: PartRequest, still: Still | None = None) -> None:
        """Send the part that is asked for, and the next, until the asker ends the stream."""
        while True:
            self._check(request)
            if still is None:
                still = await self._still(request.fragment, request.digest)
            brief = still.header.model_copy(update={"shares": {}, "open": []})  # they came with the list of parts
            ranges = part_ranges(still.anchor.numel())
            if request.fragment != still.header.fragment or request.part >= len(ranges):
                raise PayloadError(f"part {request.part} of fragment {request.fragment} is not in this conversation")
            if request.digest == still.header.digest:
                start, stop = ranges[request.part]
                await send_part(stream, brief, still.anchor[start:stop])
            else:
                await stream.send(brief)
            request = expect(await stream.receive(PART_IDLE_S), PartRequest)

    async def _still(self, fragment: int, digest: str = "") -> Still:
        """The anchor with that digest, if somebody still reads it, else as it is now."""
        wanted = self._stills.get((fragment, digest))
        if wanted is not None:
            return wanted
        async with self._host.rounds.moving(fragment):
            still = self._stills.get((fragment, self._host.protocol.digests[fragment]))
            if still is None:
                header, [anchor] = self._copy_state(fragment, with_outer=False)
                still = self._stills[fragment, header.digest] = Still(header, anchor)
            return still

    async def _send_state(self, stream: Stream, fragment: int, outer: bool = False) -> None:
        host = self._host
        async with host.rounds.moving(fragment):
            header, vectors = self._copy_state(fragment, outer)
        await send_state(stream, header, vectors)

    def _copy_state(self, fragment: int, with_outer: bool) -> tuple[StateHeader, list[Tensor]]:
        host = self._host
        outer = host.replica.outer.get(fragment) if with_outer else None
        if outer is not None:
            host.protocol.handed_over(fragment)
        vectors = [host.replica.anchors[fragment].clone()]  # a copy, for the anchor moves on while a slow peer reads
        if outer is not None:
            vectors += [outer.master.clone(), outer.momentum.clone()]
        header = StateHeader(
            fragment=fragment,
            version=host.protocol.versions[fragment],
            digest=host.protocol.digests[fragment],
            applied_tokens=host.protocol.applied_tokens,
            outer=outer is not None,
            shares=host.protocol.accounts.shares(fragment),
            **host.protocol.accounts.data_cursor(fragment),
        )
        return header, vectors


async def _quietly(work: Awaitable[None]) -> None:
    try:
        await work
    except (*BROKEN, PayloadError):
        return
