"""A swarm of cores on links with rates, in virtual time and without tensors.

    uplink (a piece of each transfer in turn) -> latency -> downlink (the same) -> the other core

Payloads, records and parts of anchors take the bytes that `Sizes` says. Messages take the mean
latency of both ends, in order. Nothing is random but by the seed, the peer and the inner step, so
two swarms whose times are multiples of each other do the same things.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from msgspec.structs import replace as altered

from diloco.core import events
from diloco.core.history import Record, genesis
from diloco.core.peer import Peer as Core
from diloco.core.settings import Identity, ProtocolSettings, Sizes
from diloco.messages.bulk import Get
from diloco.messages.control import Answer
from diloco.messages.heads import Head, Line
from tests.support import swarm_without_tensors as base
from tests.support.fake_tensors import PARTS, RUN, Anchors, Arithmetic, Saved, Signer, hexed

PIECES = 64  # of a transfer; of a record, its parts
LEAST_BYTES = 2.0**14  # of a piece
READ_S = 10.0  # in which others read what a peer still sends when it leaves (`swarm.node.node`)
REDIAL_S = 2.0
OPENED, ASKED = 2, 3  # one-way trips until a stream is open, and its first message there
TOKENS = 1000  # of an inner step
# of cores that pass on the parts of a record while it arrives; None where they do not
MOVED, ARRIVING, SERVED = (getattr(events, name, None) for name in ("Moved", "Arriving", "Served"))


class Link(NamedTuple):
    """A peer's access to the network; bytes per second each way, and its share of a latency."""

    up: float = 1e6
    down: float = 1e6
    latency_s: float = 0.0


@dataclass(eq=False)
class Arrival:
    """A record that comes to a peer, in parts; they are kept when a transfer breaks."""

    record: Record
    pieces: int
    here: int = 0
    followers: list["Transfer"] = field(default_factory=list)  # which pass its parts on


class Port:
    """An uplink or a downlink: serves one piece at a time, of each transfer in turn."""

    def __init__(self, swarm: "LinkedSwarm", bytes_per_s: float) -> None:
        self.swarm, self.bytes_per_s, self.bytes = swarm, bytes_per_s, 0.0
        self.turns: dict[Transfer, None] = {}
        self.busy = self.frozen = False

    def serve(self, transfer: "Transfer") -> None:
        self.turns.setdefault(transfer)
        self.go_on()

    def go_on(self) -> None:
        while self.turns and not (self.busy or self.frozen):
            transfer = next(iter(self.turns))
            del self.turns[transfer]
            if transfer.over or not transfer.has_piece(self):
                continue
            self.busy, self.bytes = True, self.bytes + transfer.piece_bytes
            seconds = transfer.piece_bytes / self.bytes_per_s
            self.swarm.at(self.swarm.now + seconds, self.free)
            transfer.take_piece(self, seconds)
            if transfer.has_piece(self):
                self.turns[transfer] = None

    def free(self) -> None:
        self.busy = False
        self.go_on()


