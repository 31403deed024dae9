"""Answers to other peers: records of the newest versions, and parts of an anchor (`Outbox`).

A donor gives a record to `fanout` peers at a time, and these pass its parts on while they arrive;
`tips` says why nobody waits in a circle. Parts of an anchor are given to all who ask for them.
"""

from __future__ import annotations

from diloco.core import events
from diloco.core.facts import Facts
from diloco.core.fragment import FragmentState
from diloco.core.history import Record, Tip
from diloco.core.rules import pace
from diloco.messages.bulk import Get
from diloco.messages.fields import forget_oldest


def answer(core: Facts, event: events.Asked) -> None:
    """A peer asks. Parts of an anchor are given to all who ask for them."""
    get = event.get
    known = get.fragment < len(core.fragments)
    answer: events.Records | events.AnchorPart | None = None
    if known and get.want:
        answer = _part(core, core.fragments[get.fragment], event.peer, get)
    elif known:
        answer = _newer(core, core.fragments[get.fragment], event.peer, get)
    core.act(events.Reply(event.peer, get, answer))


def _part(core: Facts, f: FragmentState, peer: str, get: Get) -> events.AnchorPart | None:
    """A part of the anchor of the tip, or of the one that is pinned."""
    tips = (f.tip, f.outbox.kept(core.now))
    kept = next((tip for tip in tips if tip and tip.head.id == get.want), None)
    if kept is None or get.part >= len(kept.parts):
        return None
    f.outbox.serving[peer, get.want, get.part] = kept.head.id
    return events.AnchorPart(kept.head, kept.book, kept.parts, get.part)


def _pin(core: Facts, f: FragmentState, tip: Tip) -> None:
    f.outbox.pinned = (tip, core.now + 2 * core.settings.deadline_s)


def _newer(
    core: Facts, f: FragmentState, peer: str, get: Get
) -> events.Records | events.AnchorPart | None:
    """The records after a head, or the first part of an anchor, to few peers at a time."""
    tip, have = f.tip, get.have
    arriving = f.inbox.arriving
    passes_on = arriving and arriving.prev == have[1] and f.inbox.is_to_be_had()
    head = arriving if arriving and passes_on else tip.head
    asked = (peer, "", get.part)
    # a peer that reads slowly, or hangs, has its place for a round at most
    since = core.now - max(core.settings.deadline_s, pace.round_s(core, f))
    served = (name for name, at in f.outbox.served_at.items() if at > since and name != asked)
    others = [f.outbox.serving.get(name, "") for name in served]
    kept = f.outbox.kept(core.now)  # a newcomer is given this one, also when the tip has moved
    busy = others.count(head.id)
    busy += others.count(kept.head.id) if kept and kept.head is not head else 0
    if head.key <= have or busy >= core.settings.fanout:
        return None  # it is no news, or to be had elsewhere
    f.outbox.serving[asked] = head.id
    f.outbox.served_at[asked] = core.now
    if passes_on:
        return events.Records((Record(head, None),))
    chain, prev = list[Record](), get.have[1]
    while prev in f.outbox.records:
        chain.append(f.outbox.records[prev])
        prev = chain[-1].head.id
    if chain and prev == tip.head.id:
        return events.Records(tuple(chain))
    if kept is None or kept.key <= have:
        _pin(core, f, tip)
    else:
        tip = kept
    if not tip.parts:
        del f.outbox.serving[asked], f.outbox.served_at[asked]
        return None
    f.outbox.serving[asked] = tip.head.id
    return events.AnchorPart(tip.head, tip.book, tip.parts, 0)


def served(core: Facts, event: events.Served) -> None:
    """The stream to a peer is over: another one may have its place."""
    f, get = core.fragments[event.get.fragment], event.get
    name = (event.peer, get.want, get.part)
    f.outbox.served_at.pop(name, None)
    head, pinned = f.outbox.serving.pop(name, ""), f.outbox.pinned
    # not by the first part alone: the copy may not have been made, if the anchor moved just then
    if get.want and pinned and head == pinned[0].head.id:
        _pin(core, f, pinned[0])


def keep(core: Facts, f: FragmentState, record: Record | None) -> None:
    """Keep the record of a version for others, as long as that is less than an anchor."""
    if record:
        f.outbox.records[record.head.prev] = record
    most = min(core.settings.records, (f.sizes.anchor - 1) // f.sizes.update)
    forget_oldest(f.outbox.records, max(1, most))


def lost(f: FragmentState, peer: str) -> None:
    """A peer is gone, and with it its streams."""
    for name in [name for name in f.outbox.serving if name[0] == peer]:
        del f.outbox.serving[name]
    for name in [name for name in f.outbox.served_at if name[0] == peer]:
        del f.outbox.served_at[name]
