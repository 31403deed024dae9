"""A swarm of cores alone, in virtual time: messages take a while, and tensors are three integers.

swarm = Swarm(ProtocolSettings(sync_every=10))
peer = swarm.add("a"); swarm.until(100.0); peer.tip(), swarm.made
"""

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from diloco.core import events
from diloco.core.history import Tip, genesis
from diloco.core.peer import Peer as Core
from diloco.core.settings import Identity, ProtocolSettings, Sizes
from diloco.messages.bulk import Get, PartHeader, RecordHeader
from diloco.messages.codec import decode, encode
from diloco.messages.heads import Head
from diloco.ranges import count, first
from tests.support.fake_tensors import PARTS, RUN, Anchors, Arithmetic, Saved, Signer, hexed
from tests.support.owners import States

Pair = frozenset[str]


@dataclass(eq=False)
class Peer:
    """A core, its anchors, and a training loop of `batch` sequences in `step_s`."""

    name: str
    settings: ProtocolSettings
    trains: bool = True
    authors: bool = True
    begins: bool = True  # at once
    step_s: float = 1.0
    batch: int = 1
    cycle: int = 0  # inner steps, if it has a number of its own (DyLU)
    core: Core | None = None
    life: int = 0
    frozen: bool = False
    hangs: bool = False  # its training loop does
    stuck: bool = False  # its merges hang
    stepping: bool = False
    inbox: list[events.Event] = field(default_factory=list)
    notes: list[tuple[float, str, dict[str, object]]] = field(default_factory=list)

    anchors: Anchors = field(init=False)

    facts = property(lambda self: self.core.facts)

    def tip(self, index: int = 0) -> Tip:
        """Of a fragment."""
        return self.facts.fragments[index].tip

    def saved(self) -> Saved:
        """A checkpoint of now."""
        tips = tuple(f.tip for f in self.facts.fragments)
        return Saved(
            tips, tuple(self.anchors.now), self.facts.loop.processed, self.facts.loop.stamp
        )