class Transfer:
    """A payload or an answer on its way: `pieces` of which the first `at` are there."""

    def __init__(
        self,
        swarm: "LinkedSwarm",
        ends: tuple[str, str],
        nbytes: float,
        pieces: int,
        at: int = 0,
    ) -> None:
        self.swarm, self.nbytes, self.pieces = swarm, nbytes, pieces
        self.source, self.target = (swarm.peers[name] for name in ends)
        self.piece_bytes, self.sent, self.landed = nbytes / pieces, at, at
        self.latency_s = swarm.latency(*ends)
        self.arrived = deque[float]()  # when the last byte of each piece reaches the downlink
        self.over, self.said_at, self.says = False, swarm.now, False

    def available(self) -> int:
        """Pieces that the source has."""
        return self.pieces

    def has_piece(self, port: Port) -> bool:
        if port is self.source.uplink:
            return self.sent < self.available()
        return bool(self.arrived)

    def take_piece(self, port: Port, seconds: float) -> None:
        """A port begins with a piece, which leaves it in so many seconds."""
        swarm = self.swarm
        if port is self.source.uplink:
            self.sent += 1
            whole_at = swarm.now + seconds + self.latency_s
            swarm.at(swarm.now + self.latency_s, self._arrive, whole_at)
        else:
            swarm.at(max(swarm.now + seconds, self.arrived.popleft()), self._land)

    def _arrive(self, whole_at: float) -> None:
        self.arrived.append(whole_at)
        self.target.downlink.serve(self)

    def _land(self) -> None:
        if self.over:
            return
        self.landed += 1
        self.landing()
        if self.landed == self.pieces and not self.over:
            self.close()
            self.done()
        elif MOVED and not self.says:
            self.says = True
            self.swarm.at(max(self.swarm.now, self.said_at + self.swarm.says_s), self._say)

    def _say(self) -> None:
        self.says, self.said_at = False, self.swarm.now
        if not self.over:
            self.say()

    def close(self) -> None:
        self.over = True
        self.swarm.transfers.pop(self, None)

    def broken(self) -> None:
        """The stream ends; what is here of it is kept."""
        if not self.over:
            self.close()
            self.broke()

    def later(self, peer: "LinkedPeer", event: events.Event) -> None:
        """A peer hears that, if it still lives."""
        self.swarm.in_life(peer, self.swarm.now + self.latency_s, self.swarm.tell, peer, event)

    def landing(self) -> None: ...
    def say(self) -> None: ...
    def done(self) -> None: ...
    def broke(self) -> None: ...


class PayloadTransfer(Transfer):
    """A contribution; the target keeps what came of it."""

    def __init__(self, swarm: "LinkedSwarm", source: str, action: events.SendPayload) -> None:
        line, nbytes = action.line, swarm.sizes[action.line.fragment].payload
        pieces = pieces_of(nbytes)
        at = action.at * pieces // nbytes
        super().__init__(swarm, (source, action.peer), nbytes, pieces, at)
        self.line, self.payload = line, action.payload
        self.stamp = line.fragment, line.peer, line.stamp

    def landing(self) -> None:
        self.target.partial[self.stamp] = self.landed

    def say(self) -> None:
        assert MOVED
        nbytes = int(self.landed * self.piece_bytes)
        self.swarm.tell(self.source, MOVED(self.target.name, self.line, nbytes))

    def done(self) -> None:
        self.target.partial.pop(self.stamp, None)
        delivered = events.Delivered(self.source.name, self.line, self.payload)
        self.swarm.tell(self.target, delivered)

    def broke(self) -> None:
        self.later(self.source, events.Broke(self.target.name, self.line))


class AnswerTransfer(Transfer):
    """A part of an anchor, or records, of which the last may still be on its way to the donor."""

    def __init__(
        self,
        swarm: "LinkedSwarm",
        source: str,
        target: str,
        get: Get,
        answer: Any,
    ) -> None:
        sizes, self.get, self.answer = swarm.sizes[get.fragment], get, answer
        self.arrivals, self.donors, at = list[Arrival](), None, 0
        if isinstance(answer, events.AnchorPart):
            nbytes = swarm.part_bytes(get.fragment)
            pieces = pieces_of(nbytes)
        else:
            donor, asker, each = swarm.peers[source], swarm.peers[target], pieces_of(sizes.update)
            self.donors = donor.arrivals.get(answer.records[-1].head.id)
            for record in answer.records:
                known = asker.arrivals.get(record.head.id)
                if known is None or known.here == each:
                    known = asker.arrivals[record.head.id] = Arrival(record, each)
                self.arrivals.append(known)
            nbytes, pieces = sizes.update * len(answer.records), each * len(answer.records)
            at = min(get.part, self.arrivals[0].here) if not get.want else 0
        super().__init__(swarm, (source, target), nbytes, pieces, at)
        self.says_head = True
        if self.donors and answer.records[-1].update is None:
            self.donors.followers.append(self)

    def available(self) -> int:
        if isinstance(self.answer, events.AnchorPart) or self.answer.records[-1].update is not None:
            return self.pieces
        return self.pieces - self.donors.pieces + self.donors.here if self.donors else 0

    def landing(self) -> None:
        if not self.arrivals:
            return
        number, here = divmod(self.landed - 1, self.arrivals[0].pieces)
        arrival = self.arrivals[number]
        arrival.here = max(arrival.here, here + 1)
        if ARRIVING and self.says_head:
            self.says_head = False
            head = self.arrivals[0].record.head
            self.swarm.tell(self.target, ARRIVING(self.source.name, self.get, head))
        for follower in arrival.followers:
            if not follower.over:
                self.target.uplink.serve(follower)

    def say(self) -> None:
        assert MOVED
        nbytes = int(self.landed * self.piece_bytes)
        self.swarm.tell(self.target, MOVED(self.source.name, self.get, nbytes))

    def done(self) -> None:
        answer = self.answer
        if self.arrivals:
            whole = self.swarm.records
            answer = events.Records(tuple(whole[one.record.head.id] for one in self.arrivals))
            for one in self.arrivals:
                if self.target.arrivals.get(one.record.head.id) is one:
                    del self.target.arrivals[one.record.head.id]
        if SERVED:
            self.later(self.source, SERVED(self.target.name, self.get))
        self.swarm.tell(self.target, events.Gave(self.source.name, self.get, answer))

    def broke(self) -> None:
        self.later(self.target, events.Broke(self.source.name, self.get))
        if SERVED:
            self.later(self.source, SERVED(self.target.name, self.get))


