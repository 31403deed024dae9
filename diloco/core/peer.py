"""The core of one peer, whole and sans-IO: `Peer.receive(event, now)` returns actions, which the
owner carries out.

An event only changes facts. Then one function, `_decide`, looks at all facts and acts, so no
message is waited for, and there is no state machine. It never sleeps, opens a socket or reads a
clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from statistics import median_low
from typing import Any

from diloco.core import author, contributions, data, events, lifecycle, tips
from diloco.core.facts import Facts, FragmentState
from diloco.core.history import Arithmetic, Tip
from diloco.core.members import AddressBook, Members, Patience, score
from diloco.core.settings import Identity, ProtocolSettings, Sizes
from diloco.messages import fields
from diloco.messages.bulk import Get
from diloco.messages.codec import objection_to_wire
from diloco.messages.control import Answer, Dealt, Figures, Hello, Lease, Offer, Planned, Status
from diloco.messages.heads import Line
from diloco.protocol import WIRE_VERSION
from diloco.ranges import NONE

HEARS_S = 0.5  # between two statuses that say only which authors a peer hears
FASTEST = 4.0
MAX_RAISE = 1000  # times what was typed here
OTHER_DATA = (
    "peers share sequences out by number, and on each a number is other text, so some is trained on"
    " twice or never, and perhaps some that the other holds out; give both the same files, or set"
    " data.shard=0 data.shards=1 on each"
)
HANDLERS: dict[type[events.Event], Callable[[Facts, Any], None]] = {
    events.Lost: lifecycle.lost,
    events.Gave: tips.gave,
    events.Arriving: tips.arriving,
    events.Served: tips.served,
    events.Applied: tips.applied,
    events.Asked: tips.answer,
    events.Merged: author.merged,
    events.Stepped: contributions.stepped,
    events.Captured: contributions.captured,
    events.Loaded: contributions.loaded,
}


class Peer:
    """One peer's part in the swarm. Nothing from the network makes it raise: messages that do not
    fit are ignored, or answered with no.

    Args:
        tips: by fragment, what the anchors here are. wall_ms: milliseconds of the clock at `now`.
        processed, stamp: of the lives before this one.
        planned: how long the run is, as typed here.
    """

    def __init__(
        self,
        identity: Identity,
        settings: ProtocolSettings,
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
            FragmentState(i, tip, size, {tip.head.id: now}, Patience(settings.floor_s), tip.head.id)
            for i, (tip, size) in enumerate(zip(tips, sizes, strict=True))
        ]
        members, wall_ms = Members(identity.me, identity.is_author), wall_ms - int(now * 1000)
        state = members, fragments, processed, stamp, planned
        self.facts = Facts(identity, settings, arithmetic, now, wall_ms, *state)
        self.addresses, self.figures = AddressBook(), Figures()
        self._typed = planned
        self._looked_at = self._told_at = now
        self._decided_at = -settings.tick_s
        self._event: events.Event = events.Tick()
        self._other_data: dict[str, None] = {}
        self._said_authors: frozenset[str] = frozenset()
        self._said_units = NONE
        self._said_flags: tuple[object, ...] = ()
        self._said_waits, self._waits_since = False, inf

    def receive(self, event: events.Event, now: float) -> list[events.Action]:
        """Take in what happened, and say what to do about it."""
        core, settings = self.facts, self.facts.settings
        core.out, core.now, self._event = [], now, event
        if now - self._looked_at > settings.silence_s:
            lifecycle.wake_up(core, now - self._looked_at)
        self._looked_at = now
        if self._take_in(event) or now >= self._decided_at + settings.tick_s:
            self._decided_at = now
            if not core.exited:
                self._decide()
        else:
            core.wake(self._decided_at + settings.tick_s)
        return core.out

    def _take_in(self, event: events.Event) -> bool:
        """Change facts; whether to decide at once, and not together with what comes next."""
        core = self.facts
        match event:
            case events.Heard(peer, message):
                return self._heard(peer, message)
            case events.Connected(peer, hello):
                self._connected(peer, hello)
            case events.Broke(peer, Get() as get, bad):
                tips.broke(core, peer, get, bad)
            case events.Broke(peer, Line() as line):
                contributions.not_sent(core, peer, line)
            case events.Moved(peer, Line() as line, nbytes):
                contributions.moved(core, peer, line, nbytes)
            case events.Moved(peer, Get() as get, nbytes):
                tips.moved(core, peer, get, nbytes)
            case events.Delivered():
                # to look at all that are here takes longer than to take one in
                return contributions.delivered(core, event)
            case _:
                HANDLERS.get(type(event), lifecycle.hear_loop)(core, event)
        return not isinstance(event, events.Asked | events.Moved)

    def _decide(self) -> None:
        """Look at all facts, and act."""
        core = self.facts
        lifecycle.drop_the_silent(core)
        for f in core.fragments:
            if f.ahead or f.coming or f.fetch:
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

    def is_open(self, f: FragmentState) -> bool:
        """Whether the fate of this peer's newest contribution is open."""
        return contributions.own(self.facts, f) is not None and not self.facts.over(f.tip)

    def discarded(self) -> int:
        """Tokens of this peer that are not in the model here, nor on their way there."""
        return contributions.discarded(self.facts, self.facts.control)

    def measure(self, figures: Figures) -> None:
        """Figures for watchers, with the next heartbeat."""
        self.figures = figures

    def fastest_steps_per_s(self, mine: float) -> float:
        """The pace of the fastest peer that trains; at most `FASTEST` medians, as it may lie."""
        trainers = (member.status for member in self.facts.members.all() if member.status.trains)
        measured = [
            pace for pace in (mine, *(member.steps_per_s for member in trainers)) if pace > 0
        ]
        return min(max(measured), FASTEST * median_low(measured)) if measured else 0.0

    def name(self, peer: str) -> str:
        """The display name of a peer that is here."""
        if peer == self.facts.me:
            return self.facts.identity.name
        member = self.facts.members.get(peer)
        return member.hello.name if member else ""

    def others_at(self) -> list[str]:
        """One address of each other peer that is here."""
        named = self.addresses.all(member.peer for member in self.facts.members.all())
        return [addresses[0] for addresses in named.values()]

    def objection(self, hello: Hello) -> str | None:
        """Why the sender cannot be in this run, as one line for its user; None when it can."""
        me, fragments = self.facts.identity, len(self.facts.fragments)
        if (objection := objection_to_wire(hello.wire_version)) is not None:
            return objection
        if hello.run_id != me.run_id:
            return f"run.id={hello.run_id} is not the run here, which is run.id={me.run_id}"
        if (there := hello.manifest_hash) != me.manifest_hash:
            return f"the manifest {there[:12]} differs from {me.manifest_hash[:12]} here"
        if len(hello.status.tips) != fragments:
            return f"{len(hello.status.tips)} fragments there, {fragments} here"
        return None

    def misfit(self, message: object) -> str | None:
        """Why no honest peer of this run says that, in one line; None when one may."""
        fragments = len(self.facts.fragments)
        match message:
            case Hello(status=Status() as status) | (Status() as status):
                said = max([*status.tips, *status.arriving], default=0)
            case Offer(line=Line(fragment=said) as line):
                if said < fragments and contributions.impossible(self.facts, line):
                    claims = f"{line.tokens} tokens, {len(line.units)} ranges of data"
                    return f"{claims} in {line.steps} steps are claimed"
            case Answer(fragment=said):
                pass
            case _:
                return None
        if said < fragments:
            return None
        return f"a message about fragment {said}, and the run has {fragments}"

    # -- hearing -----------------------------------------------------------------------------------

    def _connected(self, peer: str, hello: Hello) -> None:
        core = self.facts
        status, every = hello.status, set(range(len(core.fragments)))
        if not status.whole or status.tips.keys() != every or status.arriving.keys() - every:
            return
        if core.members.join(peer, hello, core.now):
            core.note("join", peer=peer, name=hello.name, live=len(core.members) + 1)
        self.addresses.hear(peer, hello.addresses)
        self._compare_data(peer, hello)
        self._hear_plan(peer, status)
        self._hear_tips(peer, status, every)
        core.send(peer, self.status())  # what changed since its own hello was read

    def _compare_data(self, peer: str, hello: Hello) -> None:
        """Name a peer where numbers of sequences stand for other text, once."""
        here, there = self.facts.identity.data, hello.sequences
        if here and there and here != there and peer not in self._other_data:
            self._other_data[peer] = None
            fields.forget_oldest(self._other_data, fields.MAX_NAMED)
            sides = {"there": _short(there), "here": _short(here)}
            self.facts.note("other_data", peer=peer, name=hello.name, **sides, so=OTHER_DATA)

    def _heard(self, peer: str, message: object) -> bool:
        core, fragments = self.facts, len(self.facts.fragments)
        if peer not in core.members:
            core.out.append(events.Disconnect(peer))  # this peer gave it up, and it does not know
            return False
        match message:
            case Status() if max([*message.tips, *message.arriving], default=0) < fragments:
                before = core.members[peer].status.arriving
                changed = core.members.hear(peer, message, core.now)
                self._hear_plan(peer, message)
                return self._hear_tips(peer, message, before) or changed
            case Offer():
                contributions.offered(core, peer, message)
            case Answer():
                contributions.answered(core, peer, message)
            case Lease():
                data.answer(core, peer, message)
            case Dealt():
                data.receive(core, peer, message)
        return True

    def _hear_tips(self, peer: str, status: Status, before: Iterable[int]) -> bool:
        """Take in which versions a peer has, and which are arriving there, where `before` are the
        fragments of which one was; whether a greater one can be asked for at once."""
        core, news = self.facts, False
        for index in range(len(core.fragments)) if status.whole else status.tips:
            f, key = core.fragments[index], status.tips.get(index, (0, ""))
            f.ahead.pop(peer, None)
            if key > f.tip.key:
                f.ahead[peer] = key
                news = news or f.moving is None
        for index in before:
            core.fragments[index].coming.pop(peer, None)
        for index, key in status.arriving.items():
            f = core.fragments[index]
            f.coming[peer] = key
            news = news or f.moving is None
        return news

    def _hear_plan(self, peer: str, status: Status) -> None:
        """The run is as long as who may make versions says, if nobody makes it endless for all."""
        core = self.facts
        pairs = zip(core.planned, status.planned, strict=True)
        steps, tokens, rounds = (max(here, there) if here else 0 for here, there in pairs)
        higher = steps, tokens, rounds
        if higher == core.planned or not core.identity.is_author(peer):
            return
        typed = zip(higher, self._typed, strict=True)
        if any(there > MAX_RAISE * here for there, here in typed):
            core.note("plan_ignored", peer=peer, planned=list(higher))
            return
        core.planned = higher
        core.note("planned", peer=peer, planned=list(higher), typed=list(self._typed))

    # -- telling -----------------------------------------------------------------------------------

    def status(self, whole: bool = True, figures: Figures | None = None) -> Status:
        """What this peer has and does: all of it, or what changed since the last status to all."""
        core = self.facts
        told = range(len(core.fragments)) if whole else sorted(core.changed_tips)
        hears, said = core.members.authors(), self._said_authors
        return Status(
            whole=whole,
            tips={i: core.fragments[i].tip.key for i in told},
            steps=fields.at_most(core.steps),
            position=core.position,
            cycle=core.cycle,
            steps_per_s=fields.within_bounds(core.steps_per_s, fields.MAX_RATE),
            trains=core.trains_now,
            waits=core.says_waits,
            pauses=core.pauses,
            leaves=core.leaving,
            authors=core.is_author(),
            hears=sorted(hears if whole else hears - said),
            deaf=[] if whole else sorted(said - hears),
            units=self._said_units if whole or core.changed_data else None,
            planned=core.planned,
            moved=core.moved,
            arriving=core.arriving(),
            figures=figures,
        )

    def _tell(self) -> None:
        """Tell everybody what changed, and that this peer lives."""
        core, hears = self.facts, self.facts.members.authors()
        if core.changed_data:
            has = data.has(core)[: fields.MAX_RANGES]
            core.changed_data, self._said_units = has != self._said_units, has
        is_author, arriving = core.is_author(), core.arriving()
        flags = core.trains_now, core.pauses, core.leaving, is_author, core.planned, arriving
        news = flags != self._said_flags or core.changed_tips or core.changed_data
        waits = core.says_waits
        news = self._waits_news(waits) or news
        beats = core.now >= self._told_at + core.members.beat_s(core.settings.heartbeat_s)
        # few need it, and rarely
        hears_other = hears != self._said_authors
        if news or beats or (hears_other and core.now >= self._told_at + HEARS_S):
            said = self.status(whole=False, figures=self.figures if beats else None)
            core.out += [events.Broadcast(said)] if len(core.members) else []
            if core.changed_tips and core.made_step:  # the first head after a step
                core.progress_at, core.made_step = core.now, False
            self._told_at, self._said_flags, self._said_authors = core.now, flags, hears
            self._said_waits = waits
            core.changed_tips.clear()
            core.changed_data = False
        elif hears_other:
            core.wake(self._told_at + HEARS_S)

    def _waits_news(self, waits: bool) -> bool:
        """Whether it is news that this peer waits, or no more: for so long that it matters."""
        core, settings = self.facts, self.facts.settings
        if waits == self._said_waits:
            self._waits_since = inf
            return False
        self._waits_since = min(self._waits_since, core.now)
        lasts = core.now >= self._waits_since + settings.tick_s
        if not lasts:
            core.wake(self._waits_since + settings.tick_s)
        return lasts

    def hello(self) -> Hello:
        """First message to a peer that is called; the owner adds `seal` and `instance`."""
        core, me = self.facts, self.facts.identity
        peers = [member.peer for member in core.members.all()]
        if len(peers) > fields.MAX_NAMED:  # each names other ones: a newcomer hears of nearly all
            peers.sort(key=lambda peer: score(0, f"{me.me} {peer}"))
            del peers[fields.MAX_NAMED :]
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


def _short(data: str) -> str:
    digest, _, shape = data.partition("-")
    count = int(shape.partition("x")[0])
    return (f"{count:,} sequences, " if count else "") + digest[:8]
