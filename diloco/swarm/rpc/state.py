"""What is newer than a head, in records or in parts; or one part of an anchor.

1. Asker: `Get`. Donor: records, each a head with its update; or the first part of its anchor, with
   head, book and the digests of all parts; or one part; or `No`.
2. The asker checks every byte against a digest before the core hears of it.
"""

from __future__ import annotations

import logging
import traceback

import torch
from blake3 import blake3
from torch import Tensor

from diloco.core.events import AnchorPart, Asked, Broke, Gave, Records, Reply
from diloco.core.facts import Goal
from diloco.core.history import Record
from diloco.errors import PayloadError
from diloco.messages.bulk import Get, No, PartHeader, RecordHeader, Values
from diloco.outer.codecs import CODECS, Codec
from diloco.outer.digest import part_digest, part_ranges
from diloco.outer.payloads import empty_payload
from diloco.outer.replica import Replica
from diloco.swarm.context import Context
from diloco.swarm.rpc.registry import answers
from diloco.swarm.wire.streams import BROKEN, PeerStream
from diloco.swarm.wire.tasks import in_thread

logger = logging.getLogger(__name__)

PIECE = 1 << 16  # elements of an anchor sent at a time: small, so that a shared link stays fair
BYTES = 1 << 20  # of an update sent at a time


def payload_digest(payload: Tensor) -> str:
    """The digest (hex) of encoded bytes (uint8)."""
    return blake3(payload.numpy().data).hexdigest()


def _anchor_codec(replica: Replica, number: int) -> Codec:
    """That of its last update if it carried the values themselves, so that nothing is lost."""
    return replica.down if replica.down.carries_values and number > 0 else CODECS["fp32"]


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
    stream: PeerStream, get: Get, replica: Replica, goal: Goal | None
) -> Records | AnchorPart | None:
    """The answer of a donor, checked; `goal` is what is fetched in parts. Raises `PayloadError`."""
    await stream.send(get)
    answer, fragment = await stream.receive(), get.fragment
    match answer:
        case No():
            return None
        case RecordHeader():
            return Records(tuple(await _records(stream, fragment, answer, replica)))
        case PartHeader(head, book, digests) if not get.want:
            num_parts = len(part_ranges(replica.fragments[fragment].numel))
            if head.fragment != fragment or len(digests) != num_parts:
                raise PayloadError(f"asked for fragment {fragment}, got another one or other parts")
            goal = Goal(head, book, digests)
        case Values() if goal is not None and get.want == goal.head.id:
            pass
        case _:
            kind = type(answer).__name__
            raise PayloadError(f"{kind} is no answer to a question for fragment {fragment}")
    values = await _values(stream, replica, fragment, get.part, goal)
    return AnchorPart(goal.head, goal.book, goal.digests, get.part, values)


async def _records(
    stream: PeerStream, fragment: int, header: RecordHeader, replica: Replica
) -> list[Record]:
    found: list[Record] = []
    while True:
        head = header.head
        if head.fragment != fragment or (found and head.prev != found[-1].head.id):
            said = f"a record of fragment {head.fragment} does not follow"
            raise PayloadError(f"{said} what fragment {fragment} has")
        update = empty_payload(replica.updates[fragment].nbytes)
        for piece in torch.split(update, BYTES):
            await stream.receive_payload(piece)
        if await in_thread(payload_digest, update) != head.update:
            said = f"the update of a record of fragment {fragment} is not what its head names"
            raise PayloadError(said)
        found.append(Record(head, update))
        if header.more == 0:
            return found
        following = await stream.receive()
        if not isinstance(following, RecordHeader) or following.more != header.more - 1:
            raise PayloadError("a record does not say how many follow")
        header = following


async def _values(
    stream: PeerStream, replica: Replica, fragment: int, part: int, goal: Goal
) -> Tensor:
    start, stop = part_ranges(replica.fragments[fragment].numel)[part]
    values = torch.empty(stop - start, dtype=torch.float32)
    how = _anchor_codec(replica, goal.head.number)
    for piece in torch.split(values, PIECE):
        payload = torch.empty(how.nbytes(piece.numel()), dtype=torch.uint8)
        await stream.receive_payload(payload)
        how.decode(payload, piece)
    if await in_thread(part_digest, values) != goal.digests[part]:
        raise PayloadError(f"part {part} of fragment {fragment} is not what its digest says")
    return values


# -- answering -------------------------------------------------------------------------------------


@answers(Get)
class StateServer:
    """Gives records and parts."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def answer(self, stream: PeerStream, get: Get) -> None:
        """Send what the core says."""
        context, replica = self._context, self._context.replica
        if get.fragment >= len(replica.fragments):
            raise PayloadError(f"fragment {get.fragment} does not exist")
        actions = context.do(Asked(stream.peer, get))
        [answer] = [one.answer for one in actions if isinstance(one, Reply)]
        if isinstance(answer, Records):
            for more, record in zip(
                reversed(range(len(answer.records))), answer.records, strict=True
            ):
                await stream.send(RecordHeader(record.head, more))
                for piece in torch.split(record.update, BYTES):
                    await stream.send_payload(piece)
            return
        if answer is None:
            return await stream.send(No())
        values = await context.read_part(get.fragment, answer.head.id, answer.part)
        if values is None:
            return await stream.send(No())
        whole = PartHeader(answer.head, answer.book, answer.digests)
        await stream.send(Values() if get.want else whole)
        how = _anchor_codec(replica, answer.head.number)
        for piece in torch.split(values, PIECE):
            payload = torch.empty(how.nbytes(piece.numel()), dtype=torch.uint8)
            how.encode(piece, payload)
            await stream.send_payload(payload)
