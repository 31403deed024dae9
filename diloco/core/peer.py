"""The core of one peer, whole and sans-IO: `Peer.receive(event, now)` returns actions, which the
owner carries out.

An event only changes facts. Then one function, `_decide`, looks at all facts and acts, so no
message is waited for, and there is no state machine. It never sleeps, opens a socket or reads a
clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median_low
from typing import Any

from diloco.core import events
from diloco.core.facts import Facts
from diloco.core.fragment import FragmentState
from diloco.core.history import Arithmetic, Tip
from diloco.core.members import AddressBook
from diloco.core.rules import author, contributions, data, giving, learning, lifecycle, tips
from diloco.core.settings import Identity, ProtocolSettings, Sizes
from diloco.core.telling import Telling
from diloco.messages import fields
from diloco.messages.bulk import Get
from diloco.messages.codec import objection_to_wire
from diloco.messages.control import Answer, Dealt, Figures, Hello, Lease, Offer, Planned, Status
from diloco.messages.heads import Line

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
    events.Served: giving.served,
    events.Applied: tips.applied,
    events.Asked: giving.answer,
    events.Merged: author.merged,
    events.Wanted: learning.wanted,
    events.Stepped: learning.stepped,
    events.Paused: learning.paused,
    events.Loaded: learning.loaded,
    events.Captured: contributions.captured,
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
            FragmentState.of(i, tip, size, settings.floor_s, now)
            for i, (tip, size) in enumerate(zip(tips, sizes, strict=True))
        ]
        self.facts = Facts.of(
            identity=identity,
            settings=settings,
            arithmetic=arithmetic,
            fragments=fragments,
            now=now,
            wall_ms=wall_ms,
            processed=processed,
            stamp=stamp,
            planned=planned,
        )
        self.addresses = AddressBook()
        self._typed = planned
        self._looked_at = now
        self._decided_at = -settings.tick_s
        self._event: events.Event = events.Tick()
        self._other_data: dict[str, None] = {}
        self._telling = Telling(self.facts, self.addresses)

    def receive(self, event: events.Event, now: float) -> list[events.Action]:
        """Take in what happened, and say what to do about it."""
        core, settings = self.facts, self.facts.settings
        core.begin(now)
        self._event = event
        if now - self._looked_at > settings.silence_s:
            lifecycle.wake_up(core, now - self._looked_at)
        self._looked_at = now
        tick_s = core.tick_s
        if self._take_in(event) or now >= self._decided_at + tick_s:
            self._decided_at = now
            if not core.life.exited:
                self._decide()
        else:
            core.wake_after(now, tick_s)
        return core.out

    def _take_in(self, event: events.Event) -> bool:
        """Change facts. Return True if to decide at once, and not together with what comes next."""
        core = self.facts
        match event:
            case events.Heard(peer, message):
                return self._heard(peer, message)
            case events.Connected(peer, hello):
                self._connected(peer, hello)
            case events.Broke(peer, Get() as get, bad):
                return tips.broke(core, peer, get, bad)
            case events.Gave(peer, get, None):
                return tips.broke(core, peer, get)
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
        return not isinstance(event, events.Asked | events.Moved | events.Served)

    def _decide(self) -> None:
        """Look at all facts, and act."""
        core = self.facts
        lifecycle.drop_the_silent(core)
        for f in core.fragments:
            if f.inbox.ahead or f.inbox.coming or f.inbox.fetch:
                tips.fetch(core, f)
        lifecycle.get_ready(core)
        lifecycle.assemble(core)
        learning.take_turn(core)
        accounts = not isinstance(self._event, events.Heard | events.Tick)
        accounts = accounts or core.data.changed or core.life.leaving
        for f in core.fragments:
            if core.loop.due:
                learning.contribute(core, f)
            name = core.author_of(f) if f.pool else ""
            if name == core.me:
                author.close(core, f)
            elif name:
                contributions.pass_on(core, f, name)
            learning.load(core, f)
            if accounts:
                learning.account(core, f)
        data.lease(core)
        self._telling.tell()
        lifecycle.leave(core)

    # -- for everybody else ------------------------------------------------------------------------

    @property
    def figures(self) -> Figures:
        """Figures for watchers, as measured last."""
        return self._telling.figures

    @property
    def runs(self) -> bool:
        """True if the training loop may make an inner step."""
        core = self.facts
        has_data = bool(core.data.queue) or not core.data.wanted or not core.settings.leased
        return core.trains_now and not core.waits and has_data and core.life.assembled

    def wants(self, line: Line) -> bool:
        """Return True if the payload of a contribution is wanted here."""
        return contributions.judged(self.facts, line) == "want"

    def is_open(self, f: FragmentState) -> bool:
        """Return True if the fate of this peer's newest contribution is open."""
        return learning.own(self.facts, f) is not None and not self.facts.over(f.tip)

    def discarded(self) -> int:
        """Tokens of this peer that are not in the model here, nor on their way there."""
        return learning.discarded(self.facts, self.facts.control)

    def measure(self, figures: Figures) -> None:
        """Figures for watchers, with the next heartbeat."""
        self._telling.figures = figures

    def status(self, whole: bool = True) -> Status:
        """The status of this peer: all of it, or what changed since the last one to all."""
        return self._telling.status(whole)

    def hello(self) -> Hello:
        """First message to a peer that is called; the owner adds `seal` and `instance`."""
        return self._telling.hello()

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
                index = max([*status.tips, *status.arriving], default=0)
            case Offer(line=Line(fragment=index) as line):
                if index < fragments and contributions.impossible(self.facts, line):
                    claims = f"{line.tokens} tokens, {len(line.units)} ranges of data"
                    return f"{claims} in {line.steps} steps are claimed"
            case Answer(fragment=index):
                pass
            case _:
                return None
        if index < fragments:
            return None
        return f"a message about fragment {index}, and the run has {fragments}"

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
            core.act(events.Disconnect(peer))  # this peer gave it up, and it does not know
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
                return False
            case Lease():
                data.answer(core, peer, message)
                return False
            case Dealt():
                data.receive(core, peer, message)
        return True

    def _hear_tips(self, peer: str, status: Status, before: Iterable[int]) -> bool:
        """Take in which versions a peer has, and which are arriving there, where `before` are the
        fragments of which one was. Return True if a greater one can be asked for at once."""
        fragments = self.facts.fragments
        told = range(len(fragments)) if status.whole else status.tips
        news = [tips.told(fragments[i], peer, status.tips.get(i, (0, ""))) for i in told]
        news += [
            tips.told_arriving(fragments[i], peer, status.arriving.get(i))
            for i in {*before, *status.arriving}
        ]
        return any(news)

    def _hear_plan(self, peer: str, status: Status) -> None:
        """The run is as long as who may make versions says, if nobody makes it endless for all."""
        core = self.facts
        if status.planned == core.planned:
            return
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


def _short(data: str) -> str:
    digest, _, shape = data.partition("-")
    count = int(shape.partition("x")[0])
    return (f"{count:,} sequences, " if count else "") + digest[:8]
