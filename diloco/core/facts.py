"""What one peer knows: of the histories, of the contributions, of the others. The rules are functions on these facts.

history            one fragment's heads, lines and books                             (no facts, only what they mean)
tips               rules 1 and 2: an anchor moves up only; who lacks a head asks for it
members            rule 3: who is there, and who is the author
contributions      rule 4: they flow to the author until they are in a version
author             rule 5: when a version closes, and of what
data               which sequences who trains on
peer               an event changes facts, then one function looks at all of them and acts
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

from diloco.core.events import Action, Broadcast, Merge, Note, Send, Wake
from diloco.core.history import Arithmetic, Record, Signer, Tip
from diloco.core.members import Members
from diloco.core.patience import Patience
from diloco.core.units import NONE, union
from diloco.messages.base import Message
from diloco.messages.control import Planned
from diloco.messages.fields import MAX_TOKENS, Units, forget_oldest
from diloco.messages.heads import Book, Head, Key, Line

__all__ = [
    "CONTROL", "Facts", "Fetch", "Fragment", "Goal", "Identity", "Item", "Moving", "Settings", "Sizes", "score",
]  # fmt: skip

MOST_SHUNNED = 1024
SHUNNED = 8  # times the patience for an author, or for what it gives: how long it is passed over
CONTROL = 0  # the fragment whose book has the swarm clock and the data


@dataclass(frozen=True)
class Settings:
    """How histories grow: equal on all peers of a run. Times are seconds.

    Attributes:
        fragments: how many there are. sync_every: H, inner steps of a cycle.
        staggered: fragments are sent one after another, evenly over the cycle; else all at its end.
        overlap: inner steps from sending a pseudo-gradient until training needs the next head.
        quorum: contributions after which a version waits for the rest only for `grace_s`; None: half of those that are
            expected, and then two median rounds, at least `floor_s` (a barrier).
        grace_slack: instead of `grace_s`, this part of what the overlap leaves.
        late: versions that a contribution's base may be behind.
        staleness_exponent: a contribution that is s versions late weighs (1 + s) ** -staleness_exponent.
        weights: what a contribution weighs, see `author.weights`.
        delay: contributions to a momentum step, None: as many as there are peers that train. windowed: there are any.
        leased: training takes sequences of the run's list only, and waits for them.
        min_peers: nobody begins alone where so many are expected.
        heartbeat_s, silence_s, settle_s, stall_s, refresh_s, stuck_s, deadline_s, fanout: see `README.md`.
        tick_s: statuses that come within that time are acted upon together.
        min_bytes_per_s: a deadline grows with the size of what was asked for.
        uplink_bytes_per_s: a record is given to `fanout` peers in the time that this takes, `refresh_s` at most.
    """

    fragments: int = 1
    sync_every: int = 4
    staggered: bool = False
    overlap: int = 0
    quorum: int | None = None
    grace_s: float = 0.0
    grace_slack: float = 0.0
    late: int = 8
    staleness_exponent: float = 0.5
    weights: str = "tokens"
    delay: int | None = 1
    windowed: bool = False
    leased: bool = True
    min_peers: int = 1
    heartbeat_s: float = 1.25
    silence_s: float = 10.0
    silence_beats: float = 8.0
    settle_s: float = 5.0
    stall_s: float = 20.0
    first_step_s: float = 180.0
    floor_s: float = 20.0
    refresh_s: float = 5.0
    stuck_s: float = 60.0
    deadline_s: float = 8.0
    tick_s: float = 0.01
    min_bytes_per_s: float = 2.0**16
    uplink_bytes_per_s: float = 2.5e7
    fanout: int = 3
    records: int = 8
    bag: int = 256
    bag_bytes: int = 2**62

    @property
    def barrier(self) -> bool:
        """Whether a version waits for every peer that trains."""
        return self.quorum is None

    @property
    def lockstep(self) -> bool:
        """Whether all peers exchange all fragments at one barrier, and take no inner step meanwhile."""
        return self.barrier and not self.staggered and not self.overlap


class Sizes(NamedTuple):
    """Bytes of a fragment, and the number of parts in which its anchor is fetched."""

    payload: int
    update: int
    anchor: int
    parts: int


@dataclass(frozen=True)
class Identity:
    """Who this peer is, and in which run.

    Attributes:
        trains: it makes inner steps. may_author: others can call it, and its owner and the run allow it.
        tokens_per_step: of the manifest; None where a training loop counts in its own way.
        data: names the sequences that numbers stand for here, as in `Hello`.
        is_author: whether another peer may make versions, by its invitation.
    """

    me: str
    name: str
    run_id: str
    manifest_hash: str
    signer: Signer
    trains: bool = True
    may_author: bool = True
    device: str = ""
    data: str = ""
    tokens_per_step: int | None = None
    is_author: Callable[[str], bool] = lambda peer: True


@dataclass
class Item:
    """A contribution that is here. `taken`: when its pseudo-gradient was taken, `since`: when it was here, whole."""

    line: Line
    payload: Any
    since: float
    taken: float
    to: str = ""  # whom it was offered
    asked: bool = False  # they have not answered yet
    again: float = 0.0  # when it is offered again
    got: float | None = None  # since when they have it


class Goal(NamedTuple):
    """A head that is fetched in parts, with the digests of all of them."""

    head: Head
    book: Book
    digests: tuple[str, ...]


@dataclass
class Fetch:
    """What is asked for: at first whatever is newer, from `donor`; then the parts of a goal from several donors."""

    donor: str  # "": it is a pause
    until: float
    goal: Goal | None = None
    parts: dict[int, Any] = field(default_factory=dict)
    asked: dict[int, tuple[str, float]] = field(default_factory=dict)  # donor and deadline of a part


class Moving(NamedTuple):
    """The anchor is being moved to that head. `own`: this peer is its author, and signs it when the bytes are there."""

    head: Head
    book: Book
    update: Any  # None: the anchor came in parts
    donor: str = ""
    own: bool = False


@dataclass(eq=False)
class Fragment:
    """One fragment, as one peer knows it.

    Attributes:
        tip: the head whose anchor is here, with its book. came: when the newest heads came.
        records: the newest, by the id of the head before.
        told: who has a greater tip, and which. fetch: what is asked for. coming: records that are here and not applied.
        moving: the head that the anchor is being moved to. merge: the next version, which is being made here.
        torn: an update did not lead to what its head says. damaged: that was this peer's fault.
        busy: who says, since when, that it cannot give now. noes: how often that was said, since the last head.
        later: donors that failed, and when to ask them again. refused: heads that no honest author makes.
        shown: a tip that is kept until then for those who fetch its parts. served: tip, how often since when.
        bag: contributions to the next version, by contributor. enough: since when a quorum of them is here.
        base: id of the head from which training here started. unsent: tokens since then; steps, units: the same.
        draft: a contribution whose payload is being made.
        waiting: it has sent; inner steps that it may make before it needs a head.
        again: when a version is tried again whose making failed.
        discarded: tokens that were counted as discarded.
    """

    index: int
    tip: Tip
    sizes: Sizes
    came: dict[str, float]
    patience: Patience
    base: str
    records: dict[str, Record] = field(default_factory=dict)
    told: dict[str, Key] = field(default_factory=dict)
    fetch: Fetch | None = None
    coming: list[Record] = field(default_factory=list)
    moving: Moving | None = None
    merge: Merge | None = None
    busy: dict[str, float] = field(default_factory=dict)
    noes: int = 0
    torn: bool = False
    damaged: bool = False
    later: dict[str, float] = field(default_factory=dict)
    refused: dict[str, None] = field(default_factory=dict)
    shown: tuple[Tip, float] | None = None
    served: tuple[str, int, float] = ("", 0, 0.0)
    bag: dict[str, Item] = field(default_factory=dict)
    enough: float | None = None
    again: float = 0.0
    unsent: int = 0
    steps: int = 0
    units: Units = NONE
    draft: Line | None = None
    waiting: int | None = None
    discarded: int = 0
    loading: bool = False

    @property
    def adrift(self) -> bool:
        """Whether training here started from a head of which nothing can be merged any more."""
        return self.base not in self.tip.bases

    def needs_load(self) -> bool:
        """Whether training has to go on from the tip: it waits for that, has learned nothing, or all of it is lost."""
        if self.base == self.tip.head.id or self.draft is not None:
            return False
        waited = not self.unsent if self.waiting is None else self.waiting <= 0
        return waited or self.adrift

    def forget(self) -> None:
        """What was learned here since the base is lost, or sent."""
        self.unsent, self.steps, self.units = 0, 0, NONE

    def greater(self) -> dict[str, Key]:
        """Who tells a greater tip that is not refused."""
        return {peer: key for peer, key in self.told.items() if key[1] not in self.refused} if self.told else self.told

    def behind(self) -> bool:
        """Whether a greater tip is to be had. Nobody counts who told one before and did not give it."""
        return bool(self.told) and any(peer not in self.later for peer in self.greater())

    def has(self) -> Units:
        """Sequences of the contributions that are here."""
        return union(*(item.line.units for item in self.bag.values() if not self.tip.objection(item.line)))


@lru_cache(1 << 16)
def score(fragment: int, peer: str) -> int:
    """Rendezvous: the order of peers for a fragment, the lowest first."""
    return -int.from_bytes(sha256(f"{fragment}:{peer}".encode()).digest()[:8])


@lru_cache(1 << 8)
def in_turn(fragments: int, peers: tuple[str, ...]) -> list[str]:
    """By fragment, the first peer in rendezvous order that has no more than its share of them."""
    share, larger = divmod(fragments, len(peers))
    held, chosen = dict.fromkeys(peers, 0), list[str]()
    for fragment in range(fragments):
        most = share + (sum(number > share for number in held.values()) < larger)
        chosen.append(min((peer for peer in peers if held[peer] < most), key=lambda peer: score(fragment, peer)))
        held[chosen[-1]] += 1
    return chosen


@dataclass(eq=False)
class Facts:
    """Everything that one peer knows; only the modules of this package change it.

    Attributes:
        now: monotonic seconds. wall_ms: milliseconds of the clock at `now` = 0.
        ready: it has what the others had when it came. settled_at: until then it listens.
        begun: its training loop is in step with the others. assembled: so did all who are here.
        goals: what the others had when it had listened.
        moved: when this peer made an inner step, or got the first head after one.
        shunned: authors that are passed over, until when.
        processed: tokens, over all lives. stamp: the newest. steps: inner steps of this life.
        position: inner steps of this cycle. cycle: how many there are. turn: a fragment is due. due: those to send.
        queue: sequences to train on. lease_from: who was asked for more.
        heals: anchors that were damaged, and fetched. takeovers: versions of this peer for which another one was named.
        granted: by peer, what this author dealt, and until when it is kept.
        out: actions for the owner.
    """

    identity: Identity
    settings: Settings
    arithmetic: Arithmetic
    now: float
    wall_ms: int
    members: Members
    fragments: list[Fragment]
    processed: int = 0
    stamp: int = 0
    steps: int = 0
    position: int = 0
    cycle: int = 0
    steps_per_s: float = 0.0
    turn: bool = False
    next: int = 0
    due: list[Fragment] = field(default_factory=list)
    pauses: bool = False
    ready: bool = False
    begun: bool = True
    assembled: bool = False
    min_peers: int = 1
    settled_at: float = 0.0
    goals: list[Key] = field(default_factory=list)
    moved: float = 0.0
    made_step: bool = True
    leaving: bool = False
    finished: bool = False
    leave_by: float = 0.0
    exited: bool = False
    shunned: dict[str, float] = field(default_factory=dict)
    queue: Units = NONE
    wanted: int = 0
    lease_again: float = 0.0
    lease_from: str = ""
    granted: dict[str, tuple[Units, float]] = field(default_factory=dict)
    planned: Planned = (0, 0, 0)
    sync_s: float = 0.0
    heals: int = 0
    takeovers: int = 0
    untold: set[int] = field(default_factory=set)  # fragments whose tip changed since the last status
    untold_data: bool = True  # what `data.has` says may have changed since then
    out: list[Action] = field(default_factory=list)
    _wakes: set[float] = field(default_factory=set)

    @property
    def me(self) -> str:
        """This peer's id."""
        return self.identity.me

    @property
    def control(self) -> Fragment:
        """The fragment whose book has the swarm clock and the data."""
        return self.fragments[CONTROL]

    def fragment(self, index: int) -> Fragment | None:
        """The fragment of that number; None for one that the run does not have."""
        return self.fragments[index] if index < len(self.fragments) else None

    def over(self, tip: Tip) -> bool:
        """Whether the run ends with that head: as it is planned, or because nothing is greater.

        Tokens count in its own history, and in that of the swarm clock if it has reached the same version: the
        fragments of a round close one after another, and all of them end with that round.
        """
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
        """Whether the training loop waits, for a head or for what has to be sent or loaded before it. Of a run that is
        over no head comes any more.
        """
        if all(self.over(f.tip) for f in self.fragments):
            return any(f.loading for f in self.fragments)
        return self.turn or bool(self.due) or any(
            f.loading or f.adrift or (f.waiting is not None and f.waiting <= 0 and not self.over(f.tip))
            for f in self.fragments
        )  # fmt: skip

    @property
    def says_waits(self) -> bool:
        """Whether this peer waits, as it says to others."""
        return (self.trains_now and self.waits) or (self.identity.trains and self.lacks_peers())

    def began(self) -> bool:
        """Whether anybody here has made an inner step."""
        return self.steps > 0 or any(member.status.steps for member in self.members.all())

    def lacks_peers(self) -> bool:
        """Whether nobody has begun, and fewer are here than this peer's owner wants to begin with."""
        return len(self.members) + 1 < self.min_peers and not self.began()

    def stalled(self) -> bool:
        """Whether this peer makes no progress."""
        floor_s = self.settings.stall_s if self.steps else self.settings.first_step_s
        return not self.pauses and self.now - self.moved > floor_s

    def pace_of(self, peer: str) -> float:
        """Inner steps per second of a peer, as it says; 0 if that is not known."""
        member = self.members.get(peer)
        return self.steps_per_s if peer == self.me else member.status.steps_per_s if member else 0.0

    def num_trainers(self) -> int:
        """Peers that train now, at least 1."""
        return max(1, self.trains_now + sum(member.status.trains for member in self.members.all()))

    def send(self, peer: str, message: Message) -> None:
        """Say something to one peer."""
        self.out.append(Send(peer, message))

    def broadcast(self, message: Message) -> None:
        """Say something to all members."""
        if len(self.members):
            self.out.append(Broadcast(message))

    def note(self, kind: str, **fields: object) -> None:
        """One line for the log of events."""
        self.out.append(Note(kind, fields))

    def wake(self, at: float) -> None:
        """Look again at that time."""
        self._wakes = {other for other in self._wakes if other > self.now}
        if at not in self._wakes:
            self._wakes.add(at)
            self.out.append(Wake(at))

    def deadline_s(self, nbytes: int) -> float:
        """Seconds in which an answer of so many bytes has to be there."""
        return self.settings.deadline_s + nbytes / self.settings.min_bytes_per_s

    def rounds_s(self, f: Fragment) -> float:
        """How long the newest rounds of a fragment took, on average."""
        times = sorted(f.came.values())
        return (times[-1] - times[0]) / max(1, len(times) - 1)

    def patience_s(self, f: Fragment) -> float:
        """How long an author may have a contribution without a version."""
        return max(self.settings.stuck_s, 4 * self.rounds_s(f))

    # -- rule 3 -------------------------------------------------------------------------------------------------------

    def is_author(self) -> bool:
        """Whether this peer may be an author: not before it has what others had when it came, nor when it leaves and
        what it was making is made.
        """
        if not self.identity.may_author or (self.hands_over() and not self.making()):
            return False
        return self.ready or not any(f.told and f.greater() for f in self.fragments)

    def hands_over(self) -> bool:
        """Whether this peer makes no further versions, because it leaves and others may make them."""
        return self.leaving and self.members.any_author()

    def making(self) -> bool:
        """Whether this peer is making a version, of which nobody has heard."""
        return any(f.merge or (f.moving and f.moving.own) for f in self.fragments)

    def author(self, f: Fragment, named: str = "") -> str:
        """Who makes the next version: whom the tip names, or who is in turn; of those whom somebody hears."""
        able: Mapping[str, object] | Sequence[str] = self.members.able(self.is_author())
        if self.shunned:
            able = [peer for peer in able if self.shunned.get(peer, 0.0) <= self.now]
        return named if named in able else self._in_turn(f, able)

    def author_of(self, f: Fragment) -> str:
        """The author of the next version of a fragment."""
        return self.author(f, f.tip.head.next)

    def second(self, f: Fragment) -> str:
        """Who is the author if the one whom the tip names goes."""
        author = self.author_of(f)
        return self._in_turn(f, [peer for peer in self.members.able(self.is_author()) if peer != author])

    def _in_turn(self, f: Fragment, able: Iterable[str]) -> str:
        peers = tuple(sorted(able))
        return in_turn(len(self.fragments), peers)[f.index] if peers else ""

    def heir(self, f: Fragment) -> str:
        """Whom the head that this peer makes names: itself, for what the encoding lost is here; another one if it may
        make no more, or has more fragments than its share.
        """
        able = [peer for peer in self.members.authors() if self.shunned.get(peer, 0.0) <= self.now]
        able += [self.me] * self.is_author()
        if self.me not in able:
            return self.author(f)
        held = Counter(self.author_of(one) for one in self.fragments)
        share = -(-len(self.fragments) // len(able))
        if held[self.me] <= share:
            return self.me
        return min(
            (peer for peer in able if held[peer] < share), key=lambda peer: score(f.index, peer), default=self.me
        )

    def way(self, peer: str) -> str:
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
