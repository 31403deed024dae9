"""The core of one peer, whole and sans-IO: `Peer.receive(event, now)` returns actions, which the
owner carries out.

An event only changes facts. Then one function, `_decide`, looks at all facts and acts, so no
message is waited for, and there is no state machine. It never sleeps, opens a socket or reads a
clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median_low
from typing import Any

from diloco.config import WIRE_VERSION
from diloco.core import author, contributions, data, events, lifecycle, tips
from diloco.core.facts import Facts, Fragment, score
from diloco.core.history import Arithmetic, Tip
from diloco.core.members import AddressBook, Members
from diloco.core.patience import Patience
from diloco.core.settings import Identity, Settings, Sizes
from diloco.core.units import NONE
from diloco.messages.bulk import Get
from diloco.messages.codec import objection_to_wire
from diloco.messages.control import Answer, Figures, Grant, Hello, Lease, Offer, Planned, Status
from diloco.messages.fields import (
    MAX_NAMED,
    MAX_RANGES,
    MAX_RATE,
    at_most,
    forget_oldest,
    within_bounds,
)
from diloco.messages.heads import Line

HEARS_S = 0.5  # between two statuses that say only which authors a peer hears
LOOK_S = 1.0  # between two looks for silent members
FASTEST = 4.0
MAX_RAISE = 1000  # times what was typed here
OTHER_DATA = (
    "peers share sequences out by number, and on each a number is other text, so some is trained on"
    " twice or never, and perhaps some that the other holds out; give both the same files, or set"
    " data.shard=0 data.shards=1 on each"
)
HANDLERS: dict[type[events.Event], Callable[[Facts, Any], None]] = {
    events.Gave: tips.gave,
    events.Applied: tips.applied,
    events.Asked: tips.answer,
    events.Merged: author.merged,
    events.Stepped: contributions.stepped,
    events.Captured: contributions.captured,
    events.Delivered: contributions.delivered,
    events.Loaded: contributions.loaded,
}


def _short(data: str) -> str:
    digest, _, shape = data.partition("-")
    count = int(shape.partition("x")[0])
    return (f"{count:,} sequences, " if count else "") + digest[:8]


class Peer:
    """One peer's part in the swarm.

    Messages that do not fit are ignored or answered with no; nothing from the network makes this
    raise.

    Args:
        tips: by fragment, what the anchors here are. wall_ms: milliseconds of the clock at `now`.
        processed, stamp: of the lives before this one.
        planned: how long the run is, as typed here.
    """

    def __init__(
        self,
        identity: Identity,
        settings: Settings,
        arithmetic: Arithmetic,
        tips: Sequence[Tip],
        sizes: Sequence[Sizes],
        now: float,
        wall_ms: int,
        processed: int = 0,
        stamp: int = 0,
        planned: Planned = (0, 0, 0),
    ) -> None:
        fragments = [
            Fragment(i, tip, size, {tip.head.id: now}, Patience(settings.floor_s), tip.head.id)
            for i, (tip, size) in enumerate(zip(tips, sizes, strict=True))
        ]
        self.addresses = AddressBook()
        self.facts = Facts(
            identity,
            settings,
            arithmetic,
            now,
            wall_ms - int(now * 1000),
            Members(identity.me, identity.is_author),
            fragments,
            processed,
            stamp,
            cycle=settings.sync_every,
            settled_at=now + settings.settle_s,
            lease_again=now,
            moved=now,
            planned=planned,
            min_peers=settings.min_peers,
        )
        self.figures = Figures()
        self._typed = planned
        self._looked_at = self._told_at = self._listened_at = now
        self._decided_at = -settings.tick_s
        self._event: events.Event = events.Tick()
        self._other_data: dict[str, None] = {}
        self._said_authors: frozenset[str] = frozenset()
        self._said_units = NONE
        self._said_flags: tuple[object, ...] = ()

    def receive(self, event: events.Event, now: float) -> list[events.Action]:
        """Take in what happened, and say what to do about it."""
        core = self.facts
        core.out, core.now = [], now
        self._event = event
        self._wake_up()
        if self._take_in(event) or now >= self._decided_at + core.settings.tick_s:
            self._decided_at = now
            if not core.exited:
                self._decide()
        else:
            core.wake(self._decided_at + core.settings.tick_s)
        return core.out

    def _take_in(self, event: events.Event) -> bool:
        """Change facts; whether they are looked at at once, and not together with what comes
        next."""
        core = self.facts
        match event:
            case events.Heard(peer, message):
                return self._heard(peer, message)
            case events.Connected(peer, hello):
                self._connected(peer, hello)
            case events.Lost(peer, why):
                self._lost(peer, why)
            case events.Broke(peer, Get() as get, bad):
                tips.broke(core, peer, get, bad)
            case events.Broke(peer, Line() as line):
                contributions.not_sent(core, peer, line)
            case _ if type(event) in HANDLERS:
                HANDLERS[type(event)](core, event)
            case _:
                self._hear_loop(event)
        return not isinstance(event, events.Asked)

    def _hear_loop(self, event: events.Event) -> None:
        """The training loop says something."""
        core = self.facts
        match event:
            case events.Wanted(sequences, cycle):
                core.wanted, core.cycle = sequences, cycle or core.cycle
            case events.Begun(trains):
                core.begun, core.moved = trains, core.now
                core.position = (
                    lifecycle.first_position(core) if trains and core.ready else core.position
                )
            case events.Paused(pauses):
                core.pauses, core.moved = pauses, core.now
            case events.Leave(finished):
                core.leaving, core.finished, core.leave_by = (
                    True,
                    finished,
                    core.now + core.settings.stuck_s,
                )
            case events.Alone():
                core.min_peers = 1
            case events.Discovered():
                core.settled_at = min(core.settled_at, core.now)

    def _decide(self) -> None:
        """Look at all facts, and act."""
        core = self.facts
        self._look_for_the_silent()
        for f in core.fragments:
            if f.ahead or f.fetch:
                tips.fetch(core, f)
        lifecycle.get_ready(core)
        lifecycle.assemble(core)
        contributions.take_turn(core)
        for f in core.fragments:
            if core.due:
                contributions.contribute(core, f)
            name = core.author_of(f) if f.pool else ""
            if name == core.me:
                author.close(core, f)
            elif name:
                contributions.pass_on(core, f, name)
            tips.load(core, f)
            if core.changed_data or not isinstance(self._event, events.Heard):
                contributions.account(core, f)
        data.lease(core)
        self._tell()
        lifecycle.leave(core)

    # -- for everybody else ------------------------------------------------------------------------

    @property
    def runs(self) -> bool:
        """Whether the training loop may make an inner step."""
        core = self.facts
        has_data = bool(core.queue) or not core.wanted or not core.settings.leased
        return core.trains_now and not core.waits and has_data and core.assembled

    def wants(self, line: Line) -> bool:
        """Whether the payload of a contribution is wanted here."""
        return contributions.judged(self.facts, line) == "want"

    def is_open(self, f: Fragment) -> bool:
        """Whether the fate of this peer's newest contribution is open."""
        return contributions.own(self.facts, f) is not None and not self.facts.over(f.tip)

    def discarded(self) -> int:
        """Tokens of this peer that are not in the model here, nor on their way there."""
        return contributions.discarded(self.facts, self.facts.control)

    def measure(self, figures: Figures) -> None:
        """Figures for watchers, with the next heartbeat."""
        self.figures = figures

    def fastest_steps_per_s(self, mine: float) -> float:
        """The pace of the fastest peer that trains, at most `FASTEST` times the median, as anybody
        may claim any."""
        paces = [
            mine,
            *(one.status.steps_per_s for one in self.facts.members.all() if one.status.trains),
        ]
        measured = [pace for pace in paces if pace > 0]
        return min(max(measured), FASTEST * median_low(measured)) if measured else 0.0

    def name(self, peer: str) -> str:
        """The display name of a peer that is here."""
        member = self.facts.members.get(peer)
        return (
            self.facts.identity.name
            if peer == self.facts.me
            else member.hello.name
            if member
            else ""
        )

    def others_at(self) -> list[str]:
        """One address of each other peer that is here."""
        named = self.addresses.all(member.peer for member in self.facts.members.all())
        return [addresses[0] for addresses in named.values()]

    def objection(self, hello: Hello) -> str | None:
        """Why the sender of this hello cannot be in this run, as one line for its user; None when
        it can."""
        me, fragments = self.facts.identity, len(self.facts.fragments)
        if (objection := objection_to_wire(hello.wire_version)) is not None:
            return objection
        if hello.run_id != me.run_id:
            return f"run.id={hello.run_id} is not the run here, which is run.id={me.run_id}"
        if hello.manifest_hash != me.manifest_hash:
            return (
                f"the manifest {hello.manifest_hash[:12]} differs from {me.manifest_hash[:12]} here"
            )
        if len(hello.status.tips) != fragments:
            return f"{len(hello.status.tips)} fragments there, {fragments} here"
        return None

    def misfit(self, message: object) -> str | None:
        """Why no honest peer of this run says that, in one line; None when one may."""
        fragments = len(self.facts.fragments)
        match message:
            case Hello(status=Status(tips=tips)) | Status(tips=tips):
                said = max(tips, default=0)
            case Offer(line=Line(fragment=said) as line):
                if said < fragments and contributions.impossible(self.facts, line):
                    return (
                        f"{line.tokens} tokens, {len(line.units)} ranges of data in {line.steps}"
                        " steps are claimed"
                    )
            case Answer(fragment=said):
                pass
            case _:
                return None
        return (
            None
            if said < fragments
            else f"a message about fragment {said}, and the run has {fragments}"
        )

    # -- members -----------------------------------------------------------------------------------

    def _wake_up(self) -> None:
        """Who was asleep (SIGSTOP, laptop lid) was given up by the others: it listens first, and
        drops its data."""
        core = self.facts
        if core.now - self._looked_at > core.settings.silence_s:
            core.ready, core.settled_at, core.queue = False, core.now + core.settings.settle_s, NONE
            for member in core.members.all():
                member.heard = core.now
            core.changed_data = True
            core.note("slept", seconds=round(core.now - self._looked_at, 1))
        self._looked_at = core.now

    def _look_for_the_silent(self) -> None:
        core, settings = self.facts, self.facts.settings
        if core.now - self._listened_at >= LOOK_S:
            self._listened_at = core.now
            for peer in core.members.silent(core.now, settings.silence_s, settings.silence_beats):
                core.out.append(events.Disconnect(peer))
                self._lost(peer, "silent")

    def _connected(self, peer: str, hello: Hello) -> None:
        core = self.facts
        if hello.status.tips.keys() != set(range(len(core.fragments))) or not hello.status.whole:
            return
        if core.members.join(peer, hello, core.now):
            core.note("join", peer=peer, name=hello.name, live=len(core.members) + 1)
        self.addresses.hear(peer, hello.addresses)
        self._compare_data(peer, hello)
        self._hear_plan(peer, hello.status)
        self._hear_tips(peer, hello.status)
        core.send(peer, self.status())  # what changed since its own hello was read

    def _compare_data(self, peer: str, hello: Hello) -> None:
        """Name a peer where numbers of sequences stand for other text, once."""
        here, there = self.facts.identity.data, hello.sequences
        if here and there and here != there and peer not in self._other_data:
            self._other_data[peer] = None
            forget_oldest(self._other_data, MAX_NAMED)
            sides = {"there": _short(there), "here": _short(here)}
            self.facts.note("other_data", peer=peer, name=hello.name, **sides, so=OTHER_DATA)

    def _lost(self, peer: str, why: str) -> None:
        core = self.facts
        member = core.members.remove(peer)
        if member is None:
            return
        data.lost(core, peer)
        for f in core.fragments:
            f.ahead.pop(peer, None)
            for item in f.pool.values():
                if item.to == peer:
                    item.to, item.got = "", None
            if f.fetch and f.fetch.goal:
                f.fetch.asked = {part: one for part, one in f.fetch.asked.items() if one[0] != peer}
            elif f.fetch and f.fetch.donor == peer:
                f.fetch = None
        kind = "leave" if member.status.leaves else "lost"
        core.note(kind, peer=peer, name=member.hello.name, why=why, live=len(core.members) + 1)

    # -- talking -----------------------------------------------------------------------------------

    def _heard(self, peer: str, message: object) -> bool:
        core = self.facts
        if peer not in core.members:
            core.out.append(events.Disconnect(peer))  # this peer gave it up, and it does not know
            return False
        match message:
            case Status() if all(index < len(core.fragments) for index in message.tips):
                changed = core.members.hear(peer, message, core.now)
                self._hear_plan(peer, message)
                return self._hear_tips(peer, message) or changed
            case Offer():
                contributions.offered(core, peer, message)
            case Answer():
                contributions.answered(core, peer, message)
            case Lease():
                data.leased(core, peer, message)
            case Grant():
                data.granted(core, peer, message)
        return True

    def _hear_tips(self, peer: str, status: Status) -> bool:
        """Whether it tells a greater tip that can be asked for at once."""
        core, news = self.facts, False
        for index in range(len(core.fragments)) if status.whole else status.tips:
            f, key = core.fragments[index], status.tips.get(index, (0, ""))
            f.ahead.pop(peer, None)
            if key > f.tip.key:
                f.ahead[peer] = key
                news = news or (f.fetch is None and f.moving is None)
        return news

    def _hear_plan(self, peer: str, status: Status) -> None:
        """The run is as long as whoever may make its versions says, within reason: nobody makes it
        endless for all."""
        core = self.facts
        pairs = zip(core.planned, status.planned, strict=True)
        higher = tuple(max(here, there) if here else 0 for here, there in pairs)
        if higher == core.planned or not core.identity.is_author(peer):
            return
        if any(there > MAX_RAISE * typed for there, typed in zip(higher, self._typed, strict=True)):
            core.note("plan_ignored", peer=peer, planned=list(higher))
            return
        core.planned = (higher[0], higher[1], higher[2])
        core.note("planned", peer=peer, planned=list(higher))

    def status(self, whole: bool = True, figures: Figures | None = None) -> Status:
        """What this peer has and does: all of it, or what changed since the last status to
        everybody."""
        core = self.facts
        told = range(len(core.fragments)) if whole else sorted(core.changed_tips)
        hears, said = core.members.authors(), self._said_authors
        return Status(
            whole=whole,
            tips={i: core.fragments[i].tip.key for i in told},
            steps=at_most(core.steps),
            position=core.position,
            cycle=core.cycle,
            steps_per_s=within_bounds(core.steps_per_s, MAX_RATE),
            trains=core.trains_now,
            waits=core.says_waits,
            pauses=core.pauses,
            leaves=core.leaving,
            authors=core.is_author(),
            hears=sorted(hears if whole else hears - said),
            deaf=[] if whole else sorted(said - hears),
            units=self._said_units if whole or core.changed_data else None,
            planned=core.planned,
            figures=figures,
        )

    def _tell(self) -> None:
        """Tell everybody what changed, and that this peer lives."""
        core, hears = self.facts, self.facts.members.authors()
        if core.changed_data:
            has = data.has(core)[:MAX_RANGES]
            core.changed_data, self._said_units = has != self._said_units, has
        flags = (
            core.trains_now,
            core.says_waits,
            core.pauses,
            core.leaving,
            core.is_author(),
            core.planned,
        )
        beats = core.now >= self._told_at + core.members.beat_s(core.settings.heartbeat_s)
        # few need it, and rarely
        hears_other = hears != self._said_authors and core.now >= self._told_at + HEARS_S
        if (
            flags != self._said_flags
            or core.changed_tips
            or core.changed_data
            or hears_other
            or beats
        ):
            core.broadcast(self.status(whole=False, figures=self.figures if beats else None))
            if core.changed_tips and core.made_step:
                core.moved, core.made_step = core.now, False  # it got the first head after a step
            self._told_at, self._said_flags, self._said_authors = core.now, flags, hears
            core.changed_tips.clear()
            core.changed_data = False
        elif hears != self._said_authors:
            core.wake(self._told_at + HEARS_S)

    def hello(self) -> Hello:
        """First message to a peer that is called; the owner adds `seal` and `instance`."""
        core, me = self.facts, self.facts.identity
        peers = [member.peer for member in core.members.all()]
        if len(peers) > MAX_NAMED:  # each peer names others, so a newcomer hears of nearly all
            peers = sorted(peers, key=lambda peer: score(0, f"{me.me} {peer}"))[:MAX_NAMED]
        return Hello(
            wire_version=WIRE_VERSION,
            run_id=me.run_id,
            manifest_hash=me.manifest_hash,
            name=me.name,
            trains=me.trains,
            authors=me.may_author,
            device=me.device,
            peers=peers,
            addresses=self.addresses.all([me.me, *peers]),
            status=self.status(),
            sequences=me.data,
        )
