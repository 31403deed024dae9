"""The answering side of bulk streams: permissions, limits and offences."""

from __future__ import annotations

import logging
import traceback
from contextlib import suppress

from diloco.errors import PayloadError
from diloco.messages.base import Place, Refusal
from diloco.swarm.context import Context
from diloco.swarm.limits import REQUEST_BYTES, Offence, bulk_streams, offences
from diloco.swarm.rpc.registry import ANSWERS, load_questions
from diloco.swarm.wire.streams import BROKEN, PeerStream
from diloco.swarm.wire.transport import ByteReader, ByteWriter

logger = logging.getLogger(__name__)


class Server:
    """Answers the bulk streams that others open, or refuses them with the reason."""

    def __init__(self, context: Context) -> None:
        load_questions()
        self.serving = 0  # open streams
        self._context = context
        self._sides = {kind: side(context) for kind, side in ANSWERS.items()}
        self._limiter = bulk_streams(len(context.replica.fragments))

    async def serve(self, peer: str, reader: ByteReader, writer: ByteWriter) -> None:
        """Handle one incoming stream until it ends."""
        context, stream = self._context, PeerStream(peer, reader, writer, self._context.traffic)
        why = self._limiter.opened(peer, context.now())
        if why is not None:
            logger.debug("a bulk stream of %s is over a limit: %s", peer, why)
            with suppress(*BROKEN, PayloadError):
                # do not wait for the other side, which could hold the stream open
                await stream.send(Refusal(why))
            stream.close()
            return
        self.serving += 1
        try:
            await self._answer(stream)
            await stream.drained()
        except PayloadError as error:
            context.note("refused", peer=peer, why=str(error))
            if isinstance(error, Offence):
                context.offence(peer, str(error))
            with suppress(*BROKEN, PayloadError):
                await stream.refuse(str(error))
        except BROKEN as error:
            logger.debug("a bulk stream of %s broke: %r", peer, error)
            # An error and its frames are a cycle, which would keep the copy of a fragment until the
            # collector runs.
            traceback.clear_frames(error.__traceback__)
        finally:
            self.serving -= 1
            self._limiter.closed(peer)
            stream.close()
            context.tasks.notify()

    async def _answer(self, stream: PeerStream) -> None:
        penalty = self._context.penalties.refusal(stream.peer, self._context.now())
        if penalty is not None:  # its messages are not even decoded
            await stream.refuse(penalty)
            return
        with offences():
            request = await stream.receive(limit=REQUEST_BYTES)
        if request.place is not Place.REQUEST:
            raise Offence(f"a bulk stream cannot begin with {type(request).__name__}")
        objection = self._context.gate.objection(stream.peer, request)
        if objection is not None:
            raise PayloadError(objection)
        side = self._sides.get(type(request))
        if side is None:
            raise PayloadError(f"{type(request).__name__} is not answered here")
        await side.answer(stream, request)
