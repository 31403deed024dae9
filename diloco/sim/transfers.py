"""What moves the anchors of a bare node: contributions, merges, update records and states, over streams that break.

Each method of `Transfers` is one conversation, as those of `swarm.rounds` and `swarm.serve` are, step by step:

    exchange -> contribute -> (header) -> serve -> merge -> (record or state) -> adopt
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from diloco.config import OuterConfig
from diloco.protocol.actions import Action, Broadcast
from diloco.protocol.exchange import Exchange, Step
from diloco.protocol.leases import Lease
from diloco.protocol.ledger import Units
from diloco.protocol.messages.bulk import Contribution, Record, StateHeader, Verdict
from diloco.protocol.peer import CONTROL_FRAGMENT, Peer
from diloco.protocol.shares import Shares
from diloco.protocol.syncer import Close, Syncer
from diloco.sim.lineage import Contributed, Lineage, Made, digest_of, repeated
from diloco.sim.world import Clock, Conversation, Violation, World
from diloco.swarm.units import Reserve

__all__ = ["CHUNKS", "MANIFEST", "Arena", "Transfers"]

CHUNKS = 3
MANIFEST = digest_of("manifest")
RETRY_S = 1.0
STREAM_TIMEOUT_S = 30.0  # of a read that somebody has to answer at once


class State(NamedTuple):
    """A fragment's state on its way; `momentum` when it is handed over."""

    version: int
    digest: str
    anchor: str
    applied_tokens: int
    shares: Shares
    momentum: tuple[int, ...] | None
    header: StateHeader


class Answer(NamedTuple):
    """What the other side of a stream sends back; `Record` and `State` are mutually exclusive."""

    verdict: Verdict | None
    update: Record | State | None


class Arena(World):
    """What the conversations need of their world: `break_rate` is the chance that a stream breaks at a
    chunk, `repeat_rate` the chance that a contribution is sent twice.

    The DHT here is never out of reach, unlike real ones.
    """

    def __init__(self, seed: int, latency_s: float, fragments: int, break_rate: float) -> None:
        super().__init__(seed, latency_s)
        self.fragments, self.break_rate = fragments, break_rate
        self.repeat_rate = 0.0
        self.dht: dict[int, int] = {}  # newest terms that were stored
        self.nodes: dict[str, Transfers] = {}
        self.records: list[Record] = []
        self.lineage = Lineage()
        self.learned_from: dict[Contributed, Units] = {}  # of contributions to the control fragment


class Stream:
    """One bulk stream from a client to a server. It ends when either closes it or dies, or the connection does.

    What was under way when the client gave up may still be read by the server: `in_flight` chunks of it.
    """

    def __init__(self, world: Arena, client: Transfers, server: Transfers) -> None:
        self.world, self.client, self.server = world, client, server
        self.answer: Answer | None = None
        self._link = world.link(client, server)
        self._closed = False
        self._in_flight = 0

    def broken(self) -> bool:
        """Whether nothing comes through any more, as the client sees it."""
        world = self.world
        return (
            self._closed
            or self._link is None
            or not world.alive(self.server)
            or world.link(self.client, self.server) != self._link
        )

    def close(self) -> None:
        """Either side is through with it; a few chunks may be on their way."""
        if not self._closed:
            self._closed, self._in_flight = True, self.world.random.randrange(CHUNKS)

    def pass_over(self, source: Transfers, target: Transfers, given_up: Callable[[], bool]) -> Conversation:
        """Something is on its way, until it can arrive or is given up."""
        world = self.world
        yield world.latency()
        yield lambda: given_up() or source is target or world.reaches(source, target)

    def chunk(self) -> Generator[float | Callable[[], bool], None, bool]:
        """The server reads the next chunk; False when there is none any more."""
        world = self.world
        yield from self.pass_over(self.client, self.server, self.broken)
        if world.random.random() < world.break_rate:
            self.close()
        if not self.broken():
            return True
        self._in_flight -= 1
        return self._in_flight >= 0


