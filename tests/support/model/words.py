"""The words of the model's fuzz, over the messages and events of the production core: see
`model`."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from msgspec import structs

from diloco.core import events, facts, history
from diloco.core.units import union
from diloco.messages import bulk, control, heads
from diloco.messages.fields import Units as Ranges
from tests.support.fake_tensors import RUN, Signer, Tensor, hexed

Units = frozenset[int]
NONE: Units = frozenset()
score = facts.score


def as_set(units: Ranges) -> Units:
    """Ranges of sequences as the model has them."""
    return frozenset(number for start, stop in units for number in range(start, stop))


def as_ranges(units: Units) -> Ranges:
    """Sequences as the core has them."""
    return union([(number, number + 1) for number in units])


@dataclass(frozen=True)
class Settings:
    """What the fuzz draws, by the model's names and with its values; `model.translated` has the
    names of the core."""

    fragments: int = 1
    every: int = 4
    batch: int = 1
    staggered: bool = False
    overlap: int = 0
    need: int | None = None
    wait: float | None = None
    late: int = 8
    window: int = 1
    heartbeat: float = 2.0
    silence: float = 8.0
    settle: float = 3.0
    stall: float = 10.0
    floor: float = 6.0
    refresh: float = 4.0
    deadline: float = 8.0
    stuck: float = 40.0
    fanout: int = 2
    records: int = 8


# -- a history -------------------------------------------------------------------------------------


class Line(NamedTuple):
    """What the checks read of a line."""

    peer: str
    stamp: int
    base: str
    tokens: int
    units: Units

    @classmethod
    def of(cls, line: heads.Line) -> Line:
        return cls(line.peer, line.stamp, line.base, line.tokens, as_set(line.units))


@dataclass(frozen=True)
class Head:
    """A head of the core; what a liar replaces are fields of its own. Equal heads are the same
    object."""

    core: heads.Head
    lines: tuple[tuple[Line, float], ...]
    next: str
    state: str
    signature: bytes

    fragment = property(lambda self: self.core.fragment)
    number = property(lambda self: self.core.number)
    prev = property(lambda self: self.core.prev if self.core.number else "")
    author = property(lambda self: self.core.author)
    work = property(lambda self: self.core.work)
    id = property(lambda self: self.now.id)
    key = property(lambda self: self.now.key)

    @cached_property
    def now(self) -> heads.Head:
        """The head of the core, with what was replaced."""
        return structs.replace(
            self.core, state=self.state, next=self.next, signature=self.signature
        )


_HEADS: dict[str, Head] = {}


def head_of(head: heads.Head) -> Head:
    """What the checks see of it."""
    if head.id not in _HEADS:
        lines = tuple((Line.of(line), weight) for line, weight in head.lines)
        _HEADS[head.id] = Head(head, lines, head.next, head.state, head.signature)
    return _HEADS[head.id]


def sign(one: Head, peer: str) -> bytes:
    """The signature of a peer."""
    signed: heads.Head = history.sign(structs.replace(one.now, signature=b""), Signer(peer), RUN)
    return signed.signature


@dataclass(frozen=True)
class Book:
    """A book of the core with its data as the model has it."""

    core: heads.Book
    digest = property(lambda self: self.core.digest)

    def of(self, peer: str) -> tuple[int, int]:
        return self.core.of(peer)

    @cached_property
    def merged(self) -> Units:
        return as_set(self.core.merged)


def state_of(book: Book, anchor: Tensor) -> str:
    """What a head says of its book and its anchor."""
    return history.state_of(book.core, [hexed(part) for part in anchor])


@dataclass(frozen=True)
class Tip:
    """A tip of the core, with the anchor that its owner keeps."""

    head: Head
    book: Book
    anchor: Tensor
    sound = property(lambda self: self.head.state == state_of(self.book, self.anchor))


# -- what the owners of two cores send each other beside the messages of the core ------------------

Record = namedtuple("Record", "head update")
Payload = namedtuple("Payload", "line delta")
Records = namedtuple("Records", "fragment records")
Part = namedtuple("Part", "core values get")
No = namedtuple("No", "get")
Told = namedtuple("Told", "tips")  # other ones than a liar has
Get, Lease, Offer = bulk.Get, control.Lease, control.Offer
Message: TypeAlias = Any

Up = namedtuple("Up", "peer")
Stepped = namedtuple("Stepped", "")
Broke, Disconnect, Down, Exit, Heard = (
    events.Broke,
    events.Disconnect,
    events.Lost,
    events.Exit,
    events.Heard,
)
Leave, Note, Send, Tick = events.Leave, events.Note, events.Send, events.Tick
Event: TypeAlias = Any
