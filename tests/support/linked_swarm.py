"""A swarm of cores on links with rates, in virtual time and without tensors.

    uplink (a piece of each transfer in turn) -> latency -> downlink (the same) -> the other core

Payloads, records and parts of anchors take the bytes that `Sizes` says. Messages take the mean
latency of both ends, in order. Nothing is random but by the seed, the peer and the inner step, so
two swarms whose times are multiples of each other do the same things.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any, NamedTuple

from msgspec.structs import replace as altered

from diloco.core import events
from diloco.core.facts import CONTROL
from diloco.core.history import Record, genesis
from diloco.core.peer import Peer as Core
from diloco.core.settings import Identity, ProtocolSettings, Sizes
from diloco.messages.bulk import UPDATE_PARTS, Get
from diloco.messages.control import Answer
from diloco.messages.heads import Head, Key, Line
from tests.support import swarm_without_tensors as base
from tests.support.fake_tensors import PARTS, RUN, Anchors, Arithmetic, Saved, Signer, hexed

LEAST_BYTES = 2**14  # of a piece
READ_S = 10.0  # in which others read what a peer still sends when it leaves (`swarm.node.node`)
STALL_S = 20.0  # for which a donor waits for parts that have stopped to come (`swarm.rpc.state`)
FIRST_MOVED_S = 1.0  # after its first byte, a transfer is told of; then with each heartbeat
LISTENING_S = 15.0  # the same for who comes, where heartbeats are as rare as in large swarms
REDIAL_S = 2.0
OPENED, ASKED = 2, 3  # one-way trips until a stream is open, and its first message there
TOKENS = 1000  # of an inner step


class Link(NamedTuple):
    """A peer's access to the network; bytes per second each way, and its share of a latency."""

    up: float = 1e6
    down: float = 1e6
    latency_s: float = 0.0


@dataclass(eq=False)
class Arrival:
    """A record that comes to a peer in parts, as in `swarm.rpc.updates`."""

    head: Head
    here: int = 0  # parts
    live: bool = True
    times: int = 0  # how often a transfer of it began
    followers: list["AnswerTransfer"] = field(default_factory=list)  # which pass its parts on

    def end_followers(self) -> None:
        """What they wait for does not come."""
        followers, self.followers = self.followers, []
        for follower in followers:
            follower.broken()


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
        self.begun_at, self.over, self.trickle = swarm.now, False, 0  # bytes of the next piece
        self.listens = False  # its peer is told again soon

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
        self.landed, self.trickle = self.landed + 1, 0
        self.landing()
        if self.landed == self.pieces and not self.over:
            self.close()
            self.done()

    def close(self) -> None:
        self.over = True
        self.swarm.transfers.pop(self, None)
        self.hears.moving.pop(self, None)

    @property
    def hears(self) -> "LinkedPeer":
        """Who is told how many bytes have moved."""
        return self.target

    def moves(self) -> bool:
        """Whether bytes of it come, be it fewer than a piece: equal streams share a link."""
        freezes = self.source.frozen or self.target.frozen
        under_way = self.sent > self.landed or self.sent < self.available()
        return under_way and not freezes and self.swarm.now > self.begun_at + self.latency_s

    def moved(self) -> events.Moved | None:
        """What is told of that at each heartbeat."""
        if not self.moves():
            return None
        self.trickle += 1
        return self.tells(int(self.landed * self.piece_bytes) + self.trickle)

    def tells(self, nbytes: int) -> events.Moved:
        raise NotImplementedError

    def broken(self) -> None:
        """The stream ends; what is here of it is kept."""
        if not self.over:
            self.close()
            self.broke()

    def later(self, peer: "LinkedPeer", event: events.Event) -> None:
        """A peer hears that, if it still lives."""
        self.swarm.in_life(peer, self.swarm.now + self.latency_s, self.swarm.tell, peer, event)

    def landing(self) -> None: ...
    def done(self) -> None: ...
    def broke(self) -> None: ...


