"""The state of one peer, by who changes it. The rules are functions on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from diloco.core import history
from diloco.core.events import Action, Note, Send, Wake
from diloco.core.fragment import FragmentState
from diloco.core.history import Arithmetic, Tip
from diloco.core.members import Members, in_turn, score
from diloco.core.settings import Identity, ProtocolSettings
from diloco.messages.base import Message
from diloco.messages.control import Planned
from diloco.messages.fields import MAX_BYTES, MAX_TOKENS, Units, at_most, forget_oldest
from diloco.messages.heads import Head, Key, Line, digest
from diloco.ranges import NONE

MOST_SHUNNED = 1024
MOST_SIGNED = 1024  # signatures that were right: a contribution comes as offer, payload and line
SMALL_SWARM = 16  # members up to which a tick is `tick_s`; it grows with more
SHUNNED = 8  # times the patience for an author, or for what it gives: how long it is passed over
CONTROL = 0  # the fragment whose book has the swarm clock and the data


@dataclass
class Loop:
    """The training loop of this peer (`learning`)."""

    cycle: int  # inner steps in one
    processed: int = 0  # tokens, over all lives
    stamp: int = 0  # the newest
    steps: int = 0  # inner steps of this life
    position: int = 0  # inner steps of this cycle
    steps_per_s: float = 0.0
    pauses: bool = False
    turn_due: bool = False  # a staggered fragment is to be sent
    next_turn: int = 0  # from this fragment on
    due: list[FragmentState] = field(default_factory=list)


@dataclass
class Life:
    """How this peer comes and goes (`lifecycle`)."""

    min_peers: int  # that have to be here before it begins
    settled_at: float  # until then it listens
    listened_at: float  # when it last looked for silent members
    begun: bool = False  # it is in step with the others
    assembled: bool = False  # so were all who are here
    ready: bool = False  # it has what the others had when it came
    goals: list[Key] = field(default_factory=list)  # what the others had when it had listened
    evened: bool = False  # then, at a barrier, what they had when the goals were here
    leaving: bool = False
    finished: bool = False
    leave_by: float = 0.0
    exited: bool = False


@dataclass
class DataQueue:
    """Sequences to train on (`data`)."""

    lease_again: float
    queue: Units = NONE
    wanted: int = 0
    lease_from: str = ""  # who was asked for more
    dealt: dict[str, tuple[Units, float]] = field(default_factory=dict)  # by peer; until when
    changed: bool = True  # what `data.has` says may have changed since it was told
    held: Units | None = None  # what it says, until that may have changed


@dataclass(eq=False)
class Facts:
    """Everything that one peer knows. What is not in a part of it, its own methods change; and
    `peer` the plan, `tips` its counts."""

    identity: Identity
    settings: ProtocolSettings
    arithmetic: Arithmetic
    now: float  # monotonic seconds
    wall_ms: int  # milliseconds of the clock at `now` = 0
    members: Members
    fragments: list[FragmentState]
    loop: Loop
    life: Life
    data: DataQueue
    progress_at: float  # the last step, byte moved, or first head after a step
    planned: Planned = (0, 0, 0)
    heals: int = 0  # anchors that were damaged, and fetched
    takeovers: int = 0  # versions of this peer for which another one was named
    moved: int = 0  # bytes for this peer's own training (`Status.moved`)
    made_step: bool = True  # since the last head was told
    shunned: dict[str, float] = field(default_factory=dict)  # authors passed over, until when
    indirect: dict[str, None] = field(default_factory=dict)  # authors noted as `indirect`
    apart_until: float = -inf  # until then others are authors, as few reach this peer
    out: list[Action] = field(default_factory=list)  # for the owner
    _signed: dict[str, None] = field(default_factory=dict)
    _wakes: set[float] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        identity: Identity,
        settings: ProtocolSettings,
        arithmetic: Arithmetic,
        fragments: list[FragmentState],
        now: float,
        wall_ms: int,
        processed: int,
        stamp: int,
        planned: Planned,
    ) -> Facts:
        """The facts of a peer that starts `now`."""
        return cls(
            identity=identity,
            settings=settings,
            arithmetic=arithmetic,
            now=now,
            wall_ms=wall_ms - int(now * 1000),
            members=Members(identity.me, identity.is_author),
            fragments=fragments,
            loop=Loop(settings.sync_every, processed, stamp),
            life=Life(settings.min_peers, now + settings.settle_s, now),
            data=DataQueue(now),
            progress_at=now,
            planned=planned,
        )

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
        return {
            f.index: f.inbox.arriving.key
            for f in self.fragments
            if f.inbox.arriving and f.inbox.fetch and f.inbox.fetch.donor and not f.inbox.fetch.goal
        }

    def over(self, tip: Tip) -> bool:
        """Return True if the run ends with that head, as planned, or as nothing is greater. A round
        in which the swarm clock passes the end is the last one of all fragments."""
        steps, tokens, _ = self.planned
        tokens, head, clock = tokens or MAX_TOKENS, tip.head, self.control.tip.head
        by_tokens = head.work >= tokens or (clock.work >= tokens and head.number >= clock.number)
        return bool(steps and head.number >= steps) or by_tokens

    @property
    def trains_now(self) -> bool:
        """True if this peer makes inner steps, or is about to."""
        life = self.life
        return self.identity.trains and life.ready and life.begun and not life.leaving

    @property
    def waits(self) -> bool:
        """True if training waits for a head, or has to send or load something first."""
        if all(self.over(f.tip) for f in self.fragments):  # no head comes any more
            return any(f.learned.loading for f in self.fragments)
        if self.loop.turn_due or self.loop.due:
            return True
        for f in self.fragments:
            learned = f.learned
            if learned.loading or f.stale or (learned.needs_head and not self.over(f.tip)):
                return True
        return False

    @property
    def says_waits(self) -> bool:
        """True if this peer waits, as it says to others."""
        return (self.trains_now and self.waits) or (self.identity.trains and self.lacks_peers())

    def began(self) -> bool:
        """Return True if a peer that is here, and stays, has made an inner step."""
        stay = (member.status for member in self.members.all() if not member.status.leaves)
        return self.loop.steps > 0 or any(status.steps for status in stay)

    def lacks_peers(self) -> bool:
        """Return True if fewer are here than this peer is to begin with, and no member trains."""
        if len(self.members) + 1 >= self.life.min_peers or self.began():
            return False
        return not any(m.status.trains and not m.status.leaves for m in self.members.all())

    def num_trainers(self) -> int:
        """Peers that train now, at least 1."""
        return max(1, self.trains_now + sum(member.status.trains for member in self.members.all()))

    def progress(self, nbytes: int) -> None:
        """So many bytes were moved for this peer's own training."""
        if nbytes > 0:
            self.moved, self.progress_at = at_most(self.moved + nbytes, MAX_BYTES), self.now

    def made_progress(self, step: bool = False) -> None:
        """This peer goes on: it made an inner step, or what it waited for has ended."""
        self.progress_at, self.made_step = self.now, self.made_step or step

    def told_head(self) -> None:
        """A head was told. The first one after an inner step is progress, too."""
        if self.made_step:
            self.progress_at, self.made_step = self.now, False

    def sign(self, content: Any) -> Any:
        """A line or head with this peer's signature."""
        return history.sign(content, self.identity.signer, self.identity.run_id)

    def signed_by(self, signed: Line | Head, peer: str) -> bool:
        """Return True if that peer has signed it, for this run."""
        content = self.identity.run_id.encode() + signed.content
        check = digest("signed", peer, signed.signature, content)
        if check not in self._signed and self.identity.signer.verify(
            peer, content, signed.signature
        ):
            self._signed[check] = None
            forget_oldest(self._signed, MOST_SIGNED)
        return check in self._signed

    def begin(self, now: float) -> None:
        """Begin a turn: no action is due yet."""
        self.now, self.out = now, []

    def act(self, *actions: Action) -> None:
        """Have the owner carry these out."""
        self.out += actions

    def send(self, peer: str, message: Message) -> None:
        """Say something to one peer."""
        self.act(Send(peer, message))

    def note(self, kind: str, **fields: object) -> None:
        """One line for the log of events."""
        self.act(Note(kind, fields))

    @property
    def tick_s(self) -> float:
        """In which messages of little news are acted upon together: in a large swarm something
        comes in every `tick_s` of the settings."""
        return self.settings.tick_s * max(1.0, len(self.members) / SMALL_SWARM)

    def wake_after(self, at: float, period_s: float) -> None:
        """Look again at the first multiple of a period after that time, so that what many fragments
        wait for is one look."""
        if not period_s:
            return self.wake(at)
        look_at = ((at + period_s / 50) // period_s + 1) * period_s  # timers may ring a bit early
        self.wake(look_at if look_at > at else look_at + period_s)  # a quotient is rounded

    def wake(self, at: float) -> None:
        """Look again at that time."""
        self._wakes = {other for other in self._wakes if other > self.now}
        if at not in self._wakes:
            self._wakes.add(at)
            self.act(Wake(at))

    # -- rule 3 ------------------------------------------------------------------------------------

    def is_author(self) -> bool:
        """Return True if this peer has what others had, and does not hand over."""
        if not self.identity.may_author or (self.hands_over() and not self.making()):
            return False
        inboxes = [f.inbox for f in self.fragments]
        return self.life.ready or not any(inbox.ahead and inbox.greater() for inbox in inboxes)

    def hands_over(self) -> bool:
        """Return True if this peer leaves, or few reach it: others make further versions."""
        gives_up = self.life.leaving or self.now < self.apart_until
        return gives_up and bool(self.members.authors())

    def making(self) -> bool:
        """Return True while this peer makes a version of which nobody has heard."""
        return any(f.round.merge or f.inbox.moves_own for f in self.fragments)

    def author_of(self, f: FragmentState) -> str:
        """The author of the next version: the tip names it; if it is gone, the next in turn."""
        named, able = f.tip.head.next, self._trusted(self.members.able(self.is_author()))
        return named if named in able else self._in_turn(f, able)

    def second(self, f: FragmentState) -> str:
        """The author of a fragment if the present one goes."""
        return self._in_turn(f, self.members.able(self.is_author()) - {self.author_of(f)})

    def _in_turn(self, f: FragmentState, able: Iterable[str]) -> str:
        peers = tuple(sorted(able))
        return in_turn(len(self.fragments), peers)[f.index] if peers else ""

    def _trusted(self, peers: Collection[str]) -> Collection[str]:
        shunned = self.shunned
        return [peer for peer in peers if shunned.get(peer, 0.0) <= self.now] if shunned else peers

    def heir(self, f: FragmentState) -> str:
        """Choose the author that the next head of this peer names: itself, as it has the master
        copy, unless it is the author of more than its share of fragments."""
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
        """The peer that is told what is for another one: itself, or one that hears it."""
        if peer in self.members:
            return peer
        hear = [other.peer for other in self.members.all() if peer in other.hears]
        return min(hear, key=lambda other: score(CONTROL, other), default="")

    def shun(self, author: str, seconds: float) -> None:
        """Pass an author over, in all fragments, for so long or until it makes a version."""
        self.shunned = {peer: until for peer, until in self.shunned.items() if until > self.now}
        self.shunned[author] = self.now + seconds
        forget_oldest(self.shunned, MOST_SHUNNED)

    def stand_back(self, peers: Collection[str], seconds: float) -> None:
        """Leave further versions to others for so long, as these peers do not reach this one."""
        if self.now >= self.apart_until and self.members.authors():
            self.apart_until = self.now + seconds
            self.note("stands_back", peers=sorted(peers))

    def note_way(self, author: str, via: str) -> None:
        """Note once that an author is reached by way of another peer only."""
        if via != author and author not in self.indirect:
            self.indirect[author] = None
            forget_oldest(self.indirect, MOST_SHUNNED)
            self.note("indirect", author=author, via=via)

    def trust_again(self, author: str) -> None:
        """An author makes versions, so it is not stuck."""
        if self.shunned.pop(author, None):
            self.note("not_shunned", author=author)
