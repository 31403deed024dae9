"""The control mesh: one outgoing stream to every peer, one incoming from it, and the DHT to find new ones.

What is said goes out on our stream; what we hear comes in on theirs. Bulk bytes never travel here, so a link saturated
by a pseudo-gradient does not starve heartbeats. A stream that ends is noticed at once:

1. A peer is killed. Our stream to it and its stream to us read end-of-file within milliseconds.
2. We dial it once more. Its daemon is gone too, or lingers and accepts a stream that nobody answers.
3. No answer: it is lost, and the protocol drops it from the round that is waiting for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Mapping
from typing import Protocol

from diloco.errors import PayloadError
from diloco.protocol.messages import Message, Refusal, UnknownKind, expect
from diloco.protocol.messages.control import Hello, Status
from diloco.protocol.peer import Peer
from diloco.protocol.penalties import Offence, offences
from diloco.swarm.wire.deadline import within
from diloco.swarm.wire.streams import BROKEN, Stream, Traffic
from diloco.swarm.wire.transport import Reader, Refused, Transport, Writer

__all__ = ["ControlMesh", "Participant"]

logger = logging.getLogger(__name__)

CONTROL = "diloco/1/control"
DIAL_TIMEOUT_S = 10.0
RECORD_LIFE_S = 60.0
RECORD_PERIOD_S = 15.0


class Participant(Protocol):
    """What the mesh needs of the node that it connects to others; all of it is called in the loop.

    The node is told of a peer that connected (`greeted`), spoke (`heard`), said what no honest one does (`offended`) or
    is gone (`lost`); why another does not let it in (`refused`); what the DHT says of all (`named`); and that a call of
    its own was answered or given up (`notify`). It says why a peer may not begin with that hello (`objection`), and
    what the DHT shall say of itself (`record`).
    """

    protocol: Peer
    traffic: Traffic

    def greeted(self, peer: str, hello: Hello) -> None: ...
    def heard(self, peer: str, message: Message) -> None: ...
    def offended(self, peer: str, why: str) -> None: ...
    def lost(self, peer: str, why: str) -> None: ...
    async def refused(self, peer: str, reason: str) -> None: ...
    def named(self, records: Mapping[str, object]) -> None: ...
    def notify(self) -> None: ...
    def objection(self, peer: str, hello: Hello) -> str | None: ...
    def record(self) -> list[str]: ...


class ControlMesh:
    """Keeps a node connected to all others of the run.

    A peer that cannot be reached is left out and dialled again when it is heard of again. Nothing here raises at the
    owner; a wrong run or manifest is refused on the stream with the reason.
    """

    def __init__(self, transport: Transport, owner: Participant) -> None:
        self._transport = transport
        self._owner = owner
        self._protocol = owner.protocol
        self._outgoing: dict[str, asyncio.Queue[Message | None]] = {}
        self._incoming: dict[str, Stream] = {}
        self._dialling: dict[str, asyncio.Task[bool]] = {}
        self._checking: set[str] = set()
        self._tasks: set[asyncio.Task[object]] = set()
        self._closed = False

    async def start(self) -> list[str]:
        """Listen, dial the seeds and whomever the DHT names; returns the seeds that answered."""
        await self._transport.handle(CONTROL, self._serve)
        seeds = self._transport.seeds
        answered = await asyncio.gather(*(self.dial(peer) for peer in seeds))
        self._spawn(self._discover())
        return [peer for peer, ok in zip(seeds, answered, strict=True) if ok]

    def broadcast(self, message: Message) -> None:
        """Queue a message to every connected peer; never blocks."""
        for queue in self._outgoing.values():
            queue.put_nowait(message)

    def disconnect(self, peer: str) -> None:
        """End both streams of a peer that is given up; if it lives, it notices and calls."""
        queue = self._outgoing.pop(peer, None)
        if queue is not None:
            queue.put_nowait(None)
        stream = self._incoming.pop(peer, None)
        if stream is not None:
            stream.close()

    async def close(self) -> None:
        """Flush what is queued, end all streams, and forget the DHT record."""
        self._closed = True
        for queue in self._outgoing.values():
            queue.put_nowait(None)
        senders = [task for task in self._tasks if task.get_name() == "send"]
        if senders:
            await asyncio.wait(senders, timeout=2.0)
        for stream in self._incoming.values():
            stream.close()  # hivemind owns the tasks that read them, and logs a task that is cancelled as an error
        tasks = [*self._tasks, *self._dialling.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2.0)

    def settled(self) -> bool:
        """Whether no call is under way and every peer that answered ours has said hello to us."""
        calling = any(not task.done() for task in self._dialling.values())
        return not calling and all(peer in self._protocol.members for peer in self._outgoing)

    def dial(self, peer: str) -> asyncio.Task[bool]:
        """Open our stream to a peer unless there is one; the result says whether it answered."""
        if peer not in self._dialling or self._dialling[peer].done():
            self._dialling[peer] = asyncio.create_task(self._dial(peer))
            self._dialling[peer].add_done_callback(lambda _: self._owner.notify())
        return self._dialling[peer]

    async def _dial(self, peer: str) -> bool:
        if peer in self._outgoing or peer == self._protocol.me or self._closed:
            return True
        if self._penalty(peer) is not None:
            return False
        stream: Stream | None = None
        try:
            reader, writer = await within(DIAL_TIMEOUT_S, self._transport.open(peer, CONTROL))
            stream = Stream(peer, reader, writer, self._owner.traffic)
            await stream.send(self._protocol.hello())
            answer = await stream.receive(DIAL_TIMEOUT_S)
            if isinstance(answer, Refusal):
                stream.close()
                await self._owner.refused(peer, answer.reason)
                return False
            expect(answer, Status)
        except Refused as error:
            await self._owner.refused(peer, str(error))
            return False
        except (*BROKEN, PayloadError) as error:
            logger.debug("dialling %s failed: %r", peer, error)
            if stream is not None:
                stream.close()
            return False
        self._outgoing[peer] = asyncio.Queue()
        self._spawn(self._send_all(peer, stream), "send")
        return True

    async def _send_all(self, peer: str, stream: Stream) -> None:
        """Our side of the stream to a peer: queued messages until either side ends it."""
        queue = self._outgoing[peer]
        ended = asyncio.create_task(_ended(stream))
        # What changed between the hello and now was broadcast to the others only.
        queue.put_nowait(self._protocol.status())
        for claim in self._protocol.hello().claims:
            queue.put_nowait(claim)
        try:
            while not ended.done():
                getting = asyncio.create_task(queue.get())
                await asyncio.wait({getting, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not getting.done():
                    getting.cancel()
                    break
                message = getting.result()
                if message is None:
                    return
                await within(DIAL_TIMEOUT_S, stream.send(message))
        except BROKEN as error:
            logger.debug("the stream to %s broke: %r", peer, error)
        finally:
            ended.cancel()
            stream.close()
            if self._outgoing.get(peer) is queue:
                del self._outgoing[peer]
        await self._check(peer, "connection reset")

    async def _serve(self, peer: str, reader: Reader, writer: Writer) -> None:
        """Their stream to us: hello, then whatever they say."""
        stream = Stream(peer, reader, writer, self._owner.traffic)
        try:
            with offences():
                hello = expect(await stream.receive(), Hello)
            objection = self._owner.objection(peer, hello) or self._protocol.objection(hello) or self._penalty(peer)
            if objection is not None or self._closed:
                await stream.send(Refusal(reason=objection or "this peer is leaving"))
                await stream.drained()
                return
            self._check_possible(hello)
            await stream.send(self._protocol.status())
            self._incoming[peer] = stream
            self._owner.greeted(peer, hello)
            self._spawn(self._call_back(peer))
            for other in hello.peers:
                self.dial(other)
            while True:
                try:
                    with offences():
                        message = await stream.receive(None)
                except UnknownKind as error:
                    logger.debug("%s may be newer: %s", peer, error)
                    continue
                self._check_possible(message)
                self._owner.heard(peer, message)
        except PayloadError as error:
            await self._give_up(peer, stream, error)
        except BROKEN as error:
            logger.debug("the stream from %s ended: %r", peer, error)
        finally:
            stream.close()
        if self._incoming.get(peer) is stream:
            del self._incoming[peer]
            await self._check(peer, "connection reset")

    def _check_possible(self, message: Message) -> None:
        why = self._protocol.impossible(message)
        if why is not None:
            raise Offence(why)

    def _penalty(self, peer: str) -> str | None:
        return self._protocol.penalties.refusal(peer, asyncio.get_running_loop().time())

    async def _give_up(self, peer: str, stream: Stream, error: PayloadError) -> None:
        """A peer that said something invalid is lost. When it calls again it hears for how long it is refused."""
        new = self._incoming.get(peer) is not stream
        if isinstance(error, Offence):
            self._owner.offended(peer, str(error))
        self._owner.lost(peer, str(error))
        self.disconnect(peer)
        if new:
            with contextlib.suppress(*BROKEN, PayloadError):
                await stream.send(Refusal(reason=str(error)))
                await stream.drained()

    async def _call_back(self, peer: str) -> None:
        """A call that had begun before it connected to us may fail where a new one takes its connection."""
        if not await self.dial(peer):
            await self.dial(peer)

    async def _check(self, peer: str, why: str) -> None:
        """A stream ended. A peer that said goodbye is gone; any other gets one more call before it counts as lost."""
        member = self._protocol.members.get(peer)
        if self._closed or member is None or peer in self._checking:
            return
        self._checking.add(peer)
        try:
            queue = self._outgoing.pop(peer, None)
            if queue is not None:
                queue.put_nowait(None)
            said_goodbye = member.status.gone
            if said_goodbye or not await self.dial(peer):
                self._owner.lost(peer, why)
        finally:
            self._checking.discard(peer)

    async def _discover(self) -> None:
        """Once in a while: tell the DHT that we are here, and dial whom it knows and we do not."""
        key = f"{self._protocol.run_id}/peers"
        while True:
            try:
                await self._transport.store(key, self._protocol.me, self._owner.record(), RECORD_LIFE_S)
                named = await self._transport.get(key)
                self._owner.named(named)
                for peer in {**named, **dict.fromkeys(member.peer for member in self._protocol.members.all())}:
                    self.dial(peer)  # a member may hear nothing of us: it refused our call when it called us
            except BROKEN as error:
                logger.debug("the DHT did not answer: %r", error)
            await asyncio.sleep(RECORD_PERIOD_S)

    def _spawn(self, work: Awaitable[object], name: str | None = None) -> None:
        task: asyncio.Task[object] = asyncio.ensure_future(work)
        if name is not None:
            task.set_name(name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _ended(stream: Stream) -> None:
    """Returns when the other side ends a stream on which it has nothing to say."""
    try:
        await stream.receive(None)
    except (*BROKEN, PayloadError):
        return
