"""How peers come and go (`Life`). A newcomer listens, gets what others have, and begins."""

from __future__ import annotations

from collections.abc import Sequence

from diloco.core import events
from diloco.core.facts import Facts
from diloco.core.rules import contributions, data, giving, learning, pace, tips
from diloco.messages.heads import Key

LOOK_S = 1.0  # between two looks for silent members


def wake_up(core: Facts, asleep_s: float) -> None:
    """Listen first, without data: the others gave this peer up (SIGSTOP, laptop lid)."""
    core.life.ready = False
    core.life.settled_at = core.now + core.settings.settle_s
    core.members.listen(core.now)
    data.give_back(core)
    core.note("slept", seconds=round(asleep_s, 1))


def drop_the_silent(core: Facts) -> None:
    """Give up members that have said nothing for too long."""
    settings = core.settings
    if core.now - core.life.listened_at >= LOOK_S:
        core.life.listened_at = core.now
        for peer in core.members.silent(core.now, settings.silence_s, settings.silence_beats):
            core.act(events.Disconnect(peer))
            lost(core, events.Lost(peer, "silent"))


def lost(core: Facts, event: events.Lost) -> None:
    """A member is gone: nothing more is expected from it."""
    peer = event.peer
    member = core.members.remove(peer, core.now)
    if member is None:
        return
    data.lost(core, peer)
    for f in core.fragments:
        tips.lost(f, peer)
        giving.lost(f, peer)
        contributions.lost(f, peer)
    kind, live = "leave" if member.status.leaves else "lost", len(core.members) + 1
    core.note(kind, peer=peer, name=member.hello.name, why=event.why, live=live)


def hear_loop(core: Facts, event: events.Event) -> None:
    """The training loop says something."""
    match event:
        case events.Begun():
            core.life.begun = True
            core.made_progress()
            if core.life.ready:
                learning.get_in_step(core)
        case events.Leave(finished):
            core.life.leaving = True
            core.life.finished = finished
            core.life.leave_by = core.now + max(pace.patience_s(core, f) for f in core.fragments)
        case events.Alone():
            core.life.min_peers = 1
        case events.Discovered():
            core.life.settled_at = min(core.life.settled_at, core.now)


def get_ready(core: Facts) -> None:
    """A newcomer listens first, and gets what the others have, as long as bytes of it come.

    1. The others make versions of all fragments at a barrier. 2. A newcomer has got the last ones,
    and meanwhile a newer one of one fragment. 3. If it began now, its rounds of that fragment would
    be others than those of the rest, and the swarm would wait for both. So it gets the newer ones
    of all, once.
    """
    moved_at = max(f.inbox.moved_at for f in core.fragments)
    core.life.settled_at = max(core.life.settled_at, moved_at)
    if core.life.ready or core.now < core.life.settled_at or core.lacks_peers():
        return
    if not core.life.goals:
        core.life.goals = _newest(core)
    there = _has(core, core.life.goals)
    uneven = core.settings.barrier and len({f.tip.head.number for f in core.fragments}) > 1
    if there and uneven and not core.life.evened:
        core.life.evened = True
        core.life.goals = _newest(core)
        there = _has(core, core.life.goals)
    late = core.now > core.life.settled_at + core.settings.stuck_s
    if (there or late) and all(f.tip.head.prev for f in core.fragments):
        core.life.ready = True
        core.life.goals = []
        core.life.evened = False
        core.life.min_peers = 1
        core.made_progress()
        learning.get_in_step(core)


def _newest(core: Facts) -> list[Key]:
    """Return by fragment the greatest head of which this peer knows."""
    return [max([f.tip.key, *f.inbox.greater().values()]) for f in core.fragments]


def _has(core: Facts, goals: Sequence[Key]) -> bool:
    """Return True if these heads are here, or only peers that are passed over have them."""
    pairs, shunned = zip(core.fragments, goals, strict=True), core.shunned.keys()
    return all(f.tip.key >= goal or f.inbox.greater().keys() <= shunned for f, goal in pairs)


def assemble(core: Facts) -> None:
    """All who are here are about to train before anybody does, or the first would be rounds ahead
    before the last have loaded their anchors. A latecomer waits for nobody."""
    if core.life.assembled or not core.trains_now:
        return
    limits = core.now, core.settings.stall_s, pace.first_step_s(core)
    others = [member for member in core.members.all() if member.hello.trains]
    idle = [member for member in others if not (member.status.trains or member.status.leaves)]
    waits = any(member.status.waits or not member.stalled(*limits) for member in idle)
    core.life.assembled = core.began() or not (waits or core.lacks_peers())


def latest_exit(core: Facts) -> float:
    """When a leaving peer that still serves others goes all the same."""
    return core.life.leave_by + 3 * max(pace.patience_s(core, f) for f in core.fragments)


def leave(core: Facts) -> None:
    """Send what was learned; exit once another peer has that, and the newest heads of this one."""
    if not core.life.leaving:
        return
    kept = lacks = making = False
    limit = core.life.leave_by
    # those who train still make the last head of a fragment that is behind
    lasts = core.over(core.control.tip) and any(m.status.trains for m in core.members.all())
    for f in core.fragments:
        if any(core.now - at < pace.round_s(core, f) for at in f.outbox.served_at.values()):
            limit = latest_exit(core)
        without = [member.tips.get(f.index, (0, "")) < f.tip.key for member in core.members.all()]
        # when the run is over, all end with its last heads; else one of the others has to have them
        if core.life.finished:
            lacks = lacks or any(without) or bool(f.inbox.greater().keys() - core.shunned.keys())
            lacks = lacks or (lasts and not core.over(f.tip))
        else:
            lacks = lacks or (bool(without) and all(without))
        making = making or bool(f.learned.draft or f.round.merge or f.inbox.moving)
        useful = [item for item in f.pool.values() if not f.tip.objection(item.line)]
        kept = kept or (not core.over(f.tip) and any(item.held_since is None for item in useful))
    learning.send_rest(core)
    if not (core.loop.due or kept or making or lacks) or core.now > limit:
        core.life.exited = True
        core.act(events.Exit())