def pieces_of(nbytes: float) -> int:
    """In how many a transfer goes."""
    return int(max(1, min(PIECES, nbytes // LEAST_BYTES)))


@dataclass(eq=False)
class LinkedPeer(base.Peer):
    """A core on a link, and a training loop. `dylu`: it makes fewer inner steps if it is slow."""

    link: Link = field(default_factory=Link)
    dylu: bool = False
    trained_s: float = 0.0  # in inner steps that are done
    made: int = 0  # inner steps
    begun_at: float | None = None  # with its first inner step
    ended_at: float | None = None  # its training
    leaves: bool = False
    uplink: Port = field(init=False)
    downlink: Port = field(init=False)
    partial: dict[tuple[int, str, int], int] = field(default_factory=dict)  # pieces of payloads
    arrivals: dict[str, Arrival] = field(default_factory=dict)  # by head
    later: list[events.Action] = field(default_factory=list)  # after the inner step under way

    def utilization(self, now: float) -> float:
        """Share of its time in inner steps, from the first one until it ended its training."""
        if self.begun_at is None:
            return 0.0
        until = now if self.ended_at is None else self.ended_at
        return self.trained_s / max(1e-9, until - self.begun_at)


class Said(NamedTuple):
    """A note of a core."""

    at: float
    peer: str
    kind: str
    fields: dict[str, Any]
    over: bool  # the run is, for that peer


class LinkedSwarm(base.Swarm):
    """Peers, links, and the connections between them.

    Args:
        sizes: of each fragment.
        planned: steps, tokens and rounds of the run; peers leave when it is over.
        jitter: how far an inner step is longer or shorter than the mean, at most.
        part_bytes: of an answer with a part of the anchor of a fragment.
        says_s: between two events about one transfer.
    """

    peers: dict[str, LinkedPeer]  # type: ignore[assignment]

    def __init__(
        self,
        settings: ProtocolSettings,
        sizes: Sequence[Sizes],
        planned: tuple[int, int, int] = (0, 0, 0),
        seed: int = 0,
        jitter: float = 0.02,
        says_s: float = 1.0,
    ) -> None:
        super().__init__(settings, seed=seed)
        self.seed, self.sizes, self.planned, self.jitter = seed, list(sizes), planned, jitter
        self.says_s = says_s
        self.transfers: dict[Transfer, None] = {}
        self.records: dict[str, Record] = {}  # by head, as its author has made it
        self.said: list[Said] = []
        self.captured: list[Line] = []
        self.adopted: dict[str, dict[str, float]] = {}  # by head and peer
        self.on_step: list[Callable[[LinkedPeer], None]] = []
        self._latencies: dict[tuple[str, str], float] = {}

    # -- connections -------------------------------------------------------------------------------

    def latency(self, one: str, other: str) -> float:
        """Seconds from one peer to another: no two pairs have the same."""
        key = (one, other)
        if key not in self._latencies:
            spread = Random(f"{self.seed} {min(key)} {max(key)}").uniform(0.9, 1.1)
            ends = [self.peers[name].link.latency_s for name in key]
            self._latencies[key] = self._latencies[other, one] = sum(ends) / 2 * spread
        return self._latencies[key]

    def part_bytes(self, fragment: int) -> float:
        """Of a part of an anchor, in fp32."""
        return self.sizes[fragment].anchor / PARTS

    def reconnect(self, one: str, other: str) -> None:
        """Connect two peers, now or as soon as both can be."""
        pair, both = frozenset((one, other)), (self.peers[one], self.peers[other])
        if pair in self.epochs or any(peer.core is None for peer in both):
            return
        hellos = [self.greets(other), self.greets(one)]
        if not all(hellos):
            self.at(self.now + REDIAL_S, self.reconnect, one, other)
            return
        epoch, trip_s = next(self._order), self.latency(one, other)
        self.epochs[pair] = epoch
        for peer, there, hello in zip((one, other), (other, one), hellos, strict=True):
            self.at(
                self.now + trip_s, self._arrive, pair, epoch, peer, events.Connected(there, hello)
            )

    def drop(self, pair: base.Pair, who: str) -> None:
        """One side closes the connection, with all streams."""
        if pair in self.epochs:
            one, other = pair
            del self.epochs[pair]
            self.reset(pair)
            (there,) = pair - {who}
            trip_s = self.latency(one, other)
            self.at(self.now + trip_s, self._gone, pair, there, who)
            self.at(self.now + trip_s + REDIAL_S, self.reconnect, one, other)

    def reset(self, pair: base.Pair) -> None:
        """All streams between two peers break."""
        for transfer in [*self.transfers]:
            if {transfer.source.name, transfer.target.name} == pair:
                transfer.broken()

    # -- peers -------------------------------------------------------------------------------------

    def add(self, name: str, saved: Saved | None = None, **fields: Any) -> LinkedPeer:
        """A peer that starts now."""
        peer = LinkedPeer(name, **{"settings": self.settings, **fields})
        peer.uplink, peer.downlink = Port(self, peer.link.up), Port(self, peer.link.down)
        self.peers[name] = peer
        self.start(peer, saved)
        return peer

    def start(self, peer: LinkedPeer, saved: Saved | None = None, wall_ms: int = 0) -> None:  # type: ignore[override]
        """Start its next life."""
        settings = peer.settings
        anchors = tuple(tuple(range(i, i + PARTS)) for i in range(settings.fragments))
        if saved is None:
            parts = [tuple(map(hexed, anchor)) for anchor in anchors]
            saved = Saved(tuple(genesis(i, RUN, one) for i, one in enumerate(parts)), anchors, 0, 0)
        name, wall_ms = peer.name, 10**6 + int(self.now * 1000)
        identity = Identity(name, name, RUN, "0" * 64, Signer(name), peer.trains, peer.authors)
        peer.life, peer.inbox, peer.later = peer.life + 1, [], []
        peer.frozen = peer.stuck = peer.stepping = peer.leaves = False
        peer.begun_at, peer.begins = None, False
        start = saved.tips, self.sizes, self.now, wall_ms, saved.processed, saved.stamp
        peer.core = Core(identity, settings, Arithmetic(), *start, self.planned)
        peer.anchors = Anchors(peer.core.facts, saved.anchors)
        self.heads |= {tip.head.id: tip.head for tip in saved.tips}
        trips_s = [0.0]
        for other in self.peers.values():
            if other is not peer and other.core is not None:
                self.reconnect(name, other.name)
                trips_s.append(self.latency(name, other.name))
        self.in_life(peer, self.now + 2 * max(trips_s), self.tell, peer, events.Discovered())
        self.in_life(peer, self.now, self._tick, peer)

    def _tick(self, peer: base.Peer) -> None:
        life = peer.life
        self.tell(peer, events.Tick())
        if peer.life == life:
            self.in_life(peer, self.now + peer.settings.heartbeat_s, self._tick, peer)

    def die(self, peer: base.Peer) -> None:
        super().die(peer)
        assert isinstance(peer, LinkedPeer)
        peer.partial.clear()
        peer.arrivals.clear()
        peer.ended_at = self.now if peer.ended_at is None else peer.ended_at

    def freeze(self, peer: LinkedPeer) -> None:
        """It stops; nobody hears of it, and what is on its way to and from it waits."""
        peer.frozen = peer.uplink.frozen = peer.downlink.frozen = True

    def thaw(self, peer: base.Peer) -> None:
        assert isinstance(peer, LinkedPeer)
        for port in (peer.uplink, peer.downlink):
            port.frozen = False
            port.go_on()
        super().thaw(peer)

    # -- training ----------------------------------------------------------------------------------

    def tell(self, peer: base.Peer, event: events.Event) -> None:
        """Something happens to a peer."""
        assert isinstance(peer, LinkedPeer)
        if peer.core is None:
            return
        if peer.frozen:
            peer.inbox += [event] if not isinstance(event, events.Tick) else []
            return
        for action in peer.core.receive(event, self.now):
            self.do(peer, action)
        self._train(peer)

    def _train(self, peer: LinkedPeer) -> None:
        core = peer.core
        if core is None or peer.stepping or peer.hangs or peer.leaves:
            return
        if core.facts.ready and not peer.begins:
            peer.begins = True
            self.tell(peer, events.Wanted(0, self._cycle(peer)))
            for f in core.facts.fragments:
                self.tell(peer, events.Loaded(f.index, f.tip.head.id))
            self.tell(peer, events.Begun())
        elif core.runs:
            peer.stepping = True
            peer.begun_at = self.now if peer.begun_at is None else peer.begun_at
            factor = Random(f"{self.seed} {peer.name} {peer.made}").uniform(-1, 1) * self.jitter
            seconds = peer.step_s * (1.0 + factor)
            self.in_life(peer, self.now + seconds, self._stepped, peer, seconds)

    def _cycle(self, peer: LinkedPeer) -> int:
        every, mine = peer.settings.sync_every, 1 / peer.step_s
        if not peer.dylu or peer.core is None:
            return every
        return max(1, min(every, int(every * mine / peer.core.fastest_steps_per_s(mine))))

    def _stepped(self, peer: LinkedPeer, seconds: float) -> None:
        peer.stepping, peer.made, peer.trained_s = False, peer.made + 1, peer.trained_s + seconds
        later, peer.later = peer.later, []
        for action in later:
            self.do(peer, action)
        if peer.core is None or peer.facts.leaving:
            return
        self.tell(peer, events.Stepped(TOKENS, (), 1 / peer.step_s))
        if peer.leaves:
            peer.ended_at = self.now
            self.tell(peer, events.Leave())
        for heard in self.on_step:
            heard(peer)

    def leave(self, peer: LinkedPeer, finished: bool = False) -> None:
        """Its training loop ends: the run is over, or it does so after the inner step under way."""
        if not peer.leaves and peer.core is not None:
            peer.leaves = True
            if finished or not peer.stepping:
                peer.ended_at = self.now
                self.tell(peer, events.Leave(finished))

    # -- what cores ask for ------------------------------------------------------------------------

    def send(self, sender: str, to: Sequence[str], event: events.Event, trips: int = 1) -> int:
        """Bring an event to other peers; to how many."""
        by_time = dict[float, list[tuple[base.Pair, int, str]]]()
        for name in to:
            pair = frozenset((sender, name))
            if (epoch := self.epochs.get(pair)) is not None:
                trip_s = self.latency(sender, name)
                by_time.setdefault(trip_s, []).append((pair, epoch, name))
        for trip_s, there in by_time.items():
            self.at(self.now + trips * trip_s, self._arrive_at_all, there, event)
        return sum(map(len, by_time.values()))

    def _arrive_at_all(self, there: list[tuple[base.Pair, int, str]], event: events.Event) -> None:
        for pair, epoch, name in there:
            self._arrive(pair, epoch, name, event)

    def do(self, peer: base.Peer, action: events.Action) -> None:
        """Carry one action out."""
        assert isinstance(peer, LinkedPeer)
        match action:
            case events.Send() | events.Broadcast() | events.SendPayload():
                self._send(peer, action)
            case events.AskDonor() | events.Reply():
                self._fetch(peer, action)
            case events.Capture() | events.Load() if peer.stepping:
                peer.later.append(action)
            case events.Capture(line):
                self.captured.append(line)
                super().do(peer, action)
            case events.Load() if peer.dylu:
                self.in_life(peer, self.now, self._plan, peer)
                super().do(peer, action)
            case events.Note(kind, fields):
                self._note(peer, kind, fields)
            case events.Exit():
                self._exit(peer, self.now + READ_S)
            case _:
                super().do(peer, action)

    def _send(self, peer: LinkedPeer, action: Any) -> None:
        name = peer.name
        match action:
            case events.Send(to, Answer(says="want") as answer):
                nbytes = self.sizes[answer.fragment].payload
                here = peer.partial.get((answer.fragment, answer.peer, answer.stamp), 0)
                answer = altered(answer, at=here * nbytes // pieces_of(nbytes))
                self.send(name, [to], events.Heard(name, answer))
            case events.Send(to, message):
                self.send(name, [to], events.Heard(name, message))
            case events.Broadcast(message):
                members = [member.peer for member in peer.facts.members.all()]
                self.send(name, members, events.Heard(name, message))
            case events.SendPayload(to):
                at = self.now + OPENED * self.latency(name, to)
                self.in_life(peer, at, self._send_payload, peer, action)

    def _fetch(self, peer: LinkedPeer, action: Any) -> None:
        name = peer.name
        match action:
            case events.AskDonor(to, get):
                if not self.send(name, [to], events.Asked(name, get), ASKED):
                    self.in_life(peer, self.now, self.tell, peer, events.Broke(to, get))
            case events.Reply(to, get, None):
                self.send(name, [to], events.Gave(name, get, None))
            case events.Reply(to, get, answer):
                if isinstance(answer, events.AnchorPart):
                    answer = peer.anchors.filled(answer.head.fragment, answer)
                self._begin(AnswerTransfer(self, name, to, get, answer), to)

    def _plan(self, peer: LinkedPeer) -> None:
        self.tell(peer, events.Wanted(0, self._cycle(peer)))

    def _send_payload(self, peer: LinkedPeer, action: events.SendPayload) -> None:
        there, line = self.peers[action.peer].core, action.line
        if there is not None and there.wants(line):
            self._begin(PayloadTransfer(self, peer.name, action), action.peer)
        else:
            self.tell(peer, events.Broke(action.peer, line))

    def _begin(self, transfer: Transfer, to: str) -> None:
        self.transfers[transfer] = None
        if frozenset((transfer.source.name, to)) not in self.epochs:
            transfer.broken()
        else:
            transfer.source.uplink.serve(transfer)

    def _note(self, peer: LinkedPeer, kind: str, fields: dict[str, Any]) -> None:
        self.said.append(Said(self.now, peer.name, kind, fields, peer.facts.finished))
        if kind != "tip":
            return
        f = peer.facts.fragments[fields["fragment"]]
        head = f.tip.head
        self.adopted.setdefault(head.id, {})[peer.name] = self.now
        if head.id not in self.heads:
            self.heads[head.id] = head
            self.made.append((self.now, head))
        if head.prev in f.records:
            self.records.setdefault(head.id, f.records[head.prev])
        if all(peer.facts.over(one.tip) for one in peer.facts.fragments):
            self.in_life(peer, self.now, self.leave, peer, True)

    def _exit(self, peer: LinkedPeer, until: float) -> None:
        sends = any(transfer.source is peer for transfer in self.transfers)
        if sends and self.now < until:
            self.in_life(peer, self.now + 0.1, self._exit, peer, until)
        else:
            self.die(peer)

    # -- what came of it ---------------------------------------------------------------------------

    def alive(self) -> list[LinkedPeer]:
        """Peers that run."""
        return [peer for peer in self.peers.values() if peer.core is not None]

    def history(self, fragment: int) -> list[Head]:
        """The versions of a fragment that the greatest of all heads has in it, in their order."""
        heads = [head for _, head in self.made if head.fragment == fragment]
        here, found = max(heads, key=lambda head: head.key, default=None), list[Head]()
        while here is not None and here.number:
            found.append(here)
            here = self.heads.get(here.prev)
        return found[::-1]
