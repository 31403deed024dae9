"""This peer as auditor: it recomputes parts of what others publish, drawn in secret (see `outer.audit`).

    update adopted -> watches are drawn -> each keeps its part of the updates -> due: the author is asked -> audit

A *watch* is one part of a fragment. It is drawn when it begins, and nobody knows of it until the author of the newest
version is asked for the contributions to that; then it ends. It lasts until a momentum from before it is forgotten, for
nineteen versions at most. At version 0 nothing is to be forgotten, so watches for all first versions are drawn there.

All watches of a fragment end with the term of its syncer, and where a version came without its update: what an heir has
of master and momentum is not known to everybody. So the first versions of an heir are not audited.

Memory: with a part s of all versions audited by n members, s / n x 200 encoded fragments.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from diloco.errors import PayloadError
from diloco.outer.audit import FORGOTTEN, memories, memory, pick
from diloco.outer.merkle import Tree
from diloco.outer.optimizer import OuterStep
from diloco.outer.recompute import Part
from diloco.outer.shown import Shown, part_at, part_count, show
from diloco.protocol.limits import ACCUSATIONS, ACCUSATIONS_PER_S, UNSHOWN, UNSHOWN_PER_S, Buckets
from diloco.protocol.messages.audits import MAX_ASKED, MAX_STEPS, Accusation
from diloco.protocol.messages.heads import Head, Record
from diloco.protocol.penalties import Offence
from diloco.protocol.proofs import condemn
from diloco.swarm.conversations import audit
from diloco.swarm.conversations.audit import Evidence
from diloco.swarm.conversations.context import Context
from diloco.swarm.conversations.framing import UpdateRecord
from diloco.swarm.conversations.tasks import in_thread
from diloco.swarm.wire.streams import BROKEN, Stream

__all__ = ["Auditor"]


@dataclass
class _Watch:
    number: int
    part: Part
    due: int  # version
    steps: list[tuple[Head, Shown]] = field(default_factory=list)


class Auditor:
    """Audits versions that this peer adopts, and passes proofs on. Whatever fails is an event.

    `audited` counts parts that were recomputed.
    """

    def __init__(self, context: Context, seed: str | None) -> None:
        self.audited = 0
        self._context = context
        self._settings = context.replica.settings
        self._random = random.SystemRandom() if seed is None else random.Random(f"audits of {seed}")
        self._watches: dict[int, list[_Watch]] = {}
        self._last: dict[int, Head] = {}  # by fragment: of the version that was followed last
        self._unshown: Buckets[str] = Buckets(UNSHOWN_PER_S, UNSHOWN)
        self._accusations: Buckets[str] = Buckets(ACCUSATIONS_PER_S, ACCUSATIONS)
        self._lasts = _remembered(context) if self._settings.audited else 0

    async def follow(self, record: UpdateRecord) -> None:
        """An update was adopted. The fragment's lock is held."""
        head, context = record.header.head, self._context
        if not self._settings.audited or head.author == context.protocol.me or not record.hashes:
            return
        last = self._last.get(head.fragment)
        self._last[head.fragment] = head
        goes_on = last is not None and (last.author, last.term, last.version + 1, last.digest) == (
            head.author, head.term, head.version, head.digest_before,
        )  # fmt: skip
        watches = self._watches.setdefault(head.fragment, [])
        if not goes_on:
            watches.clear()
        watches += self._drawn(head, head.version + self._lasts)
        if head.version == 1:
            watches += [watch for ahead in range(self._lasts) for watch in self._drawn(head, 1 + ahead)]
        if not watches:
            return
        replica = context.replica
        at = replica.down.offsets(replica.fragments[head.fragment].numel)
        payloads = [record.update[start:stop] for start, stop in pairwise(at)]
        tree = await in_thread(Tree, record.hashes)
        for watch in watches:
            watch.steps.append((head, show(replica.down, payloads, tree, watch.part)))
        self._ask_due(record.header, watches)

    def _drawn(self, head: Head, due: int) -> list[_Watch]:
        fragment = self._context.replica.fragments[head.fragment]
        count, members = part_count(fragment, self._settings), max(1, len(self._context.protocol.members))
        drawn = ((one, part_at(fragment, self._settings, one)) for one in self._pick(count, members))
        return [_Watch(number, part, due) for number, part in drawn if part is not None]

    def _pick(self, count: int, members: int) -> list[int]:
        return pick(count, self._settings.audit, members, self._random)

    def _ask_due(self, record: Record, watches: list[_Watch]) -> None:
        due, version = [], record.version
        for watch in watches:
            if watch.due == version:
                if memory(self._settings, [audit.step_of(head) for head, _ in watch.steps]) <= FORGOTTEN:
                    due.append(watch)
                else:
                    watch.due += 1
        over = {id(watch) for watch in watches if watch in due or len(watch.steps) >= MAX_STEPS}
        watches[:] = [watch for watch in watches if id(watch) not in over]
        if due and record.head.author in self._context.protocol.members:
            self._context.tasks.spawn(self._audit(record, due))

    async def _audit(self, record: Record, watches: Sequence[_Watch]) -> None:
        """Ask the author of a version for what it merged, and recompute it."""
        context, head = self._context, record.head
        lease = context.protocol.leases.get(head.fragment)
        newest = lease is not None and lease.version <= head.version and context.protocol.me in record.contributors
        shown: dict[int, Sequence[Shown]] = {}
        try:
            for at in range(0, len(watches), MAX_ASKED):
                async with context.open(head.author) as stream:
                    parts = [(watch.number, watch.part) for watch in watches[at : at + MAX_ASKED]]
                    await audit.ask(context, stream, record, parts, shown.__setitem__)
        except (*BROKEN, PayloadError) as error:
            self._not_shown(head, error, newest)
        for watch in watches:
            if watch.number in shown:
                evidence = Evidence(watch.number, watch.part, tuple(watch.steps), record, shown[watch.number])
                self.audited += 1
                if await self._convicts(evidence):
                    self._spread(evidence)
                    return

    def _not_shown(self, head: Head, error: Exception, newest: bool) -> None:
        """An author did not show what it signed. That happens now and then to an honest one that leaves or has a thin
        link. A connection that broke says nothing.
        """
        context, author = self._context, head.author
        why = str(error) or type(error).__name__
        context.note("audit_failed", fragment=head.fragment, version=head.version, syncer=author, why=why)
        if isinstance(error, Offence):
            context.do(context.protocol.offence(author, why, context.now()))
        elif newest and isinstance(error, PayloadError | asyncio.TimeoutError):
            if not self._unshown.take(author, context.now()):
                why = f"does not show what it merged, again and again: {why}"
                context.do(context.protocol.offence(author, why, context.now()))

    # -- proofs -------------------------------------------------------------------------------------------------------

    async def _convicts(self, evidence: Evidence) -> bool:
        """Whether evidence proves that its syncer lied; then it is out here."""
        found = await in_thread(audit.deviation, self._context.replica, evidence)
        if found is None:
            return False
        heads = {head.version: head for head, _ in evidence.steps}
        head = heads.get(found.version + 1, evidence.record.head)
        self._context.do(condemn(self._context.protocol, head, f"published what nobody contributed: {found.why}"))
        return True

    def _spread(self, evidence: Evidence, known_to: str = "") -> None:
        author = evidence.record.head.author
        for member in self._context.protocol.members.all():
            if member.peer not in (known_to, author):
                self._context.tasks.spawn(self._offer(member.peer, evidence))

    async def _offer(self, peer: str, evidence: Evidence) -> None:
        try:
            async with self._context.open(peer) as stream:
                await audit.offer(self._context, stream, evidence)
        except (*BROKEN, PayloadError):
            pass  # it knows, or it is gone

    async def hear(self, stream: Stream, offered: Accusation) -> None:
        """A peer offers a proof. `Offence` if it is none; `PayloadError` if it proves nothing, or comes too often."""
        context = self._context
        if offered.author in context.protocol.liars:
            await stream.refuse("this proof is known here")
            return
        if not self._accusations.take(stream.peer, context.now()):
            raise PayloadError("too many proofs are offered by this peer")
        evidence = await audit.receive(context, stream, offered)
        if not await self._convicts(evidence):
            raise PayloadError(f"a proof about {offered.author} proves nothing")
        self._spread(evidence, stream.peer)


def _remembered(context: Context) -> int:
    """After how many versions a momentum from before them is forgotten."""
    settings = context.replica.settings
    delay = 1 if settings.delay is None or not settings.windowed else settings.delay
    steps = (OuterStep(settings.momentum_risen + version, delay, 0, delay) for version in range(1, MAX_STEPS))
    left = enumerate(memories(settings, steps), start=1)
    return next((versions for versions, part in left if versions > 1 and part <= FORGOTTEN), MAX_STEPS - 1)
