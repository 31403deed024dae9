"""Statuses of a peer for the others: a hello to each, whole, then what changed, and heartbeats."""

from __future__ import annotations

from itertools import islice
from math import inf

from diloco.core.events import Broadcast
from diloco.core.facts import Facts
from diloco.core.members import AddressBook, score
from diloco.core.rules import data
from diloco.messages import fields
from diloco.messages.control import Figures, Hello, Status
from diloco.messages.heads import Key
from diloco.protocol import WIRE_VERSION
from diloco.ranges import NONE

FEW = 4  # less than one of so many
HEARS_S = 0.5  # between two statuses that say only which authors a peer hears


class Telling:
    """Compares the facts of a peer with what it told to all."""

    def __init__(self, core: Facts, addresses: AddressBook) -> None:
        self.figures = Figures()
        self._core = core
        self._addresses = addresses
        self._told_at = self._figures_at = core.now
        self._told_tips = {f.index: f.tip.key for f in core.fragments}
        self._told_authors: frozenset[str] = frozenset()
        self._told_units = NONE
        self._told_flags: tuple[object, ...] = ()
        self._told_arriving: dict[int, Key] = {}
        self._told_waits = False
        self._waits_since = inf
        self._units_changed = False  # since then

    def status(self, whole: bool = True, figures: Figures | None = None) -> Status:
        """The status of this peer: all of it, or what changed since the last one to all."""
        core = self._core
        told = range(len(core.fragments)) if whole else self._changed_tips()
        hears, before = core.members.authors(), self._told_authors
        return Status(
            whole=whole,
            tips={i: core.fragments[i].tip.key for i in told},
            steps=fields.at_most(core.loop.steps),
            position=core.loop.position,
            cycle=core.loop.cycle,
            steps_per_s=fields.within_bounds(core.loop.steps_per_s, fields.MAX_RATE),
            trains=core.trains_now,
            waits=core.says_waits,
            pauses=core.loop.pauses,
            leaves=core.life.leaving,
            authors=core.is_author(),
            hears=sorted(hears if whole else hears - before),
            deaf=[] if whole else sorted(before - hears),
            units=self._told_units if whole or self._units_changed else None,
            planned=core.planned,
            moved=core.moved,
            arriving=core.arriving(),
            figures=figures,
        )

    def tell(self) -> None:
        """Tell everybody what changed, and that this peer lives."""
        core, hears = self._core, self._core.members.authors()
        if data.take_changed(core):
            has = data.has(core)[: fields.MAX_RANGES]
            self._units_changed = has != self._told_units
            self._told_units = has
        arriving, changed_tips, waits = core.arriving(), self._changed_tips(), core.says_waits
        leaves = core.life.leaving
        flags = (core.trains_now, core.loop.pauses, leaves, core.is_author(), core.planned)
        news = arriving != self._told_arriving or bool(changed_tips) or self._units_changed
        news = self._waits_news(waits) or news
        if news and not leaves and core.tick_s > core.settings.tick_s:
            # in a large swarm those who have a version first say so soon, for all to get it
            keys = {i: core.fragments[i].tip.key for i in changed_tips}
            keys |= arriving.items() - self._told_arriving.items()
            rare = any(self._few_have(i, key) for i, key in keys.items())
            pause_s = core.settings.tick_s if rare else core.tick_s
            news = core.now >= self._told_at + pause_s
            if not news:
                core.wake_after(core.now, pause_s)
        news = news or flags != self._told_flags
        beats = core.now >= self._told_at + core.members.beat_s(core.settings.heartbeat_s)
        # few need it, and rarely
        hears_other = hears != self._told_authors
        if news or beats or (hears_other and core.now >= self._told_at + HEARS_S):
            # news may come more often than heartbeats, for as long as the run lasts
            is_due = core.now >= self._figures_at + core.members.beat_s(core.settings.heartbeat_s)
            self._figures_at = core.now if is_due else self._figures_at
            status = self.status(whole=False, figures=self.figures if is_due else None)
            if len(core.members):
                core.act(Broadcast(status))
            if changed_tips:
                core.told_head()
            self._told_at = core.now
            self._told_tips |= status.tips
            self._told_authors = hears
            self._told_flags, self._told_arriving = flags, arriving
            self._told_waits = waits
            self._units_changed = False
        elif hears_other:
            core.wake(self._told_at + HEARS_S)

    def _changed_tips(self) -> list[int]:
        """Fragments whose tip has moved since it was told to all."""
        told = self._told_tips
        return [f.index for f in self._core.fragments if f.tip.key != told[f.index]]

    def _few_have(self, index: int, key: Key) -> bool:
        """Return True if few members tell this version of a fragment, or a later one."""
        members = self._core.members.all()
        having = (member for member in members if member.tips.get(index, (0, "")) >= key)
        enough = -(-len(members) // FEW)
        return len(list(islice(having, enough))) < enough

    def _waits_news(self, waits: bool) -> bool:
        """Return True if this peer waits, or no more, for so long that it is news."""
        core, settings = self._core, self._core.settings
        if waits == self._told_waits:
            self._waits_since = inf
            return False
        self._waits_since = min(self._waits_since, core.now)
        lasts = core.now >= self._waits_since + settings.tick_s
        if not lasts:
            core.wake_after(self._waits_since + settings.tick_s, core.tick_s)
        return lasts

    def hello(self) -> Hello:
        """First message to a peer that is called; the owner adds `seal` and `instance`."""
        core, me = self._core, self._core.identity
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
            addresses=self._addresses.all([me.me, *peers]),
            status=self.status(),
            sequences=me.data,
        )
