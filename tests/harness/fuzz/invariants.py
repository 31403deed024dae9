"""What holds whatever fails: checked with every event of every node, and once the swarm is whole
again.

Whenever a tip moves:

- it moves up, and its author is the first to have it;
- equal ids have equal anchors and equal books, and the anchor has the digests that the tip says;
- in a history no contribution and no sequence of data is twice, tokens add up, and nothing was
  learned in another one.

When a contribution is made, its tokens were learned in the history that it goes to. Before the
first inner step from a head, the parameters are its anchor. Nobody asks a donor again and again.

When the swarm rests, everything is healed and nobody trains (`check_rest`):

- all have the same tips, and believe in the same authors; no contribution is in flight;
- tokens are conserved: what a peer has processed is in the model, told as discarded, or not sent
  yet;
- no sequence of the data is left out: what is in no model is dealt again;
- no version is lost that a peer had, as long as all peers could always reach each other, but for
  those of two authors who cannot know of each other yet; if nobody was killed either, what had been
  learned by a peer that met others and left is in the model, or kept for its next version.

At the end no life failed, nobody left an exception untaken, and no task of an ended life goes on
(`finish`).
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch

from diloco.core.events import Asked, Captured, Event, Stepped
from diloco.core.facts import CONTROL
from diloco.core.fragment import FragmentState
from diloco.core.history import Tip
from diloco.core.rules.data import deal, has
from diloco.core.rules.learning import discarded, own
from diloco.messages.fields import Units
from diloco.messages.heads import Head
from diloco.outer.digest import part_digests
from diloco.outer.fragments import gather_
from diloco.ranges import NONE, difference, union
from diloco.swarm.node.node import Node
from tests.harness.fuzz.crowd import Crowd
from tests.harness.fuzz.lives import Life, Violation
from tests.harness.fuzz.versions import Versions

SETTLE_S = 5.0  # after the last fault or life ended
# in which all agree once nobody trains, and after which they still do
RESTS_S, STAYS_S = 150.0, 15.0
# until a record in a store reaches all: three looks, the second of them at an old list
NEWS_S = 10.0
FINISH_S = 100.0  # in which everybody is done
MOST_ASKED = 8  # questions of one peer for one fragment that a donor gets in a second


@dataclass
class _Seen:
    """What was seen of a life.

    `since`, `loaded`, `told` are by fragment; `unread` and `damaged` are fragments.
    """

    life: Life
    node: Node
    tips: list[Tip]  # the last one of each fragment
    had: set[str] = field(default_factory=set)  # ids of control heads
    trained: int = 0  # tokens
    since: Counter[int] = field(default_factory=Counter)  # of these, when the history changed
    loaded: dict[int, str] = field(default_factory=dict)  # the head that the parameters were
    unread: set[int] = field(default_factory=set)  # not looked at since the tip moved
    damaged: set[int] = field(default_factory=set)  # the anchor is no more what the tip says
    told: Counter[int] = field(default_factory=Counter)  # tokens said to be discarded


class Watch:
    """Sees every event of the nodes of a crowd before their cores do, and looks at them after every
    turn of the loop; raises `Violation`.

    `seen` is what was seen of each life, by its owner. `left`: who left in peace, and for each
    fragment the newest stamp and the tokens that had to be in the model. `holes`: data that is in
    no model and that nobody has.
    """

    def __init__(self, crowd: Crowd) -> None:
        self.versions, self.seen = Versions(), dict[str, _Seen]()
        self.left: list[tuple[str, list[tuple[int, int]]]] = []
        self.holes: Units = NONE
        self._crowd, self._touched = crowd, dict[str, _Seen]()
        self._told: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self._asked: defaultdict[tuple[str, str, int], list[float]] = defaultdict(list)
        self._violation: Violation | None = None
        crowd.on_life, crowd.on_note = self._observe, self._noted
        crowd.loop.on_turn = self._look

    def _observe(self, life: Life) -> None:
        node = life.node
        assert node is not None
        tips = [f.tip for f in node.core.facts.fragments]
        seen = _Seen(life, node, tips, told=self._told[life.owner])
        if life.flips:  # its checkpoint may hold them
            seen.damaged.update(range(len(tips)))
        for tip in tips:
            if tip.head.number == 0:
                self.versions.add(tip, self._crowd.loop.seconds)
        self.seen[life.owner] = self._touched[life.owner] = seen
        node.context.tap = lambda event, now: self._hears(seen, event)
        if life.sync is not None:
            life.sync._optimizer.register_step_pre_hook(lambda *_: self._check_loaded(seen))

    def _noted(self, life: Life, kind: str, fields: dict[str, Any]) -> None:
        if kind == "discarded":
            self._told[life.owner][fields["fragment"]] += fields["tokens"]

    def _hears(self, seen: _Seen, event: Event) -> None:
        """An event is about to change a core, which shows what came of the ones before."""
        self._touched[seen.life.owner] = seen
        try:
            self._check(seen)
            self._check_event(seen, event)
        except Violation as violation:  # which would end a task of the node
            self._violation = self._violation or violation

    def _look(self) -> None:
        if self._violation:
            raise self._violation
        touched, self._touched = self._touched, {}
        for owner, seen in touched.items():
            if not seen.life.ended:
                self._check(seen)
                self._read(seen)
                if seen.unread - seen.damaged:
                    self._touched[owner] = seen

    # -- while it goes on --------------------------------------------------------------------------

    def _check_event(self, seen: _Seen, event: Event) -> None:
        match event:
            case Stepped(tokens):
                seen.trained += tokens
            case Captured(line) if line.tokens > seen.trained - seen.since[line.fragment]:
                here = seen.tips[line.fragment].head
                if line.base in [head.id for head in self.versions.chain(here)]:
                    said = f"{seen.life.name} sends more than it learned in the history of"
                    raise Violation(f"{said} {line.base}")
            case Asked(peer, get) if not get.want:
                asked = self._asked[peer, seen.life.name, get.fragment]
                now = self._crowd.loop.seconds
                asked[:] = [*(at for at in asked if at > now - 1.0), now]
                if len(asked) > MOST_ASKED:
                    said = f"{peer} asks {seen.life.name} for fragment {get.fragment}"
                    raise Violation(f"{said} again and again")

    def _check(self, seen: _Seen) -> None:
        for f, before in zip(seen.node.core.facts.fragments, seen.tips, strict=True):
            if f.tip is not before and f.tip.head is not before.head:
                self._moved(seen, f, before)
                seen.tips[f.index] = f.tip

    def _moved(self, seen: _Seen, f: FragmentState, before: Tip) -> None:
        name, tip = seen.life.name, f.tip
        if tip.key <= before.key:
            said = f"{name} goes from {before.key} back to {tip.key}"
            raise Violation(f"{said} in fragment {f.index}")
        known = self.versions.made.get(tip.head.id)
        if known is None:
            self._made(name, f)
        elif (known.parts, known.book) != (tip.parts, tip.book.digest):
            which = f"version {tip.head.number} of fragment {f.index}"
            raise Violation(f"{name} has another anchor or book of {which}")
        if f.index == CONTROL:
            seen.had.add(tip.head.id)
        seen.unread.add(f.index)
        seen.damaged.discard(f.index)
        if f.learned.base not in [head.id for head in self.versions.chain(tip.head)]:
            seen.since[f.index] = seen.trained

    def _made(self, name: str, f: FragmentState) -> None:
        head = f.tip.head
        which = f"version {head.number} of fragment {f.index}"
        if head.author != name:
            raise Violation(f"{name} has {which} before its author, {head.author}")
        self.versions.add(f.tip, self._crowd.loop.seconds)
        if why := self.versions.wrong(head):
            raise Violation(f"{which} by {name}: {why}")

    def _read(self, seen: _Seen) -> None:
        """Look at anchors that have moved, unless they are moving again."""
        for fragment in sorted(seen.unread - seen.damaged):
            lock, f = seen.node.context.locks[fragment], seen.node.core.facts.fragments[fragment]
            if not f.inbox.moving and not (lock._lock.locked() and not lock._readers):
                seen.unread.discard(fragment)
                if part_digests(seen.node.replica.anchors[fragment]) != f.tip.parts:
                    name = seen.life.name
                    raise Violation(f"anchor {fragment} of {name} is not what its tip says")

    def _check_loaded(self, seen: _Seen) -> None:
        """What an inner step begins with, in the thread of the peer."""
        replica = seen.node.replica
        for f in seen.node.core.facts.fragments:
            first = seen.loaded.get(f.index) != f.learned.base
            seen.loaded[f.index] = f.learned.base
            known = (
                f.learned.base == f.tip.head.id
                and not f.inbox.moving
                and f.index not in seen.damaged
            )
            if first and known and not replica.settings.mixing:
                values = torch.empty(replica.fragments[f.index].numel)
                local = {name: one.detach() for name, one in replica.local.tensors.items()}
                gather_(values, replica.fragments[f.index], 0, local)
                if part_digests(values) != f.tip.parts:
                    said = f"{seen.life.name} trains fragment {f.index} from something else"
                    self._crowd.failures.append(said)

    # -- when it rests -----------------------------------------------------------------------------

    def damaged(self, life: Life, fragment: int) -> None:
        """A peer's anchor is no more what its tip says."""
        self.seen[life.owner].damaged.add(fragment)

    def living(self) -> list[_Seen]:
        """Of the lives that go on."""
        return [self.seen[life.owner] for life in self._crowd.members() if life.owner in self.seen]

    def agree(self) -> bool:
        """Whether all have the same tips and the same authors, and nothing is on its way."""
        if not all(life.at_rest or not life.member.trains for life in self._crowd.members()):
            return False
        cores = [seen.node.core.facts for seen in self.living()]
        names = {core.me for core in cores}
        for fragments in zip(*(core.fragments for core in cores), strict=True):
            authors = {core.author_of(f) for core, f in zip(cores, fragments, strict=True)}
            tips = {f.tip.key for f in fragments}
            if len(tips) > 1 or len(authors) > 1 or not authors <= names:
                return False
        pairs = ((core, f) for core in cores for f in core.fragments)
        return not any(own(core, f) or f.inbox.moving or f.round.merge for core, f in pairs)

    def find_holes(self) -> None:
        """Remember which data is in no model, and nowhere else."""
        cores = [seen.node.core.facts for seen in self.living()]
        best = max((core.control.tip for core in cores), key=lambda tip: tip.key)
        taken = union(best.book.merged, *map(has, cores))
        self.holes = difference(((0, taken[-1][1]),) if taken else NONE, taken)

    def leaves(self, life: Life) -> None:
        """A peer has left in peace: the others have what it had learned, if it met any."""
        core = self.seen[life.owner].node.core.facts
        if len(core.members) and core.now <= core.life.leave_by:
            learned = [
                (core.loop.stamp, core.loop.processed - discarded(core, f)) for f in core.fragments
            ]
            self.left.append((life.name, learned))

    async def rest(self) -> None:
        """Nobody trains: all get the same, and stay with it."""
        self._crowd.rests = True
        await self._crowd.until(self.agree, RESTS_S, "all have the same, and nothing is on its way")
        await asyncio.sleep(STAYS_S)
        await self._crowd.until(self.agree, 1.0, "all still have the same")
        self.check_rest()

    async def finish(self) -> None:
        """All leave, and the last check is made."""
        crowd = self._crowd
        crowd.goal = 0
        trainers = [life for life in crowd.members() if life.member.trains]
        done = "every trainer is done"
        await crowd.until(lambda: all(life.ended for life in trainers), FINISH_S, done)
        for life in crowd.living():
            crowd.leave(life.name)
        await crowd.until(lambda: not crowd.living(), FINISH_S, "every host has left")
        await asyncio.sleep(SETTLE_S)
        check_end(crowd)

    def check_rest(self) -> None:
        """Check a swarm that rests; raises `Violation`."""
        living = self.living()
        heads = [f.tip.head for f in living[0].node.core.facts.fragments]
        for seen in living:
            self._check_tokens(seen)
        parted = self._crowd.torn or any(life.ended == "killed" for life in self._crowd.started)
        for name, learned in self.left if not parted else ():
            for head, (stamp, tokens) in zip(heads, learned, strict=True):
                here = self.versions.tokens(head, name, stamp) + self._pooled(head, name)
                if (missing := tokens - here) > 0:
                    which = f"fragment {head.fragment}"
                    raise Violation(f"{missing} tokens of {name}, which left, are not in {which}")
        survived = {head.id for head in self.versions.chain(heads[CONTROL])}
        news_s = NEWS_S if self._crowd.store else -inf
        for seen in living if not self._crowd.torn else ():
            lost = [self.versions.made[each].head for each in seen.had - survived]
            # Two may make the same version: while they still meet, or when an author comes back.
            # Over a store both may go on until the record of one reaches the other.
            lost = [head for head in lost if head.prev not in survived]
            last = heads[CONTROL]
            if more := [head.number for head in lost if self.versions.late(head, last) > news_s]:
                raise Violation(f"{seen.life.name} had versions {sorted(more)}, and they are lost")
        self._check_data(living)

    def _pooled(self, head: Head, name: str) -> int:
        """Tokens of a contribution that others keep for the next version of a fragment."""
        fragments = (seen.node.core.facts.fragments[head.fragment] for seen in self.living())
        items = ((f, f.pool.get(name)) for f in fragments)
        kept = (i.line.tokens for f, i in items if i and not f.tip.objection(i.line))
        return max(kept, default=0)

    def _check_tokens(self, seen: _Seen) -> None:
        core, name = seen.node.core.facts, seen.life.name
        for f in core.fragments:
            applied, said = self.versions.tokens(f.tip.head, name), f.tip.book.of(name)[1]
            lost, trained, which = discarded(core, f), seen.trained, f"fragment {f.index}"
            if applied != said:
                raise Violation(f"the book of {which} has {said} of {name}, its heads {applied}")
            if lost < 0 or lost != seen.told[f.index]:
                raise Violation(f"{name} has discarded {lost} of {which}, and told {seen.told}")
            if seen.life.fresh and trained != applied + lost + f.learned.tokens:
                parts = (
                    f"{applied} are in {which}, {lost} discarded and {f.learned.tokens} not sent"
                )
                raise Violation(f"{name} processed {trained} tokens, of which {parts}")

    def _check_data(self, living: list[_Seen]) -> None:
        """What was in no model when all was healed was dealt again, or would be."""
        cores = [life.node.core.facts for life in self._crowd.living() if life.node is not None]
        left = difference(self.holes, union(cores[0].control.tip.book.merged, *map(has, cores)))
        [dealer] = [core for core in cores if core.author_of(core.control) == core.me]
        granted, dealer.data.dealt = dealer.data.dealt, {}  # who has not got its data asks again
        if left:
            left = difference(left, deal(dealer, "", dealer.control.tip.head.work + 1, NONE))
        dealer.data.dealt = granted
        if left:
            raise Violation(f"the sequences {left} are dealt to nobody")


def check_end(crowd: Crowd) -> None:
    """Check a crowd whose peers have all ended; raises `Violation`."""
    gc.collect()  # exceptions that nobody took are told when their tasks are collected
    if crowd.failures:
        raise Violation("; ".join(crowd.failures))
    for life in crowd.started:
        if life.ended and (left := [task.get_coro() for task in crowd.loop.tasks_of(life.owner)]):
            raise Violation(f"{life.name} has ended ({life.ended}), and goes on with {left}")
    if not any(life.ended == "done" and life.node is not None for life in crowd.ended):
        raise Violation("nobody finished")
