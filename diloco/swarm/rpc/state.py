"""Transfer of the state that is newer than a head, as records or anchor parts, or of one part.

1. Asker: `Get`. Donor: records, each a head with its update in parts; or the first part of its
   anchor, with head, book and the digests of all parts; or one part; or `No`.
2. The asker checks all bytes against their digests before the core gets them.
3. It passes on the parts of an update while the rest is arriving. If its stream breaks, it asks
   the next donor for the missing parts.
"""

from __future__ import annotations

import asyncio
import logging
import traceback

import torch
from msgspec.structs import replace as with_fields
from torch import Tensor

from diloco.core.events import (
    AnchorPart,
    Arriving,
    Asked,
    Broke,
    Gave,
    Moved,
    Records,
    Reply,
    Served,
)
from diloco.core.fragment import Goal
from diloco.core.history import Record
from diloco.errors import PayloadError
from diloco.messages.bulk import Get, No, PartHeader, RecordHeader, Values, Waiting
from diloco.messages.codec import expect
from diloco.outer.codecs import CODECS, Codec
from diloco.outer.digest import part_digest, part_ranges
from diloco.outer.payloads import empty_payload
from diloco.outer.replica import Replica
from diloco.swarm.context import Context
from diloco.swarm.rpc.registry import answers
from diloco.swarm.rpc.updates import (
    Arrival,
    Update,
    payload_digest,
    update_digest,
    update_ranges,
)
from diloco.swarm.wire.streams import BROKEN, STALL_FLOOR_S, PeerStream
from diloco.swarm.wire.tasks import in_thread

logger = logging.getLogger(__name__)

PIECE = 1 << 16  # elements of an anchor sent at a time: few, to share a link fairly
BYTES = 1 << 18  # bytes of an update sent at a time
WAITING_S = 5.0  # interval of messages that the next part is still arriving


def anchor_codec(replica: Replica, number: int) -> Codec:
    """Choose a lossless codec: that of the last update if it carried the values, else fp32."""
    return replica.down if replica.down.carries_values and number > 0 else CODECS["fp32"]


# -- asking ----------------------------------------------------------------------------------------


async def fetch(context: Context, peer: str, get: Get) -> None:
    """Ask a donor, and give the core the result."""
    stream: PeerStream | None = None
    try:
        async with context.open(peer) as stream:
            if not get.want:
                _end_earlier(context, stream, get.fragment)
            with context.moving(lambda: stream.bytes_in, lambda n: context.do(Moved(peer, get, n))):
                answer = await ask(context, stream, get)
    except PayloadError as error:
        context.note("fetch_failed", fragment=get.fragment, donor=peer, why=str(error))
        context.do(Broke(peer, get, bad=True))
    except BROKEN as error:
        logger.debug("%s gave no answer: %r", peer, error)
        # an error and its frames are a reference cycle, which would keep a part in memory
        traceback.clear_frames(error.__traceback__)
        if stream is None or get.want or context.fetching.get(get.fragment) is stream:
            context.do(Broke(peer, get))
    else:
        context.do(Gave(peer, get, answer))


def _end_earlier(context: Context, stream: PeerStream, fragment: int) -> None:
    """End the fragment's earlier fetch, as two streams must not fill one update."""
    earlier = context.fetching.get(fragment)
    context.fetching[fragment] = stream
    if earlier is not None:
        earlier.close()


async def ask(context: Context, stream: PeerStream, get: Get) -> Records | AnchorPart | None:
    """Receive and check the answer of a donor. Raises `PayloadError`."""
    fragment, replica = get.fragment, context.replica
    fetching, held = (
        context.core.facts.fragments[fragment].inbox.fetch,
        context.arrivals.get(fragment),
    )
    goal = fetching.goal if fetching else None
    question = get
    # 1. The last part is here. 2. The core has turned to another donor, so it is not given the
    # update. 3. No donor has a part after the last one: the update is asked for anew.
    if held and not held.is_whole and held.head.prev == get.have[1] and not get.want:
        question = with_fields(get, held=held.head.id, part=held.parts)
    await stream.send(question)
    answer = await stream.receive()
    match answer:
        case No():
            return None
        case RecordHeader():
            return Records(tuple(await _records(context, stream, question, answer)))
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
    context: Context, stream: PeerStream, get: Get, header: RecordHeader
) -> list[Record]:
    records: list[Record] = []
    while True:
        head, fragment = header.head, get.fragment
        if head.fragment != fragment or (records and head.prev != records[-1].head.id):
            follows = f"a record of fragment {head.fragment} does not follow"
            raise PayloadError(f"{follows} what fragment {fragment} has")
        arrival = _arrival(context, get, header)
        if not records and head.prev == get.have[1]:
            context.arrivals[fragment] = arrival
        await _fill_update(context, stream, get, arrival)
        records.append(Record(head, arrival.update))
        if header.more == 0:
            return records
        following = await stream.receive()
        if not isinstance(following, RecordHeader) or following.more != header.more - 1:
            raise PayloadError("a record does not say how many follow")
        header = following


