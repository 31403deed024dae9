"""Get: what is newer than a head, in records or in parts, or one part of an anchor.

1. Asker: `Get`. Donor: records, each a head with its update; or the first part of its anchor, with
   head, book and the digests of all parts; or one part; or `No`.
2. The asker checks every byte against a digest before the core hears of it.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Awaitable, Callable

import torch
from blake3 import blake3
from torch import Tensor

from diloco.core.events import Broke, Gave, Part, Records, Reply
from diloco.core.facts import Goal
from diloco.core.history import Record
from diloco.errors import PayloadError
from diloco.messages.bulk import Get, No, PartHeader, RecordHeader, Values
from diloco.outer.codecs import Codec, codec
from diloco.outer.digest import part_digest, part_ranges
from diloco.outer.payloads import empty_payload
from diloco.outer.replica import Replica
from diloco.swarm.context import Context
from diloco.swarm.wire.streams import BROKEN, Stream
from diloco.swarm.wire.tasks import in_thread

logger = logging.getLogger(__name__)

PIECE = 1 << 16  # elements of an anchor sent at a time: small, so that a shared link stays fair
BYTES = 1 << 20  # of an update sent at a time

ReadPart = Callable[[int, str, int], Awaitable[Tensor | None]]
"""Values (fp32) of a part of the anchor of a head, by fragment, head and part; None when that is
not here any more."""


def anchor_codec(replica: Replica, number: int) -> Codec:
    """How an anchor travels without loss: as its last update did, if that carried the values
    themselves."""
    return replica.down if replica.down.carries_values and number > 0 else codec("fp32")


def payload_digest(payload: Tensor) -> str:
    """The digest (hex) of encoded bytes (uint8)."""
    return blake3(payload.numpy().data).hexdigest()


# -- asking ----------------------------------------------------------------------------------------


async def fetch(context: Context, peer: str, get: Get) -> None:
    """Ask a donor, and tell the core what came of it."""
    fetching = context.core.facts.fragments[get.fragment].fetch
    try:
        async with context.open(peer) as stream:
            answer = await ask(stream, get, context.replica, fetching.goal if fetching else None)
    except PayloadError as error:
        context.note("fetch_failed", fragment=get.fragment, donor=peer, why=str(error))
        context.do(Broke(peer, get, bad=True))
    except BROKEN as error:
        logger.debug("%s gave no answer: %r", peer, error)
        # an error and its frames are a cycle, which would keep a part
        traceback.clear_frames(error.__traceback__)
        context.do(Broke(peer, get))
    else:
        context.do(Gave(peer, get, answer))


async def ask(
    stream: Stream, get: Get, replica: Replica, goal: Goal | None
) -> Records | Part | None:
    """The answer of a donor; `goal` is what is fetched in parts. `PayloadError` for an answer that
    is no good."""
    await stream.send(get)
    answer = await stream.receive()
    match answer:
        case No():
            return None
        case RecordHeader():
            return Records(tuple(await _records(stream, get, answer, replica)))
        case PartHeader(head, book, digests) if not get.want:
            if head.fragment != get.fragment or len(digests) != len(_ranges(replica, get.fragment)):
                raise PayloadError(
                    f"asked for fragment {get.fragment}, got another one or other parts"
                )
            return Part(
                head,
                book,
                digests,
                0,
                await _values(stream, replica, get.fragment, 0, head.number, digests),
            )
        case Values() if goal is not None and get.want == goal.head.id:
            values = await _values(
                stream, replica, get.fragment, get.part, goal.head.number, goal.digests
            )
            return Part(goal.head, goal.book, goal.digests, get.part, values)
    raise PayloadError(
        f"{type(answer).__name__} is no answer to a question for fragment {get.fragment}"
    )


def _ranges(replica: Replica, fragment: int) -> list[tuple[int, int]]:
    return part_ranges(replica.fragments[fragment].numel)


async def _records(
    stream: Stream, get: Get, header: RecordHeader, replica: Replica
) -> list[Record]:
    found: list[Record] = []
    while True:
        head = header.head
        if head.fragment != get.fragment or (found and head.prev != found[-1].head.id):
            raise PayloadError(
                f"a record of fragment {head.fragment} does not follow what fragment"
                f" {get.fragment} has"
            )
        update = empty_payload(replica.updates[get.fragment].nbytes)
        for piece in torch.split(update, BYTES):
            await stream.receive_payload(piece)
        if await in_thread(payload_digest, update) != head.update:
            raise PayloadError(
                f"the update of a record of fragment {get.fragment} is not what its head names"
            )
        found.append(Record(head, update))
        if header.more == 0:
            return found
        following = await stream.receive()
        if not isinstance(following, RecordHeader) or following.more != header.more - 1:
            raise PayloadError("a record does not say how many follow")
        header = following


async def _values(
    stream: Stream,
    replica: Replica,
    fragment: int,
    part: int,
    number: int,
    digests: tuple[str, ...],
) -> Tensor:
    start, stop = _ranges(replica, fragment)[part]
    values, how = torch.empty(stop - start, dtype=torch.float32), anchor_codec(replica, number)
    for piece in torch.split(values, PIECE):
        payload = torch.empty(how.nbytes(piece.numel()), dtype=torch.uint8)
        await stream.receive_payload(payload)
        how.decode(payload, piece)
    if await in_thread(part_digest, values) != digests[part]:
        raise PayloadError(f"part {part} of fragment {fragment} is not what its digest says")
    return values


# -- answering -------------------------------------------------------------------------------------


async def serve(stream: Stream, reply: Reply, replica: Replica, read_part: ReadPart) -> None:
    """Send what the core answers."""
    get, answer = reply.get, reply.answer
    if isinstance(answer, Records):
        for more, record in zip(reversed(range(len(answer.records))), answer.records, strict=True):
            await stream.send(RecordHeader(record.head, more))
            for piece in torch.split(record.update, BYTES):
                await stream.send_payload(piece)
        return
    values = None if answer is None else await read_part(get.fragment, answer.head.id, answer.part)
    if answer is None or values is None:
        return await stream.send(No())
    await stream.send(
        Values() if get.want else PartHeader(answer.head, answer.book, answer.digests)
    )
    how = anchor_codec(replica, answer.head.number)
    for piece in torch.split(values, PIECE):
        payload = torch.empty(how.nbytes(piece.numel()), dtype=torch.uint8)
        how.encode(piece, payload)
        await stream.send_payload(payload)
