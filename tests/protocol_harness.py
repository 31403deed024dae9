"""Toy nodes around the real protocol core: they train, contribute, merge and fetch, without tensors.

The anchor of a fragment is only its digest, a hash of its whole history: equal digests mean that the same contributions
were merged in the same order. The outer state of a fragment is the list of versions that went into it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from hashlib import sha256

from protocol_world import Conversation, World

from diloco.config import OuterConfig
from diloco.protocol.actions import Action, Broadcast, CatchUp, Hold, Merge, Note, Release
from diloco.protocol.exchange import Exchange, Step
from diloco.protocol.leases import Lease
from diloco.protocol.messages import Record
from diloco.protocol.peer import Peer
from diloco.protocol.syncer import Close

__all__ = ["CHUNKS", "MANIFEST", "Swarm", "ToyNode", "digest_of"]

CHUNKS = 3


def digest_of(*history: object) -> str:
    """Digest that stands for an anchor with that history."""
    return sha256(repr(history).encode()).hexdigest()


MANIFEST = digest_of("manifest")


class Swarm(World):
    """A world of toy nodes. `break_rate` is the chance that a stream breaks at a chunk; `settings` go to every node."""

    def __init__(
        self, seed: int = 0, fragments: int = 4, break_rate: float = 0.0, latency_s: float = 0.2, **settings: object
    ) -> None:
        super().__init__(seed, latency_s)
        self.fragments, self.break_rate, self.settings = fragments, break_rate, settings
        self.nodes: dict[str, ToyNode] = {}
        self.records: list[Record] = []

    def start(self, names: str, **settings: object) -> None:
        """Peers of these one-letter names start now, in an order that the seed decides; by default they train."""
        for name in self.random.sample(names, len(names)):
            self.nodes[name] = node = ToyNode(self, name, **{**self.settings, **settings})  # type: ignore[arg-type]
            self.join(node)
            if node.peer.newcomer:
                self.spawn(node, node.get_acquainted())
            self.spawn(node, node.heartbeat())
            self.spawn(node, node.train())

    def run_to_the_end(self, limit_s: float = 400.0) -> list[ToyNode]:
        """Until every living trainer is done, and then until what is under way is over; returns who lives."""
        self.run(
            lambda: all(self.awake(n) and (n.peer.state == "done" or not n.peer.trains) for n in self.living()), limit_s
        )
        self.run_for(10.0)
        return [node for _, node in sorted(self.nodes.items()) if self.alive(node)]

    def run_for(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        self.run(lambda: self.now >= end, 2 * seconds)


class ToyNode:
    """One peer: its protocol core, its toy fragments, and its half of every conversation."""

    def __init__(
        self, world: Swarm, name: str, outer_steps: int = 3, steps: int = 4, step_s: float = 0.5, **settings: object
    ) -> None:
        digests = [digest_of(fragment) for fragment in range(world.fragments)]
        outer = OuterConfig(method="diloco", sync_every=steps)
        self.peer = Peer(name, name, "run", MANIFEST, **{"digests": digests, "outer": outer, **settings})  # type: ignore[arg-type]
        self.world, self.name = world, name
        self.outer_steps, self.steps, self.step_s = outer_steps, steps, step_s
        self.records: dict[int, Record] = {}
        self.momentum: dict[int, tuple[int, ...]] = {}  # of the fragments held
        self.folded: dict[int, Counter[tuple[str, int]]] = {}  # (contributor, chunk) in the sum of the fragments held
        self.notes: list[Note] = []
        self.exchanges: list[Exchange] = []

    def carry_out(self, action: Action) -> None:
        """What the protocol asks of its owner, except for what is the world's."""
        match action:
            case Hold(fragment=fragment):
                self.momentum.setdefault(fragment, ())
                self.folded[fragment] = Counter()
            case Release(fragment=fragment):
                del self.momentum[fragment], self.folded[fragment]
                self.records.pop(fragment, None)
            case Merge():
                self.world.spawn(self, self.merge(action.close))
            case CatchUp():
                self.world.spawn(self, self.catch_up(action.fragment, action.donors, action.outer))
            case Note():
                self.notes.append(action)
            case _:
                raise AssertionError(action)

    def kinds(self) -> Counter[str]:
        """How many notes of which kind the protocol made."""
        return Counter(note.kind for note in self.notes)

    # -- training -----------------------------------------------------------------------------------------------------

    def get_acquainted(self) -> Conversation:
        """Hear everybody who can be reached before believing anything about who holds what."""
        peer, world = self.peer, self.world
        yield lambda: all(n is self or n.name in peer.members or not world.link(self, n) for n in world.living())
        world.do(self, peer.acquainted(world.now))

    def heartbeat(self) -> Conversation:
        while True:
            self.world.do(self, [Broadcast(self.peer.status()), *self.peer.tick(self.world.now)])
            yield 1.0

    def train(self) -> Conversation:
        """Inner steps and exchanges until the last version; a peer that leaves stops in the middle of a round."""
        peer, world = self.peer, self.world
        yield lambda: peer.trains and peer.may_train()
        target_steps = self.steps - peer.first_position()
        while peer.versions[0] < self.outer_steps:
            base_versions = list(peer.versions)
            world.do(self, peer.enter("training", world.now))
            for step in range(target_steps):
                yield self.step_s
                if peer.state == "leaving":
                    return
                peer.progress(step + 1, target_steps, 1 / self.step_s, 0)
            world.do(self, peer.enter("exchanging", world.now))
            begun = [Exchange(f, v, target_steps, 8 * target_steps, MANIFEST) for f, v in enumerate(base_versions)]
            running = set(range(len(begun)))
            for exchange in begun:
                world.spawn(self, self.exchange(exchange, running))
            yield lambda running=running: not running
            self.exchanges += begun
            if not peer.in_step(world.now):  # join anew
                world.do(self, peer.enter("starting", world.now))
                yield peer.may_train
            target_steps = self.steps
        world.do(self, peer.enter("done", world.now))

    def leave(self) -> Conversation:
        """After the exchange that is under way: say goodbye, wait until the fragments are taken over, and go."""
        yield lambda: self.peer.state != "exchanging"
        self.world.do(self, self.peer.enter("leaving", self.world.now))
        yield lambda: not self.peer.leases.held_by(self.name)
        self.world.kill(self.name)

    def live_lease(self, fragment: int) -> Lease | None:
        """The lease on a fragment, if its holder is connected."""
        lease = self.peer.leases.get(fragment)
        return lease if lease and (lease.holder == self.name or lease.holder in self.peer.members) else None

    def stream_to(self, other: ToyNode) -> Callable[[], bool]:
        """A stream to another node (or to itself): says whether it is broken by now."""
        link = self.world.link(self, other)
        return lambda: link is None or not self.world.alive(other) or self.world.link(self, other) != link

    # -- conversations ------------------------------------------------------------------------------------------------

    def exchange(self, exchange: Exchange, running: set[int]) -> Conversation:
        fragment, retry_at = exchange.fragment, 0.0
        while True:
            lease = self.live_lease(fragment)
            match exchange.next_step(lease, self.peer.versions[fragment], self.world.now, retry_at):
                case Step.DONE:
                    running.discard(fragment)
                    return
                case Step.WAIT:
                    yield 0.2
                case Step.CATCH_UP:
                    donors = self.peer.members.donors(fragment, exchange.base_version + 1)
                    yield from self.catch_up(fragment, tuple(donors), outer=False)
                    yield 0.2
                case Step.CONTRIBUTE:
                    assert lease is not None
                    retry_at = self.world.now + 1.0
                    yield from self.contribute(exchange, lease)

    def contribute(self, exchange: Exchange, lease: Lease) -> Conversation:
        """One stream to the syncer: header, verdict, chunks, and the record once the version is published."""
        world, fragment = self.world, exchange.fragment
        holder, header = world.nodes[lease.holder], exchange.header(lease)
        stream_broke = self.stream_to(holder)

        def broken() -> bool:
            now = self.live_lease(fragment)
            return stream_broke() or now is None or (now.holder, now.term) != (lease.holder, lease.term)

        def reach() -> Conversation:
            yield world.latency()
            yield lambda: broken() or world.awake(holder)

        yield from reach()
        if broken():
            return exchange.broke(lease)
        verdict, syncer = holder.peer.offer(self.name, header), holder.peer.syncers.get(fragment)
        if not verdict.accepted:
            record = holder.records.get(fragment)
            late = record is not None and record.version == header.base_version + 1 <= verdict.version
            exchange.refused(verdict.model_copy(update={"record_follows": late}), lease)
            yield from reach()
            return self.adopt(record, exchange, lease) if record is not None and late and not broken() else None
        for chunk in range(verdict.first_chunk, CHUNKS):
            yield from reach()
            wanted = (
                holder.peer.syncers.get(fragment) is syncer and syncer is not None and syncer.wants(self.name, chunk)
            )
            if broken() or not wanted or world.random.random() < world.break_rate:
                return exchange.broke(lease)
            holder.folded[fragment][self.name, chunk] += 1
            syncer.folded(self.name)
        world.do(holder, holder.peer.arrived(self.name, fragment, world.now))

        def settled() -> bool:  # also when the syncer caught up with a later version instead
            return (
                holder.peer.versions[fragment] > header.base_version or holder.peer.syncers.get(fragment) is not syncer
            )

        yield lambda: broken() or settled()
        record = holder.records.get(fragment)
        yield from reach()
        if record is None or record.version != header.base_version + 1 or broken():
            return exchange.broke(lease)
        return self.adopt(record, exchange, lease)

    def adopt(self, record: Record, exchange: Exchange, lease: Lease) -> None:
        """Move the anchor by an update record, if it follows what is here."""
        peer, fragment = self.peer, record.fragment
        exchange.recorded(record.contributors, self.name)
        if (peer.versions[fragment], peer.digests[fragment]) == (record.version - 1, record.digest_before):
            now, tokens = self.world.now, record.applied_tokens
            self.world.do(self, peer.adopted(fragment, record.version, record.digest, tokens, now))
        elif peer.versions[fragment] < record.version:
            exchange.broke(lease)

    def merge(self, close: Close) -> Conversation:
        """Make the next version of a fragment; every contributor must be in it once, and whole."""
        peer, world, fragment = self.peer, self.world, close.fragment
        syncer, version = peer.syncers[fragment], close.base_version + 1
        whole = {(peer, chunk): 1 for peer in close.contributors for chunk in range(CHUNKS)}
        folded, self.folded[fragment] = self.folded[fragment], Counter()
        assert folded.items() >= whole.items() and set(folded.values()) == {1}, folded
        yield 0.02 + world.latency()
        if peer.syncers.get(fragment) is not syncer:
            return
        before, digest = peer.digests[fragment], digest_of(peer.digests[fragment], *close.contributors)
        clock = peer.applied_tokens + (0 if fragment else close.tokens)
        names = list(close.contributors)
        record = Record(
            fragment=fragment, term=syncer.term, version=version, digest_before=before, digest=digest,
            contributors=names, applied_tokens=clock,
        )  # fmt: skip
        self.records[fragment] = record
        self.momentum[fragment] += (version,)
        world.records.append(record)
        world.do(self, peer.published(fragment, digest, close.tokens, names, world.now))

    def catch_up(self, fragment: int, donors: tuple[str, ...], outer: bool) -> Conversation:
        """Fetch the state of a fragment from the first donor that is there."""
        world, peer = self.world, self.peer
        for donor in (world.nodes[name] for name in donors):
            broken = self.stream_to(donor)
            yield 5 * world.latency()
            yield (
                lambda donor=donor, broken=broken: broken() or (world.awake(donor) and not donor.peer.merging(fragment))
            )
            if broken() or peer.merging(fragment) or donor.peer.versions[fragment] < peer.versions[fragment]:
                continue
            version, digest, tokens = (
                donor.peer.versions[fragment],
                donor.peer.digests[fragment],
                donor.peer.applied_tokens,
            )
            if outer and donor.peer.state == "leaving" and fragment in donor.momentum:
                self.momentum[fragment] = donor.momentum[fragment]
            if fragment in self.folded:
                self.folded[fragment] = Counter()
            world.do(self, peer.adopted(fragment, version, digest, tokens, world.now))
            return
        peer.catch_up_failed(fragment)
