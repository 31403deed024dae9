"""Seeded schedules of faults for swarms of cores, and the promises that hold in each of them."""

import heapq
import itertools
import math
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

from msgspec.structs import replace as altered

from diloco.core import events
from diloco.core.fragment import FragmentState
from diloco.core.members import STALL_STEPS
from diloco.core.rules import data, learning
from diloco.core.settings import ProtocolSettings
from diloco.messages.fields import Units
from diloco.messages.heads import Head, Line
from diloco.ranges import count, difference, union
from tests.harness.fuzz.versions import Versions
from tests.support.fake_tensors import Saved, gradient, hexed
from tests.support.swarm_without_tensors import Peer, Swarm

MODES = "barrier barrier quorum immediate staggered overlap dylu".split()
FAULTS = ["kill"] * 3 + ["freeze"] * 2 + ["split"] * 2
FAULTS += "pair break leave join stuck hang damage slow".split()
LASTING, FOR_GOOD = sorted({*FAULTS} - {"break", "join", "damage"}), 10.0**9
DEADLINES = dict(heartbeat_s=2.0, silence_s=8.0, silence_beats=0.0, settle_s=3.0, stall_s=10.0)
DEADLINES |= dict(first_step_s=10.0, floor_s=6.0, refresh_s=4.0, stuck_s=40.0)
BASE = ProtocolSettings(delay=1, windowed=True, **DEADLINES)  # type: ignore[arg-type]


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
            if f.tip.head.id not in self.versions.made:
                self.versions.add(f.tip, self.now)
            self.seen[peer.name, f.index] = f.tip.head
            self.since[peer.name, f.index] = peer.facts.loop.processed
            self.bases[peer.name, f.index] = f.learned.base

    def check(self, peer: Peer) -> None:
        super().check(peer)
        name, stamps = peer.name, self.learned[peer.name]
        held, peer.facts.data.held = peer.facts.data.held, None
        holds(held is None or held == data.has(peer.facts), name, "tells old data")
        for f in peer.facts.fragments:
            head, before = f.tip.head, self.seen[name, f.index]
            if head is not before:
                self.seen[name, f.index] = head
                holds(head.key > before.key and head.work >= before.work, name, "goes down")
                if head.id not in self.versions.made:
                    self.check_version(peer, f)
                if self.bases[name, f.index] not in [one.id for one in self.versions.chain(head)]:
                    self.since[name, f.index] = peer.facts.loop.processed
                what = peer.anchors.now[f.index], f.tip.book.digest
                holds(self.anchors.setdefault(head.id, what) == what, "two anchors of", head.id)
                lied = head.update in self.lies and any(peer.anchors.momenta[f.index])
                holds(not lied or name == self.liar, name, "adopts what moves too far")
            self.bases[name, f.index] = f.learned.base
            item = f.pool.get(name)
            if item and item.line.stamp in stamps and not f.tip.objection(item.line):
                stamps.discard(item.line.stamp)
                learned = peer.facts.loop.processed - self.since[name, f.index]
                holds(item.line.tokens <= learned, name, "sends what another history taught")

    def check_version(self, peer: Peer, f: FragmentState) -> None:
        """A head that nobody has seen before."""
        head = f.tip.head
        holds(head.author == peer.name, "nobody made", head.id)
        self.versions.add(f.tip, self.now)
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
                core, name, own = peer.facts, peer.name, learning.own(peer.facts, f)
                applied = self.versions.tokens(f.tip.head, name)
                lost = learning.discarded(core, f)
                holds(own is None or not core.author_of(f), "a line of", name, "stays in flight")
                holds(applied == f.tip.book.of(name)[1], "the book says other tokens than heads")
                notes = [said for _, kind, said in peer.notes if kind == "discarded"]
                told = [said["tokens"] for said in notes if said["fragment"] == f.index]
                holds(0 <= lost == sum(told), lost, "tokens are discarded, and told are", told)
                total = applied + lost + f.learned.tokens + (own.tokens if own else 0)
                fits = name in self.again or core.loop.steps * peer.batch == total
                holds(fits, "tokens of", name, "are missing")
        for name, index, stamp, tokens in self.left:
            lacks = tokens - self.versions.tokens(side[0].tip(index).head, name, stamp)
            holds(lacks <= 0, lacks, "tokens of", name, "which left, are not in", index)
        liars = [peer for peer in self.peers.values() if peer.core and peer.name == self.liar]
        held = (data.has(peer.facts) for peer in [*side, *liars])
        missing = difference(missing, union(side[0].tip().book.merged, *held))
        for peer in side:
            core, names = peer.facts, {other.name for other in side}
            given = [units for name, (units, _) in core.data.dealt.items() if name in names]
            if missing and core.author_of(core.control) == peer.name:
                core.now = math.inf
                given.append(data.deal(core, "", missing[-1][1] + 1, ()))
            missing = difference(missing, union(*given))
        holds(not missing, "nobody is given", missing)


