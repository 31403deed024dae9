"""The world of bare nodes, with streams that break, and what goes over them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, NamedTuple

from diloco.protocol.ledger import Units
from diloco.protocol.messages.bulk import Record, StateHeader, Verdict
from diloco.protocol.shares import Shares
from diloco.sim.lineage import Contributed, Lineage, digest_of
from diloco.sim.world import Conversation, Node, World

if TYPE_CHECKING:  # the nodes, which live in this world
    from diloco.sim.transfers import Transfers

__all__ = ["CHUNKS", "MANIFEST", "Answer", "Arena", "State", "Stream"]

CHUNKS = 3
MANIFEST = digest_of("manifest")


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
    """What the conversations need of their world.

    `break_rate` is the chance that a stream breaks at a chunk, `repeat_rate` that a contribution is sent twice. The DHT
    here is never out of reach, unlike real ones.
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

    def __init__(self, world: Arena, client: Node, server: Node) -> None:
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

    def pass_over(self, source: Node, target: Node, given_up: Callable[[], bool]) -> Conversation:
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
