"""The answering side of bulk streams: which function answers which request, and what is refused before any of them."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from diloco.errors import PayloadError
from diloco.protocol.messages import Message, Refusal
from diloco.protocol.messages.base import Place
from diloco.protocol.messages.bulk import Contribution, InnerRequest, PartRequest, StateRequest, UnitRequest
from diloco.protocol.messages.watching import DialBack, ManifestRequest, Probe, SnapshotRequest
from diloco.protocol.penalties import Limiter, Offence, offences
from diloco.swarm.conversations import contribution, manifest, units, watch
from diloco.swarm.conversations.anchor import AnchorDonor
from diloco.swarm.conversations.context import Context
from diloco.swarm.conversations.framing import refuse
from diloco.swarm.conversations.inner_state import InnerDonor
from diloco.swarm.conversations.probe import ProbeServer
from diloco.swarm.wire.streams import BROKEN, Stream
from diloco.swarm.wire.transport import Reader, Writer

__all__ = ["BulkServer"]

logger = logging.getLogger(__name__)

Answer = Callable[[Stream, Any], Awaitable[None]]


class BulkServer:
    """Answers the bulk streams that others open; a peer that sends something invalid is refused with the reason."""

    def __init__(self, context: Context) -> None:
        self.serving = 0  # streams under way
        self.anchors = AnchorDonor(context)
        self.inner = InnerDonor()
        self._context = context
        self._limiter = Limiter(len(context.replica.fragments))
        self._answers = self._table(ProbeServer(context.transport, context.protocol, context.now))

    def _table(self, probes: ProbeServer) -> dict[type[Message], Answer]:
        context = self._context

        async def inner_state(stream: Stream, request: InnerRequest) -> None:
            context.check_run(request.manifest_hash)
            await self.inner.answer(stream)

        async def snapshot(stream: Stream, request: SnapshotRequest) -> None:
            await watch.answer(stream, context.recorder.packed(context.protocol, context.manifest_text, context.now()))

        return {
            Contribution: lambda stream, request: contribution.answer(context, stream, request),
            StateRequest: self.anchors.answer,
            PartRequest: self.anchors.frozen.answer,
            InnerRequest: inner_state,
            UnitRequest: lambda stream, request: units.answer(context, stream, request),
            ManifestRequest: lambda stream, request: manifest.answer(stream, context.manifest_text),
            SnapshotRequest: snapshot,
            Probe: probes.answer,
            DialBack: probes.answer,
        }

    async def serve(self, peer: str, reader: Reader, writer: Writer) -> None:
        """Handle one incoming stream until it ends."""
        context, stream = self._context, Stream(peer, reader, writer, self._context.traffic)
        why = self._limiter.opened(peer, context.now())
        if why is not None:
            logger.debug("a bulk stream of %s is over a limit: %s", peer, why)
            await _quietly(stream.send(Refusal(reason=why)))  # and nothing is awaited: that would hold the stream open
            stream.close()
            return
        self.serving += 1
        try:
            await self._answer(stream)
            await stream.drained()
        except PayloadError as error:
            context.note("refused", peer=peer, why=str(error))
            if isinstance(error, Offence):
                context.do(context.protocol.offence(peer, str(error), context.now()))
            await _quietly(refuse(stream, str(error)))
        except BROKEN as error:
            logger.debug("a bulk stream of %s broke: %r", peer, error)
            # An error and its frames are a cycle, which would keep the copy of a fragment until the collector runs.
            traceback.clear_frames(error.__traceback__)
        finally:
            self.serving -= 1
            self._limiter.closed(peer)
            stream.close()
            context.tasks.notify()

    async def _answer(self, stream: Stream) -> None:
        with offences():
            request = await stream.receive()
        penalty = self._context.protocol.penalties.refusal(stream.peer, self._context.now())
        if penalty is not None:
            await refuse(stream, penalty)
            return
        if request.place is not Place.REQUEST:
            raise Offence(f"a bulk stream cannot begin with {type(request).__name__}")
        objection = self._context.gate.objection(stream.peer, request)
        if objection is not None:
            raise PayloadError(objection)
        answer = self._answers.get(type(request))
        if answer is None:
            raise PayloadError(f"{type(request).__name__} is not answered here")
        await answer(stream, request)


async def _quietly(work: Awaitable[None]) -> None:
    try:
        await work
    except (*BROKEN, PayloadError):
        return
