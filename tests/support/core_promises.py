"""The promises of the core, checked in a swarm without tensors: after each event, and when nobody
trains any more."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any

from diloco.core import contributions, data
from diloco.core.facts import FragmentState
from diloco.core.settings import ProtocolSettings
from diloco.messages.fields import Units
from diloco.messages.heads import Head
from diloco.ranges import count, difference, union
from diloco.testing.fuzz.versions import Made, Versions
from tests.support.swarm_without_tensors import Peer, Swarm


class Violation(AssertionError):
    """A promise is broken."""


def holds(promise: bool, *said: object) -> None:
    """Or break."""
    if not promise:
        raise Violation(" ".join(map(str, said)))


class Promises(Swarm):
    """A swarm that is watched."""

    def __init__(self, settings: ProtocolSettings, seed: int) -> None:
        super().__init__(settings, seed=seed)
        self.versions = Versions()
        self.anchors: dict[str, Any] = {}
        self.liar = ""
        self.lies: set[str] = set()  # digests of updates
        self.seen: dict[tuple[str, int], Head] = {}  # the tips of each peer
        # of what each peer learns, as it was before the event
        self.bases: dict[tuple[str, int], str] = {}
        self.since: Counter[tuple[str, int]] = Counter()  # tokens processed when it left a history
        self.learned: defaultdict[str, set[int]] = defaultdict(set)  # stamps of this life
        self.again: set[str] = set()  # began with a checkpoint
        # what those had given who left when nothing else happened
        self.left: list[tuple[str, int, int, int]] = []

    def begins(self, peer: Peer) -> None:
        """Another life."""
        if peer.life > 1:
            self.again.add(peer.name)
        self.learned[peer.name].clear()
        for f in peer.facts.fragments:
            made = Made(f.tip.head, f.tip.parts, f.tip.book.digest)
            self.versions.made.setdefault(f.tip.head.id, made)
            self.seen[peer.name, f.index] = f.tip.head
            self.since[peer.name, f.index] = peer.facts.processed
            self.bases[peer.name, f.index] = f.base

    def check(self, peer: Peer) -> None:
        name, stamps = peer.name, self.learned[peer.name]
        for f in peer.facts.fragments:
            head, before = f.tip.head, self.seen[name, f.index]
            if head is not before:
                self.seen[name, f.index] = head
                holds(head.key > before.key and head.work >= before.work, name, "goes down")
                if head.id not in self.versions.made:
                    self.check_version(peer, f)
                if self.bases[name, f.index] not in [one.id for one in self.versions.chain(head)]:
                    self.since[name, f.index] = peer.facts.processed
                what = peer.anchors.now[f.index], f.tip.book.digest
                holds(self.anchors.setdefault(head.id, what) == what, "two anchors of", head.id)
                lied = head.update in self.lies and any(peer.anchors.momenta[f.index])
                holds(not lied or name == self.liar, name, "adopts what moves too far")
            self.bases[name, f.index] = f.base
            item = f.pool.get(name)
            if item and item.line.stamp in stamps and not f.tip.objection(item.line):
                stamps.discard(item.line.stamp)
                learned = peer.facts.processed - self.since[name, f.index]
                holds(item.line.tokens <= learned, name, "sends what another history taught")

    def check_version(self, peer: Peer, f: FragmentState) -> None:
        """A head that nobody has seen before."""
        head = f.tip.head
        holds(head.author == peer.name, "nobody made", head.id)
        self.versions.add(f.tip)
        why = self.versions.wrong(head)
        holds(not why and head.fragment == f.index, "version", head.number, "by", peer.name, why)
        units = sum(count(line.units) for one in self.versions.chain(head) for line in one.counted)
        holds(f.index or units == head.work, "tokens without data")

    def holes(self, side: list[Peer]) -> Units:
        """Sequences that are in no model, and that nobody has."""
        best = max((peer.tip() for peer in side), key=lambda tip: tip.key)
        taken = union(best.book.merged, *(data.has(peer.facts) for peer in side))
        return difference(((0, taken[-1][1]),), taken) if taken else ()

    def check_rest(self, side: list[Peer], missing: Units) -> None:
        """What holds when nobody trains any more."""
        for i in range(self.settings.fragments):
            tips = {peer.name: peer.tip(i).key for peer in side}
            holds(len(set(tips.values())) == 1, "different tips of", i, tips)
        for peer in side:
            for f in peer.facts.fragments:
                core, name, own = peer.facts, peer.name, contributions.own(peer.facts, f)
                applied = self.versions.tokens(f.tip.head, name)
                lost = contributions.discarded(core, f)
                holds(own is None or not core.author_of(f), "a line of", name, "stays in flight")
                holds(applied == f.tip.book.of(name)[1], "the book says other tokens than heads")
                notes = [said for _, kind, said in peer.notes if kind == "discarded"]
                told = [said["tokens"] for said in notes if said["fragment"] == f.index]
                holds(0 <= lost == sum(told), lost, "tokens are discarded, and told are", told)
                total = applied + lost + f.unsent + (own.tokens if own else 0)
                fits = name in self.again or core.steps * peer.batch == total
                holds(fits, "tokens of", name, "are missing")
        for name, index, stamp, tokens in self.left:
            lacks = tokens - self.versions.tokens(side[0].tip(index).head, name, stamp)
            holds(lacks <= 0, lacks, "tokens of", name, "which left, are not in", index)
        liars = [peer for peer in self.peers.values() if peer.core and peer.name == self.liar]
        held = (data.has(peer.facts) for peer in [*side, *liars])
        missing = difference(missing, union(side[0].tip().book.merged, *held))
        for peer in side:
            core, names = peer.facts, {other.name for other in side}
            given = [units for name, (units, _) in core.dealt.items() if name in names]
            if missing and core.author_of(core.control) == peer.name:
                core.now = math.inf
                given.append(data.deal(core, "", missing[-1][1] + 1, ()))
            missing = difference(missing, union(*given))
        holds(not missing, "nobody is given", missing)
