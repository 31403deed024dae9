"""Virtual time and links for peers in memory: what happens in which order, and what reaches whom. No sockets, no
sleeping.

    heap of (time, number, node, work) -> work -> messages and conversations -> heap

What one node says to another stays in order, as on a stream, and passes through the real encoding; everything else
happens in an order that the seed decides. A *conversation* is a generator that yields the seconds to pass or a
condition to wait for.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator
from functools import partial
from itertools import combinations, count
from typing import Protocol

from diloco.protocol.actions import Action, Broadcast, Disconnect
from diloco.protocol.messages import Message, decode, encode
from diloco.protocol.peer import Peer

__all__ = ["Conversation", "Node", "World"]

Conversation = Generator[float | Callable[[], bool], None, None]


class Node(Protocol):
    """What lives in a world: a protocol core and somebody who carries out what it asks for."""

    name: str
    peer: Peer

    def carry_out(self, action: Action) -> None: ...


class World:
    """Nodes, links and the events between them.

    A link is up, or down, which both ends notice; between two nodes that are *cut* everything is lost in silence. A
    node is awake, frozen (what is sent to it waits) or dead.
    """

    def __init__(self, seed: int, latency_s: float) -> None:
        self.random = random.Random(seed)
        self.latency_s = latency_s
        self.now = 0.0
        self.events = 0
        self.at_event: dict[int, Callable[[], None]] = {}  # number of an event -> what happens just before it
        self.cut: set[frozenset[str]] = set()
        self._living: dict[str, Node] = {}
        self._wakes_at: dict[str, float] = {}
        self._heap: list[tuple[float, int, Node, Callable[[], None]]] = []
        self._number = count(1)
        self._waiting: list[tuple[Node, Callable[[], bool], Conversation]] = []
        self._links: dict[frozenset[str], int] = {}
        self._flushed: dict[tuple[Node, Node], float] = {}

    # -- what happens to nodes ----------------------------------------------------------------------------------------

    def join(self, node: Node) -> None:
        """A node is there from now on, and connects to all others; it may have the name of a dead one."""
        self._living[node.name] = node
        for other in self.living():
            self._links.pop(_pair(node, other), None)
            self.connect(node, other)

    def kill(self, name: str) -> None:
        """A node vanishes; what it sent before arrives until the streams read end-of-file."""
        dead = self._living.pop(name)
        for node in self.living():
            self.at(self.latency(), node, partial(self.disconnect, node, dead, self.link(node, dead)))

    def freeze(self, name: str, seconds: float) -> None:
        """A node does nothing for a while."""
        self._wakes_at[name] = max(self.now + seconds, self._wakes_at.get(name, 0.0))
        self.at(seconds, self._living[name], lambda: None)

    def split(self, *sides: str) -> None:
        """From now on nodes reach only those on their side; without sides all do, and connections that were cut
        break.
        """
        pairs = list(combinations(self.living(), 2))
        mended, self.cut = self.cut, set()
        for one, other in pairs:
            if sides and not any({one.name, other.name} <= set(side) for side in sides):
                self.cut.add(_pair(one, other))
            elif _pair(one, other) in mended:
                self.disconnect(one, other, self.link(one, other))

    def living(self) -> list[Node]:
        """Nodes that are not dead, by name."""
        return [self._living[name] for name in sorted(self._living)]

    def alive(self, node: Node) -> bool:
        """Whether a node is not dead."""
        return self._living.get(node.name) is node

    def awake(self, node: Node) -> bool:
        """Whether a node is neither dead nor frozen."""
        return self.alive(node) and self.now >= self._wakes_at.get(node.name, 0.0)

    # -- links --------------------------------------------------------------------------------------------------------

    def connect(self, one: Node, other: Node) -> None:
        """Each says hello to the other as soon as it is awake; nothing happens when they cannot reach each other."""
        pair = _pair(one, other)
        if one is other or pair in self._links or pair in self.cut or not (self.alive(one) and self.alive(other)):
            return
        self._links[pair] = next(self._number)
        for source, target in ((one, other), (other, one)):
            greet = partial(self._greet, source, target)
            greet() if self.awake(source) else self.at(0.0, source, greet)

    def _greet(self, source: Node, target: Node) -> None:
        hello = source.peer.hello()
        assert target.peer.objection(hello) is None
        self._send(source, target, lambda: target.peer.connected(source.name, hello, self.now))

    def disconnect(self, one: Node, other: Node, link: int | None) -> None:
        """The streams of a connection end; each side calls once more before it gives the other up."""
        if self.link(one, other) != link:
            return
        self._links.pop(_pair(one, other), None)

        def noticed(node: Node, gone: Node) -> None:
            self.connect(node, gone)
            if self.link(node, gone) is None:
                self.do(node, node.peer.lost(gone.name, self.now, "connection reset"))

        self.at(self.latency(), one, partial(noticed, one, other))
        self.at(self.latency(), other, partial(noticed, other, one))

    def link(self, one: Node, other: Node) -> int | None:
        """Number of the connection between two nodes; None while there is none, 0 from a node to itself."""
        return 0 if one is other else self._links.get(_pair(one, other))

    def latency(self) -> float:
        """Seconds on the way: mostly few and sometimes many."""
        return self.latency_s * self.random.random() ** 3

    def _send(self, source: Node, target: Node, hear: Callable[[], list[Action]]) -> None:
        link, way = self.link(source, target), (source, target)
        if link is None or _pair(source, target) in self.cut:
            return
        self._flushed[way] = max(self.now + self.latency(), self._flushed.get(way, 0.0))

        def arrive() -> None:
            if self.link(source, target) == link:
                self.do(target, hear())

        self._push(self._flushed[way], target, arrive)

    # -- time ---------------------------------------------------------------------------------------------------------

    def do(self, node: Node, actions: list[Action]) -> None:
        """Carry out what a node's protocol asks for."""
        for action in actions:
            match action:
                case Broadcast():
                    self._broadcast(node, decode(encode(action.message)))
                case Disconnect():
                    if action.peer in self._living:
                        other = self._living[action.peer]
                        self.disconnect(node, other, self.link(node, other))
                case _:
                    node.carry_out(action)

    def _broadcast(self, node: Node, message: Message) -> None:
        for other in self.living():
            if other is not node:
                self._send(node, other, lambda to=other.peer: to.heard(node.name, message, self.now))

    def at(self, delay_s: float, node: Node, work: Callable[[], None]) -> None:
        """Something happens to a node after a while, or when it wakes up, unless it is dead by then."""
        self._push(self.now + delay_s, node, work)

    def _push(self, at: float, node: Node, work: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (at, next(self._number), node, work))

    def spawn(self, node: Node, conversation: Conversation) -> None:
        """Begin a conversation, or go on with it, until it waits for something."""
        wanted = next(conversation, None)
        if isinstance(wanted, float):
            self.at(wanted, node, partial(self.spawn, node, conversation))
        elif wanted is not None:
            self._waiting.append((node, wanted, conversation))

    def run(self, until: Callable[[], bool], limit_s: float) -> None:
        """Events in the order of time until the condition holds; it must within that many virtual seconds."""
        limit_s += self.now
        while not until():
            state = [(node.name, node.peer.state, node.peer.versions) for node in self.living()]
            assert self.now < limit_s, f"still waiting after {self.now:.0f} s: {state}"
            self.at_event.pop(self.events, lambda: None)()
            self.events += 1
            at, number, node, work = heapq.heappop(self._heap)
            self.now = max(self.now, at)
            if self.awake(node):
                work()
                self._continue()
            elif self.alive(node):
                heapq.heappush(self._heap, (self._wakes_at[node.name], number, node, work))

    def _continue(self) -> None:
        """Whoever waited for what is true now goes on."""
        while ready := [entry for entry in self._waiting if self.awake(entry[0]) and entry[1]()]:
            self._waiting = [entry for entry in self._waiting if entry not in ready and self.alive(entry[0])]
            for node, _, conversation in ready:
                self.spawn(node, conversation)


def _pair(one: Node, other: Node) -> frozenset[str]:
    return frozenset((one.name, other.name))
