"""Bulk streams: contributions up, update records down, state and manifest for newcomers. One stream per transfer.

A contribution, as both sides see it:

1. contributor: header. syncer: verdict (from which chunk on).
2. contributor: payload chunk by chunk, each encoded just before it is sent; syncer: each validated and folded in on
   arrival.
3. syncer: receipt. Both wait for the version to close.
4. syncer: record header, then the update; contributor: keeps it aside until it is whole, applies it, compares the
   digest.

An anchor of more than one part, which `download` puts together:

1. newcomer: state request. donor: the list of part digests (or the one record that is missing, and no more).
2. newcomer, on this stream and on one to each of some other donors: part request. donor: state header, the part.
3. step 2 again and again; the newcomer ends the stream.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.errors import PayloadError
from diloco.outer.codecs import codec
from diloco.outer.digest import part_ranges
from diloco.outer.fragments import CHUNK
from diloco.outer.replica import Replica
from diloco.protocol.download import MAX_DONORS
from diloco.protocol.fragment import Lease
from diloco.protocol.ledger import Units, count, union
from diloco.protocol.messages import Refusal, expect
from diloco.protocol.messages.bulk import (
    MAX_PARTS,
    Contribution,
    PartList,
    PartRequest,
    Receipt,
    Record,
    StateHeader,
    StateRequest,
    UnitGrant,
    UnitRequest,
    Verdict,
)
from diloco.protocol.messages.watching import ManifestReply, ManifestRequest
from diloco.protocol.peer import Peer
from diloco.swarm.wire.malloc import short_lived
from diloco.swarm.wire.streams import BULK, Stream, Traffic, open_bulk
from diloco.swarm.wire.transport import Transport

__all__ = ["BULK", "BulkClient", "FetchedRecord", "FetchedState", "Offer", "Seconds", "open_bulk"]

REFUSED_BYTES = 1 << 24  # that are read of a peer that sends on, so that it gets to read why it is refused
STATE_CODEC = codec("fp32")
PIECE = CHUNK // MAX_DONORS  # elements of a part written at a time: a thin link, shared, is no slower to bring the next


@dataclass
class Seconds:
    """Where the time of one exchange went."""

    comm: float = 0.0
    wait: float = 0.0
    outer: float = 0.0


@dataclass(frozen=True)
class FetchedRecord:
    """An update record, whole; `update` is its payload (uint8)."""

    header: Record
    update: Tensor


@dataclass(frozen=True)
class FetchedState:
    """A fragment's state; master and momentum only from a syncer. `verified`: the anchor has its header's digest."""

    header: StateHeader
    anchor: Tensor
    master: Tensor | None
    momentum: Tensor | None
    verified: bool = False


@dataclass(frozen=True)
class Offer:
    """A donor is ready to send parts of an anchor; `stream` is open, and whoever has the offer closes it."""

    list: PartList
    stream: Stream


@dataclass(frozen=True)
class Unfinished:
    """What is left of a download that broke off: an anchor, and the digest of each part of it that is right."""

    anchor: Tensor
    held: list[str | None]


class BulkClient:
    """This peer's side of the transfers it begins. Everything in `BROKEN`, and `PayloadError`, goes to the caller."""

    def __init__(self, transport: Transport, protocol: Peer, replica: Replica, traffic: Traffic) -> None:
        self._transport = transport
        self._protocol = protocol
        self._replica = replica
        self._traffic = traffic
        self.unfinished: dict[int, Unfinished] = {}  # by fragment, for a while

    async def contribute(
        self, lease: Lease, header: Contribution, seconds: Seconds
    ) -> tuple[Verdict, FetchedRecord | FetchedState | None]:
        """Send one contribution to the syncer and wait for the record, or for the state when several versions passed.

        The wait has no time limit of its own: the caller ends it when the syncer is lost or loses its lease.
        """
        stream = await open_bulk(self._transport, lease.holder, self._traffic)
        try:
            begun_at = asyncio.get_running_loop().time()
            await stream.send(header)
            verdict = expect(await stream.receive(), Verdict)
            if not verdict.accepted:
                record = await self._receive_record(stream) if verdict.record_follows else None
                return verdict, record
            for chunk in range(verdict.first_chunk, len(self._replica.chunks[lease.fragment])):
                await stream.send_payload(self._replica.encode(lease.fragment, chunk))
            expect(await stream.receive(None), Receipt)
            sent_at = asyncio.get_running_loop().time()
            message = await stream.receive(None)
            record_at = asyncio.get_running_loop().time()
            update: FetchedRecord | FetchedState
            if isinstance(message, Record):
                update = await self._receive_record(stream, message)
            else:
                update = await self._receive_state(stream, lease.fragment, expect(message, StateHeader))
            seconds.comm = sent_at - begun_at + asyncio.get_running_loop().time() - record_at
            seconds.wait = record_at - sent_at
            return verdict, update
        finally:
            stream.close()

    async def _receive_record(self, stream: Stream, header: Record | None = None) -> FetchedRecord:
        if header is None:
            header = expect(await stream.receive(), Record)
        if header.fragment >= len(self._replica.fragments):
            raise PayloadError(f"a record for fragment {header.fragment}, which does not exist")
        update = short_lived(self._replica.update_nbytes(header.fragment))
        at = 0
        for start, stop in self._replica.chunks[header.fragment]:
            size = self._replica.down.nbytes(stop - start)
            await stream.receive_payload(update[at : at + size])
            at += size
        return FetchedRecord(header, update)

    async def fetch(
        self, donor: str, fragment: int, have_version: int, outer: bool
    ) -> FetchedRecord | FetchedState | Offer:
        """Get the newest state of a fragment from a donor, or the one record that is missing.

        An anchor of several parts is only offered; with the outer state, which nobody else has, it comes whole.

        Raises:
            PayloadError: the donor refuses, or sends something that is not what its header says.
        """
        in_parts = not outer and 1 < len(part_ranges(self._replica.fragments[fragment].numel)) <= MAX_PARTS
        request = StateRequest(
            manifest_hash=self._protocol.manifest_hash,
            fragment=fragment,
            have_version=have_version,
            outer=outer,
            in_parts=in_parts,
        )
        stream = await self.open(donor)
        kept = False
        try:
            await stream.send(request)
            answer = await stream.receive()
            if isinstance(answer, Record):
                return await self._receive_record(stream, answer)
            if isinstance(answer, PartList) and in_parts:
                kept = True
                return Offer(answer, stream)
            header = expect(answer, StateHeader)
            if header.outer and not outer:
                raise PayloadError(f"asked for the anchor of fragment {fragment}, got its outer state too")
            return await self._receive_state(stream, fragment, header)
        finally:
            if not kept:
                stream.close()

    async def request_units(self, syncer: str, wanted: int, has: Units) -> Units:
        """Ask the control fragment's syncer for that many sequences more; `PayloadError` when it refuses."""
        stream = await self.open(syncer)
        try:
            hash_ = self._protocol.manifest_hash
            await stream.send(UnitRequest(manifest_hash=hash_, wanted=wanted, has=[list(unit) for unit in has]))
            granted = union(expect(await stream.receive(), UnitGrant).units)
            if count(granted) > wanted:
                raise PayloadError(f"asked for {wanted} sequences, got {count(granted)}")
            return granted
        finally:
            stream.close()

    async def open(self, donor: str) -> Stream:
        """A stream to a donor; the caller closes it."""
        return await open_bulk(self._transport, donor, self._traffic)

    async def fetch_part(self, stream: Stream, listed: PartList, part: int, out: Tensor) -> None:
        """Fill `out` (fp32) with a part, which may hold anything after a failure.

        Raises:
            PayloadError: the donor refuses, has another anchor now, or sends values that no anchor has.
        """
        hash_ = self._protocol.manifest_hash
        await stream.send(PartRequest(manifest_hash=hash_, fragment=listed.fragment, digest=listed.digest, part=part))
        header = expect(await stream.receive(), StateHeader)
        if (header.fragment, header.digest) != (listed.fragment, listed.digest):
            there = f"{'another anchor of ' * (header.version == listed.version)}version {header.version}"
            raise PayloadError(f"version {listed.version} is asked for, and {there} is there")
        await receive_vector(stream, out, PIECE)

    async def _receive_state(self, stream: Stream, fragment: int, header: StateHeader) -> FetchedState:
        if header.fragment != fragment:
            raise PayloadError(f"asked for fragment {fragment}, got fragment {header.fragment}")
        vectors = []
        for _ in range(3 if header.outer else 1):
            vectors.append(torch.empty(self._replica.fragments[fragment].numel))
            await receive_vector(stream, vectors[-1])
        return FetchedState(header, vectors[0], *(vectors[1:] if header.outer else (None, None)))


