"""Payloads, versions and anchors in a store: what the core sends and fetches, as objects."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from diloco.core import events
from diloco.core.fragment import FragmentState
from diloco.core.history import Record
from diloco.core.members import score
from diloco.errors import PayloadError
from diloco.messages.base import Message
from diloco.messages.bulk import Get, PartHeader, RecordHeader, Values
from diloco.messages.codec import expect
from diloco.messages.control import Answer, Offer
from diloco.messages.fields import forget_oldest
from diloco.messages.heads import Head, Key, Line
from diloco.outer.digest import part_digest, part_ranges
from diloco.swarm.context import Context
from diloco.swarm.mailbox import objects
from diloco.swarm.mailbox.access import Access
from diloco.swarm.mailbox.objects import Box, Link, link_of
from diloco.swarm.rpc.contribution import ContributionHeader, check_payload
from diloco.swarm.rpc.state import anchor_codec
from diloco.swarm.rpc.updates import Update, payload_digest, update_digest, update_ranges
from diloco.swarm.wire.tasks import in_thread

BASE_EVERY = 16  # versions between two anchors from which newcomers begin
HEADER_BYTES = 1 << 20
KEPT, AT_ONCE = 2, 3  # own payloads of a fragment that are kept, and older ones deleted together
STORE = "mailbox"  # stands for the store among the peers that ask the core


@dataclass
class Chain:
    """The history of a fragment in the store: heads after others, and the newest whole anchor."""

    # by each head whose record is in the store: the head before
    after: dict[str, Link] = field(default_factory=dict)
    pending: dict[str, Record] = field(default_factory=dict)  # that are to be written
    base: Link | None = None
    storing: bool = False

    def to(self, tip: Link) -> list[Link]:
        """The heads from the base to this one, and some before it, as far as they are known."""
        chain = [tip]
        while len(chain) <= objects.READ_AT_ONCE or self.base not in chain:
            if len(chain) == objects.MAX_CHAIN:
                break
            before = self.after.get(chain[0][1])
            if before is None:
                break
            chain.insert(0, before)
        return chain

    def learn(self, chain: Sequence[Link]) -> None:
        """Take in what a box names."""
        for before, link in pairwise(chain):
            self.after[link[1]] = before
        forget_oldest(self.after, 4 * objects.MAX_CHAIN)


class Contents:
    """Reads and writes what is larger than a message.

    On failure: what is not as its digest or signature says is noted with its name, and not used.
    """

    def __init__(self, context: Context, access: Access, changed: asyncio.Event) -> None:
        self._context, self._core, self._access = context, context.core, access
        self._facts, self._changed = context.core.facts, changed
        self.chains = [Chain() for _ in self._facts.fragments]
        self._taking: set[tuple[int, str, int]] = set()
        self._writes_records = asyncio.Lock()
        self._payloads: dict[tuple[int, str], list[str]] = {}  # own objects, to be deleted

    # -- contributions -----------------------------------------------------------------------------

    async def send(self, action: events.SendPayload) -> None:
        """Write a payload, unless it is there. Older ones of its contributor are deleted."""
        line = action.line
        key, name = (line.fragment, line.peer), objects.payload_name(line)
        own = self._payloads.setdefault(key, [])
        if name not in own:
            own.append(name)
            header = objects.packed(ContributionHeader(line, 0, action.age_s))
            await self._access.write(name, [header, _bytes(action.payload)])
            if len(own) > KEPT + AT_ONCE:  # in one request
                old, own[:] = own[:-KEPT], own[-KEPT:]
                await self._access.delete(old)

    def lost(self, peer: str, answer: Answer) -> None:
        """A peer wants a payload, so it is not in the store; then it is written again."""
        item = self._facts.fragments[answer.fragment].pool.get(answer.peer)
        if item and self._payloads.pop((answer.fragment, answer.peer), None):
            self._context.do(events.Broke(peer, item.line))

    async def take(self, peer: str, line: Line) -> None:
        """Read the payload of an offer, if it is wanted and there; else the core answers."""
        context, name = self._context, objects.payload_name(line)
        key = (line.fragment, line.peer, line.stamp)
        if key in self._taking:
            return
        self._taking.add(key)
        try:
            if line.fragment < len(self.chains) and self._core.wants(line):
                nbytes = context.replica.payloads[line.fragment].nbytes

                def tell(here: int) -> None:
                    context.do(events.Moved(peer, line, min(here, nbytes - 1)))

                content = await self._access.read(name, nbytes + HEADER_BYTES, tell)
                header, payload = objects.unpacked(name, content)
                header, values = expect(header, ContributionHeader), _tensor(payload)
                if header.line != line or values.numel() != nbytes:
                    raise PayloadError("it is another one than was offered")
                await check_payload(context, line, values)
                context.do(events.Delivered(peer, line, values, header.age_s))
                return
        except FileNotFoundError:
            pass  # it has to be sent
        except PayloadError as error:
            return context.note("refused", peer=line.peer, why=f"{name}: {error}")
        finally:
            self._taking.discard(key)
        context.do(events.Heard(peer, Offer(line)))

    # -- versions ----------------------------------------------------------------------------------

    def learn(self, box: Box) -> None:
        """Take in the versions and anchors that a box names."""
        for index, links in box.chains.items():
            self.chains[index].learn(links)
        for index, base in box.bases.items():
            known, tip = self.chains[index].base, self._facts.fragments[index].tip.head
            same = link_of(tip) in box.chains.get(index, [])  # else it may be of another history
            if known is None or (same and base[0] > known[0]):
                self.chains[index].base = base

    def links(self, tips: Sequence[Head]) -> tuple[dict[int, list[Link]], dict[int, Link]]:
        """Return, by fragment, the versions up to these tips, and the anchors before them."""
        chains = [chain.to(link_of(tip)) for chain, tip in zip(self.chains, tips, strict=True)]
        bases = enumerate(chain.base for chain in self.chains)
        return dict(enumerate(chains)), {i: base for i, base in bases if base and base in chains[i]}

    def gather_records(self) -> None:
        """Keep the records that the store lacks until it has them: the core forgets them soon."""
        for f in self._facts.fragments:
            chain = self.chains[f.index]
            for record in f.outbox.records.values():
                if record.head.id not in chain.after:
                    chain.pending[record.head.id] = record
            # others begin with the anchor when more is lacking
            forget_oldest(chain.pending, max(2, 2 * f.sizes.anchor // f.sizes.update))

    async def store_records(self) -> None:
        """Write the records that the store lacks: of this peer's versions, or from elsewhere."""
        self.gather_records()
        async with self._writes_records:
            for chain in self.chains:
                for head_id, record in list(chain.pending.items()):
                    await self._store_record(record)
                    chain.pending.pop(head_id, None)

    async def _store_record(self, record: Record) -> None:
        head, update = record
        chain, link = self.chains[head.fragment], link_of(head)
        header = objects.packed(RecordHeader(head, update.digests))
        name = objects.record_name(head.fragment, link)
        await self._access.write(name, [header, _bytes(update.payload)])
        chain.learn([(head.number - 1, head.prev), link])

    async def fetch(self, peer: str, get: Get, box: Box | None) -> bool:
        """Read what follows a head, or a part of an anchor, for the core. Return False if the store
        lacks that, and the peer has to write its anchor."""
        context, name = self._context, [""]
        try:
            answer = await self._answer(box, get, name) if box else None
        except PayloadError as error:
            why = f"{name[0]}: {error}"
            context.note("fetch_failed", fragment=get.fragment, donor=peer, why=why)
            context.do(events.Broke(peer, get, bad=True))
        except FileNotFoundError:
            context.do(events.Broke(peer, get))
        else:
            context.do(events.Gave(peer, get, answer))
            return answer is not None
        return True

    async def _answer(
        self, box: Box, get: Get, name: list[str]
    ) -> events.Records | events.AnchorPart | None:
        f = self._facts.fragments[get.fragment]
        if get.want:
            goal = f.inbox.fetch.goal if f.inbox.fetch else None
            if goal is None or goal.head.id != get.want:
                return None
            header = PartHeader(goal.head, goal.book, goal.digests)
            return await self._read_part(f, link_of(goal.head), get.part, name, header)
        chain = box.chains.get(get.fragment, [])
        ids = [link[1] for link in chain]
        if get.have[1] in ids:
            links = chain[ids.index(get.have[1]) + 1 :][: objects.READ_AT_ONCE]
            reads = (self._read_record(f, link, name) for link in links)
            return events.Records(tuple(await asyncio.gather(*reads))) if links else None
        base = box.bases.get(get.fragment)
        if base is None:
            return None
        is_tip = base == chain[-1] and box.hello.status.tips[get.fragment] > f.tip.key
        if f.tip.head.prev and not is_tip and base[0] <= f.tip.head.number:
            return None
        return await self._read_part(f, base, 0, name)

    async def _read_record(self, f: FragmentState, link: Link, name: list[str]) -> Record:
        name[0] = path = objects.record_name(f.index, link)
        nbytes = self._context.replica.updates[f.index].nbytes
        content = await self._access.read(path, nbytes + 2 * HEADER_BYTES)
        header, payload = objects.unpacked(path, content)
        header, values = expect(header, RecordHeader), _tensor(payload)
        head, ranges = header.head, update_ranges(nbytes)
        fits = link_of(head) == link and head.fragment == f.index and values.numel() == nbytes
        if not fits or len(header.digests) != len(ranges):
            raise PayloadError("it is another record than its name says")
        parts = (values[start:stop] for start, stop in ranges)
        digests = [await in_thread(payload_digest, part) for part in parts]
        if tuple(digests) != header.digests or update_digest(header.digests) != head.update:
            raise PayloadError("its update is not what its head names")
        return Record(head, Update(values, header.digests))

    # -- anchors -----------------------------------------------------------------------------------

    def keep_bases(self) -> None:
        """Write anchors from which newcomers begin.

        Of the peers that have a tip, one writes its anchor; should two, they write the same bytes.
        """
        self.gather_records()
        for f in self._facts.fragments:
            chain, tip, tips = self.chains[f.index], f.tip, dict[str, Key]()
            for member in self._facts.members.all():
                tips[member.peer] = member.tips.get(f.index, (0, ""))
            same = [self._facts.me, *(peer for peer, key in tips.items() if key == tip.key)]
            first = min(same, key=lambda peer: score(f.index, peer))
            if first != self._facts.me or tip.head.id in chain.pending:
                continue  # until the store has its record, nobody knows what the tip follows
            ids = {link[1] for link in chain.to(link_of(tip.head))}
            base = chain.base
            if base is None or base[1] not in ids or base[0] + BASE_EVERY <= tip.head.number:
                self.store_base(f)

    def store_base(self, f: FragmentState) -> None:
        """Write the anchor of the tip: also for a peer that no record of the store leads here."""
        chain = self.chains[f.index]
        if f.tip.parts and not chain.storing and chain.base != link_of(f.tip.head):
            chain.storing = True
            self._context.tasks.spawn(self._store_base(f, chain))

    async def _store_base(self, f: FragmentState, chain: Chain) -> None:
        # with the work of the tip, the core gives its anchor, and none that it keeps for others
        get, context = Get(f.index, (f.tip.head.work, "")), self._context
        try:
            actions = context.do(events.Asked(STORE, get))
            [answer] = [action.answer for action in actions if isinstance(action, events.Reply)]
            if not isinstance(answer, events.AnchorPart):
                return
            header, link = (
                PartHeader(answer.head, answer.book, answer.digests),
                link_of(answer.head),
            )
            for part in range(len(answer.digests)):
                values = await context.read_part(f.index, link[1], part)
                if values is None:
                    return
                first: Message = header if part == 0 else Values()
                how = anchor_codec(context.replica, answer.head.number)
                payload = torch.empty(how.nbytes(values.numel()), dtype=torch.uint8)
                await in_thread(how.encode, values, payload)
                name = objects.part_name(f.index, link, part)
                await self._access.write(name, [objects.packed(first), _bytes(payload)])
            before, chain.base = chain.base, link
            self._changed.set()
            await self._clean(f, before)
        finally:
            chain.storing = False
            if not context.tasks.closed:
                context.do(events.Served(STORE, get))

    async def _read_part(
        self,
        f: FragmentState,
        link: Link,
        part: int,
        name: list[str],
        header: PartHeader | None = None,
    ) -> events.AnchorPart:
        name[0] = path = objects.part_name(f.index, link, part)
        replica = self._context.replica
        start, stop = part_ranges(replica.fragments[f.index].numel)[part]
        how = anchor_codec(replica, link[0])
        nbytes = how.nbytes(stop - start)
        content = await self._access.read(path, nbytes + 2 * HEADER_BYTES)
        first, payload = objects.unpacked(path, content)
        if header is None:
            header = expect(first, PartHeader)
        whole = header.head.fragment == f.index and len(header.digests) > part
        if len(payload) != nbytes or link_of(header.head) != link or not whole:
            raise PayloadError("it is another part than its name says")
        values = torch.empty(stop - start, dtype=torch.float32)
        await in_thread(how.decode, _tensor(payload), values)
        if await in_thread(part_digest, values) != header.digests[part]:
            raise PayloadError("it is not what its digest says")
        return events.AnchorPart(header.head, header.book, header.digests, part, values)

    async def _clean(self, f: FragmentState, before: Link | None) -> None:
        """Delete what nobody needs after a new anchor: all that is older than the one before it."""
        oldest = min(before[0] if before else 0, f.tip.head.number - BASE_EVERY)
        old = list[str]()
        for kind in ("record", "part"):
            for name in await self._access.tags(f"{kind}/{f.index}"):
                number = name.split("/")[2].partition("-")[0]
                if number.isdecimal() and int(number) < oldest + (kind == "record"):
                    old.append(name)
        known = {head[:32]: before[0] + 1 for head, before in self.chains[f.index].after.items()}
        for name in await self._access.tags(f"payload/{f.index}"):
            if known.get(name.split("/")[2], oldest) < oldest:
                old.append(name)
        await self._access.delete(old)


def _tensor(content: memoryview) -> Tensor:
    """Bytes as a tensor (uint8) that shares their memory."""
    return torch.frombuffer(content, dtype=torch.uint8) if len(content) else torch.empty(0)


def _bytes(payload: Tensor) -> memoryview:
    """The bytes of a tensor (uint8), which are not copied."""
    content: memoryview = payload.numpy().data
    return content