class PayloadTransfer(Transfer):
    """A contribution; the target keeps what came of it."""

    def __init__(self, swarm: "LinkedSwarm", source: str, action: events.SendPayload) -> None:
        nbytes = swarm.sizes[action.line.fragment].payload
        pieces = pieces_of(nbytes, swarm.parts)
        super().__init__(swarm, (source, action.peer), nbytes, pieces, action.at * pieces // nbytes)
        self.action, self.stamp = action, stamp_of(action.line)

    @property
    def hears(self) -> "LinkedPeer":
        return self.source

    def tells(self, nbytes: int) -> events.Moved:
        return events.Moved(self.target.name, self.action.line, nbytes)

    def landing(self) -> None:
        self.target.partial[self.stamp] = self.landed

    def done(self) -> None:
        action = self.action
        self.target.partial.pop(self.stamp, None)
        came = events.Delivered(self.source.name, action.line, action.payload, action.age_s)
        self.swarm.tell(self.target, came)

    def broke(self) -> None:
        self.later(self.source, events.Broke(self.target.name, self.action.line))


class AnswerTransfer(Transfer):
    """A part of an anchor, or records, of which one may still be on its way to the donor."""

    def __init__(
        self, swarm: "LinkedSwarm", ends: tuple[str, str], get: Get, answer: Any, at: int = 0
    ) -> None:
        self.get, self.answer, self.started = get, answer, at
        self.arrivals, self.donors = list[Arrival](), None
        donor, asker = (swarm.peers[name] for name in ends)
        nbytes = swarm.part_bytes(get.fragment)
        if isinstance(answer, events.Records):
            nbytes = swarm.sizes[get.fragment].update
            self.arrivals = [Arrival(record.head) for record in answer.records]
            if at:
                self.arrivals[0] = asker.arrivals[get.fragment]
            if self.arrivals[0].head.prev == get.have[1]:
                asker.arrivals[get.fragment] = self.arrivals[0]
                self.arrivals[0].live = True
                self.arrivals[0].times += 1
            if answer.records[0].update is None:
                self.donors = donor.arrivals[get.fragment]
                self.donors.followers.append(self)
        self.each, number = pieces_of(nbytes, swarm.parts), len(self.arrivals) or 1
        super().__init__(swarm, ends, nbytes * number, self.each * number, at)
        if at:
            swarm.at(swarm.now + self.latency_s, self._arrives)

    def available(self) -> int:
        return self.donors.here if self.donors else self.pieces

    def moves(self) -> bool:
        waits = self.donors is not None and self.donors.live and not self.source.frozen
        return waits or super().moves()

    def tells(self, nbytes: int) -> events.Moved:
        nbytes -= int(self.started * self.piece_bytes)
        return events.Moved(self.source.name, self.get, nbytes)

    def landing(self) -> None:
        if not self.arrivals:
            return
        number, here = divmod(self.landed - 1, self.each)
        arrival = self.arrivals[number]
        arrival.here = here + 1
        if self.landed == 1:
            self._arrives()
        for follower in arrival.followers:
            if not follower.over:
                self.target.uplink.serve(follower)

    def _arrives(self) -> None:
        """The first part is here; the core may not want it any more."""
        if self.over:
            return
        first = self.arrivals[0]
        if first.head.prev == self.get.have[1]:
            self.swarm.tell(self.target, events.Arriving(self.source.name, self.get, first.head))
            core = self.target.core
            fetching = core.facts.fragments[self.get.fragment].inbox.fetch if core else None
            if fetching is None or fetching.donor != self.source.name:
                self.broken()

    def done(self) -> None:
        answer, records = self.answer, self.swarm.records
        if self.arrivals:
            answer = events.Records(tuple(records[one.head.id] for one in self.arrivals))
        self._served()
        self.swarm.tell(self.target, events.Gave(self.source.name, self.get, answer))

    def broke(self) -> None:
        self._served()
        self.later(self.target, events.Broke(self.source.name, self.get))
        for arrival in self.arrivals[:1]:
            arrival.live = False
            self.swarm.at(self.swarm.now + STALL_S, self._give_up, arrival, arrival.times)

    def _served(self) -> None:
        self.later(self.source, events.Served(self.target.name, self.get))

    def _give_up(self, arrival: Arrival, times: int) -> None:
        """No other donor went on: those who wait for its parts wait no longer."""
        if arrival.times == times:
            arrival.end_followers()


def stamp_of(line: Line | Answer) -> tuple[int, str, int]:
    """Names a contribution."""
    return line.fragment, line.peer, line.stamp


def pieces_of(nbytes: float, most: int = UPDATE_PARTS) -> int:
    """In how many a transfer goes."""
    return int(max(1, min(most, nbytes // LEAST_BYTES)))


@dataclass(eq=False)
class LinkedPeer(base.Peer):
    """A core on a link, and a training loop. `dylu`: it makes fewer inner steps if it is slow."""

    link: Link = field(default_factory=Link)
    dylu: bool = False
    trained_s: float = 0.0  # in inner steps that are done
    made: int = 0  # inner steps
    lives: list[list[float]] = field(default_factory=list)  # from its first inner step to its end
    cycles: list[tuple[float, float]] = field(default_factory=list)  # when, and `trained_s` then
    steps: bool = False  # it has begun an inner step in this life
    leaves: bool = False
    uplink: Port = field(init=False)
    downlink: Port = field(init=False)
    partial: dict[tuple[int, str, int], int] = field(default_factory=dict)  # pieces of payloads
    arrivals: dict[int, Arrival] = field(default_factory=dict)  # the newest, by fragment
    moving: dict[Transfer, None] = field(default_factory=dict)  # of which it hears
    later: list[events.Action] = field(default_factory=list)  # after the inner step under way

    def ends(self, now: float) -> None:
        """It trains no more in this life."""
        if self.lives and self.lives[-1][1] == inf:
            self.lives[-1][1] = now

    def utilization(self, now: float) -> float:
        """Share of its lives in inner steps."""
        return self.trained_s / max(1e-9, sum(min(end, now) - at for at, end in self.lives))


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
        parts: in how many an update is passed on, at most.
    """

    peers: dict[str, LinkedPeer]  # type: ignore[assignment]

    def __init__(
        self,
        settings: ProtocolSettings,
        sizes: Sequence[Sizes],
        planned: tuple[int, int, int] = (0, 0, 0),
        seed: int = 0,
        jitter: float = 0.02,
        parts: int = UPDATE_PARTS,
    ) -> None:
        super().__init__(settings, seed=seed)
        self.seed, self.sizes, self.planned, self.jitter = seed, list(sizes), planned, jitter
        self.parts, self.over_at = parts, inf  # when the run was over for a peer
        self.ended = dict[str, tuple[Key, ...]]()  # tips of those for which it was, as they left
        self.transfers: dict[Transfer, None] = {}
        self.records: dict[str, Record] = {}  # by head, as its author has made it
        self.said: list[Said] = []
        self.captured: list[tuple[Line, int]] = []  # with the life of its peer
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
        peer.begins = peer.steps = False
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
        assert isinstance(peer, LinkedPeer)
        life = peer.life
        self.tell(peer, events.Tick())
        for transfer in [*peer.moving] if peer.life == life else ():
            self._tell_moved(transfer)
        if peer.life == life:
            self.in_life(peer, self.now + peer.settings.heartbeat_s, self._tick, peer)

    def die(self, peer: base.Peer) -> None:
        super().die(peer)
        assert isinstance(peer, LinkedPeer)
        peer.partial.clear()
        peer.moving.clear()
        peer.arrivals.clear()
        peer.ends(self.now)

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
        for fragment, arrival in peer.arrivals.items() if peer.core else ():
            waited_for = arrival.followers and not arrival.live
            if waited_for and not peer.facts.fragments[fragment].inbox.is_to_be_had():
                arrival.end_followers()
        self._train(peer)

    def _train(self, peer: LinkedPeer) -> None:
        core = peer.core
        if core is None or peer.stepping or peer.hangs or peer.leaves:
            return
        if core.facts.life.ready and not peer.begins:
            peer.begins = True
            self.tell(peer, events.Wanted(0, self._cycle(peer)))
            for f in core.facts.fragments:
                self.tell(peer, events.Loaded(f.index, f.tip.head.id))
            self.tell(peer, events.Begun())
        elif core.runs:
            peer.stepping = True
            if not peer.steps:
                peer.steps = True
                peer.lives.append([self.now, inf])
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
        if peer.core is None or peer.facts.life.leaving:
            return
        self.tell(peer, events.Stepped(TOKENS, (), 1 / peer.step_s))
        if peer.leaves:
            peer.ends(self.now)
            self.tell(peer, events.Leave())
        for heard in self.on_step:
            heard(peer)

    def leave(self, peer: LinkedPeer, finished: bool = False) -> None:
        """Its training loop ends: the run is over, or it does so after the inner step under way."""
        if not peer.leaves and peer.core is not None:
            peer.leaves = True
            if finished or not peer.stepping:
                peer.ends(self.now)
                self.over_at = min(self.over_at, self.now) if finished else self.over_at
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
                self.captured.append((line, peer.life))
                if line.fragment == CONTROL:
                    peer.cycles.append((self.now, peer.trained_s))
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
                here = peer.partial.get(stamp_of(answer), 0)
                answer = altered(answer, at=here * nbytes // pieces_of(nbytes, self.parts))
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
                held, asked = peer.arrivals.get(get.fragment), get
                if held and held.head.prev == get.have[1] and not get.want:
                    asked = altered(get, held=held.head.id, part=held.here)
                if not self.send(name, [to], events.Asked(name, asked), ASKED):
                    self.in_life(peer, self.now, self.tell, peer, events.Broke(to, get))
            case events.Reply(to, get, None):
                self.send(name, [to], events.Gave(name, get, None))
            case events.Reply(to, get, events.AnchorPart() as part):
                part = peer.anchors.filled(get.fragment, part)
                self._begin(AnswerTransfer(self, (name, to), get, part))
            case events.Reply(to, get, answer):
                self._give(peer, to, get, answer.records)

    def _give(self, donor: LinkedPeer, to: str, get: Get, records: Sequence[Record]) -> None:
        """Send records from the part on that the asker lacks, if there is such a part here."""
        head, update = records[0]
        here, at = donor.arrivals.get(get.fragment), get.part if get.held == head.id else 0
        held = self.peers[to].arrivals.get(get.fragment)
        if update is None and (here is None or here.head != head or here.here <= at):
            self.send(donor.name, [to], events.Gave(donor.name, get, None))
            self.in_life(donor, self.now, self.tell, donor, events.Served(to, get))
        elif at and (held is None or held.head != head or held.here != at):
            self.send(donor.name, [to], events.Broke(donor.name, get, bad=True))
            self.in_life(donor, self.now, self.tell, donor, events.Served(to, get))
        else:
            answer = events.Records(tuple(records))
            self._begin(AnswerTransfer(self, (donor.name, to), get, answer, at))

    def _plan(self, peer: LinkedPeer) -> None:
        self.tell(peer, events.Wanted(0, self._cycle(peer)))

    def _send_payload(self, peer: LinkedPeer, action: events.SendPayload) -> None:
        there, stamp = self.peers[action.peer], stamp_of(action.line)
        sending = [one for one in peer.moving if isinstance(one, PayloadTransfer)]
        if any(one.stamp == stamp and one.target is there for one in sending):
            return  # it was offered again meanwhile
        if there.core is not None and there.core.wants(action.line):
            self._begin(PayloadTransfer(self, peer.name, action))
        else:
            self.tell(peer, events.Broke(action.peer, action.line))

    def _begin(self, transfer: Transfer) -> None:
        self.transfers[transfer] = transfer.hears.moving[transfer] = None
        if frozenset((transfer.source.name, transfer.target.name)) not in self.epochs:
            transfer.broken()
        elif transfer.landed == transfer.pieces:
            transfer.close()
            self.at(self.now + transfer.latency_s, transfer.done)
        else:
            soon = self.now + transfer.latency_s + FIRST_MOVED_S
            self.at(soon, self._tell_moved, transfer)
            transfer.source.uplink.serve(transfer)

    def _tell_moved(self, transfer: Transfer) -> None:
        peer, moved = transfer.hears, None if transfer.over else transfer.moved()
        if moved is not None:
            self.tell(peer, moved)
            if isinstance(transfer, PayloadTransfer):
                receives = events.Moved(peer.name, moved.question, moved.nbytes)
                self.tell(transfer.target, receives)
        if not (transfer.over or transfer.listens or peer.core is None or peer.facts.life.ready):
            transfer.listens = True
            self.at(self.now + LISTENING_S, self._tell_again, transfer)

    def _tell_again(self, transfer: Transfer) -> None:
        transfer.listens = False
        self._tell_moved(transfer)

    def _note(self, peer: LinkedPeer, kind: str, fields: dict[str, Any]) -> None:
        self.said.append(Said(self.now, peer.name, kind, fields, peer.facts.life.finished))
        if kind != "tip":
            return
        f = peer.facts.fragments[fields["fragment"]]
        head = f.tip.head
        self.adopted.setdefault(head.id, {})[peer.name] = self.now
        if head.id not in self.heads:
            self.heads[head.id] = head
            self.made.append((self.now, head))
        if head.prev in f.outbox.records:
            self.records.setdefault(head.id, f.outbox.records[head.prev])
        if all(peer.facts.over(one.tip) for one in peer.facts.fragments):
            self.in_life(peer, self.now, self.leave, peer, True)

    def _exit(self, peer: LinkedPeer, until: float) -> None:
        sends = any(transfer.source is peer for transfer in self.transfers)
        if sends and self.now < until:
            self.in_life(peer, self.now + 0.1, self._exit, peer, until)
        else:
            if peer.facts.life.finished:
                self.ended[peer.name] = tuple(f.tip.key for f in peer.facts.fragments)
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
