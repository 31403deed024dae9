"""Virtual time and links for peers in memory: what happens in which order, and what reaches whom. No sockets, no
sleeping, no tensors.

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

from diloco.protocol.actions import Action, Broadcast, Disconnect, Wake
from diloco.protocol.messages import Message, decode, encode
from diloco.protocol.messages.control import Hello
from diloco.protocol.peer import Peer

__all__ = ["Clock", "Conversation", "Node", "Violation", "World"]

Conversation = Generator[float | Callable[[], bool], None, None]
Pair = frozenset[str]
ROUNDING_S = 1e-6  # so that a clock with a rate of its own does not read a little less than what was waited for
MAX_EVENTS = 50_000  # far more than a run of some minutes has
POLL_EVENTS = 6  # after which the conditions of all are looked at, and not only of those something happened to


class Violation(AssertionError):
    """Something that must hold whatever fails does not."""


class Clock:
    """A node's own monotonic clock: it reads `offset_s + rate * seconds` of the world."""

    def __init__(self, offset_s: float = 0.0, rate: float = 1.0) -> None:
        self.offset_s, self.rate = offset_s, rate

    def read(self, world_s: float) -> float:
        """What it shows at a time of the world."""
        return self.offset_s + self.rate * world_s

    def until(self, at: float, world_s: float) -> float:
        """Seconds of the world from now until it shows `at`; 0 when that is past."""
        return max(0.0, (at - self.offset_s) / self.rate - world_s) + ROUNDING_S


class Node(Protocol):
    """What lives in a world: a protocol core and somebody who carries out what it asks for."""

    name: str
    peer: Peer
    clock: Clock

    def carry_out(self, action: Action) -> None:
        """Do what the world does not."""