def _arrival(context: Context, get: Get, header: RecordHeader) -> Arrival:
    """Return a new record, or the one that continues where an earlier stream broke."""
    held, head = context.arrivals.get(get.fragment), header.head
    if held and held.head == head and header.part == held.parts:
        return held
    nbytes = context.replica.updates[get.fragment].nbytes
    if len(header.digests) != len(update_ranges(nbytes)) or header.part:
        raise PayloadError(f"a record of fragment {get.fragment} has other parts than were asked")
    if update_digest(header.digests) != head.update:
        raise PayloadError(
            f"the parts of a record of fragment {get.fragment} are not what its head names"
        )
    return Arrival(head, Update(empty_payload(nbytes), header.digests))


async def _fill_update(context: Context, stream: PeerStream, get: Get, arrival: Arrival) -> None:
    """Receive the missing parts, each of which can be passed on at once."""
    facts, is_first = context.core.facts, context.arrivals.get(get.fragment) is arrival
    digests, arrival.live = arrival.update.digests, True
    try:
        while True:
            if arrival.parts and is_first:
                context.do(Arriving(stream.peer, get, arrival.head))
                is_first = False
                fetching = facts.fragments[get.fragment].inbox.fetch
                if fetching is None or fetching.donor != stream.peer:
                    raise ConnectionError("what is arriving is not wanted")
            if arrival.is_whole:
                return
            while isinstance(answer := await stream.receive(), Waiting):
                pass
            expect(answer, Values)
            number = arrival.parts
            part = arrival.update.part(number)
            await stream.receive_payload(part)
            is_right = await in_thread(payload_digest, part) == digests[number]
            # If another donor was asked meanwhile, its stream fills the update from now on.
            if context.fetching.get(get.fragment) is not stream:
                raise ConnectionError("what is arriving comes on another stream")
            if not is_right:
                if context.arrivals.get(get.fragment) is arrival:
                    del context.arrivals[get.fragment]
                raise PayloadError(
                    f"part {number} of an update of fragment {get.fragment}"
                    " is not what its digest says"
                )
            arrival.parts += 1
            context.tasks.notify()
    finally:
        arrival.live = arrival.is_whole


async def _values(
    stream: PeerStream, replica: Replica, fragment: int, part: int, goal: Goal
) -> Tensor:
    start, stop = part_ranges(replica.fragments[fragment].numel)[part]
    values = torch.empty(stop - start, dtype=torch.float32)
    how = anchor_codec(replica, goal.head.number)
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
    """Sends records and parts."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def answer(self, stream: PeerStream, get: Get) -> None:
        """Send what the core decides for a request."""
        context = self._context
        if get.fragment >= len(context.replica.fragments):
            raise PayloadError(f"fragment {get.fragment} does not exist")
        actions = context.do(Asked(stream.peer, get))
        [answer] = [action.answer for action in actions if isinstance(action, Reply)]
        try:
            if isinstance(answer, Records):
                await self._send_records(stream, get, answer.records)
            elif answer is None:
                await stream.send(No())
            else:
                await self._send_values(stream, get, answer)
        finally:
            if answer is not None and not context.tasks.closed:
                context.do(Served(stream.peer, get))

    async def _send_records(
        self, stream: PeerStream, get: Get, records: tuple[Record, ...]
    ) -> None:
        arrival, more = self._context.arrivals.get(get.fragment), len(records)
        for head, update in records:
            more -= 1
            if update is not None:
                arrival = Arrival(head, update, len(update.digests))
            start = get.part if get.held == head.id else 0
            # no circle of peers waits for each other's parts: see the head of `core.rules.tips`
            if arrival is None or arrival.head != head or arrival.parts <= start:
                return await stream.send(No())
            await stream.send(RecordHeader(head, arrival.update.digests, more, start))
            for number in range(start, len(arrival.update.digests)):
                await self._wait_for_part(stream, arrival, number)
                stream.push(Values())
                for piece in torch.split(arrival.update.part(number), BYTES):
                    await stream.send_payload(piece)

    async def _wait_for_part(self, stream: PeerStream, arrival: Arrival, number: int) -> None:
        """Wait until a part is here; send `Waiting` meanwhile, so that the asker does not time out.

        1. An author is killed, and two peers have parts of its last update. 2. The one with fewer
        asks the other, which learns that no peer has the rest. 3. It ends the stream at once, as
        both are about to make that version anew.
        """
        f = self._context.core.facts.fragments[arrival.head.fragment]
        until = self._context.now() + STALL_FLOOR_S
        while arrival.parts <= number:
            try:
                async with asyncio.timeout(WAITING_S):
                    await self._context.tasks.until(
                        lambda: (
                            arrival.parts > number or not (arrival.live or f.inbox.is_to_be_had())
                        )
                    )
                if arrival.parts <= number:
                    raise ConnectionError("nobody has the rest of this update")
            except TimeoutError:
                now = self._context.now()
                until = now + STALL_FLOOR_S if arrival.live else until
                if now >= until:
                    raise
                await stream.send(Waiting())

    async def _send_values(self, stream: PeerStream, get: Get, answer: AnchorPart) -> None:
        replica = self._context.replica
        values = await self._context.read_part(get.fragment, answer.head.id, answer.part)
        if values is None:
            return await stream.send(No())
        whole = PartHeader(answer.head, answer.book, answer.digests)
        await stream.send(Values() if get.want else whole)
        how = anchor_codec(replica, answer.head.number)
        for piece in torch.split(values, PIECE):
            payload = torch.empty(how.nbytes(piece.numel()), dtype=torch.uint8)
            how.encode(piece, payload)
            await stream.send_payload(payload)