async def request_manifest(transport: Transport, donor: str) -> str:
    """The manifest of the run that a peer is in, as untrusted JSON text."""
    stream = await open_bulk(transport, donor, Traffic())
    try:
        await stream.send(ManifestRequest())
        return expect(await stream.receive(), ManifestReply).text
    finally:
        stream.close()


async def send_record(stream: Stream, record: FetchedRecord, replica: Replica) -> None:
    """Write an update record: header, then its payload in the chunks of the fragment."""
    await stream.send(record.header)
    at = 0
    for start, stop in replica.chunks[record.header.fragment]:
        size = replica.down.nbytes(stop - start)
        await stream.send_payload(record.update[at : at + size])
        at += size


async def send_state(stream: Stream, header: StateHeader, vectors: list[Tensor]) -> None:
    """Write a fragment's state: header, then fp32 vectors that nobody changes meanwhile."""
    await stream.send(header)
    for vector in vectors:
        await send_vector(stream, vector)


async def send_part(stream: Stream, header: StateHeader, part: Tensor) -> None:
    """Write one part of the anchor that the header names."""
    await stream.send(header)
    await send_vector(stream, part, PIECE)


async def send_vector(stream: Stream, vector: Tensor, size: int = CHUNK) -> None:
    """Write fp32 values, so many at a time."""
    for start in range(0, vector.numel(), size):
        values = vector[start : start + size]
        payload = torch.empty(STATE_CODEC.nbytes(values.numel()), dtype=torch.uint8)
        STATE_CODEC.encode(values, payload)
        await stream.send_payload(payload)


async def receive_vector(stream: Stream, out: Tensor, size: int = CHUNK) -> None:
    """Fill a tensor with fp32 values, so many at a time; `PayloadError` for values that are not finite."""
    for start in range(0, out.numel(), size):
        values = out[start : start + size]
        payload = torch.empty(STATE_CODEC.nbytes(values.numel()), dtype=torch.uint8)
        await stream.receive_payload(payload)
        STATE_CODEC.decode(payload, values)


async def refuse(stream: Stream, reason: str) -> None:
    """Tell the other side why its stream is not wanted."""
    await stream.send(Refusal(reason=reason[:2000]))
    await stream.drained(discard=REFUSED_BYTES)
