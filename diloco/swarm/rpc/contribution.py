"""Transfer of a contribution's payload to a peer that wants it.

1. Sender: `ContributionHeader`, and the payload from the byte on that the receiver asked for.
2. Receiver: `Got` as bytes arrive, and once all have arrived and match the line. If the stream
   breaks, it keeps the bytes received, and asks for the rest.
"""

from __future__ import annotations

from math import isclose

import torch
from torch import Tensor

from diloco.core import events
from diloco.errors import PayloadError
from diloco.messages.base import MEMBERS, Message, Place
from diloco.messages.codec import expect
from diloco.messages.control import Answer
from diloco.messages.fields import Bytes, Seconds, forget_oldest
from diloco.messages.heads import Line
from diloco.outer.payloads import empty_payload
from diloco.swarm.context import Context
from diloco.swarm.limits import offences
from diloco.swarm.rpc.registry import answers
from diloco.swarm.rpc.updates import payload_digest
from diloco.swarm.wire.streams import BROKEN, PeerStream
from diloco.swarm.wire.tasks import in_thread

PIECE = 1 << 18  # bytes sent at a time
ACKNOWLEDGED_S = 200.0  # an author that sends heartbeats takes more bytes in this time
NORM_ERROR = 1e-3  # relative, because the contributor measured it on other hardware
MOST_PARTIAL = 64  # incomplete payloads that are kept


class ContributionHeader(Message, frozen=True, tag="push"):
    """Header of a contribution; its payload follows, from byte `at` on."""

    place, roles = Place.REQUEST, MEMBERS
    line: Line
    at: Bytes = 0
    age_s: Seconds = 0.0  # since the pseudo-gradient was taken


class Got(Message, frozen=True, tag="got"):
    """Number of bytes received of a payload; if that is all of them, they match the line."""

    nbytes: Bytes = 0


async def send(context: Context, action: events.SendPayload) -> None:
    """Send a payload; the core gets an event if it did not arrive, or is not wanted."""
    line, peer = action.line, action.peer
    name = peer, line.fragment, line.peer, line.stamp
    if name in context.sending:  # offered again while its bytes are being sent
        return
    context.sending.add(name)
    try:
        async with context.open(peer) as stream:
            await stream.send(ContributionHeader(line, action.at, action.age_s))
            await _send(context, stream, action)
    except (*BROKEN, PayloadError) as error:
        why = str(error) or type(error).__name__
        context.note("contribution_broke", fragment=line.fragment, author=peer, why=why)
        context.do(events.Broke(peer, line))
    finally:
        context.sending.discard(name)


async def _send(context: Context, stream: PeerStream, action: events.SendPayload) -> None:
    peer, line, arrived = action.peer, action.line, action.at

    async def acknowledged() -> None:
        nonlocal arrived
        while arrived < action.payload.numel():
            got = expect(await stream.receive(ACKNOWLEDGED_S), Got)
            arrived = got.nbytes

    reading = context.tasks.start(acknowledged())
    try:
        with context.moving(lambda: arrived, lambda n: context.do(events.Moved(peer, line, n))):
            for piece in torch.split(action.payload[action.at :], PIECE):
                if reading.done():  # it is not wanted
                    break
                await stream.send_payload(piece)
            await reading
    finally:
        reading.cancel()


async def check_payload(context: Context, line: Line, payload: Tensor) -> None:
    """Raise `PayloadError` unless a payload (uint8) is what its signed line says."""
    if await in_thread(payload_digest, payload) != line.root:
        raise PayloadError("a payload is not what its line says")
    with offences():  # the contributor signed this norm, and peers check it before passing on
        norm = await in_thread(context.replica.payload_norm, line.fragment, payload)
        if not isclose(norm, line.norm, rel_tol=NORM_ERROR, abs_tol=1e-12):
            raise PayloadError(f"a payload has norm {norm:.6g}, and its line says {line.norm:.6g}")


def received(context: Context, line: Line | Answer) -> int:
    """Count the bytes received of the payload of a contribution."""
    return context.partial.get((line.fragment, line.peer, line.stamp), (None, 0))[1]


@answers(ContributionHeader)
class ContributionServer:
    """Receives payloads."""

    def __init__(self, context: Context) -> None:
        self._context, self._replica = context, context.replica

    async def answer(self, stream: PeerStream, push: ContributionHeader) -> None:
        """Receive a payload (uint8), and give it to the core if it matches its line."""
        line, begun_at = push.line, self._context.now()
        if not self._context.core.wants(line):
            reason = f"no contribution of {line.peer} to fragment {line.fragment} is wanted"
            raise PayloadError(reason)
        most = self._replica.payloads[line.fragment].nbytes - 1

        def acknowledge(nbytes: int) -> None:
            here = min(push.at + nbytes, most)
            stream.push(Got(here))
            self._context.do(events.Moved(stream.peer, line, here))

        with self._context.moving(lambda: stream.payload_in, acknowledge):
            payload = await self._payload(stream, line, push.at)
        await check_payload(self._context, line, payload)
        await stream.send(Got(payload.numel()))
        age_s = push.age_s + self._context.now() - begun_at
        self._context.do(events.Delivered(stream.peer, line, payload, age_s))

    async def _payload(self, stream: PeerStream, line: Line, at: int) -> Tensor:
        partial, name = self._context.partial, (line.fragment, line.peer, line.stamp)
        nbytes = self._replica.payloads[line.fragment].nbytes
        payload, here = partial.pop(name) if name in partial else (empty_payload(nbytes), 0)
        if at > min(here, nbytes):
            raise PayloadError(f"a payload goes on at byte {at}, and {here} are here")
        try:
            for piece in torch.split(payload[at:], PIECE):
                await stream.receive_payload(piece)
                at += piece.numel()
        except BROKEN:
            partial[name] = payload, at
            forget_oldest(partial, MOST_PARTIAL)
            raise
        return payload
