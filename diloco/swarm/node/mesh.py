"""The control mesh: one outgoing stream to every peer, one incoming from it, and the DHT to find
new ones.

No payload travels here, so a link that is full of pseudo-gradients does not starve heartbeats. When
a peer is killed, its streams end within milliseconds. It is dialled once more, and then lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from functools import partial

from msgspec.structs import replace

from diloco.core.events import Connected, Heard, Lost
from diloco.core.members import MAX_PEERS
from diloco.errors import DilocoError, PayloadError, SwarmError
from diloco.messages.base import Message, Place, Refusal
from diloco.messages.codec import UnknownKind, expect
from diloco.messages.control import Hello, Revocations, Welcome
from diloco.messages.fields import forget_oldest
from diloco.swarm import limits
from diloco.swarm.context import Context
from diloco.swarm.limits import Offence, offences
from diloco.swarm.node.options import RunSpec
from diloco.swarm.rpc import contribution, state
from diloco.swarm.rpc.watch import request_manifest
from diloco.swarm.wire.gate import IN_USE
from diloco.swarm.wire.streams import BROKEN, CONTROL, Outgoing, PeerStream, framed
from diloco.swarm.wire.transport import ByteReader, ByteWriter, Refused

logger = logging.getLogger(__name__)

DIAL_TIMEOUT_S = 10.0
CLOSE_S = 2.0
DIALS_EVERY_S = 0.25
ALIVE_S = 6.0  # a living process sends something in this time; shorter than DIAL_TIMEOUT_S
RECORD_LIFE_S = 60.0  # lifetime of this peer's addresses in the DHT
RECORD_PERIOD_S = 15.0
FORGET_LOST_S = 86400.0  # time for which a vanished member is redialled
NAMED_SETTINGS = 5  # differing settings in the reason of a refusal


class ControlMesh:
    """Keeps a node connected to all others of the run.

    A peer that cannot be reached is left out, and dialled again when others name it. A peer with
    another run or manifest is refused on its stream, with the reason. No error here ends the node.
    `refusal` is the reason for which a trusted peer refused this one. After the start it counts
    only while no other peer admits this one.
    """

    def __init__(self, context: Context, run: RunSpec) -> None:
        self.refusal: str | None = None
        self._context, self._run = context, run
        self._core, self._gate = context.core, context.gate
        self.send = partial(contribution.send, context)
        self.fetch = partial(state.fetch, context)
        self._members = context.core.facts.members
        self._gate.identity_in_use = self._identity_in_use
        self._gate.on_revoked = self._pass_on_revocations
        self._outgoing: dict[str, Outgoing] = {}
        self._incoming: dict[str, PeerStream] = {}
        self._senders: dict[asyncio.Task[None], None] = {}  # outlive `Tasks`, to send goodbyes
        self._dialling: dict[str, asyncio.Task[bool]] = {}
        self._dials = limits.Dials()  # peers that others have named
        self._checking: set[str] = set()
        # members that vanished: time of that, and of the last call
        self._lost: dict[str, tuple[float, float]] = {}
        self._started = False
        fragments, is_closed = len(context.core.facts.fragments), self._gate.admission is not None
        self._streams = limits.Limiter(*limits.CONTROL_STREAMS)
        self._messages = limits.control_messages(fragments)
        self._hello_bytes, self._frame_bytes = limits.frame_bytes(fragments, is_closed)

    async def start(self) -> list[str]:
        """Listen, and dial the seeds and the peers in the DHT; return the seeds that answered."""
        await self._context.transport.handle(CONTROL, self._serve)
        seeds = self._context.transport.seeds
        answered = await asyncio.gather(*map(self.dial, seeds))
        self._started = True
        self._context.tasks.spawn(self._discover())
        return [peer for peer, ok in zip(seeds, answered, strict=True) if ok]

    def carries(self, peer: str) -> bool:
        """Return True for a peer that has a stream to or from this one."""
        return peer in self._outgoing or peer in self._incoming

    def broadcast(self, message: Message) -> None:
        """Send a message to every connected peer; never blocks."""
        frame = framed(message)  # once for all
        for outgoing in self._outgoing.values():
            outgoing.say(frame)

    def tell(self, peer: str, message: Message) -> None:
        """Send a message to one peer, if it is connected; never blocks."""
        if (outgoing := self._outgoing.get(peer)) is not None:
            outgoing.say(framed(message))

    def disconnect(self, peer: str) -> None:
        """End both streams of a lost peer; if it lives, it will call again."""
        if (outgoing := self._outgoing.pop(peer, None)) is not None:
            outgoing.end()
        if (stream := self._incoming.pop(peer, None)) is not None:
            stream.close()

    async def close(self) -> None:
        """Send queued messages, and end all streams. The node's tasks are closed already."""
        for outgoing in self._outgoing.values():
            outgoing.end()
        if senders := list(self._senders):
            await asyncio.wait(senders, timeout=CLOSE_S)
        for sender in senders:
            sender.cancel()
        for stream in self._incoming.values():
            # hivemind owns the tasks that read them, and logs their cancellation as an error
            stream.close()

    # -- admission ---------------------------------------------------------------------------------

    def _pass_on_revocations(self, revoked: Revocations) -> None:
        """Send a newer list to all peers, also to those on it, before they are disconnected."""
        fields = ("number", "token_ids", "peer_ids")
        self._context.note("revoked", **{name: getattr(revoked, name) for name in fields})
        self.broadcast(revoked)
        self.expel()

    def expel(self) -> None:
        """Drop the peers that are no longer admitted; fail when this peer is not."""
        context = self._context
        for peer, reason in self._gate.expel().items():
            self.disconnect(peer)
            context.do(Lost(peer, reason))
        if (lapsed := self._gate.lapsed()) is not None:
            context.tasks.fail(SwarmError(f"the swarm refused this peer: {lapsed}"))

    def _penalty(self, peer: str) -> str | None:
        return self._context.penalties.refusal(peer, self._context.now())

    async def _identity_in_use(self, peer: str, instance: str) -> str | None:
        """Return the reason to refuse a process whose identity another living process uses."""
        older, member = self._incoming.get(peer), self._members.get(peer)
        if older is None or member is None or older.instance == instance:
            return None
        now, spoke, until = self._context.now, older.received, self._context.now() + ALIVE_S
        while older.received == spoke and self._incoming.get(peer) is older and now() < until:
            await asyncio.sleep(ALIVE_S / 60)
        silent = older.received == spoke and 0.0 < 3 * member.interval_s < ALIVE_S
        return None if silent or self._incoming.get(peer) is not older else IN_USE

    # -- outgoing streams --------------------------------------------------------------------------

    def redial_later(self, peer: str) -> None:
        """Redial a member that is gone without a goodbye."""
        self._lost[peer] = (self._context.now(), self._context.now())
        forget_oldest(self._lost, MAX_PEERS)

    def all_greeted(self) -> bool:
        """Return True if no call is under way, and all peers that answered have said hello."""
        answered = not self._dials and all(task.done() for task in self._dialling.values())
        return answered and all(peer in self._members for peer in self._outgoing)

    def dial(self, peer: str) -> asyncio.Task[bool]:
        """Open a stream to a peer unless there is one; the task returns True if it answered."""
        task = self._dialling.get(peer)
        if task is None or task.done():
            task = self._dialling[peer] = self._context.tasks.start(self._dial(peer))
        return task

    def _dial_named(self, peers: Iterable[str]) -> None:
        """Dial peers that others name, at a limited rate, against floods through this peer."""
        waiting = len(self._dials) > 0
        self._dialling = {peer: task for peer, task in self._dialling.items() if not task.done()}
        known = {self._core.facts.me, *self._outgoing, *self._dialling}
        self._dials.hear(peer for peer in peers if peer not in known)
        if not waiting:
            self._dial_due()

    def _dial_lost(self) -> None:
        """Redial vanished members: with growing pauses, unless no other member is here."""
        now = self._context.now()
        for peer, (lost_at, called_at) in list(self._lost.items()):
            if now - lost_at > FORGET_LOST_S:
                del self._lost[peer]
            elif not len(self._members) or now - called_at >= (called_at - lost_at) / 2:
                self._lost[peer] = (lost_at, now)
                self._dials.hear([peer])
        self._dial_due()

    def _dial_due(self) -> None:
        if self._context.tasks.closed:
            return
        for peer in self._dials.due(self._context.now()):
            self.dial(peer)
        if self._dials:
            asyncio.get_running_loop().call_later(DIALS_EVERY_S, self._dial_due)

    async def _dial(self, peer: str) -> bool:
        if peer in self._outgoing or peer == self._core.facts.me:
            return True
        if self._penalty(peer) is not None:
            return False
        context, gate, stream = self._context, self._gate, None
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                reader, writer = await context.transport.open(peer, CONTROL)
            stream = PeerStream(peer, reader, writer, context.traffic)
            hello = replace(self._core.hello(), seal=gate.memory.seal, instance=gate.instance)
            await stream.send(hello)
            answer = await stream.receive(DIAL_TIMEOUT_S)
            if isinstance(answer, Refusal):
                raise Refused(answer.reason)
            expect(answer, Welcome)
        except (*BROKEN, PayloadError) as error:
            if stream is not None:
                stream.close()
            if isinstance(error, Refused):
                await self._refused(peer, str(error))
            logger.debug("dialling %s failed: %r", peer, error)
            return False
        if self._started:
            self.refusal = None
        outgoing = self._outgoing[peer] = Outgoing(stream)
        self.tell(peer, self._core.status())  # it missed those since the hello was made
        sender = asyncio.create_task(self._send_queued(peer, outgoing))
        self._senders[sender] = None
        sender.add_done_callback(self._senders.pop)
        return True

    async def _refused(self, peer: str, reason: str) -> None:
        """Note a refusal of this peer; only that of a seed or of a trusted peer counts."""
        context, transport = self._context, self._context.transport
        context.note("refused_us", peer=peer, why=reason)
        believed = self._gate.trusts(peer) and self._gate.authors(peer)
        if peer not in transport.seeds and not believed:
            return
        if "manifest" in reason:
            try:
                there, _ = await request_manifest(transport, peer)
                differing = "; ".join(self._run.differences(there)[:NAMED_SETTINGS])
                reason = f"the run there has other settings: {differing}; use the same"
            except (*BROKEN, DilocoError) as error:
                logger.debug("the manifest of %s could not be compared: %r", peer, error)
        if not (self._started and self._outgoing):
            self.refusal = f"the swarm refused this peer: {reason}"
            context.tasks.notify()

    async def _send_queued(self, peer: str, outgoing: Outgoing) -> None:
        """Write queued messages to a peer's stream until either side ends it."""
        stream = outgoing.stream
        ended = asyncio.create_task(stream.ended())
        ended.add_done_callback(lambda _: outgoing.awake.set())
        try:
            while not (outgoing.over or ended.done()):
                await outgoing.awake.wait()
                async with asyncio.timeout(DIAL_TIMEOUT_S):
                    await outgoing.flush()
            if not ended.done():
                return  # this side has ended the stream
        except BROKEN as error:
            logger.debug("the stream to %s broke: %r", peer, error)
        finally:
            ended.cancel()
            stream.close()
            if self._outgoing.get(peer) is outgoing:
                del self._outgoing[peer]
        await self._ended(peer)

    # -- incoming streams --------------------------------------------------------------------------

    async def _serve(self, peer: str, reader: ByteReader, writer: ByteWriter) -> None:
        """Read an incoming stream: a hello, then messages."""
        stream = PeerStream(peer, reader, writer, self._context.traffic)
        if (why := self._streams.opened(peer, self._context.now())) is not None:
            logger.debug("a control stream of %s is over a limit: %s", peer, why)
            stream.close()
            return
        try:
            await self._listen(peer, stream)
        except PayloadError as error:
            await self._give_up(peer, stream, error)
        except BROKEN as error:
            logger.debug("the stream from %s ended: %r", peer, error)
        finally:
            self._streams.closed(peer)
            stream.close()
        if self._incoming.get(peer) is stream:
            del self._incoming[peer]
            await self._ended(peer)

    async def _listen(self, peer: str, stream: PeerStream) -> None:
        context = self._context
        penalty = self._penalty(peer)
        if penalty is not None:  # its messages are not even decoded
            await stream.refuse(penalty, discard=self._hello_bytes)
            return
        with offences():
            hello = expect(await stream.receive(limit=self._hello_bytes), Hello)
        why = self._objection(peer, hello) or await self._identity_in_use(peer, hello.instance)
        if why is not None:
            await stream.refuse(why, discard=0)
            return
        self._check_message(hello)
        if peer in self._incoming:  # libp2p would go on writing to its older, dead connection
            self.disconnect(peer)
            await context.transport.hang_up(peer)
            raise ConnectionError(f"{peer} has to call again")
        await stream.send(Welcome())
        if context.tasks.closed:
            raise ConnectionError("this node is closed")  # while the hello was read
        self._incoming[peer], stream.instance = stream, hello.instance
        self._gate.learn_seal(self._run.manifest_hash, hello.seal)
        context.do(Connected(peer, hello))
        context.tasks.spawn(self._dial_twice(peer))
        self._dial_named(hello.peers)
        while True:
            try:
                with offences():
                    message = await stream.receive(None, self._frame_bytes)
            except UnknownKind as error:
                logger.debug("%s may be newer: %s", peer, error)
                continue
            self._check_message(message)
            if isinstance(message, Revocations):
                self._gate.hear(message)
            else:
                context.do(Heard(peer, message))
            delay_s = self._messages.delay_s(peer, context.now())
            if delay_s:  # more messages than an honest peer sends are read slowly
                await asyncio.sleep(delay_s)

    def _objection(self, peer: str, hello: Hello) -> str | None:
        """Return the reason to refuse a peer; None if it may connect."""
        if (reason := self._gate.objection(peer, hello)) is not None:
            self._gate.on_refused(peer, reason)
            return reason
        return "this peer is leaving" if self._context.tasks.closed else self._core.objection(hello)

    def _check_message(self, message: Message) -> None:
        """Raise `Offence` for a message that no honest peer of this run sends here."""
        if message.place not in (Place.HELLO, Place.CONTROL):
            raise Offence(f"a control stream does not carry {type(message).__name__}")
        if (why := self._core.misfit(message)) is not None:
            raise Offence(why)

    async def _give_up(self, peer: str, stream: PeerStream, error: PayloadError) -> None:
        """Drop a peer that sent an invalid message; it gets the reason when it calls again."""
        context, new = self._context, self._incoming.get(peer) is not stream
        if isinstance(error, Offence):
            context.offence(peer, str(error))
        context.do(Lost(peer, str(error)))
        self.disconnect(peer)
        if new:
            with contextlib.suppress(*BROKEN, PayloadError):
                await stream.refuse(str(error), discard=0)

    async def _dial_twice(self, peer: str) -> bool:
        """Dial again at once: a call fails whose connection is replaced."""
        return await self.dial(peer) or await self.dial(peer)

    async def _ended(self, peer: str) -> None:
        """After a stream's end, drop a peer that said goodbye, and call any other once more."""
        member = self._members.get(peer)
        if self._context.tasks.closed or member is None or peer in self._checking:
            return
        self._checking.add(peer)
        try:
            if (outgoing := self._outgoing.pop(peer, None)) is not None:
                outgoing.end()
            if member.status.leaves:
                self._context.do(Lost(peer, "said goodbye"))
            elif not await self._dial_twice(peer) and peer not in self._incoming:
                self.redial_later(peer)
                self._context.do(Lost(peer, "connection reset"))
        finally:
            self._checking.discard(peer)

    async def _discover(self) -> None:
        """Periodically store this peer's addresses in the DHT, and dial the peers found there."""
        transport = self._context.transport
        while True:
            named: dict[str, list[str]] = {}
            try:
                members = [member.peer for member in self._members.all()]
                await transport.announce(RECORD_LIFE_S, members)
                named = await transport.announced()
            except BROKEN as error:
                logger.debug("the DHT did not answer: %r", error)
            self._core.addresses.hear("", named)
            self._dial_named(named)
            for member in self._members.all():
                self._lost.pop(member.peer, None)
                # a member that called us may have refused our call: then it gets no messages
                if self.carries(member.peer):
                    self.dial(member.peer)
            self._dial_lost()
            await asyncio.sleep(RECORD_PERIOD_S)