class World(Promises):
    """A swarm whose peers, settings and faults follow from a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__(BASE, seed)
        r = self.random
        self.mode = r.choice(MODES)
        self.settings = self._drawn()
        self.latency_s, self.bulk_s = r.choice([0.01, 0.05, 0.3]), r.choice([0.1, 0.3, 1.5])
        self.work_s, self.lost = r.choice([0.0, 0.0, 0.1, 0.5]), r.choice([0.0, 0.0, 0.03, 0.15])
        self.absurd = r.choice([0.0, 0.0, 0.02])
        self.saves: defaultdict[str, list[Saved]] = defaultdict(list)
        self.damaged: set[str] = set()
        self.asked: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        crowds = (1, 1), (2, 0), (2, 1), (3, 0), (3, 0), (3, 1), (4, 0), (4, 1), (5, 0)
        trainers, hosts = r.choice(crowds)
        self.liar = "a" if trainers >= 3 and r.random() < 0.06 else ""
        for i in range(trainers + hosts):
            self.joins(trains=i < trainers, authors=i in (0, trainers) or r.random() < 0.8)
        self.horizon = r.choice([15.0, 30.0, 50.0])
        self.lasting = r.random() < 0.25  # one fault, that nothing heals
        # where versions are many, some comes late
        alone = self.lasting or self.liar or self.settings.quorum == 1
        self.leaving = not alone and r.random() < 0.1  # peers only come and leave
        kinds = LASTING if self.lasting else ["leave", "join"] if self.leaving else FAULTS
        # a newcomer has nothing to measure a lie by
        kinds = ["freeze", "slow", "break"] if self.liar else kinds
        self.lost, self.absurd = (0.0, 0.0) if self.leaving else (self.lost, self.absurd)
        for _ in range(1 if self.lasting else r.choice([0, 1, 2, 2, 3, 4, 6])):
            self.at(r.uniform(1.0, self.horizon), self.fault, r.choice(kinds))

    def _drawn(self) -> ProtocolSettings:
        r, mode = self.random, self.mode
        settings = replace(BASE, fragments=r.choice([1, 1, 2, 3]), sync_every=r.choice([3, 4, 6]))
        settings = replace(settings, late=r.choice([4, 8, 16]), fanout=r.choice([1, 2, 3]))
        settings = replace(settings, tick_s=r.choice([0.0, 0.05]))
        match mode:
            case "quorum":
                quorum, grace_s = r.choice([1, 2, 2, 3]), r.choice([0.0, 1.0, 3.0])
                return replace(settings, quorum=quorum, grace_s=grace_s)
            case "immediate" | "dylu":
                return replace(settings, quorum=1, late=16, delay=r.choice([1, 3]))
            case "staggered":
                few = r.choice([None, None, 2])
                every, fragments = r.choice([6, 8]), r.choice([2, 3])
                settings = replace(settings, staggered=True, fragments=fragments, quorum=few)
                settings = replace(settings, sync_every=every)
                return replace(settings, overlap=r.choice([0, 1, 1, 2]), grace_s=1.0)
        return replace(settings, overlap=1) if mode == "overlap" else settings

    # -- peers -------------------------------------------------------------------------------------

    def joins(self, trains: bool, authors: bool = True) -> None:
        r, name = self.random, "abcdefghijklm"[len(self.peers)]
        step_s = r.choice([0.4, 0.5, 0.5, 1.0])
        cycle = max(2, int(self.settings.sync_every * 0.8 / step_s)) if self.mode == "dylu" else 0
        batch = r.choice([1, 1, 2, 4])
        self.add(name, trains=trains, authors=authors, step_s=step_s, batch=batch, cycle=cycle)

    def start(self, peer: Peer, saved: Saved | None = None, wall_ms: int = 0) -> None:
        jump_ms = self.random.choice([0, 0, -5000, 3000]) if peer.life else 0
        self.damaged.discard(peer.name)
        super().start(peer, saved, 10**6 + int(self.now * 1000) + jump_ms)
        self.begins(peer)
        peer.anchors.learn = lambda line: self.learns(peer, line)
        if peer.name == self.liar:
            done = peer.anchors.done
            peer.anchors.done = lambda action: self.lie(done(action))  # type: ignore[method-assign]
        self.in_life(peer, self.now + self.random.uniform(2, 8), self.save, peer)

    def learns(self, peer: Peer, line: Line) -> tuple[int, ...]:
        self.learned[peer.name].add(line.stamp)
        factor = 100 if self.random.random() < self.absurd else 1
        return tuple(factor * part for part in gradient(line))

    def lie(self, event: Any) -> Any:
        """Its versions move farther than their contributions allow."""
        if not isinstance(event, events.Merged):
            return event
        lie = tuple(part * 50 + 10**6 for part in event.update)
        self.lies.add(hexed(lie))
        return altered(event, update=lie, digest=hexed(lie))

    def save(self, peer: Peer) -> None:
        if not peer.frozen and peer.name not in self.damaged:
            self.saves[peer.name] = [*self.saves[peer.name][-3:], peer.saved()]
        self.in_life(peer, self.now + self.random.uniform(4, 10), self.save, peer)

    def often(self, peer: Peer, what: str, seconds: float) -> int:
        """How often a peer did that in the last seconds, this time included."""
        times = self.asked[f"{peer.name} {peer.life}", what]
        times[:] = [at for at in times if at > self.now - seconds] + [self.now]
        return len(times)

    def do(self, peer: Peer, action: events.Action) -> None:
        settings = self.settings
        match action:
            case events.AskDonor(to, get) if not get.want:
                few = self.often(peer, to, 1.0) <= 8 * settings.fragments
                holds(few, peer.name, "asks", to, "again and again")
            case events.Reply(_, get, events.Records(records)):
                serving = peer.facts.fragments[get.fragment].outbox.serving.items()
                records_to = [to for (to, want, _), head in serving if not want]
                few = len(records_to) <= settings.fanout * len({head for _, head in serving})
                holds(few and records, peer.name, "serves a record to all")
            case events.Exit():
                core = peer.facts
                self.saves[peer.name].append(peer.saved())
                for f in core.fragments if self.leaving and self.now <= core.life.leave_by else ():
                    kept = core.loop.processed - learning.discarded(core, f)
                    self.left.append((peer.name, f.index, core.loop.stamp, kept))
        super().do(peer, action)

    # -- faults ------------------------------------------------------------------------------------

    def fault(self, kind: str) -> None:
        r, alive = self.random, [one for one in self.peers.values() if one.core and not one.frozen]
        if not alive:
            return
        peer = r.choice(alive)
        author = self.peers[peer.facts.author_of(r.choice(peer.facts.fragments)) or peer.name]
        # whoever collects is hit more often
        peer = author if author in alive and r.random() < 0.5 else peer
        seconds = FOR_GOOD if self.lasting else r.choice([1.0, 4.0, 7.0, 10.0, 15.0, 25.0])
        match kind:
            case "split" | "pair" | "break":
                self.cut(kind, seconds)
            case "kill":
                self.die(peer)
                gone_s = seconds if self.lasting else r.choice([0.2, 1, 3, 15, 40])
                self.at(self.now + gone_s, self.back, peer)
            case "freeze":
                peer.frozen = True
                self.in_life(peer, self.now + seconds, self.wakes, peer)
            case "leave":
                lonely = len(alive) < 3 or any(one.facts.life.leaving for one in alive)
                if not (self.leaving and lonely):  # others have to be there for what it leaves
                    self.tell(peer, events.Leave())
                    for_good = self.lasting or self.leaving
                    gone_s = FOR_GOOD if for_good else r.choice([10, 30])
                    self.at(self.now + gone_s, self.back, peer)
            case "join" if len(self.peers) < 7:
                self.joins(trains=r.random() < 0.8)
            case "stuck" | "hang":
                peer.stuck, peer.hangs = peer.stuck or kind == "stuck", peer.hangs or kind == "hang"
                self.at(self.now + seconds, self.goes_on, peer)
            case "damage":
                index = r.randrange(self.settings.fragments)
                first, *rest = peer.anchors.now[index]
                peer.anchors.now[index] = (first ^ 64, *rest)
                self.damaged.add(peer.name)
            case "slow":
                peer.step_s *= r.choice([5, 20])

    def cut(self, kind: str, seconds: float) -> None:
        r, names = self.random, sorted(self.peers)
        pairs = [frozenset(pair) for pair in itertools.combinations(names, 2)]
        side = set(r.sample(names, r.randint(1, max(1, len(names) - 1))))
        one = [r.choice(pairs)] if pairs else []
        if kind == "break":
            for pair, name in itertools.product(one, names):
                self.drop(pair, name) if name in pair else None
        else:
            split = [pair for pair in pairs if len(pair & side) == 1]
            self.block(split if kind == "split" else one, seconds)

    def back(self, peer: Peer) -> None:
        saves = self.saves[peer.name]
        if peer.core is None:
            old = saves and (self.leaving or self.random.random() < 0.9)
            save = saves[-1] if old and self.leaving else None
            self.start(peer, self.random.choice(saves) if old and not self.leaving else save)

    def wakes(self, peer: Peer) -> None:
        if peer.frozen:
            self.thaw(peer)

    def goes_on(self, peer: Peer) -> None:
        peer.hangs = False
        self.tell(peer, events.Tick())

    def heal(self) -> None:
        self.unblock(list(self.blocked))
        for peer in self.peers.values():
            self.wakes(peer)
            if peer.core and not self.leaving and (peer.stuck or peer.facts.life.leaving):
                self.die(peer)  # it is put right by its owner
            if not self.leaving:
                self.back(peer)
            peer.step_s = min(peer.step_s, 1.0)
            self.goes_on(peer)

    # -- the schedule ------------------------------------------------------------------------------

    def sides(self) -> list[list[Peer]]:
        """Sets of connected peers among which one trains and one can be an author."""
        alive = (p for p in self.peers.values() if p.core and not p.frozen)
        rest, found = [p for p in alive if p.name != self.liar], []
        while rest:
            side = [rest.pop(0)]
            for peer in side:
                near = [p for p in rest if frozenset((peer.name, p.name)) not in self.blocked]
                side += near
                rest = [other for other in rest if other not in near]
            able = [p for p in side if not p.stuck]
            if any(p.authors for p in able) and any(p.trains and not p.hangs for p in able):
                found.append(side)
        return found

    def works(self) -> list[list[int]]:
        """By side and fragment; nobody gets what only a damaged peer has."""
        rows = [zip(*(peer.facts.fragments for peer in side), strict=True) for side in self.sides()]
        return [[max(map(work_of, row)) for row in side] for side in rows]

    def play(self) -> None:
        """Raises `Violation`."""
        self.until(self.horizon)
        self.absurd = self.lost = 0.0
        if not self.lasting:
            self.heal()
            self._queue = [one for one in self._queue if one[2] not in (self.fault, self.unblock)]
            heapq.heapify(self._queue)
        holes = [self.holes(side) for side in self.sides()]
        self.until(self.now + (35.0 if not self.lasting else 170.0))
        before = self.works()
        longest_s = {"barrier": 40.0, "overlap": 40.0, "staggered": 60.0}
        # The only one that trains may be a slow one.
        fastest_s = min((one.step_s for one in self.peers.values() if one.trains), default=0.0)
        cycle_s = 1.5 * self.settings.sync_every * fastest_s
        self.until(self.now + max(longest_s.get(self.mode, 25.0), cycle_s))
        pairs = list(zip(before, self.works(), strict=True))
        holds(all(x < y for one in pairs for x, y in zip(*one, strict=True)), "no progress:", pairs)
        sides = self.sides()
        for peer in self.peers.values():
            peer.hangs = True
        slowest_s = max(peer.step_s for peer in self.peers.values())
        self.until(self.now + max(80.0, 2 * STALL_STEPS * slowest_s))  # then they are stalled
        for side, missing in zip(sides if not self.lies else [], holes, strict=False):
            self.check_rest([peer for peer in side if peer.core], missing)


def work_of(f: FragmentState) -> int:
    return 0 if f.inbox.damaged else f.tip.head.work


def broken(world: World) -> str:
    """Which promise is broken in a schedule, or what else went wrong; empty if all hold."""
    try:
        world.play()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:500]
    return ""