class Transfers:
    """The moving half of a node.

    Attributes:
        anchors: what the anchors really are; the protocol's digests say what it believes.
        momentum: versions that went into the outer state of the fragments held.
        folded: chunks in the sum of the fragments held.
        records: the newest update of fragments held. moving: fragments whose anchor is being read or written.
        reserve: work units, if the node was told to train on any.
        loaded: versions that the local parameters started from. flying: exchanges under way.
    """

    peer: Peer
    world: Arena
    name: str
    clock: Clock

    def began(self, outer: OuterConfig) -> None:
        """Set up what is here before anything happens."""
        fragments = len(self.peer.versions)
        self.anchors = list(self.peer.digests)
        self.records: dict[int, Record] = {}
        self.momentum: dict[int, tuple[int, ...]] = {}
        self.folded: dict[int, list[tuple[Contributed, int]]] = {}
        self.moving: set[int] = set()
        self.loaded = list(self.peer.versions)
        self.version = 0
        self.steps = 0
        self.sent = [0] * fragments
        self.exchanges: list[Exchange] = []
        self.flying: dict[int, Exchange] = {}
        self._late = outer.overlap == outer.sync_every
        self.reserve = Reserve()
        self._asking = False

    def now(self) -> float:
        """What this node's clock shows."""
        return self.clock.read(self.world.now)

    def do(self, actions: list[Action]) -> None:
        """Carry out what the protocol asks for."""
        self.world.do(self, actions)

    def carry_out(self, action: Action) -> None:
        """What the protocol asks of its owner, except for what is the world's."""
        raise NotImplementedError

    def load(self, fragments: Sequence[int]) -> None:
        """The local parameters of these fragments become the anchors."""
        for fragment in fragments:
            self.loaded[fragment] = self.peer.versions[fragment]

    def arrived(self, fragments: Sequence[int]) -> bool:
        """Whether the exchanges of these fragments are over."""
        return not any(fragment in self.flying for fragment in fragments)

    # -- work units ---------------------------------------------------------------------------------------------------

    def ask_for_units(self) -> None:
        """When they run short, one request at a time."""
        if self.reserve.missing and not self._asking:
            self._asking = True
            self.world.spawn(self, self._fetch_units())

    def _fetch_units(self) -> Conversation:
        lease, wanted, has = self._live_lease(CONTROL_FRAGMENT), self.reserve.missing, self.reserve.all
        if lease is not None:
            server = self.world.nodes[lease.holder]
            stream = Stream(self.world, self, server)
            yield from stream.pass_over(self, server, stream.broken)
            granted = None if stream.broken() else server.peer.lease_units(self.name, wanted, has)
            yield from stream.pass_over(server, self, stream.broken)
            if granted and not stream.broken():
                self.reserve.add(granted)
                self.peer.units = self.reserve.all
                self.do([Broadcast(self.peer.status())])
        self._asking = False

    # -- contributor --------------------------------------------------------------------------------------------------

    def exchange(self, exchange: Exchange) -> Conversation:
        """From the pseudo-gradient to the adopted update, whoever is syncer."""
        fragment, retry_at = exchange.fragment, 0.0
        while True:
            lease = self._live_lease(fragment)
            merged = self.peer.merged(fragment).get(self.name, -1)
            match exchange.next_step(lease, self.peer.versions[fragment], self.now(), retry_at, merged):
                case Step.DONE:
                    self.flying.pop(fragment, None)
                    self.reserve.settle(exchange.units)
                    self.peer.units = self.reserve.all
                    return
                case Step.WAIT:
                    yield 0.2
                case Step.CATCH_UP:
                    donors = self.peer.members.donors(fragment, exchange.base_version + 1)
                    yield from self.catch_up(fragment, donors, outer=False)
                    yield 0.2
                case Step.CONTRIBUTE:
                    assert lease is not None
                    retry_at = self.now() + RETRY_S
                    if lease.holder == self.name:
                        yield from self._contribute_own(exchange, lease)
                    else:
                        yield from self._contribute(exchange, lease)

    def _live_lease(self, fragment: int) -> Lease | None:
        lease = self.peer.leases.get(fragment)
        return lease if lease and (lease.holder == self.name or lease.holder in self.peer.members) else None

    def _contribution(self, header: Contribution) -> Contributed:
        return Contributed(self.name, header.base_version)

    def _contribute_own(self, exchange: Exchange, lease: Lease) -> Conversation:
        peer, fragment = self.peer, exchange.fragment
        syncer, header = peer.syncers[fragment], exchange.header(lease)
        verdict, base_version = peer.offer(self.name, header), peer.versions[fragment]
        if not verdict.accepted:
            exchange.refused(verdict, lease)
            yield 0.2
            return
        folded = verdict.first_chunk == CHUNKS
        if not folded and syncer.staged:
            yield lambda: fragment not in self.moving
            base_version = peer.versions[fragment]
            folded = self._fold_whole(syncer, self.name, self._contribution(header))
            if not folded:
                yield 0.0
                return
        elif not folded:
            for chunk in range(verdict.first_chunk, CHUNKS):
                folded = self._fold(syncer, self.name, self._contribution(header), chunk)
                if not folded:
                    break
                yield 0.0
        if folded:
            self.do(peer.arrived(self.name, fragment, self.now()))
        yield lambda: peer.versions[fragment] > base_version or peer.syncers.get(fragment) is not syncer
        if syncer.version == base_version + 1:
            exchange.recorded(syncer.last_contributors, self.name)

    def _contribute(self, exchange: Exchange, lease: Lease) -> Conversation:
        """One stream to the syncer, until its answer is here or the lease is another one."""
        fragment, world = exchange.fragment, self.world
        server, header = world.nodes[lease.holder], exchange.header(lease)
        stream = Stream(world, self, server)

        def moot() -> bool:
            now = self._live_lease(fragment)
            return stream.broken() or now is None or (now.holder, now.term) != (lease.holder, lease.term)

        yield from stream.pass_over(self, server, moot)
        if not moot():
            world.spawn(server, server.serve(stream, header))
            if world.random.random() < world.repeat_rate:
                world.spawn(server, server.serve(Stream(world, self, server), header))
            yield lambda: stream.answer is not None or moot()
            yield from stream.pass_over(server, self, moot)
        answer = None if moot() else stream.answer
        stream.close()
        if answer is None or answer.verdict is None:
            return exchange.broke(lease)
        if not answer.verdict.accepted:
            exchange.refused(answer.verdict, lease)
        if isinstance(answer.update, Record):
            exchange.recorded(answer.update.contributors, self.name)
        elif answer.update is not None:
            exchange.merged()
        if answer.update is not None and not (yield from self._adopt(fragment, answer.update)):
            exchange.broke(lease)

    # -- syncer -------------------------------------------------------------------------------------------------------

    def serve(self, stream: Stream, header: Contribution) -> Conversation:
        """Answer a contribution; what is sent back waits in the stream."""
        peer, fragment, sender = self.peer, header.fragment, stream.client.name
        verdict, record = peer.offer(sender, header), self.records.get(fragment)
        late = record is not None and record.version == header.base_version + 1 <= verdict.version
        self.world.note(self.name, f"offer of {sender} {header.fragment}:{header.base_version} {verdict}")
        if not verdict.accepted:
            verdict = verdict.model_copy(update={"record_follows": late})
            stream.answer = Answer(verdict, record if late else None)
            return
        syncer, base_version = peer.syncers[fragment], peer.versions[fragment]
        contribution = stream.client._contribution(header)
        for chunk in range(verdict.first_chunk, CHUNKS):
            if not (yield from stream.chunk()):
                return
            if not syncer.staged and not self._fold(syncer, sender, contribution, chunk):
                return stream.close()
        if syncer.staged and verdict.first_chunk < CHUNKS:
            yield lambda: fragment not in self.moving
            base_version = peer.versions[fragment]
            if not self._fold_whole(syncer, sender, contribution):
                return stream.close()
        self.do(peer.arrived(sender, fragment, self.now()))
        yield lambda: peer.versions[fragment] > base_version or peer.syncers.get(fragment) is not syncer
        record = self.records.get(fragment)
        if record is not None and record.version == header.base_version + 1:
            stream.answer = Answer(verdict, record)
        elif syncer.staged and peer.syncers.get(fragment) is syncer:
            yield lambda: fragment not in self.moving
            stream.answer = Answer(verdict, self._state(fragment, outer=False))
        else:
            stream.close()

    def _fold_whole(self, syncer: Syncer, sender: str, contribution: Contributed) -> bool:
        return all(self._fold(syncer, sender, contribution, chunk) for chunk in range(CHUNKS))

    def _fold(self, syncer: Syncer, sender: str, contribution: Contributed, chunk: int) -> bool:
        if self.peer.syncers.get(syncer.fragment) is not syncer or not syncer.wants(
            sender, chunk, contribution.base_version
        ):
            return False
        self.folded[syncer.fragment].append((contribution, chunk))
        syncer.folded(sender)
        return True

    def merge(self, close: Close) -> Conversation:
        """Make the next version of a fragment; every contributor must be in it once, and whole."""
        peer, fragment = self.peer, close.fragment
        syncer = peer.syncers[fragment]
        yield lambda: fragment not in self.moving
        if peer.syncers.get(fragment) is not syncer or syncer.version != close.base_version:
            return
        self.moving.add(fragment)
        chunks, self.folded[fragment] = tuple(self.folded[fragment]), []
        self._check_whole(close, chunks, syncer.staged)
        before, momentum, version = self.anchors[fragment], self.momentum[fragment], close.base_version + 1
        digest_before, clock = peer.digests[fragment], peer.applied_tokens
        word = peer.word(fragment, close.contributors)
        yield 0.02 + self.world.latency()
        # A peer that restarted amid a round makes the same contribution with fewer tokens: other values, in a real one.
        digest = self.anchors[fragment] = digest_of(before, chunks, momentum, sorted(close.contributors.items()))
        self.moving.discard(fragment)
        clock += close.tokens if fragment == CONTROL_FRAGMENT else 0
        self.world.lineage.add(
            digest, Made(before, fragment, version, self.name, syncer.term, chunks, tuple(close.contributors.items()))
        )
        lost = peer.syncers.get(fragment) is not syncer
        record = Record(
            fragment=fragment, term=syncer.term, version=version, digest_before=digest_before, digest=digest,
            contributors=dict(close.contributors), applied_tokens=clock,
            **(word if lost else peer.word(fragment, close.contributors)),
        )  # fmt: skip
        if lost:  # a version of the side that lost, which others adopt or replace
            self._moved(fragment, record, None)
            return
        self.records[fragment] = record
        self.momentum[fragment] = (*momentum, version)
        self.world.records.append(record)
        self.do(peer.published(fragment, digest, close.contributors, self.now()))

    def _check_whole(self, close: Close, chunks: Sequence[tuple[Contributed, int]], staged: bool) -> None:
        count = Counter((whose.peer, chunk) for whose, chunk in chunks)
        whole = {(peer, chunk) for peer in close.contributors for chunk in range(CHUNKS)}
        if (
            not (count.keys() == whole if staged else count.keys() >= whole)
            or repeated(chunks)
            or set(count.values()) - {1}
        ):
            raise Violation(f"{self.name} closes {close} over {chunks}")

    # -- both ---------------------------------------------------------------------------------------------------------

    def catch_up(self, fragment: int, donors: Sequence[str], outer: bool) -> Conversation:
        """Fetch a fragment from the first donor that has what fits here: the missing record, or the state."""
        for donor in (self.world.nodes[name] for name in donors):
            for have in (self.peer.versions[fragment], -1):
                fetched = yield from self._fetch(donor, fragment, have, outer)
                if fetched is None:
                    break
                if (yield from self._adopt(fragment, fetched)):
                    return
        self.peer.catch_up_failed(fragment)

    def _fetch(
        self, donor: Transfers, fragment: int, have: int, outer: bool
    ) -> Generator[float | Callable[[], bool], None, Record | State | None]:
        world, stream = self.world, Stream(self.world, self, donor)
        patient_until = world.now + STREAM_TIMEOUT_S

        def given_up() -> bool:
            return stream.broken() or world.now >= patient_until

        yield from stream.pass_over(self, donor, given_up)
        yield lambda: given_up() or not (donor.peer.merging(fragment) or fragment in donor.moving)
        if given_up():
            return None
        record = donor.records.get(fragment)
        missing = record is not None and record.version == have + 1 and not outer
        fetched = record if missing else donor._state(fragment, outer)
        if outer:
            donor.peer.handed_over(fragment)
        yield from stream.pass_over(donor, self, given_up)
        return None if given_up() else fetched

    def _state(self, fragment: int, outer: bool) -> State:
        peer = self.peer
        momentum = self.momentum.get(fragment) if outer and peer.state == "leaving" else None
        header = StateHeader(
            fragment=fragment, version=peer.versions[fragment], digest=peer.digests[fragment],
            applied_tokens=peer.applied_tokens, outer=outer, **peer.word(fragment),
        )  # fmt: skip
        return State(
            header.version, header.digest, self.anchors[fragment], header.applied_tokens, dict(peer.shares(fragment)),
            momentum, header,
        )  # fmt: skip

    def _adopt(self, fragment: int, update: Record | State) -> Generator[float | Callable[[], bool], None, bool]:
        """Move the anchor; False when the update does not fit what is here."""
        yield lambda: fragment not in self.moving
        peer, momentum = self.peer, None
        if peer.merging(fragment):
            return False
        if isinstance(update, Record):
            if (peer.versions[fragment], peer.digests[fragment]) != (update.version - 1, update.digest_before):
                return False
            follows = self.anchors[fragment] == update.digest_before
            self.anchors[fragment] = update.digest if follows else digest_of(self.anchors[fragment], update.digest)
        else:
            if update.anchor != update.digest or update.version < peer.versions[fragment] + (fragment in peer.syncers):
                return False
            self.anchors[fragment], momentum = update.digest, update.momentum
        self.moving.add(fragment)
        yield 0.01
        self.moving.discard(fragment)
        self._moved(fragment, update, momentum)
        if self.anchors[fragment] != update.digest:
            lease = peer.leases.get(fragment)
            if lease is not None and lease.holder != self.name:
                yield from self.catch_up(fragment, (lease.holder,), outer=False)
        return True

    def _moved(self, fragment: int, update: Record | State, momentum: tuple[int, ...] | None) -> None:
        if momentum is not None:
            self.momentum[fragment] = momentum
        if fragment in self.peer.syncers:
            self.folded[fragment] = []
            if isinstance(update, Record):
                self.momentum[fragment] = (*self.momentum[fragment], update.version)
        elif momentum is None:
            self.momentum.pop(fragment, None)
        digest = self.anchors[fragment]
        contributors, shares = (update.contributors, None) if isinstance(update, Record) else (None, update.shares)
        now, tokens = self.now(), update.applied_tokens
        self.peer.hear_word(update if isinstance(update, Record) else update.header)
        self.do(self.peer.adopted(fragment, update.version, digest, tokens, now, contributors, shares))
        self._recount(fragment, {} if shares is None else shares)

    def _recount(self, fragment: int, shares: Shares) -> None:
        """What one half of a split left out is in the model after all, when the other half won (see `Anchors`)."""
        newest = shares[self.name].last_version - 1 if self.name in shares else -1
        for exchange in self.exchanges:
            if exchange.fragment == fragment and newest == exchange.base_version:
                exchange.discarded = False
