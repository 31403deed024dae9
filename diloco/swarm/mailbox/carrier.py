"""The mailbox: a carrier that exchanges objects through a store, and needs no connection.

Every `period_s` a peer looks which boxes have changed, reads those, and writes its own.

    status, offers, answers -> letters in the own box        -> others look -> core
    contribution            -> payload object, then an offer -> the author looks, and reads it
    version                 -> record object, then the tip   -> others look, and read it
    anchor                  -> part objects, every `BASE_EVERY` versions -> newcomers read them

1. An offer or a tip stands in a box only when the object that it names was written.
2. Nobody trusts the store's clock, or another machine's: a peer is here when its box changes, and
   gone when it has not changed for some periods of its own.
3. While the store is away, the clock of this node stands still, so no deadline of the core passes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from diloco.core import events
from diloco.core.members import MAX_PEERS
from diloco.errors import PayloadError, SwarmError
from diloco.messages.base import MAX_FRAME_BYTES, Message, Place, Refusal
from diloco.messages.bulk import Get
from diloco.messages.codec import UnknownKind, decode, encode, expect
from diloco.messages.control import Answer, Offer, Revocations, Status
from diloco.messages.fields import forget_oldest
from diloco.swarm.context import Context
from diloco.swarm.limits import Offence, offences
from diloco.swarm.mailbox import objects
from diloco.swarm.mailbox.access import Access
from diloco.swarm.mailbox.contents import Contents
from diloco.swarm.mailbox.objects import Box, Letter
from diloco.swarm.mailbox.store import Store
from diloco.swarm.wire.streams import BROKEN
from diloco.swarm.wire.tasks import in_thread

logger = logging.getLogger(__name__)

# A look asks for a list, and each box that changed: with these, 8 peers make some 40 requests a
# minute each, beside payloads.
PERIODS, PERIODS_EACH = 5.0, 2.0  # heartbeats between two looks: at least, and for each peer
BOXES = 2.25  # in a period, at most: with more, eight peers would make over 60 requests a minute
OLD_BOX_PERIODS = 240.0  # without a change, after which anybody deletes a box
LISTEN_PERIODS = 2.2  # in which everybody who lives writes its box
SILENT_PERIODS, LONGEST_PERIODS = 3.0, 4.0
AGAIN_PERIODS = 4.0  # after which what was said before is said again
CLOSE_S = 5.0
LEAST_WAIT_S = 1e-3
BOX_BYTES = MAX_FRAME_BYTES + objects.MAX_SIGNATURE_BYTES + 2


@dataclass
class Sender:
    """A peer of the mailbox, as its box says."""

    tag: str  # of the object that was read last, or seen first
    changed_at: float  # when it had a newer box
    box: Box | None = None
    connected: bool = False


class Mailbox:
    """A carrier over a store.

    On failure: a store that does not answer is asked again, with growing pauses, for as long as it
    takes. What is not as its digest or signature says is noted with its name, and not used.
    """

    def __init__(
        self, context: Context, store: Store, differences: Callable[[str], list[str]]
    ) -> None:
        self.refusal: str | None = None
        self._context, self._core, self._facts = context, context.core, context.core.facts
        self._heartbeat_s = context.core.facts.settings.heartbeat_s
        self._access = Access(context, store, PERIODS * self._heartbeat_s)
        self._differences = differences
        self._senders: dict[str, Sender] = {}
        self._letters: list[Letter] = []
        self._number = 0
        self._numbers: dict[str, tuple[int, int]] = {}  # numbers of box and letter, by sender
        self._urgent = asyncio.Event()
        self._contents = Contents(context, self._access, self._urgent)
        self._listened_at = float("inf")
        self._written_at = float("-inf")

    @property
    def period_s(self) -> float:
        """Seconds between two looks; longer with more peers, so that each makes few requests."""
        return self._period_s(1 + sum(sender.connected for sender in self._senders.values()))

    def _period_s(self, peers: int) -> float:
        return self._heartbeat_s * max(PERIODS, PERIODS_EACH * peers)

    # -- as a carrier ------------------------------------------------------------------------------

    def carries(self, peer: str) -> bool:
        """Return True for a peer whose box changes here."""
        sender = self._senders.get(peer)
        return sender is not None and sender.connected

    async def start(self) -> list[str]:
        """Show this peer's box, and see whose are here."""
        facts = self._facts
        await self._open_run()
        boxes = await self._access.tags("peers")
        name = f"peers/{facts.me}"
        if name in boxes:
            with suppress(PayloadError, FileNotFoundError):
                self._number = self._opened(facts.me, await self._read(name)).number
        now = self._context.now()
        for path, tag in boxes.items():
            if path != name:
                self._senders[path.removeprefix("peers/")] = Sender(tag, now)
        await self._write_box()
        self._listened_at = now + LISTEN_PERIODS * self._period_s(len(boxes))
        self._context.tasks.spawn(self._run())
        return []

    def all_greeted(self) -> bool:
        """Return True once every peer that lives must have written its box again."""
        return not self._senders or self._context.now() >= self._listened_at

    def broadcast(self, message: Message) -> None:
        """Say something to all. A heartbeat waits for the next box, which has a status anyway."""
        if not isinstance(message, Status):
            self._write_letter("", message)
        elif message.tips or message.leaves or message.figures is None:
            self._context.tasks.spawn(self._contents.store_records())  # the box has its time
            self._urgent.set()

    def tell(self, peer: str, message: Message) -> None:
        """Say something to one peer."""
        if not isinstance(message, Status):
            self._write_letter(peer, message)

    def disconnect(self, peer: str) -> None:
        """Take a peer for gone until its box changes again."""
        if sender := self._senders.get(peer):
            sender.connected = False

    def redial_later(self, peer: str) -> None:
        """Nothing: whoever comes back writes its box."""

    async def send(self, action: events.SendPayload) -> None:
        """Write a payload, and offer it to a peer in the next box."""
        await self._contents.send(action)
        self._write_letter(action.peer, Offer(action.line))

    async def fetch(self, peer: str, get: Get) -> None:
        """Read what follows a head, or a part of an anchor, for the core."""
        sender = self._senders.get(peer)
        if not await self._contents.fetch(peer, get, sender.box if sender else None):
            self._write_letter(peer, get)

    def expel(self) -> None:
        """Nothing: the next box of a peer that is not admitted is refused."""

    async def close(self) -> None:
        """Write the last box. The node's tasks are closed already."""
        with suppress(*BROKEN, SwarmError):
            async with asyncio.timeout(CLOSE_S):
                await self._store_box(over=True)

    # -- looking and writing -----------------------------------------------------------------------

    async def _run(self) -> None:
        look_at = self._context.now()
        while True:
            now = self._context.now()
            if now >= look_at:
                look_at = now + self.period_s
                await self._look()
            beat_at = self._written_at + self.period_s
            if self._urgent.is_set() and now >= self._written_at + self.period_s / BOXES:
                beat_at = now
            if now >= beat_at:
                await self._write_box()
            if now >= self._listened_at:  # else several peers would write the first anchor
                self._contents.keep_bases()
            rest_s = self.period_s / (BOXES if self._urgent.is_set() else 1)
            wait_s = min(look_at, self._written_at + rest_s) - self._context.now()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(LEAST_WAIT_S, wait_s)):
                    await (asyncio.Future() if self._urgent.is_set() else self._urgent.wait())

    async def _look(self) -> None:
        """Read the boxes that have changed, and tell the core what is new in them."""
        context, boxes = self._context, await self._access.tags("peers")
        now, changed = context.now(), list[str]()
        for path, tag in sorted(boxes.items()):
            peer = path.removeprefix("peers/")
            if peer == self._facts.me:
                continue
            sender = self._senders.get(peer)
            if sender is None:
                sender = self._senders[peer] = Sender("", now)
                forget_oldest(self._senders, MAX_PEERS)
            if tag != sender.tag:
                sender.tag = tag
                changed.append(peer)
            elif now - sender.changed_at > OLD_BOX_PERIODS * self.period_s:
                del self._senders[peer]
                context.tasks.spawn(self._access.delete([path]))
        for peer in [peer for peer in self._senders if f"peers/{peer}" not in boxes]:
            if not self._senders[peer].connected:
                del self._senders[peer]
        await asyncio.gather(*map(self._read_box, changed))
        for peer, sender in self._senders.items():
            if sender.box and sender.connected and self._is_silent(sender.box, sender.changed_at):
                sender.connected = False
                context.do(events.Lost(peer, "silent"))

    def _is_silent(self, box: Box, changed_at: float) -> bool:
        """Return True if a peer has not written for three periods, of its own or of this peer."""
        period_s = max(self.period_s, min(box.period_s, LONGEST_PERIODS * self.period_s))
        return self._context.now() - changed_at > SILENT_PERIODS * period_s

    async def _read_box(self, peer: str) -> None:
        """Read and check a box. What is wrong in it is noted with its name."""
        name, context = f"peers/{peer}", self._context
        try:
            box = self._opened(peer, await self._read(name))
            number, letter = self._numbers.get(peer, (-1, 0))
            if box.number <= number:
                return  # an older object, which the store or somebody else showed again
            with offences():
                self._check(box)
            self._hear(peer, box, letter)
        except FileNotFoundError:
            return
        except Offence as error:
            context.offence(peer, str(error))
        except PayloadError as error:
            context.note("refused", peer=peer, why=f"{name}: {error}")

    def _opened(self, peer: str, content: memoryview) -> Box:
        """Return a box that this peer has signed. Raises `PayloadError`."""
        name, run_id = f"peers/{peer}", self._facts.identity.run_id
        body, signature = objects.split_box(name, content)
        signed = objects.signed_content(run_id, peer, body)
        if not self._context.transport.verify(peer, signed, signature):
            raise PayloadError(f"{name} is not signed by that peer for this run")
        return expect(decode(body), Box)

    def _check(self, box: Box) -> None:
        if (why := self._core.misfit(box.hello)) is not None:
            raise Offence(why)
        every = set(range(len(self._facts.fragments)))
        if box.chains.keys() != every or not all(box.chains.values()) or box.bases.keys() - every:
            raise Offence("a box names other fragments than the run has")

    def _hear(self, peer: str, box: Box, letter: int) -> None:
        """Give the core what a box says."""
        context, sender = self._context, self._senders[peer]
        before, sender.box, sender.changed_at = sender.box, box, context.now()
        same = before is not None and before.hello.instance == box.hello.instance
        self._numbers[peer] = box.number, max([letter, *(item.number for item in box.letters)])
        forget_oldest(self._numbers, MAX_PEERS)
        why = context.penalties.refusal(peer, context.now()) or context.gate.admit(
            peer, box.greeting
        )
        why = why or context.gate.objection(peer, box.hello) or self._core.objection(box.hello)
        if why is not None:
            if not same:
                context.gate.on_refused(peer, why)
                self._write_letter(peer, Refusal(why))
            return
        self._contents.learn(box)
        context.gate.learn_seal(self._facts.identity.manifest_hash, box.hello.seal)
        if box.over:
            if sender.connected:
                context.do(events.Heard(peer, box.hello.status))
                context.do(events.Lost(peer, "said goodbye"))
            sender.connected = False
            return
        if peer in self._facts.members and not sender.connected:
            return  # another carrier has it
        if not (sender.connected and same):
            sender.connected = True
            context.do(events.Connected(peer, box.hello))
            self._urgent.set()
        context.do(events.Heard(peer, box.hello.status))
        for item in box.letters:
            if item.number > letter and item.to in ("", self._facts.me):
                self._open_letter(peer, item.content)

    def _open_letter(self, peer: str, content: bytes) -> None:
        try:
            message = decode(content)
        except UnknownKind as error:
            return logger.debug("%s may be newer: %s", peer, error)
        match message:
            case Offer(line=line):
                self._context.tasks.spawn(self._contents.take(peer, line))
            case Get(fragment=index) if index < len(self._facts.fragments):
                self._contents.store_base(self._facts.fragments[index])
            case Refusal(reason=reason):
                if self._context.gate.trusts(peer) and not len(self._facts.members):
                    self.refusal = f"the swarm refused this peer: {reason}"
                    self._context.tasks.notify()
            case Revocations():
                self._context.gate.hear(message)
            case _ if message.place is not Place.CONTROL:
                raise Offence(f"a letter does not carry {type(message).__name__}")
            case _ if (why := self._core.misfit(message)) is not None:
                raise Offence(why)
            case _:
                if isinstance(message, Answer) and message.says == "want":
                    self._contents.lost(peer, message)
                self._context.do(events.Heard(peer, message))

    def _write_letter(self, to: str, message: Message) -> None:
        """Put a message into the next box, unless an equal one was put there a short while ago."""
        content, now_ms = encode(message), self._wall_ms()
        equal = [item for item in self._letters if (item.to, item.content) == (to, content)]
        if equal and now_ms < equal[0].number + 1000 * AGAIN_PERIODS * self.period_s:
            return
        number = max([now_ms, *(item.number + 1 for item in self._letters)])
        others = [item for item in self._letters if item not in equal]
        self._letters = [*others, Letter(number, to, content)][-objects.MAX_LETTERS :]
        while sum(len(item.content) for item in self._letters) > objects.MAX_LETTERS_BYTES:
            del self._letters[0]
        self._urgent.set()

    def _wall_ms(self) -> int:
        return self._facts.wall_ms + int(1000 * self._context.now())

    async def _write_box(self) -> None:
        """Write the records of new versions, and then this peer's box, which tells the tips."""
        self._urgent.clear()
        self._written_at = self._context.now()
        await self._store_box()

    async def _store_box(self, over: bool = False) -> None:
        context, facts, gate = self._context, self._facts, self._context.gate
        hello = self._core.hello()
        status = replace(hello.status, figures=self._core.figures)
        hello = replace(hello, status=status, seal=gate.memory.seal, instance=gate.instance)
        letters, tips = list(self._letters), [f.tip.head for f in facts.fragments]
        await self._contents.store_records()
        self._number = max(self._number + 1, self._wall_ms())
        chains, bases = self._contents.links(tips)
        box = Box(self._number, over, self.period_s, hello, gate.greeting(), letters, chains, bases)
        body = encode(box)
        signed = objects.signed_content(facts.identity.run_id, facts.me, body)
        chunks = objects.pack_box(body, context.transport.sign(signed))
        await self._access.write(f"peers/{facts.me}", chunks)

    # -- the store ---------------------------------------------------------------------------------

    async def _read(self, name: str) -> memoryview:
        return await self._access.read(name, BOX_BYTES)

    async def _open_run(self) -> None:
        """Compare the run in the store with this one, or begin it there."""
        facts = self._facts
        try:
            content = await self._access.read("run", objects.MAX_RUN_BYTES)
            manifest, _, digest = objects.unpack_run(content)
        except FileNotFoundError:
            run = objects.pack_run(self._context.manifest, self._context.gate.memory.seal)
            await self._access.write("run", [run])
        else:
            if digest != facts.identity.manifest_hash:
                differing = "; ".join(self._differences(manifest)[:5])
                why = f"the run there has other settings: {differing}"
                raise SwarmError(
                    f"swarm.mailbox={self._access.store.url}: {why}; use the same, or another URL"
                )
        self._context.tasks.spawn(self._store_files())

    async def _store_files(self) -> None:
        """Write the files that joiners need, if they are not there."""
        there = await self._access.tags("file") if self._context.files else {}
        for digest, (path, offset, nbytes) in self._context.files.items():
            if f"file/{digest}" not in there:
                content = await in_thread(_file_part, path, offset, nbytes)
                await self._access.write(f"file/{digest}", [content])


def _file_part(path: Path, offset: int, nbytes: int | None) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        content: bytes = file.read(-1 if nbytes is None else nbytes)
        return content
