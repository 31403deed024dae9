"""Bare nodes: the real protocol core of a peer, with digests for tensors. Thousands of swarms of them run in a minute.

    Swarm (a World) -> BareNode: trains by the real Schedule -> Transfers: contributes -> Holder: merges -> Lineage

What a node does here is what `swarm.node`, `swarm.rounds`, `swarm.serve` and the attachment of `train.api` do with
tensors and streams; every decision is the protocol's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from diloco.config import OuterConfig
from diloco.protocol.actions import Action, Broadcast, CatchUp, Hold, Merge, Note, Release
from diloco.protocol.exchange import Exchange
from diloco.protocol.peer import CONTROL_FRAGMENT, Peer
from diloco.protocol.schedule import Schedule
from diloco.protocol.shares import Shares
from diloco.sim.arena import MANIFEST, Arena
from diloco.sim.lineage import Contributed, digest_of
from diloco.sim.transfers import Transfers
from diloco.sim.world import Clock, Conversation, Violation

__all__ = ["BareNode", "Checkpoint", "Swarm"]

ACQUAINTANCE_S = 20.0
LEAVE_S = 20.0
TOKENS_PER_STEP = 8


@dataclass(frozen=True)
class Checkpoint:
    """What a process that restarts goes on from."""

    versions: list[int]
    digests: list[str]
    terms: list[int]
    applied_tokens: int
    shares: list[Shares]


class Swarm(Arena):
    """A world of bare nodes; `settings` go to every node."""

    def __init__(
        self, seed: int = 0, fragments: int = 4, break_rate: float = 0.0, latency_s: float = 0.2, **settings: object
    ) -> None:
        super().__init__(seed, latency_s, fragments, break_rate)
        self.settings = settings
        self.bare: dict[str, BareNode] = {}

    def start(self, names: Sequence[str], **settings: object) -> None:
        """Peers of these names start now, in an order that the seed decides; by default they train."""
        for name in self.random.sample(names, len(names)):
            self.nodes[name] = self.bare[name] = node = BareNode(self, name, **{**self.settings, **settings})  # type: ignore[arg-type]
            self.note(name, f"starts at versions {node.peer.versions}")
            self.join(node)
            if node.peer.newcomer:
                self.spawn(node, node.get_acquainted())
            self.spawn(node, node.heartbeat())
            if node.peer.trains:
                self.spawn(node, node.train())

    def alive_nodes(self) -> list[BareNode]:
        """Nodes that are not dead, by name."""
        return [self.bare[node.name] for node in self.living()]

    def run_to_the_end(self, limit_s: float = 400.0) -> list[BareNode]:
        """Until every living trainer is done, and then until what is under way is over; returns who lives."""

        self.run(self.done, limit_s)
        self.run_for(10.0)
        return self.alive_nodes()

    def done(self) -> bool:
        """Whether every living trainer is done, and nobody frozen."""
        living = self.living()
        return all(n.peer.state == "done" or not n.peer.trains for n in living) and all(map(self.awake, living))

    def run_for(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        self.run(lambda: self.now >= end, 2 * seconds)


class BareNode(Transfers):
    """One peer: its protocol core, its fragments, and its half of every conversation.

    A node that dies keeps what it had, for whoever looks; `saved` is its last checkpoint.
    """

    def __init__(
        self,
        world: Swarm,
        name: str,
        outer_steps: int = 3,
        steps: int = 4,
        step_s: float = 0.5,
        heartbeat_s: float = 1.0,
        outer: OuterConfig | None = None,
        saved: Checkpoint | None = None,
        clock: Clock | None = None,
        batch_size: int = 0,
        **settings: object,
    ) -> None:
        outer = outer or OuterConfig(method="diloco", sync_every=steps)
        digests = [digest_of(fragment) for fragment in range(world.fragments)] if saved is None else saved.digests
        if saved is not None:
            settings |= {"versions": saved.versions, "applied_tokens": saved.applied_tokens}
        self.peer = Peer(name, name, "run", MANIFEST, **{"digests": digests, "outer": outer, **settings})  # type: ignore[arg-type]
        self.world, self.name, self.clock, self.saved = world, name, clock or Clock(), saved
        self.outer_steps, self.step_s, self.heartbeat_s = outer_steps, step_s, heartbeat_s
        self.notes: list[Note] = []
        self.began()
        self.batch_size = batch_size  # leased sequences per step; 0: this node trains on data of its own
        self.reserve.expect(batch_size * outer.sync_every)
        if saved is not None:
            self.peer.restore_shares(saved.shares)
        for fragment in range(world.fragments):
            self.peer.leases.see_term(fragment, max(world.dht.get(fragment, 0), saved.terms[fragment] if saved else 0))

    def carry_out(self, action: Action) -> None:
        """What the protocol asks of its owner, except for what is the world's."""
        match action:
            case Hold(fragment=fragment):
                self.momentum.setdefault(fragment, ())
                self.folded[fragment] = []
                self.world.dht[fragment] = max(action.term, self.world.dht.get(fragment, 0))
            case Release(fragment=fragment):
                self.momentum.pop(fragment, None)
                self.folded.pop(fragment, None)
                self.records.pop(fragment, None)
            case Merge():
                self.world.spawn(self, self.merge(action.close))
            case CatchUp():
                self.world.spawn(self, self.catch_up(action.fragment, action.donors, action.outer))
            case Note():
                self.notes.append(action)
            case _:
                raise Violation(f"nobody carries out {action}")

    def kinds(self) -> Counter[str]:
        """How many notes of which kind the protocol made."""
        return Counter(note.kind for note in self.notes)

    # -- life ---------------------------------------------------------------------------------------------------------

    def get_acquainted(self) -> Conversation:
        """Hear everybody who can be reached before believing anything about who holds what."""
        peer, world = self.peer, self.world
        patient_until = world.now + ACQUAINTANCE_S

        def heard_all() -> bool:
            linked = [n for n in world.living() if n is not self and world.link(self, n)]
            return (bool(linked) and all(n.name in peer.members for n in linked)) or world.now >= patient_until

        yield heard_all
        self.do(peer.discovered(self.now()))

    def heartbeat(self) -> Conversation:
        """Says that this node lives, and lets time pass for its protocol."""
        while True:
            self.do([Broadcast(self.peer.status()), *self.peer.tick(self.now())])
            self.ask_for_units()
            yield self.heartbeat_s / self.clock.rate

    def train(self) -> Conversation:
        """Inner steps and exchanges until the last version; a peer that leaves stops in the middle of a round."""
        peer, outer = self.peer, self.peer.outer
        schedule = Schedule(self.world.fragments, outer.sync_every, outer.staggered, outer.overlap)
        yield peer.may_train
        schedule.begin(peer.first_position())
        self.do(peer.enter("training", self.now()))
        self.load(range(self.world.fragments))
        self.version = min(peer.versions)
        while self.version < self.outer_steps:
            yield self.step_s
            if peer.state == "leaving":
                return
            due = schedule.advance()
            self.steps += 1
            self.reserve.take(self.batch_size)
            pace = 1 / (self.step_s * self.clock.rate)
            peer.progress(schedule.inner_step, schedule.target_steps, pace, self.steps * TOKENS_PER_STEP)
            if outer.quorum is not None:
                self.version = max(self.version, peer.swarm_clock()[0])
            if outer.overlap == outer.sync_every:
                if due.send:
                    yield from self.turn(due.send)
                continue
            self.send(due.send)
            if due.receive:
                position = yield from self.receive(due.receive)
                if position:
                    schedule.begin(position)
                self.saved = self.checkpoint()
                self.do(peer.enter("training", self.now()))
        if schedule.flying:
            yield from self.receive(schedule.flying)
        self.do(peer.enter("done", self.now()))

    def send(self, fragments: Sequence[int]) -> None:
        """Begin to exchange these fragments."""
        if fragments and self.peer.lockstep:
            self.do(self.peer.enter("exchanging", self.now()))
        for fragment in fragments:
            steps, self.sent[fragment] = self.steps - self.sent[fragment], self.steps
            exchange = Exchange(
                fragment, self.loaded[fragment], steps, steps * TOKENS_PER_STEP, MANIFEST,
                staleness_limit=self.peer.outer.staleness_limit,
            )  # fmt: skip
            if fragment == CONTROL_FRAGMENT:
                exchange.units = self.reserve.send()
                self.world.learned_from[Contributed(self.name, exchange.base_version)] = exchange.units
            self.exchanges.append(exchange)
            self.flying[fragment] = exchange
            self.world.spawn(self, self.exchange(exchange))
        self.ask_for_units()

    def receive(self, fragments: Sequence[int]) -> Generator[float | Callable[[], bool], None, int]:
        """Wait for the updates of these fragments and go on from them; returns where in the cycle."""
        peer, position = self.peer, 0
        if not self.arrived(fragments):
            if peer.state != "exchanging":
                self.do(peer.enter("exchanging", self.now()))
            yield lambda: self.arrived(fragments)
        if peer.lockstep and not peer.in_step(self.now()):  # join anew
            self.do(peer.enter("starting", self.now()))
            yield peer.may_train
            position = peer.first_position()
        self.load(fragments if position == 0 else range(self.world.fragments))
        self.version = max(self.version, min(self.loaded))
        return position

    def turn(self, fragments: Sequence[int]) -> Conversation:
        """A round that is over becomes the next contribution; the update of the one before it is here, a round late."""
        yield lambda: not self.flying
        self.load(fragments)
        self.version = max(self.version, min(self.loaded))
        self.send(fragments)
        self.saved = self.checkpoint()
        self.do(self.peer.enter("training", self.now()))

    def checkpoint(self) -> Checkpoint:
        """What is written at a boundary."""
        peer = self.peer
        terms = [peer.leases.term(fragment) for fragment in range(len(peer.versions))]
        shares = [peer.shares(fragment) for fragment in range(len(peer.versions))]
        return Checkpoint(list(peer.versions), list(peer.digests), terms, peer.applied_tokens, shares)

    def leave(self) -> Conversation:
        """After the exchange that is under way: say goodbye, wait until the fragments are taken over, and go."""
        peer = self.peer
        yield lambda: peer.state != "exchanging"
        if peer.state in ("done", "leaving"):
            return
        self.do(peer.enter("leaving", self.now()))
        self.flying.clear()

        def handed_over() -> bool:
            others = [m for m in peer.members.all() if m.holds and m.status.state not in ("leaving", "done")]
            return not others or not peer.leases.held_by(self.name)

        patient_until = self.world.now + LEAVE_S
        yield lambda: handed_over() or self.world.now >= patient_until
        self.world.kill(self.name)
