"""One fragment, as one peer knows it, in parts. One module of `rules` changes each part; all of
them read it. `tests/repo/test_owners.py` reads the assignments."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf
from typing import Any, NamedTuple

from diloco.core.events import Merge
from diloco.core.history import Record, Tip
from diloco.core.members import Patience
from diloco.core.settings import Sizes
from diloco.messages.fields import Units
from diloco.messages.heads import Book, Head, Key, Line
from diloco.ranges import NONE

PartName = tuple[str, str, int]  # a peer, and `want` and `part` of its question


class Fetching(Enum):
    """States of an inbox: greater versions of others."""

    IDLE = auto()  # nothing is asked for
    ASKING = auto()  # a donor was asked for whatever is newer
    PAUSED = auto()  # it said: not now
    ARRIVING = auto()  # the head of the next update is here, and parts of it, for others to ask for
    COLLECTING = auto()  # parts of an anchor come, from several donors
    MOVING = auto()  # the anchor is being moved


class Making(Enum):
    """States of a round: the next version, at its author."""

    FILLING = auto()  # contributions come
    QUORUM = auto()  # enough are here, and the others have a while
    MERGING = auto()  # the update is being made; then the anchor moves (`Fetching.MOVING`)


class Training(Enum):
    """States of what is learned of a fragment."""

    LEARNING = auto()  # inner steps are counted for the next contribution
    DRAFTING = auto()  # its payload is being made
    SENT = auto()  # inner steps go on beside its way, `steps_left` of them
    NEEDS_HEAD = auto()  # they have run out
    LOADING = auto()  # training is about to go on from a new anchor


# States after a turn of the core, by the state before it. A turn takes in an event and decides, so
# what ends a state may begin the next but one. Each state may also stay.
NEXT: dict[Enum, set[Enum]] = {
    Fetching.IDLE: {Fetching.ASKING, Fetching.MOVING},  # an author moves its own anchor
    Fetching.ASKING: {*Fetching},
    Fetching.PAUSED: {Fetching.ASKING, Fetching.MOVING, Fetching.IDLE},
    Fetching.ARRIVING: {Fetching.MOVING, Fetching.IDLE, Fetching.ASKING},
    Fetching.COLLECTING: {Fetching.MOVING, Fetching.IDLE, Fetching.ASKING},
    Fetching.MOVING: {*Fetching},  # a question may be open beside it
    Making.FILLING: {Making.QUORUM, Making.MERGING},
    Making.QUORUM: {Making.MERGING, Making.FILLING},
    Making.MERGING: {Making.QUORUM, Making.FILLING},  # the tip is the old one until it has moved
    Training.LEARNING: {Training.DRAFTING, Training.LOADING},
    Training.DRAFTING: {Training.SENT, Training.NEEDS_HEAD, Training.LOADING},
    Training.SENT: {Training.NEEDS_HEAD, Training.LOADING},
    Training.NEEDS_HEAD: {Training.LOADING},
    Training.LOADING: {Training.LEARNING, Training.DRAFTING},
}


@dataclass
class Contribution:
    """A contribution that is here."""

    line: Line
    payload: Any
    arrived_at: float  # whole
    captured_at: float  # its pseudo-gradient
    carrier: str = ""  # the peer that sent it here; "" for the own one
    sent_to: str = ""  # the peer that was offered it, or sent it
    sending_since: float = inf
    sent_bytes: int = 0  # that are there
    unanswered: bool = False  # that peer has not said what it does with the offer
    offer_at: float = 0.0  # when it is offered again
    held_since: float | None = None  # since when that peer says that it has it


class Transfer(NamedTuple):
    """The payload of a contribution that is arriving here."""

    stamp: int  # of its line
    since: float
    moved_at: float  # when the newest bytes came
    nbytes: int


class Goal(NamedTuple):
    """A head that is fetched in parts, with the digests of all of them."""

    head: Head
    book: Book
    digests: tuple[str, ...]


@dataclass
class Fetch:
    """A question: for whatever is newer, from `donor`; then parts of a goal, from several."""

    donor: str  # "": it is a pause
    until: float  # `inf` while bytes come: then the stream has the deadline
    goal: Goal | None = None
    parts: dict[int, Any] = field(default_factory=dict)
    asked: dict[int, tuple[str, float]] = field(default_factory=dict)  # donor, deadline of a part
    moved: dict[int, int] = field(default_factory=dict)  # bytes that came, by part

    def donor_of(self, part: int) -> str:
        """The donor that was asked for a part of the goal; "" if none was."""
        return self.asked.get(part, ("", 0.0))[0]


class Moving(NamedTuple):
    """The head that the anchor is being moved to."""

    head: Head
    book: Book
    update: Any  # None: the anchor came in parts
    donor: str = ""
    own: bool = False  # this peer is its author, and signs it when the bytes are there


@dataclass
class Inbox:
    """Greater versions of others, until the anchor has moved to one (`tips`). A donor that fails,
    or is gone, leads back to IDLE; from COLLECTING only when nobody else has the goal."""

    ahead: dict[str, Key] = field(default_factory=dict)  # who has a greater tip, and which
    coming: dict[str, Key] = field(default_factory=dict)  # to whom a greater one is arriving
    arriving: Head | None = None  # the next one, of whose update parts are here
    moved_at: float = -inf  # when the newest bytes came
    fetch: Fetch | None = None
    received: list[Record] = field(default_factory=list)  # records that are here and not applied
    moving: Moving | None = None
    mismatch: bool = False  # an update did not lead to what its head says
    damaged: bool = False  # and that was this peer's fault
    busy_since: dict[str, float] = field(default_factory=dict)  # donors that say: not now
    times_busy: int = 0  # how often that was said, since the last head
    retry_at: dict[str, float] = field(default_factory=dict)  # when to ask failed donors again
    refused: dict[str, None] = field(default_factory=dict)  # heads that no honest author makes

    @property
    def state(self) -> Fetching:
        """Its state; `NEXT` says what may follow."""
        if self.moving:
            return Fetching.MOVING
        if self.fetch is None:
            return Fetching.IDLE
        if self.fetch.goal:
            return Fetching.COLLECTING
        if not self.fetch.donor:
            return Fetching.PAUSED
        return Fetching.ARRIVING if self.arriving else Fetching.ASKING

    @property
    def moves_own(self) -> bool:
        """True while the anchor moves to a version that this peer has made."""
        return self.moving is not None and self.moving.own

    def asked(self, peer: str) -> Fetch | None:
        """The open question for whatever is newer, if `peer` was asked it."""
        waits = self.fetch and self.fetch.goal is None and self.fetch.donor == peer
        return self.fetch if waits else None

    def greater(self) -> dict[str, Key]:
        """Peers that tell a greater tip which is not refused, and that tip."""
        return {peer: key for peer, key in self.ahead.items() if key[1] not in self.refused}

    def is_to_be_had(self) -> bool:
        """Return True if a peer gives a greater tip, or tells one."""
        return bool(self.greater()) or (self.fetch is not None and bool(self.fetch.donor))

    def behind(self) -> bool:
        """Return True if a greater tip is to be had from a peer that did not fail to give it.

        1. The author of the last version leaves, when all but one peer have it, or parts of it.
        2. That one hears nobody any more who has it whole, and is the next author.
        3. It goes on with what is arriving, and makes no rival of the same version.
        """
        if self.arriving and self.fetch and self.fetch.donor:
            return True
        return bool(self.ahead) and any(peer not in self.retry_at for peer in self.greater())


@dataclass
class Outbox:
    """Versions that others ask for here (`giving`). A stream that ends frees its place."""

    records: dict[str, Record] = field(default_factory=dict)  # the newest, by the head before
    pinned: tuple[Tip, float] | None = None  # a tip kept until then, for those who fetch its parts
    serving: dict[PartName, str] = field(default_factory=dict)  # heads that are being sent
    served_at: dict[PartName, float] = field(default_factory=dict)  # since when

    def kept(self, now: float) -> Tip | None:
        """A tip whose parts others fetch, and which is kept for them."""
        if self.pinned is None:
            return None
        tip, until = self.pinned
        return tip if now < until or tip.head.id in self.serving.values() else None


@dataclass
class Closing:
    """The next version, on the side of its author (`author`). A merge that fails is tried again."""

    patience: Patience
    quorum: tuple[str, float] = ("", 0.0)  # id of a tip, and since when enough are here for it
    merge: Merge | None = None  # it is being made here
    merge_at: float = 0.0  # when that is tried again after it failed

    def state(self, tip: str) -> Making:
        """Its state for the version after that tip."""
        if self.merge:
            return Making.MERGING
        return Making.QUORUM if self.quorum[0] == tip else Making.FILLING


@dataclass
class Learned:
    """The progress of training here since its base (`learning`). It is lost when the base is too
    old for the tip, or another history took the data."""

    base: str  # id of the head from which training here started, or whose successor it waits for
    tokens: int = 0
    steps: int = 0
    units: Units = NONE
    draft: Line | None = None  # a contribution whose payload is being made
    steps_left: int | None = None  # inner steps until it needs a head; None: it has not sent
    loading: bool = False
    discarded: int = 0  # tokens that were counted as discarded

    @property
    def state(self) -> Training:
        """Its state; `NEXT` says what may follow."""
        if self.loading:
            return Training.LOADING
        if self.draft:
            return Training.DRAFTING
        if self.steps_left is None:
            return Training.LEARNING
        return Training.NEEDS_HEAD if self.needs_head else Training.SENT

    @property
    def needs_head(self) -> bool:
        """True if training has sent what it learned, and may not make another inner step."""
        return self.steps_left is not None and self.steps_left <= 0


@dataclass(eq=False)
class FragmentState:
    """One fragment: its tip, and a part for each of the rules."""

    index: int
    sizes: Sizes
    round: Closing
    learned: Learned
    # `tips`
    tip: Tip  # the head whose anchor is here, with its book
    adopted_at: dict[str, float]  # when the newest heads came, by id
    # `contributions`
    pool: dict[str, Contribution] = field(default_factory=dict)  # to the next version
    transfers: dict[str, Transfer] = field(default_factory=dict)  # to the pool, by contributor
    sent_s: float = 0.0  # that sending the last contribution took
    inbox: Inbox = field(default_factory=Inbox)
    outbox: Outbox = field(default_factory=Outbox)

    @classmethod
    def of(cls, index: int, tip: Tip, sizes: Sizes, floor_s: float, now: float) -> FragmentState:
        """The fragment of a peer whose anchor is at `tip`, and that waits `floor_s` at least."""
        learned = Learned(tip.head.id)
        return cls(index, sizes, Closing(Patience(floor_s)), learned, tip, {tip.head.id: now})

    @property
    def stale(self) -> bool:
        """True if training started from a head of which nothing can be merged any more."""
        return self.learned.base not in self.tip.bases

    def needs_load(self) -> bool:
        """Return True if training has to go on from the tip: it learned nothing, waits, or is
        lost."""
        learned = self.learned
        if learned.base == self.tip.head.id or learned.draft is not None:
            return False
        idle = learned.steps_left is None and not learned.tokens
        return self.stale or learned.needs_head or idle
