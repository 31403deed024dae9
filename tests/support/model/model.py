"""The production core under the fuzz of its model, which lies in a room of the workplace, and not
in this repository:

    PYTHONPATH=. MODEL=tests/support/model python ROOM/fuzz.py 0 300        schedules of these seeds
    PYTHONPATH=. MODEL=tests/support/model python ROOM/fuzz.py --scenes     how long each failure
                                                                            costs

`Peer` has the model's names, and carries out what the core asks for, at once: tensors are three
integers.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import words as w
from msgspec.structs import replace

from diloco.core import contributions, data, events, facts, history
from diloco.core.peer import Peer as Core
from diloco.core.settings import Identity, Settings, Sizes
from diloco.messages import bulk, control
from tests.support.fake_tensors import (
    PARTS,
    RUN,
    Anchors,
    Arithmetic,
    Signer,
    Tensor,
    gradient,
    hexed,
)

Saved = namedtuple("Saved", "tips processed stamp")
Held = namedtuple("Held", "line")  # a contribution in a bag


def translated(settings: w.Settings) -> Settings:
    """The model's settings by the core's names."""
    return Settings(
        fragments=settings.fragments,
        sync_every=settings.every,
        staggered=settings.staggered,
        overlap=settings.overlap,
        quorum=settings.need,
        grace_s=settings.wait or 0.0,
        late=settings.late,
        delay=settings.window,
        windowed=True,
        heartbeat_s=settings.heartbeat,
        silence_s=settings.silence,
        silence_beats=0.0,
        settle_s=settings.settle,
        stall_s=settings.stall,
        first_step_s=settings.stall,
        floor_s=settings.floor,
        refresh_s=settings.refresh,
        stuck_s=settings.stuck,
        deadline_s=settings.deadline,
        tick_s=0.0,
        min_bytes_per_s=1e18,
        uplink_bytes_per_s=1e-9,
        fanout=settings.fanout,
        records=settings.records,
    )


class Fragment:
    """A view of one fragment, with the anchor that the owner of the core keeps."""

    def __init__(self, core: facts.Fragment, anchors: Anchors) -> None:
        self.core, self.index, self._anchors = core, core.index, anchors
        self._tip = w.Tip(w.head_of(core.tip.head), w.Book(core.tip.book), self.anchor)

    anchor = property(lambda self: self._anchors.now[self.index])
    momentum = property(lambda self: self._anchors.momenta[self.index])
    base = property(lambda self: self.core.base)
    unsent = property(lambda self: self.core.unsent)

    @property
    def tip(self) -> w.Tip:
        head = w.head_of(self.core.tip.head)
        if self._tip.head is not head or self._tip.anchor != self.anchor:
            self._tip = w.Tip(head, w.Book(self.core.tip.book), self.anchor)
        return self._tip

    @tip.setter
    def tip(self, tip: w.Tip) -> None:
        self._anchors.now[self.index] = tip.anchor  # a fault

    @property
    def bag(self) -> dict[str, Held]:
        return {peer: Held(w.Line.of(item.line)) for peer, item in self.core.pool.items()}

    @property
    def records(self) -> dict[str, w.Record]:
        return {
            prev: w.Record(w.head_of(one.head), one.update)
            for prev, one in self.core.records.items()
        }


class Peer:
    """A core and its owner. `learn`: the pseudo-gradient of a line."""

    def __init__(
        self,
        me: str,
        settings: w.Settings,
        now: float,
        wall: int = 0,
        saved: Saved | None = None,
        trains: bool = True,
        may_author: bool = True,
        learn: Callable[[Any], Tensor] = gradient,
    ) -> None:
        self.me, self.settings, self.leaving = me, settings, False
        anchors: list[Tensor] = [tuple(range(i, i + PARTS)) for i in range(settings.fragments)]
        tips = [
            history.genesis(i, RUN, [hexed(part) for part in anchor])
            for i, anchor in enumerate(anchors)
        ]
        if saved:
            anchors = [tip.anchor for tip in saved.tips]
            tips = [
                history.Tip(t.head.now, t.book.core, tuple(map(hexed, t.anchor)))
                for t in saved.tips
            ]
        self.core = Core(
            Identity(me, me, RUN, "0" * 64, Signer(me), trains, may_author),
            translated(settings),
            Arithmetic(),
            tips,
            [Sizes(1, 1, 1000, PARTS) for _ in anchors],
            now,
            wall,
            *(saved[1:] if saved else ()),
        )
        self.facts = self.core.facts
        self._anchors = Anchors(self.facts, tuple(anchors))
        self._anchors.learn = learn
        self.fragments = [Fragment(f, self._anchors) for f in self.facts.fragments]
        self.control = self.fragments[0]
        self.facts.wanted, self.facts.cycle = 2 * settings.every * settings.batch, settings.every
        self._out: list[Any] = []
        self._time = now
        self._moved: set[int] = set()
        self._deferred: list[events.Merge] = []
        self._asked: events.Reply

    # -- read by the checks ------------------------------------------------------------------------

    processed = property(lambda self: self.facts.processed)
    stamp = property(lambda self: self.facts.stamp)
    runs = property(lambda self: self.core.runs)
    members = property(lambda self: {member.peer: member for member in self.facts.members.all()})
    now = property(lambda self: self.facts.now, lambda self, now: setattr(self.facts, "now", now))
    granted = property(
        lambda self: {
            peer: (w.as_set(one), until) for peer, (one, until) in self.facts.granted.items()
        }
    )
    _leave_by = property(lambda self: self.facts.leave_by)

    def author(self, f: Fragment, named: str = "") -> str:
        return self.facts.author(f.core, named)

    def discarded(self, f: Fragment) -> int:
        return contributions.discarded(self.facts, f.core)

    def _own(self, f: Fragment) -> Held | None:
        line = contributions.own(self.facts, f.core)
        return Held(w.Line.of(line)) if line else None

    def _has(self) -> w.Units:
        return w.as_set(data.has(self.facts))

    def _deal(self, peer: str, want: int, has: w.Units) -> w.Units:
        return w.as_set(data.deal(self.facts, peer, want, w.as_ranges(has)))

    def saved(self) -> Saved:
        return Saved(tuple(f.tip for f in self.fragments), self.processed, self.stamp)

    # -- events in, actions out --------------------------------------------------------------------

    def receive(self, event: w.Event, now: float) -> list[Any]:
        self._out, self._time = [], now
        self._moved.clear()
        deferred, self._deferred = self._deferred, []
        for merge in deferred:
            self._do(merge)
        match event:
            case w.Up(peer):
                self._send(peer, self.core.hello())
            case w.Heard(peer, message):
                self._heard(peer, message)
            case w.Broke(peer, w.Offer(line) | w.Payload(line)):
                self._tell(w.Broke(peer, line))
            case w.Stepped():
                units = w.as_ranges(
                    frozenset(sorted(w.as_set(self.facts.queue))[: self.settings.batch])
                )
                if units:
                    self._tell(events.Stepped(len(w.as_set(units)), units))
            case w.Down() | w.Leave() | w.Broke(_, w.Get()):
                self.leaving = self.leaving or event == w.Leave()
                self._tell(event)
            case _:
                self._tell(events.Tick())
        return self._out

    def _heard(self, peer: str, message: w.Message) -> None:
        match message:
            case control.Hello():
                self._tell(events.Connected(peer, message))
            case w.Payload(line, delta):
                self._tell(
                    events.Delivered(peer, line, delta)
                    if hexed(delta) == line.root
                    else w.Broke(peer, line)
                )
            case w.Get():
                self._tell(events.Asked(peer, message))
            case w.Records(fragment, records):
                self._gave(peer, self.fragments[fragment], records)
            case w.Part(said, values, get):
                answer = events.Part(said.head, said.book, said.digests, said.part, values)
                good = hexed(values) == said.digests[said.part]
                self._tell(events.Gave(peer, get, answer) if good else w.Broke(peer, get, bad=True))
            case w.No(get):
                self._tell(events.Gave(peer, get, None))
            case _:
                self._tell(w.Heard(peer, message))

    def _gave(self, peer: str, f: Fragment, records: Sequence[w.Record]) -> None:
        chain = tuple(history.Record(one.head.now, one.update) for one in records)
        self._tell(events.Gave(peer, w.Get(f.index, (0, "")), events.Records(chain)))

    def _tell(self, event: events.Event) -> None:
        for action in self.core.receive(event, self._time):
            self._do(action)

    def _do(self, action: events.Action) -> None:
        match action:
            case w.Send(peer, message):
                self._send(peer, message)
            case events.Broadcast(message):
                for member in self.facts.members.all():
                    self._send(member.peer, message)
            case events.Push(peer, line, payload):
                self._send(peer, w.Payload(line, payload))
            case events.Ask(peer, get):
                self._send(peer, get)
            case events.Reply(peer, get):
                self._asked = action
                self._send(peer, self._give(self.fragments[get.fragment], get))
            case w.Disconnect() | w.Exit():
                self._out.append(action)
            case w.Note(kind, said):
                values = (
                    (said["fragment"], said["tokens"])
                    if kind == "discarded"
                    else tuple(said.values())
                )
                self._out.append(w.Note({"refused_head": "refused"}.get(kind, kind), values))  # type: ignore[arg-type]
            case _:
                self._work(action)

    def _work(self, action: events.Action) -> None:
        """What the training loop and the owner of the anchors do."""
        match action:
            case events.Merge(index) if index in self._moved:
                self._deferred.append(action)  # the checks see one version at a time
            case events.Merge(index):
                self._merge(self.fragments[index], action)
            case events.Apply(index, own=True):
                self._publish(self.fragments[index], action)
            case events.Wake():
                pass  # it is told the time each second
            case _:
                self._done(action)

    def _done(self, action: Any) -> None:
        event = self._anchors.done(action)
        if isinstance(event, events.Applied):
            self._moved.add(event.fragment)
        self._tell(event)

    # -- talking -----------------------------------------------------------------------------------

    def _status(self) -> w.Told:
        """What scenes replace, to tell other tips."""
        return w.Told({})

    def _send(self, peer: str, message: w.Message) -> None:
        told = self._status().tips
        if told and isinstance(message, control.Hello):
            message = replace(message, status=replace(message.status, tips=told))
        elif told and isinstance(message, control.Status):
            message = replace(message, tips=told)
        self._out.append(w.Send(peer, message))

    def _give(self, f: Fragment, get: bulk.Get) -> w.Message:
        answer = self._asked.answer
        if answer is None:
            return w.No(get)
        if isinstance(answer, events.Records):
            return w.Records(
                f.index, tuple(w.Record(w.head_of(one.head), one.update) for one in answer.records)
            )
        part = self._anchors.filled(f.index, answer)
        return w.Part(part, part.values, get)

    def _part(self, tip: w.Tip, part: int) -> w.Part:
        core = events.Part(tip.head.now, tip.book.core, tuple(map(hexed, tip.anchor)), part)
        return w.Part(core, tip.anchor[part], self._asked.get)

    # -- anchors -----------------------------------------------------------------------------------

    def _merge(self, f: Fragment, merge: Any) -> None:
        self._done(merge)

    def _publish(self, f: Fragment, action: events.Apply) -> None:
        anchor = tuple(a + u for a, u in zip(f.anchor, action.update, strict=True))
        moved = tuple((m + u) // 2 for m, u in zip(f.momentum, action.update, strict=True))
        head = w.head_of(replace(action.head, state=w.state_of(w.Book(action.book), anchor)))
        self._adopt(
            f, w.Tip(head, w.Book(action.book), anchor), moved, w.Record(head, action.update)
        )

    def _adopt(self, f: Fragment, tip: w.Tip, moved: Tensor, record: w.Record) -> None:
        """This peer's version. Schedules with a liar replace this, and come here with a lie."""
        moving, told = f.core.moving, record.head
        assert moving is not None
        head = replace(moving.head, next=told.next)
        f.core.moving = moving._replace(head=head, update=record.update)
        self._moved.add(f.index)
        self._tell(self._anchors.moved(f.index, head.id, tip.anchor, moved))
