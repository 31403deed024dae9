"""The answering side of bulk streams: which function answers which request, and what is refused before any of them."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from diloco.errors import PayloadError
from diloco.protocol.limits import REQUEST_BYTES, bulk_streams
from diloco.protocol.messages import Message, Refusal
from diloco.protocol.messages.base import Place
from diloco.protocol.messages.bulk import Contribution, InnerRequest, PartRequest, StateRequest, UnitRequest
from diloco.protocol.messages.watching import (
    DialBack,
    FileRequest,
    ManifestReply,
    ManifestRequest,
    Probe,
    SnapshotRequest,
)
from diloco.protocol.penalties import Offence, offences
from diloco.swarm.conversations import contribution, units
from diloco.swarm.conversations.context import Context
from diloco.swarm.conversations.files import FileDonor
from diloco.swarm.conversations.inner_state import InnerDonor, Snapshot, send_inner
from diloco.swarm.conversations.parts import AnchorDonor
from diloco.swarm.conversations.probe import ProbeServer
from diloco.swarm.conversations.watch import send_snapshot
from diloco.swarm.wire.streams import BROKEN, Stream
from diloco.swarm.wire.transport import Reader, Writer

__all__ = ["BulkServer"]

logger = logging.getLogger(__name__)

Answer = Callable[[Stream, Any], Awaitable[None]]


class BulkServer:
    """Answers the bulk streams that others open; a peer that sends something invalid is refused with the reason."""

    def __init__(self, context: Context, inner_state: Snapshot) -> None:
        self.serving = 0  # streams under way
        self.anchors = AnchorDonor(context)
        self._context = context
        self._limiter = bulk_streams(len(context.replica.fragments))
        self._inner = InnerDonor(inner_state)
        probes = ProbeServer(context.transport, context.protocol, context.now)
        self._answers: dict[type[Message], Answer] = {
            Contribution: lambda stream, request: contribution.answer(context, stream, request, self.anchors.freeze),
            StateRequest: self.anchors.answer,
            PartRequest: self.anchors.answer_part,
            InnerRequest: self._send_inner,
            UnitRequest: lambda stream, request: units.answer(context, stream, request),
            ManifestRequest: lambda stream, request: stream.send(
                ManifestReply(text=context.manifest_text, seal=context.gate.memory.seal)
            ),
            SnapshotRequest: lambda stream, request: send_snapshot(stream, context.recorder.packed(context.now())),
            FileRequest: FileDonor(context).answer,
            Probe: probes.measure,
            DialBack: probes.call_back,
        }

    async def serve(self, peer: str, reader: Reader, writer: Writer) -> None:
        """Handle one incoming stream until it ends."""
        context, stream = self._context, Stream(peer, reader, writer, self._context.traffic)
        why = self._limiter.opened(peer, context.now())
        if why is not None:
            logger.debug("a bulk stream of %s is over a limit: %s", peer, why)
            with suppress(*BROKEN, PayloadError):
                await stream.send(Refusal(reason=why))  # and no answer is awaited: that would hold the stream open
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
            with suppress(*BROKEN, PayloadError):
                await stream.refuse(str(error))
        except BROKEN as error:
            logger.debug("a bulk stream of %s broke: %r", peer, error)
            # An error and its frames are a cycle, which would keep the copy of a fragment until the collector runs.
            traceback.clear_frames(error.__traceback__)
        finally:
            self.serving -= 1
            self._limiter.closed(peer)
            stream.close()
            context.tasks.notify()
        self.forget_records()

    def forget_records(self) -> None:
        """Drop the updates to a version that every connected peer has; a peer that comes later gets the state."""
        members = self._context.protocol.members.all()
        for fragment, records in list(self._context.records.items()):
            newest = records[-1].header.version
            adopted = all(member.status.versions[fragment] >= newest for member in members)
            if adopted and self.serving == 0:
                del self._context.records[fragment]

    async def _answer(self, stream: Stream) -> None:
        penalty = self._context.protocol.penalties.refusal(stream.peer, self._context.now())
        if penalty is not None:  # and nothing that it says is decoded
            await stream.refuse(penalty)
            return
        with offences():
            request = await stream.receive(limit=REQUEST_BYTES)
        if request.place is not Place.REQUEST:
            raise Offence(f"a bulk stream cannot begin with {type(request).__name__}")
        objection = self._context.gate.objection(stream.peer, request)
        if objection is not None:
            raise PayloadError(objection)
        answer = self._answers.get(type(request))
        if answer is None:
            raise PayloadError(f"{type(request).__name__} is not answered here")
        await answer(stream, request)

    async def _send_inner(self, stream: Stream, request: InnerRequest) -> None:
        self._context.check_run(request.manifest_hash)
        await send_inner(stream, await self._inner.get())
