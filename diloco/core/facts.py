"""What one peer knows of histories, contributions and others. The rules are functions on that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from diloco.core import history
from diloco.core.events import Action, Merge, Note, Send, Wake
from diloco.core.history import Arithmetic, Record, Tip
from diloco.core.members import Members, Patience, in_turn, score
from diloco.core.settings import Identity, ProtocolSettings, Sizes
from diloco.messages.base import Message
from diloco.messages.control import Planned
from diloco.messages.fields import MAX_BYTES, MAX_TOKENS, Units, at_most, forget_oldest
from diloco.messages.heads import Book, Head, Key, Line
from diloco.ranges import NONE

MOST_SHUNNED = 1024
SHUNNED = 8  # times the patience for an author, or for what it gives: how long it is passed over
CONTROL = 0  # the fragment whose book has the swarm clock and the data


@dataclass
class Contribution:
    """A contribution that is here."""

    line: Line
    payload: Any
    arrived_at: float  # whole
    captured_at: float  # its pseudo-gradient
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
    """What is asked for: whatever is newer, from `donor`; then parts of a goal, from several."""

    donor: str  # "": it is a pause
    until: float  # `inf` while bytes come: then the stream has the deadline
    goal: Goal | None = None
    parts: dict[int, Any] = field(default_factory=dict)
    asked: dict[int, tuple[str, float]] = field(default_factory=dict)  # donor, deadline of a part
    moved: dict[int, int] = field(default_factory=dict)  # bytes that came, by part


class Moving(NamedTuple):
    """The head that the anchor is being moved to."""

    head: Head
    book: Book
    update: Any  # None: the anchor came in parts
    donor: str = ""
    own: bool = False  # this peer is its author, and signs it when the bytes are there


@dataclass(eq=False)
class FragmentState:
    """One fragment, as one peer knows it."""

    index: int
    tip: Tip  # the head whose anchor is here, with its book
    sizes: Sizes
    adopted_at: dict[str, float]  # when the newest heads came, by id
    patience: Patience
    base: str  # id of the head from which training here started
    # of others
    ahead: dict[str, Key] = field(default_factory=dict)  # who has a greater tip, and which
    coming: dict[str, Key] = field(default_factory=dict)  # to whom a greater one is arriving
    arriving: Head | None = None  # the next one, of whose update parts are here
    fetch: Fetch | None = None
    received: list[Record] = field(default_factory=list)  # records that are here and not applied
    moving: Moving | None = None
    mismatch: bool = False  # an update did not lead to what its head says
    damaged: bool = False  # and that was this peer's fault
    busy_since: dict[str, float] = field(default_factory=dict)  # donors that say: not now
    times_busy: int = 0  # how often that was said, since the last head
    retry_at: dict[str, float] = field(default_factory=dict)  # when to ask failed donors again
    refused: dict[str, None] = field(default_factory=dict)  # heads that no honest author makes
    # for others
    records: dict[str, Record] = field(default_factory=dict)  # the newest, by the head before
    pinned: tuple[Tip, float] | None = None  # a tip kept until then, for those who fetch its parts
    # heads of which something is sent, by peer, `want` and `part` of its question; and since when
    serving: dict[tuple[str, str, int], str] = field(default_factory=dict)
    served_at: dict[tuple[str, str, int], float] = field(default_factory=dict)
    # the next version
    pool: dict[str, Contribution] = field(default_factory=dict)  # to it, by contributor
    transfers: dict[str, Transfer] = field(default_factory=dict)  # to the pool, by contributor
    quorum_at: float | None = None  # since when a quorum of them is here
    merge: Merge | None = None  # it is being made here
    merge_at: float = 0.0  # when that is tried again after it failed
    # what was learned here since the base
    unsent: int = 0  # tokens
    steps: int = 0
    units: Units = NONE
    draft: Line | None = None  # a contribution whose payload is being made
    steps_left: int | None = None  # inner steps until it needs a head; None: it has not sent
    loading: bool = False
    sent_s: float = 0.0  # that sending the last contribution took
    discarded: int = 0  # tokens that were counted as discarded

    @property
    def stale(self) -> bool:
        """Whether training started from a head of which nothing can be merged any more."""
        return self.base not in self.tip.bases

    @property
    def moves_own(self) -> bool:
        """Whether the anchor is moving to a version that this peer has made."""
        return self.moving is not None and self.moving.own

    @property
    def needs_head(self) -> bool:
        """Whether training has sent what it learned, and may not make another inner step."""
        return self.steps_left is not None and self.steps_left <= 0

    def needs_load(self) -> bool:
        """Whether training has to go on from the tip: it learned nothing, waits, or it is lost."""
        if self.base == self.tip.head.id or self.draft is not None:
            return False
        return self.stale or self.needs_head or (self.steps_left is None and not self.unsent)

    def forget(self) -> None:
        """What was learned here since the base is lost, or sent."""
        self.unsent, self.steps, self.units = 0, 0, NONE

    def drop_donor(self, donor: str) -> None:
        """Wait no more for what a donor was asked for; others are asked for it."""
        if self.fetch and self.fetch.goal:
            asked = self.fetch.asked
            self.fetch.asked = {part: one for part, one in asked.items() if one[0] != donor}
        elif self.fetch and self.fetch.donor == donor:
            self.fetch = None

    def kept(self, now: float) -> Tip | None:
        """A tip whose parts others fetch, and which is kept for them."""
        if self.pinned is None:
            return None
        tip, until = self.pinned
        return tip if now < until or tip.head.id in self.serving.values() else None

    def greater(self) -> dict[str, Key]:
        """Who tells a greater tip that is not refused."""
        return {peer: key for peer, key in self.ahead.items() if key[1] not in self.refused}

    def is_to_be_had(self) -> bool:
        """Whether anybody gives a greater tip, or tells one."""
        return bool(self.greater()) or (self.fetch is not None and bool(self.fetch.donor))

    def behind(self) -> bool:
        """Whether a greater tip is to be had, from others than those who did not give it before.

        1. The author of the last version leaves, when all but one peer have it, or parts of it.
        2. That one hears nobody any more who has it whole, and is the next author.
        3. It goes on with what is arriving, and makes no rival of the same version.
        """
        if self.arriving and self.fetch and self.fetch.donor:
            return True
        return bool(self.ahead) and any(peer not in self.retry_at for peer in self.greater())


@dataclass(eq=False)
class Facts:
    """Everything that one peer knows; only the modules of this package change it."""

    identity: Identity
    settings: ProtocolSettings
    arithmetic: Arithmetic
    now: float  # monotonic seconds
    wall_ms: int  # milliseconds of the clock at `now` = 0
    members: Members
    fragments: list[FragmentState]
    processed: int = 0  # tokens, over all lives
    stamp: int = 0  # the newest
    planned: Planned = (0, 0, 0)
    out: list[Action] = field(default_factory=list)  # for the owner
    # the training loop
    steps: int = 0  # inner steps of this life
    position: int = 0  # inner steps of this cycle
    cycle: int = field(init=False)  # how many there are in one
    steps_per_s: float = 0.0
    moved: int = 0  # bytes for this peer's own training (`Status.moved`)
    progress_at: float = field(init=False)  # the last step, byte moved, or first head after a step
    made_step: bool = True
    begun: bool = False  # it is in step with the others
    assembled: bool = False  # so were all who are here
    min_peers: int = field(init=False)  # that have to be here before it begins
    pauses: bool = False
    # fragments to send
    turn_due: bool = False
    next_turn: int = 0  # from this fragment on
    due: list[FragmentState] = field(default_factory=list)
    # coming and leaving
    ready: bool = False  # it has what the others had when it came
    settled_at: float = field(init=False)  # until then it listens
    goals: list[Key] = field(default_factory=list)  # what the others had when it had listened
    leaving: bool = False
    finished: bool = False
    leave_by: float = 0.0
    exited: bool = False
    # data
    queue: Units = NONE  # sequences to train on
    wanted: int = 0
    lease_again: float = field(init=False)
    lease_from: str = ""  # who was asked for more
    dealt: dict[str, tuple[Units, float]] = field(default_factory=dict)  # by peer; until when
    # others
    shunned: dict[str, float] = field(default_factory=dict)  # authors passed over, until when
    changed_tips: set[int] = field(default_factory=set)  # fragments, since the last status
    changed_data: bool = True  # what `data.has` says may have changed since then
    heals: int = 0  # anchors that were damaged, and fetched
    takeovers: int = 0  # versions of this peer for which another one was named
    listened_at: float = field(init=False)  # when it last looked for silent members
    _wakes: set[float] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.cycle, self.min_peers = self.settings.sync_every, self.settings.min_peers
        self.progress_at = self.lease_again = self.listened_at = self.now
        self.settled_at = self.now + self.settings.settle_s

    @property
    def me(self) -> str:
        """This peer's id."""
        return self.identity.me

    @property
    def control(self) -> FragmentState:
        """The fragment whose book has the swarm clock and the data."""
        return self.fragments[CONTROL]

    def arriving(self) -> dict[int, Key]:
        """The versions of which parts are here, and more are coming, by fragment."""
        fetching = (f for f in self.fragments if f.fetch and f.fetch.donor and not f.fetch.goal)
        return {f.index: f.arriving.key for f in fetching if f.arriving}

    def over(self, tip: Tip) -> bool:
        """Whether the run ends with that head, as planned, or as nothing is greater. A round in
        which the swarm clock passes the end is the last one of all fragments."""
        steps, tokens, _ = self.planned
        tokens, head, clock = tokens or MAX_TOKENS, tip.head, self.control.tip.head
        by_tokens = head.work >= tokens or (clock.work >= tokens and head.number >= clock.number)
        return bool(steps and head.number >= steps) or by_tokens

    @property
    def trains_now(self) -> bool:
        """Whether this peer makes inner steps, or is about to."""
        return self.identity.trains and self.ready and self.begun and not self.leaving

    @property
    def waits(self) -> bool:
        """Whether training waits for a head, or has to send or load something first."""
        if all(self.over(f.tip) for f in self.fragments):  # no head comes any more
            return any(f.loading for f in self.fragments)
        if self.turn_due or self.due:
            return True
        lacks = (f.needs_head and not self.over(f.tip) for f in self.fragments)
        return any(f.loading or f.stale for f in self.fragments) or any(lacks)

    @property
    def says_waits(self) -> bool:
        """Whether this peer waits, as it says to others."""
        return (self.trains_now and self.waits) or (self.identity.trains and self.lacks_peers())

    def began(self) -> bool:
        """Whether anybody who is here, and stays, has made an inner step."""
        stay = (member.status for member in self.members.all() if not member.status.leaves)
        return self.steps > 0 or any(status.steps for status in stay)

    def lacks_peers(self) -> bool:
        """Whether nobody has begun, and fewer are here than this peer is to begin with."""
        return len(self.members) + 1 < self.min_peers and not self.began()

    def num_trainers(self) -> int:
        """Peers that train now, at least 1."""
        return max(1, self.trains_now + sum(member.status.trains for member in self.members.all()))

    def progress(self, nbytes: int) -> None:
        """So many bytes were moved for this peer's own training."""
        if nbytes > 0:
            self.moved, self.progress_at = at_most(self.moved + nbytes, MAX_BYTES), self.now

    def sign(self, one: Any) -> Any:
        """A line or head with this peer's signature."""
        return history.sign(one, self.identity.signer, self.identity.run_id)

    def signed_by(self, one: Line | Head, peer: str) -> bool:
        """Whether that peer has signed it, for this run."""
        content = self.identity.run_id.encode() + one.content
        return self.identity.signer.verify(peer, content, one.signature)

    def send(self, peer: str, message: Message) -> None:
        """Say something to one peer."""
        self.out.append(Send(peer, message))

    def note(self, kind: str, **fields: object) -> None:
        """One line for the log of events."""
        self.out.append(Note(kind, fields))

    def wake(self, at: float) -> None:
        """Look again at that time."""
        self._wakes = {other for other in self._wakes if other > self.now}
        if at not in self._wakes:
            self._wakes.add(at)
            self.out.append(Wake(at))

    # -- rule 3 ------------------------------------------------------------------------------------

    def is_author(self) -> bool:
        """Whether this peer may be an author: it has what others had, and does not hand over."""
        if not self.identity.may_author or (self.hands_over() and not self.making()):
            return False
        return self.ready or not any(f.ahead and f.greater() for f in self.fragments)

    def hands_over(self) -> bool:
        """Whether this peer makes no further versions: it leaves, and others may make them."""
        return self.leaving and bool(self.members.authors())

    def making(self) -> bool:
        """Whether this peer is making a version, of which nobody has heard."""
        return any(f.merge or f.moves_own for f in self.fragments)

    def author_of(self, f: FragmentState) -> str:
        """Who makes the next version: whom the tip names, or if that peer is gone, the next one."""
        named, able = f.tip.head.next, self._trusted(self.members.able(self.is_author()))
        return named if named in able else self._in_turn(f, able)

    def second(self, f: FragmentState) -> str:
        """Who is the author of a fragment if the present one goes."""
        return self._in_turn(f, self.members.able(self.is_author()) - {self.author_of(f)})

    def _in_turn(self, f: FragmentState, able: Iterable[str]) -> str:
        peers = tuple(sorted(able))
        return in_turn(len(self.fragments), peers)[f.index] if peers else ""

    def _trusted(self, peers: Collection[str]) -> Collection[str]:
        shunned = self.shunned
        return [peer for peer in peers if shunned.get(peer, 0.0) <= self.now] if shunned else peers

    def heir(self, f: FragmentState) -> str:
        """Whom a head of this peer names: itself, which has the master, unless it has too many."""
        others = self._trusted(self.members.authors())
        if not self.is_author():
            return self._in_turn(f, self._trusted(self.members.able(False)))
        held = Counter(self.author_of(fragment) for fragment in self.fragments)
        share = -(-len(self.fragments) // (len(others) + 1))
        if held[self.me] <= share:
            return self.me
        free = (peer for peer in others if held[peer] < share)
        return min(free, key=lambda peer: score(f.index, peer), default=self.me)

    def next_hop(self, peer: str) -> str:
        """Who is told what is for a peer: itself, or somebody who hears it."""
        if peer in self.members:
            return peer
        hear = [other.peer for other in self.members.all() if peer in other.hears]
        return min(hear, key=lambda other: score(CONTROL, other), default="")

    def shun(self, author: str, seconds: float) -> None:
        """Pass an author over, in all fragments, for so long or until it makes a version."""
        self.shunned = {peer: until for peer, until in self.shunned.items() if until > self.now}
        self.shunned[author] = self.now + seconds
        forget_oldest(self.shunned, MOST_SHUNNED)
