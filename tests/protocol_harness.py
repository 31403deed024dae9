"""A swarm in memory and virtual time: `Peer`s that carry out each other's actions, without sockets, threads or sleeping.

    heap of (time, number, node, work) -> one event -> that node's `Peer` -> actions -> messages and conversations -> heap

What a node does beside the protocol (training, contributing, merging, fetching) is a generator that yields seconds to
pass or a condition to wait for. The anchor of a fragment is only its digest, a hash of its whole history, so equal digests
mean that the same contributions were merged in the same order. Messages of one peer to another stay in order, as on a
stream, and pass through the real encoding; all else happens in an order that the seed decides.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from hashlib import sha256
from itertools import count

from diloco.protocol.actions import Action, Broadcast, CatchUp, Disconnect, Hold, Merge, Note, Release
from diloco.protocol.exchange import Exchange, Step
from diloco.protocol.leases import Lease
from diloco.protocol.messages import Message, Record, decode, encode
from diloco.protocol.peer import Peer
from diloco.protocol.syncer import Close

__all__ = ["CHUNKS", "MANIFEST", "Node", "World", "digest_of"]

Conversation = Generator[float | Callable[[], bool], None, None]
MANIFEST = sha256(b"manifest").hexdigest()
CHUNKS = 3
HEARTBEAT_S = RETRY_S = 1.0
MERGE_S = 0.05


def digest_of(*history: object) -> str:
    """Digest that stands for an anchor with that history."""
    return sha256(repr(history).encode()).hexdigest()


class Node:
    """One peer: its protocol core, its toy fragments, and whether it is alive, awake, or dead."""

    def __init__(self, peer: Peer, outer_steps: int, steps: int, step_s: float) -> None:
        self.peer, self.id = peer, peer.me
        self.outer_steps, self.steps, self.step_s = outer_steps, steps, step_s
        self.records: dict[int, Record] = {}
        self.outer: dict[int, tuple[int, ...]] = {}  # stands for the momentum: versions that went into it
        self.folded: dict[int, Counter[tuple[str, int]]] = {}  # (contributor, chunk) in the sum of a fragment
        self.finished: list[Exchange] = []
        self.alive, self.wakes_at = True, 0.0

    def live_lease(self, fragment: int) -> Lease | None:
        """The lease on a fragment, if its holder is connected."""
        lease = self.peer.leases.get(fragment)
        return lease if lease and (lease.holder == self.id or lease.holder in self.peer.members) else None


class World:
    """Nodes, links, and the events between them. `break_rate` is the chance that a stream breaks at a chunk."""

    def __init__(self, seed: int = 0, fragments: int = 4, break_rate: float = 0.0, latency_s: float = 0.1) -> None:
        self.random = random.Random(seed)
        self.fragments, self.break_rate, self.latency_s = fragments, break_rate, latency_s
        self.now, self.events = 0.0, 0
        self.nodes: dict[str, Node] = {}
        self.notes: list[tuple[str, Note]] = []
        self.history: dict[tuple[int, int], list[Record]] = {}  # (fragment, version) -> what was published as that
        self.at_event: dict[int, Callable[[], None]] = {}
        self.reachable: Callable[[str, str], bool] = lambda a, b: True
        self._heap: list[tuple[float, int, Node, Callable[[], None]]] = []
        self._number = count()
        self._waiting: list[tuple[Node, Callable[[], bool], Conversation]] = []
        self._links: dict[frozenset[str], int] = {}
        self._flushed: dict[tuple[str, str], float] = {}

    # -- what a test does ---------------------------------------------------------------------------------------------

    def join(self, name: str, outer_steps: int = 3, steps: int = 4, step_s: float = 0.5, **settings: object) -> Node:
        """A peer starts and connects to everybody; one that does not train has `trains=False`."""
        digests = [digest_of(fragment) for fragment in range(self.fragments)]
        peer = Peer(name, name, "run", MANIFEST, **{"digests": digests, **settings})  # type: ignore[arg-type]
        node = self.nodes[name] = Node(peer, outer_steps, steps, step_s)
        for other in self._others(node):
            self.connect(node, other)
        self.spawn(node, self._heartbeat(node))
        if peer.trains:
            self.spawn(node, self._train(node))
        return node

    def connect(self, one: Node, other: Node) -> None:
        """Both say hello, if neither is dead and they can reach each other."""
        if one.alive and other.alive and self.reachable(one.id, other.id):
            self._links[frozenset((one.id, other.id))] = next(self._number)
            for source, target in ((one, other), (other, one)):
                hello = source.peer.hello()
                assert target.peer.objection(hello) is None
                self._send(source, target, lambda t=target, s=source, h=hello: t.peer.connected(s.id, h, self.now))

    def disconnect(self, one: Node, other: Node, why: str) -> None:
        """Streams between two nodes end; what was under way is lost, and each notices in its own time."""
        self._links.pop(frozenset((one.id, other.id)), None)
        for node, gone in ((one, other), (other, one)):
            self._at(self._latency_s(), node, lambda n=node, g=gone: self._noticed(n, g, why))

    def kill(self, name: str) -> None:
        """A node vanishes; what it had sent arrives until the others notice."""
        dead = self.nodes[name]
        dead.alive = False
        for node in self._others(dead):
            self._at(self._latency_s(), node, lambda n=node: self.disconnect(n, dead, "connection reset"))

    def freeze(self, name: str, seconds: float) -> None:
        """A node does nothing for a while; what is sent to it waits."""
        self.nodes[name].wakes_at = self.now + seconds
        self._at(seconds, self.nodes[name], lambda: None)

    def split(self, *groups: str) -> None:
        """Only peers of one group reach each other; without groups all do. Streams that may not be hang, and none end."""
        side = {name: group for group in groups for name in group}
        self.reachable = lambda a, b: side.get(a) == side.get(b)

    def leave(self, name: str) -> None:
        """A node says goodbye, waits until its fragments are taken over, and goes."""
        self.spawn(self.nodes[name], self._leave(self.nodes[name]))

    def run(self, until: Callable[[], bool], limit_s: float = 600.0) -> None:
        """Events in order of time until the condition holds; fails when it does not within that many virtual seconds."""
        limit_s += self.now
        while not until():
            assert self._heap and self.now < limit_s, f"still waiting at {self.now:.1f} s: {self.report()}"
            self.at_event.pop(self.events, lambda: None)()
            self.events += 1
            at, number, node, work = heapq.heappop(self._heap)
            self.now = max(self.now, at)
            if node.alive and self.now < node.wakes_at:
                heapq.heappush(self._heap, (node.wakes_at, number, node, work))
            elif node.alive:
                work()
            while ready := [entry for entry in self._waiting if self._awake(entry[0]) and entry[1]()]:
                self._waiting = [entry for entry in self._waiting if entry not in ready and entry[0].alive]
                for owner, _, conversation in ready:
                    self.spawn(owner, conversation)

    def done(self) -> bool:
        """Whether every living trainer is done."""
        return all(node.peer.state in ("done", "leaving") for node in self.living() if node.peer.trains)

    def living(self) -> list[Node]:
        """Nodes that are not dead, by name."""
        return [self.nodes[name] for name in sorted(self.nodes) if self.nodes[name].alive]

    def report(self) -> str:
        """State of every living node in one line each."""
        return "".join(
            f"\n{n.id} {n.peer.state} {n.peer.versions} leases {[n.peer.leases.get(f) for f in range(self.fragments)]}"
            for n in self.living()
        )

    # -- events, links and conversations ------------------------------------------------------------------------------

    def spawn(self, node: Node, conversation: Conversation) -> None:
        """Go on with a conversation until it waits for something."""
        wanted = next(conversation, None) if node.alive else None
        if isinstance(wanted, float):
            self._at(wanted, node, lambda: self.spawn(node, conversation))
        elif wanted is not None:
            self._waiting.append((node, wanted, conversation))

    def do(self, node: Node, actions: Sequence[Action]) -> None:
        """Carry out what a node's protocol asks for."""
        for action in actions:
            match action:
                case Broadcast():
                    self._broadcast(node, action.message)
                case Note():
                    self.notes.append((node.id, action))
                case Hold():
                    node.outer.setdefault(action.fragment, ())
                    node.folded[action.fragment] = Counter()
                case Release():
                    del node.outer[action.fragment], node.folded[action.fragment]
                    node.records.pop(action.fragment, None)
                case Merge():
                    self.spawn(node, self._merge(node, action.close))
                case CatchUp():
                    self.spawn(node, self._catch_up(node, action.fragment, action.donors, action.outer))
                case Disconnect():
                    self.disconnect(node, self.nodes[action.peer], "disconnected")

    def _at(self, delay_s: float, node: Node, work: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._number), node, work))

    def _awake(self, node: Node) -> bool:
        return node.alive and self.now >= node.wakes_at

    def _others(self, node: Node) -> list[Node]:
        return [other for other in self.living() if other is not node]

    def _latency_s(self) -> float:
        return self.latency_s * self.random.random() ** 3

    def _link(self, one: Node, other: Node) -> int | None:
        return 0 if one is other else self._links.get(frozenset((one.id, other.id)))

    def _send(self, source: Node, target: Node, hear: Callable[[], list[Action]]) -> None:
        link = self._link(source, target)
        arrival = max(self.now + self._latency_s(), self._flushed.get((source.id, target.id), 0.0))
        self._flushed[source.id, target.id] = arrival
        connected = link is not None and self.reachable(source.id, target.id)
        if connected:
            self._at(
                arrival - self.now,
                target,
                lambda: self.do(target, hear() if self._link(source, target) == link else []),
            )

    def _broadcast(self, node: Node, message: Message) -> None:
        heard = decode(encode(message))
        for other in self._others(node):
            self._send(node, other, lambda o=other: o.peer.heard(node.id, heard, self.now))

    def _noticed(self, node: Node, gone: Node, why: str) -> None:
        if self._link(node, gone) is None:  # one more call, as the real mesh does before it gives a peer up
            self.connect(node, gone)
        if self._link(node, gone) is None:
            self.do(node, node.peer.lost(gone.id, self.now, why))