class World:
    """Nodes, links and the events between them.

    A link is up, or down, which both ends notice. Between two nodes that are *cut* nothing arrives: what is said is
    lost, and the link breaks when the cut ends, or it is *held* and arrives late. A node is awake, frozen (what is sent
    to it waits) or dead. `run` raises `Violation` when its condition does not come true in time.
    """

    def __init__(self, seed: int, latency_s: float) -> None:
        self.random = random.Random(seed)
        self.latency_s = latency_s
        self.now = 0.0
        self.events = 0
        self.at_event: dict[int, Callable[[], None]] = {}  # number of an event -> what happens just before it
        self.check: Callable[[set[Node]], None] = lambda nodes: None  # called after every event with those it touched
        self.trace: Callable[[str, str], None] | None = None  # called with a node's name and what happens to it
        self.cut: dict[Pair, bool] = {}  # whether what is said meanwhile is held
        self._living: list[Node] = []  # by name
        self._touched: set[Node] = set()
        self._wakes_at: dict[str, float] = {}
        self._heap: list[tuple[float, int, Node | None, Callable[[], None]]] = []
        self._number = count(1)
        self._waiting: list[tuple[Node, Callable[[], bool], Conversation]] = []
        self._links: dict[Pair, int] = {}
        self._flushed: dict[tuple[Node, Node], float] = {}
        self._held: dict[Pair, list[Callable[[], None]]] = {}
        self._lost: set[Pair] = set()  # pairs whose link must break, for something said on it was lost

    # -- what happens to nodes ----------------------------------------------------------------------------------------

    def join(self, node: Node) -> None:
        """A node is there from now on, and connects to all others; it may have the name of a dead one."""
        self._living = sorted([*self._living, node], key=lambda n: n.name)
        self._wakes_at.pop(node.name, None)
        for other in self._living:
            self._links.pop(_pair(node, other), None)
            self.connect(node, other)

    def kill(self, name: str) -> None:
        """A node vanishes; what it sent before arrives until the streams read end-of-file."""
        dead = self.find(name)
        self.note(name, "dies")
        self._living.remove(dead)
        self._waiting = [entry for entry in self._waiting if entry[0] is not dead]
        for node in self._living:
            self.at(self.latency(), node, partial(self.disconnect, node, dead, self.link(node, dead)))

    def freeze(self, name: str, seconds: float) -> None:
        """A node does nothing for a while."""
        self.note(name, f"freezes for {seconds:.1f} s")
        self._wakes_at[name] = max(self.now + seconds, self._wakes_at.get(name, 0.0))
        self.at(seconds, self.find(name), lambda: None)

    def split(self, *sides: str, held: bool = False, heal_s: float = 0.0) -> None:
        """From now on nodes reach only those on their side; without sides all do.

        Args:
            sides: names of the nodes of each side. held: what is said across arrives when the cut ends.
            heal_s: nodes that were cut find each other again within this time.
        """
        mended, self.cut = self.cut, {}
        for one, other in combinations(self._living, 2):
            pair = _pair(one, other)
            if sides and not any({one.name, other.name} <= set(side) for side in sides):
                self.cut[pair] = held
            elif pair in mended:
                self._mend(one, other, heal_s)

    def _mend(self, one: Node, other: Node, heal_s: float) -> None:
        pair, link = _pair(one, other), self.link(one, other)
        held, lost = self._held.pop(pair, []), pair in self._lost
        self._lost.discard(pair)
        if link is None or lost:
            self.at(heal_s * self.random.random(), one, partial(self.disconnect, one, other, link))
        else:
            for delivery in held:
                delivery()

    def find(self, name: str) -> Node:
        """The living node of that name; `KeyError` when there is none."""
        for node in self._living:
            if node.name == name:
                return node
        raise KeyError(name)

    def living(self) -> list[Node]:
        """Nodes that are not dead, by name."""
        return self._living

    def alive(self, node: Node) -> bool:
        """Whether a node is not dead."""
        return node in self._living

    def awake(self, node: Node) -> bool:
        """Whether a node is neither dead nor frozen."""
        return node in self._living and self.now >= self._wakes_at.get(node.name, 0.0)

    def time(self, node: Node) -> float:
        """What a node's clock shows now."""
        return node.clock.read(self.now)

    def note(self, name: str, what: str) -> None:
        """One line of the trace."""
        if self.trace is not None:
            self.trace(name, what)

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
        if (objection := target.peer.objection(hello)) is not None:
            raise Violation(objection)
        self._send(source, target, hello)

    def disconnect(self, one: Node, other: Node, link: int | None) -> None:
        """The streams of a connection end; each side calls once more before it gives the other up."""
        if self.link(one, other) != link:
            return
        self._links.pop(_pair(one, other), None)
        self.note(one.name, f"connection with {other.name} ends")

        def noticed(node: Node, gone: Node) -> None:
            self.connect(node, gone)
            if self.link(node, gone) is None:
                self.do(node, node.peer.lost(gone.name, self.time(node), "connection reset"))

        self.at(self.latency(), one, partial(noticed, one, other))
        self.at(self.latency(), other, partial(noticed, other, one))

    def link(self, one: Node, other: Node) -> int | None:
        """Number of the connection between two nodes; None while there is none, 0 from a node to itself."""
        return 0 if one is other else self._links.get(_pair(one, other))

    def reaches(self, one: Node, other: Node) -> bool:
        """Whether what one says to the other arrives now."""
        return _pair(one, other) not in self.cut and self.awake(other)

    def latency(self) -> float:
        """Seconds on the way: mostly few and sometimes many."""
        return self.latency_s * self.random.random() ** 3

    def stall(self, one: Node, other: Node, seconds: float) -> None:
        """What one node says to another arrives no sooner than after a while."""
        way = (one, other)
        self._flushed[way] = max(self.now + seconds, self._flushed.get(way, 0.0))

    def _send(self, source: Node, target: Node, message: Message) -> None:
        pair = _pair(source, target)
        link = self._links.get(pair)
        if link is None:
            return
        if pair in self.cut:
            if self.cut[pair] and pair not in self._lost:
                self._held.setdefault(pair, []).append(partial(self._deliver, source, target, message, link))
            else:
                self._lost.add(pair)
            return
        self._deliver(source, target, message, link)

    def _deliver(self, source: Node, target: Node, message: Message, link: int) -> None:
        way, pair = (source, target), _pair(source, target)
        self._flushed[way] = at = max(self.now + self.latency(), self._flushed.get(way, 0.0))

        def arrive() -> None:
            if self._links.get(pair) != link:
                return
            if self.trace is not None:
                self.trace(target.name, f"<- {source.name} {_brief(message)}")
            if (offence := target.peer.impossible(message)) is not None:
                raise Violation(f"{source.name} would be punished: {offence}")
            now = target.clock.read(self.now)
            if isinstance(message, Hello):
                self.do(target, target.peer.connected(source.name, message, now))
            else:
                self.do(target, target.peer.heard(source.name, message, now))

        self._push(at, target, arrive)

    # -- time ---------------------------------------------------------------------------------------------------------

    def do(self, node: Node, actions: list[Action]) -> None:
        """Carry out what a node's protocol asks for."""
        self._touched.add(node)
        for action in actions:
            if isinstance(action, Broadcast):
                message = decode(encode(action.message))
                for other in self._living:
                    if other is not node:
                        self._send(node, other, message)
            elif isinstance(action, Disconnect):
                for other in self._living:
                    if other.name == action.peer:
                        self.disconnect(node, other, self.link(node, other))
            elif isinstance(action, Wake):
                self.at(node.clock.until(action.at, self.now), node, partial(self._tick, node))
            else:
                if self.trace is not None:
                    self.trace(node.name, f"-> {action}")
                node.carry_out(action)

    def _tick(self, node: Node) -> None:
        self.do(node, node.peer.tick(self.time(node)))

    def at(self, delay_s: float, node: Node, work: Callable[[], None]) -> None:
        """Something happens to a node after a while, or when it wakes up, unless it is dead by then."""
        self._push(self.now + delay_s, node, work)

    def later(self, delay_s: float, work: Callable[[], None]) -> None:
        """Something happens after a while that is no node's doing."""
        self._push(self.now + delay_s, None, work)

    def _push(self, at: float, node: Node | None, work: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (at, next(self._number), node, work))

    def spawn(self, node: Node, conversation: Conversation) -> None:
        """Begin a conversation, or go on with it, until it waits for something."""
        self._touched.add(node)
        wanted = next(conversation, None)
        if isinstance(wanted, float):
            self._push(self.now + wanted, node, partial(self.spawn, node, conversation))
        elif wanted is not None:
            self._waiting.append((node, wanted, conversation))

    def run(self, until: Callable[[], bool], limit_s: float) -> None:
        """Events in the order of time until the condition holds; it must within that many virtual seconds."""
        limit_s += self.now
        while not until():
            if self.now >= limit_s:
                state = [(node.name, node.peer.state, node.peer.versions) for node in self._living]
                raise Violation(f"still waiting after {self.now:.0f} s: {state}")
            if self.events in self.at_event:
                self.at_event.pop(self.events)()
            self.events += 1
            if self.events >= MAX_EVENTS:
                raise Violation(f"still busy after {self.events} events and {self.now:.3f} s")
            if not self._heap and not self._living:
                return  # the last one left, or died
            if not self._heap:
                raise Violation("nothing happens any more")
            at, number, node, work = heapq.heappop(self._heap)
            self.now = max(self.now, at)
            if node is None or self.awake(node):
                if node is not None:
                    self._touched.add(node)
                work()
                self._continue()
                self.check(self._touched)
                self._touched.clear()
            elif self.alive(node):
                heapq.heappush(self._heap, (self._wakes_at[node.name], number, node, work))

    def _continue(self) -> None:
        """Whoever waited for what is true now goes on; what happens elsewhere may be noticed a little late."""
        touched, everybody = self._touched, self.events % POLL_EVENTS == 0
        while ready := [
            entry
            for entry in self._waiting
            if (everybody or entry[0] in touched) and entry[1]() and self.awake(entry[0])
        ]:
            self._waiting = [entry for entry in self._waiting if entry not in ready]
            for node, _, conversation in ready:
                if self.alive(node):
                    self.spawn(node, conversation)


_pairs: dict[tuple[str, str], Pair] = {}


def _pair(one: Node, other: Node) -> Pair:
    names = (one.name, other.name)
    if names not in _pairs:
        _pairs[names] = frozenset(names)
    return _pairs[names]


def _brief(message: Message) -> str:
    """A message for the trace: digests are cut short."""
    fields = message.model_dump(exclude={"kind", "wire_version", "run_id", "manifest_hash", "name"})
    return f"{type(message).__name__} {_short(fields)}"


def _short(value: object) -> object:
    match value:
        case str():
            return value[:8]
        case dict():
            return {key: _short(item) for key, item in value.items() if item not in ("", 0, 0.0, [])}
        case list() | tuple():
            return [_short(item) for item in value]
    return value
