"""The production core under the fuzz of its model, which lies in a room of the workplace, and not in this repository:

    PYTHONPATH=. MODEL=tests/support/model python ROOM/fuzz.py 0 300        schedules of these seeds
    PYTHONPATH=. MODEL=tests/support/model python ROOM/fuzz.py --scenes     how long each failure costs

`Peer` has the model's names, and carries out what the core asks for, at once: tensors are three integers.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from statistics import median_low
from typing import Any

import words as w
from msgspec.structs import replace

from diloco.core import contributions, data, events, facts, history
from diloco.core.peer import Peer as Core
from diloco.messages import bulk, control, heads

Saved = namedtuple("Saved", "tips processed stamp")
Held = namedtuple("Held", "line")  # a contribution in a bag


class Arithmetic:
    """The bounds that follow from `Peer._merge`."""

    def bounds(
        self, number: int, contributions: int, pushes: int, delay: int, longest: float, reach: tuple[float, ...]
    ) -> history.Bounds:
        return history.Bounds(longest + reach[0] // 2 + 4, ((3 * reach[0] + 2 * longest) // 4 + 4, 0.0, 0.0))


def gradient(line: Any) -> w.Tensor:
    """Stands for a pseudo-gradient."""
    numbers = [int(w.hexed(line.peer, line.stamp, part)[:8], 16) for part in range(w.PARTS)]
    return tuple((1 if number % 2 else -1) * (500 + number % 500) for number in numbers)


def translated(settings: w.Settings) -> facts.Settings:
    """The model's settings by the core's names."""
    return facts.Settings(
        fragments=settings.fragments, sync_every=settings.every, staggered=settings.staggered,
        overlap=settings.overlap, quorum=settings.need, grace_s=settings.wait or 0.0, late=settings.late,
        delay=settings.window, windowed=True, heartbeat_s=settings.heartbeat, silence_s=settings.silence,
        silence_beats=0.0, settle_s=settings.settle, stall_s=settings.stall, first_step_s=settings.stall,
        floor_s=settings.floor, refresh_s=settings.refresh, stuck_s=settings.stuck, deadline_s=settings.deadline,
        tick_s=0.0, min_bytes_per_s=1e18, fanout=settings.fanout, records=settings.records,
    )  # fmt: skip


class Fragment:
    """A view of one fragment, with the anchor that the owner of the core keeps."""

    def __init__(self, core: facts.Fragment, anchor: w.Tensor) -> None:
        self.core, self.index, self.anchor = core, core.index, anchor
        self.momentum: w.Tensor = (0,) * w.PARTS
        self.shown: dict[str, w.Tensor] = {}
        self._tip = w.Tip(w.head_of(core.tip.head), w.Book(core.tip.book), anchor)

    @property
    def tip(self) -> w.Tip:
        head = w.head_of(self.core.tip.head)
        if self._tip.head is not head or self._tip.anchor != self.anchor:
            self._tip = w.Tip(head, w.Book(self.core.tip.book), self.anchor)
        return self._tip

    @tip.setter
    def tip(self, tip: w.Tip) -> None:
        self.anchor = tip.anchor  # a fault

    base = property(lambda self: self.core.base)
    unsent = property(lambda self: self.core.unsent)

    @property
    def bag(self) -> dict[str, Held]:
        return {peer: Held(w.Line.of(item.line)) for peer, item in self.core.bag.items()}

    @property
    def records(self) -> dict[str, w.Record]:
        return {prev: w.Record(w.head_of(one.head), one.update) for prev, one in self.core.records.items()}


class Peer:
    """A core and its owner. `learn`: the pseudo-gradient of a line."""

    def __init__(
        self, me: str, settings: w.Settings, now: float, wall: int = 0, saved: Saved | None = None, trains: bool = True,
        may_author: bool = True, learn: Callable[[Any], w.Tensor] = gradient,
    ) -> None:  # fmt: skip
        self.me, self.settings, self.leaving, self._learn = me, settings, False, learn
        anchors: list[w.Tensor] = [tuple(range(i, i + w.PARTS)) for i in range(settings.fragments)]
        tips = [history.genesis(i, w.RUN, [w.hexed(part) for part in anchor]) for i, anchor in enumerate(anchors)]
        if saved:
            anchors = [tip.anchor for tip in saved.tips]
            tips = [history.Tip(t.head.now, t.book.core, tuple(map(w.hexed, t.anchor))) for t in saved.tips]
        self.core = Core(
            facts.Identity(me, me, w.RUN, "0" * 64, w.Signer(me), trains, may_author), translated(settings),
            Arithmetic(), tips, [facts.Sizes(1, 1, 1000, w.PARTS) for _ in anchors], now, wall,
            *(saved[1:] if saved else ()),
        )  # fmt: skip
        self.facts = self.core.facts
        self.fragments = [Fragment(f, anchor) for f, anchor in zip(self.facts.fragments, anchors, strict=True)]
        self.control = self.fragments[0]
        self.facts.wanted, self.facts.cycle = 2 * settings.every * settings.batch, settings.every
        self._out: list[Any] = []
        self._time = now
        self._moved: set[int] = set()
        self._deferred: list[events.Merge] = []
        self._asked: events.Reply

    # -- read by the checks -------------------------------------------------------------------------------------------

    processed = property(lambda self: self.facts.processed)
    stamp = property(lambda self: self.facts.stamp)
    runs = property(lambda self: self.core.runs)
    members = property(lambda self: {member.peer: member for member in self.facts.members.all()})
    now = property(lambda self: self.facts.now, lambda self, now: setattr(self.facts, "now", now))
    granted = property(lambda self: {peer: (w.as_set(one), until) for peer, (one, until) in self.facts.granted.items()})
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

    # -- events in, actions out ---------------------------------------------------------------------------------------

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
                units = w.as_ranges(frozenset(sorted(w.as_set(self.facts.queue))[: self.settings.batch]))
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
                self._tell(events.Delivered(peer, line, delta) if w.hexed(delta) == line.root else w.Broke(peer, line))
            case w.Get():
                self._tell(events.Asked(peer, message))
            case w.Records(fragment, records):
                self._gave(peer, self.fragments[fragment], records)
            case w.Part(said, values, get):
                answer = events.Part(said.head, said.book, said.digests, said.part, values)
                good = w.hexed(values) == said.digests[said.part]
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
                values = (said["fragment"], said["tokens"]) if kind == "discarded" else tuple(said.values())
                self._out.append(w.Note({"refused_head": "refused"}.get(kind, kind), values))  # type: ignore[arg-type]
            case _:
                self._work(action)

    def _work(self, action: events.Action) -> None:
        """What the training loop and the owner of the anchors do."""
        match action:
            case events.Capture(line):
                delta = self._learn(line)
                self._tell(events.Captured(line, delta, float(max(map(abs, delta))), w.hexed(delta)))
            case events.Load(index):
                self._tell(events.Loaded(index, self.facts.fragments[index].tip.head.id))
            case events.Merge(index) if index in self._moved:
                self._deferred.append(action)  # the checks see one version at a time
            case events.Merge(index):
                self._merge(self.fragments[index], action)
            case events.Apply():
                self._apply(self.fragments[action.fragment], action)
            case events.Replace(index, head, parts):
                self._move(self.fragments[index], tuple(parts), head, (0,) * w.PARTS)

    # -- talking ------------------------------------------------------------------------------------------------------

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
            return w.Records(f.index, tuple(w.Record(w.head_of(one.head), one.update) for one in answer.records))
        anchor = f.anchor if answer.head.id == f.core.tip.head.id else f.shown[answer.head.id]
        return self._part(w.Tip(w.head_of(answer.head), w.Book(answer.book), anchor), answer.part)

    def _part(self, tip: w.Tip, part: int) -> w.Part:
        core = events.Part(tip.head.now, tip.book.core, tuple(map(w.hexed, tip.anchor)), part)
        return w.Part(core, tip.anchor[part], self._asked.get)

    # -- anchors ------------------------------------------------------------------------------------------------------

    def _merge(self, f: Fragment, merge: Any) -> None:
        norms = [share.line.norm for share in merge.shares]
        long = 3 * median_low(norms) if len(norms) > 2 else max(norms)
        weights = [int(1000 * s.weight * s.discount) * (s.line.norm <= long) for s in merge.shares]
        weights = weights if any(weights) else [1] * len(weights)
        pairs = list(zip(weights, merge.shares, strict=True))
        mean = [sum(w * share.payload[part] for w, share in pairs) // sum(weights) for part in range(w.PARTS)]
        steps = merge.pushes + sum(map(bool, weights)) >= merge.delay  # a window is full
        update = tuple(m // 2 * steps - part for m, part in zip(f.momentum, mean, strict=True))
        left_out = frozenset(share.line.peer for w, share in pairs if not w)
        self._tell(events.Merged(f.index, merge.base, update, w.hexed(update), left_out))

    def _apply(self, f: Fragment, action: events.Apply) -> None:
        anchor = tuple(a + u for a, u in zip(f.anchor, action.update, strict=True))
        tip = w.Tip(w.head_of(action.head), w.Book(action.book), anchor)
        moved = tuple((m + u) // 2 for m, u in zip(f.momentum, action.update, strict=True))
        if action.own:
            head = w.head_of(replace(action.head, state=w.state_of(tip.book, anchor)))
            self._adopt(f, w.Tip(head, tip.book, anchor), moved, w.Record(head, action.update))
        elif max(map(abs, action.update)) > action.limit:
            self._tell(events.Applied(f.index, action.head.id, why="far"))
        elif not tip.sound:
            damaged = tuple(map(w.hexed, f.anchor)) != f.core.tip.parts
            self._tell(events.Applied(f.index, action.head.id, why="digest", damaged=damaged))
        else:
            self._move(f, anchor, action.head, moved)

    def _adopt(self, f: Fragment, tip: w.Tip, moved: w.Tensor, record: w.Record) -> None:
        """This peer's version. Schedules with a liar replace this, and come here with a lie."""
        moving, told = f.core.moving, record.head
        assert moving is not None
        head = replace(moving.head, next=told.next)
        f.core.moving = moving._replace(head=head, update=record.update)
        self._move(f, tip.anchor, head, moved)

    def _move(self, f: Fragment, anchor: w.Tensor, head: heads.Head, moved: w.Tensor) -> None:
        kept = f.core.shown[0].head.id if f.core.shown else ""
        f.shown = {id_: one for id_, one in {**f.shown, f.core.tip.head.id: f.anchor}.items() if id_ == kept}
        f.anchor, f.momentum = anchor, moved
        self._moved.add(f.index)
        self._tell(events.Applied(f.index, head.id, tuple(map(w.hexed, anchor))))