class Swarm:
    """Peers, and connections between them.

    Messages arrive in order after `latency_s`; bulk takes `bulk_s` more, in any order, and is
    `lost` sometimes. Work on tensors takes `work_s`.
    """

    def __init__(
        self,
        settings: ProtocolSettings,
        latency_s: float = 0.03,
        bulk_s: float = 0.5,
        work_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.settings, self.random = settings, Random(seed)
        self.latency_s, self.bulk_s, self.work_s = latency_s, bulk_s, work_s
        self.peers: dict[str, Peer] = {}
        self.made: list[tuple[float, Head]] = []  # every version, and when its author had it
        self.heads: dict[str, Head] = {}
        self.states = States()
        self.now = self.lost = 0.0
        self.epochs: dict[Pair, int] = {}  # of the connections that are up
        self.blocked: set[Pair] = set()
        self.held: list[tuple[Pair, int, str, events.Event]] = []
        self._last: dict[tuple[str, str], float] = {}
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count(1)

    # -- time and connections ----------------------------------------------------------------------

    def at(self, when: float, what: Callable[..., None], *args: Any) -> None:
        """Do that then."""
        heapq.heappush(self._queue, (when, next(self._order), what, args))

    def until(self, end: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Let time pass."""
        while self._queue and self._queue[0][0] <= end and not stop():
            self.now, _, what, args = heapq.heappop(self._queue)
            what(*args)
        self.now = self.now if stop() else end

    def carry(
        self, sender: str, to: str, event: Any, back: events.Event | None = None, bulk: bool = False
    ) -> None:
        """Bring an event to another peer; if the stream breaks, the sender hears `back`."""
        pair = frozenset((sender, to))
        epoch = self.epochs.get(pair)
        if epoch is None:
            return
        if (bulk or back) and self.random.random() < self.lost:
            if back:
                self.at(self.now + 3 * self.latency_s, self._arrive, pair, epoch, sender, back)
            return
        if pair in self.blocked:
            self.held.append((pair, epoch, to, event))
            return
        when = self.now + self.latency_s * self.random.uniform(0.7, 1.5)
        if bulk:
            when += self.bulk_s * self.random.uniform(0.5, 2.0)
        else:
            when = self._last[sender, to] = max(when, self._last.get((sender, to), 0.0))
        self.at(when, self._arrive, pair, epoch, to, event)

    def _arrive(self, pair: Pair, epoch: int, to: str, event: events.Event) -> None:
        if self.epochs.get(pair) == epoch:
            self.tell(self.peers[to], event)

    def drop(self, pair: Pair, who: str) -> None:
        """One side closes the connection; the other hears of it, unless the network is cut."""
        if self.epochs.pop(pair, None) and pair not in self.blocked:
            (other,) = pair - {who}
            self.at(self.now + self.latency_s, self._gone, pair, other, who)

    def _gone(self, pair: Pair, peer: str, other: str) -> None:
        if pair not in self.epochs:
            self.tell(self.peers[peer], events.Lost(other))

    def reconnect(self, one: str, other: str) -> None:
        """Connect two peers whenever they can be."""
        pair = frozenset((one, other))
        if pair not in self.epochs and pair not in self.blocked:
            hellos = [self.greets(other), self.greets(one)]
            if all(hellos):
                epoch = self.epochs[pair] = next(self._order)
                for peer, there, hello in zip((one, other), (other, one), hellos, strict=True):
                    self.tell(self.peers[peer], events.Lost(there))
                    connected, at = events.Connected(there, hello), self.now + self.latency_s
                    self.at(at, self._arrive, pair, epoch, peer, connected)
        self.at(self.now + self.random.uniform(0.3, 2.0), self.reconnect, one, other)

    def block(self, pairs: Iterable[Pair], seconds: float) -> None:
        """Cut the network between these; nobody hears of it."""
        pairs = list(pairs)
        self.blocked |= set(pairs)
        self.at(self.now + seconds, self.unblock, pairs)

    def unblock(self, pairs: Iterable[Pair]) -> None:
        """What was on its way arrives."""
        self.blocked -= set(pairs)
        held, self.held = self.held, []
        for pair, epoch, to, event in held:
            if pair in self.blocked:
                self.held.append((pair, epoch, to, event))
            else:
                self.at(self.now + self.latency_s, self._arrive, pair, epoch, to, event)

    # -- peers -------------------------------------------------------------------------------------

    def add(self, name: str, saved: Saved | None = None, **fields: Any) -> Peer:
        """A peer that starts now."""
        peer = Peer(name, **{"settings": self.settings, **fields})
        for other in self.peers:
            self.at(self.now, self.reconnect, name, other)
        self.peers[name] = peer
        self.start(peer, saved)
        return peer

    def start(self, peer: Peer, saved: Saved | None = None, wall_ms: int = 0) -> None:
        """Start its next life."""
        settings = peer.settings
        anchors = tuple(tuple(range(i, i + PARTS)) for i in range(settings.fragments))
        tips = tuple(genesis(i, RUN, tuple(map(hexed, anchor))) for i, anchor in enumerate(anchors))
        saved = saved or Saved(tips, anchors, 0, 0)
        name, wall_ms = peer.name, wall_ms or 10**6 + int(self.now * 1000)
        identity = Identity(name, name, RUN, "0" * 64, Signer(name), peer.trains, peer.authors)
        peer.life, peer.inbox, peer.notes = peer.life + 1, [], []
        peer.frozen = peer.stuck = peer.stepping = False
        sizes, clock = [Sizes(1, 1, 1000, PARTS)] * settings.fragments, (self.now, wall_ms)
        start = saved.tips, sizes, *clock, saved.processed, saved.stamp
        peer.core = Core(identity, settings, Arithmetic(), *start)
        peer.anchors = Anchors(peer.core.facts, saved.anchors)
        self.heads |= {tip.head.id: tip.head for tip in saved.tips}
        cycle = peer.cycle or settings.sync_every
        if peer.begins:
            self.in_life(peer, self.now, self.tell, peer, events.Begun())
        wanted = events.Wanted(2 * cycle * peer.batch, cycle)
        self.in_life(peer, self.now, self.tell, peer, wanted)
        self.in_life(peer, self.now + self.random.random(), self._tick, peer)

    def in_life(self, peer: Peer, when: float, what: Callable[..., None], *args: Any) -> None:
        """Do that then, if the peer is still in this life."""
        life = peer.life
        self.at(when, lambda: what(*args) if peer.life == life else None)

    def _tick(self, peer: Peer) -> None:
        life = peer.life
        self.tell(peer, events.Tick())
        if peer.life == life:
            self.in_life(peer, self.now + 1.0, self._tick, peer)

    def die(self, peer: Peer) -> None:
        """The process ends; the others hear of it, unless the network is cut."""
        peer.core, peer.life = None, peer.life + 1
        for pair in [pair for pair in self.epochs if peer.name in pair]:
            self.drop(pair, peer.name)

    def thaw(self, peer: Peer) -> None:
        """It wakes up, and finds what came meanwhile."""
        inbox, peer.frozen, peer.inbox = peer.inbox, False, []
        for event in [*inbox, events.Tick()]:
            self.tell(peer, event)

    # -- what cores ask for ------------------------------------------------------------------------

    def greets(self, peer: str) -> Any:
        """What it says first; None while it cannot."""
        one = self.peers[peer]
        return None if one.core is None or one.frozen else decode(encode(one.core.hello()))

    def tell(self, peer: Peer, event: events.Event) -> None:
        """Something happens to a peer."""
        if peer.core is None:
            return
        if peer.frozen:
            peer.inbox += [event] if not isinstance(event, events.Tick) else []
            return
        actions = peer.core.receive(event, self.now)
        for head in [f.tip.head for f in peer.facts.fragments if f.tip.head.id not in self.heads]:
            self.heads[head.id] = head
            self.made.append((self.now, head))
        self.check(peer)
        for action in actions:
            self.do(peer, action)
        if peer.core and peer.core.runs and not peer.stepping and not peer.hangs:
            peer.stepping = True
            done_at = self.now + peer.step_s * self.random.uniform(0.95, 1.05)
            self.in_life(peer, done_at, self._step, peer)

    def check(self, peer: Peer) -> None:
        """What tests look at after each event; benchmarks do not."""
        self.states.follow(peer.facts)

    def _step(self, peer: Peer) -> None:
        peer.stepping = False
        units = first(peer.facts.data.queue, peer.batch)
        if units and not peer.facts.life.leaving:
            self.tell(peer, events.Stepped(count(units), units, 1 / peer.step_s))

    def do(self, peer: Peer, action: events.Action) -> None:
        """Carry one action out."""
        match action:
            case events.Send(to, message):
                self.carry(peer.name, to, events.Heard(peer.name, decode(encode(message))))
            case events.Broadcast(message):
                event = events.Heard(peer.name, decode(encode(message)))
                for member in peer.facts.members.all():
                    self.carry(peer.name, member.peer, event)
            case events.SendPayload(to, line, payload):
                event = events.Delivered(peer.name, line, payload)
                self.carry(peer.name, to, event, events.Broke(to, line), True)
            case events.AskDonor(to, get):
                self.carry(peer.name, to, events.Asked(peer.name, get), events.Broke(to, get))
            case events.Reply(to, get, answer):
                self._reply(peer, to, get, answer)
            case events.Disconnect(to):
                self.drop(frozenset((peer.name, to)), peer.name)
            case events.Note(kind, said):
                peer.notes.append((self.now, kind, said))
            case events.Wake(when):
                self.in_life(peer, when, self.tell, peer, events.Tick())
            case events.Exit():
                self.die(peer)
            case events.Merge() if peer.stuck:
                pass
            case _:
                done_at = self.now + self.work_s * self.random.uniform(0.5, 2.0)
                work = lambda: self.tell(peer, peer.anchors.done(action))  # noqa: E731
                self.in_life(peer, done_at, work)

    def _reply(self, peer: Peer, to: str, get: Get, answer: Any) -> None:
        gave = events.Gave(peer.name, get, self._written(peer, answer))
        self.carry(peer.name, to, gave, bulk=answer is not None)
        if answer is not None:
            served = events.Served(to, get)
            self.in_life(peer, self.now + 2 * self.bulk_s, self.tell, peer, served)

    def _written(self, peer: Peer, answer: Any) -> Any:
        match answer:
            case events.Records(records):
                for record in records:
                    decode(encode(RecordHeader(record.head, (record.head.update,))))
            case events.AnchorPart(head):
                answer = peer.anchors.filled(head.fragment, answer)
                decode(encode(PartHeader(head, answer.book, answer.digests)))
        return answer


def begun(**settings: Any) -> tuple[Swarm, Peer, Peer]:
    """Two peers in the middle of a round, the author first."""
    swarm = Swarm(ProtocolSettings(sync_every=10, **settings))
    peers = [swarm.add(name) for name in "ab"]
    swarm.until(60.0)
    swarm.until(100.0, lambda: swarm.now > swarm.made[-1][0] + 5.0)
    author = swarm.peers[peers[0].facts.author_of(peers[0].facts.control)]
    return swarm, author, next(peer for peer in peers if peer is not author)
