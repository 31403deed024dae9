"""How peers come and go. Who comes listens, gets what others have, and begins with them."""

from __future__ import annotations

from math import inf

from diloco.core import data, events, pace
from diloco.core.facts import Facts
from diloco.ranges import NONE

LOOK_S = 1.0  # between two looks for silent members


def wake_up(core: Facts, asleep_s: float) -> None:
    """Listen first, without data: the others gave this peer up (SIGSTOP, laptop lid)."""
    core.ready, core.settled_at, core.queue = False, core.now + core.settings.settle_s, NONE
    for member in core.members.all():
        member.heard_at = core.now
    core.changed_data = True
    core.note("slept", seconds=round(asleep_s, 1))


def drop_the_silent(core: Facts) -> None:
    """Give up members that have said nothing for too long."""
    settings = core.settings
    if core.now - core.listened_at >= LOOK_S:
        core.listened_at = core.now
        for peer in core.members.silent(core.now, settings.silence_s, settings.silence_beats):
            core.out.append(events.Disconnect(peer))
            lost(core, events.Lost(peer, "silent"))


def lost(core: Facts, event: events.Lost) -> None:
    """A member is gone: nothing more is expected from it."""
    peer = event.peer
    member = core.members.remove(peer)
    if member is None:
        return
    data.lost(core, peer)
    for f in core.fragments:
        f.ahead.pop(peer, None)
        f.coming.pop(peer, None)
        f.serving = {name: head for name, head in f.serving.items() if name[0] != peer}
        f.served_at = {name: at for name, at in f.served_at.items() if name[0] != peer}
        f.transfers.pop(peer, None)
        f.drop_donor(peer)
        for item in f.pool.values():
            if item.sent_to == peer:
                item.sent_to, item.held_since, item.sending_since = "", None, inf
    kind, live = "leave" if member.status.leaves else "lost", len(core.members) + 1
    core.note(kind, peer=peer, name=member.hello.name, why=event.why, live=live)


def hear_loop(core: Facts, event: events.Event) -> None:
    """The training loop says something."""
    match event:
        case events.Wanted(sequences, cycle):
            core.wanted, core.cycle = sequences, cycle or core.cycle
        case events.Begun():
            core.begun, core.progress_at = True, core.now
            if core.ready:
                core.position = first_position(core)
        case events.Paused(pauses):
            core.pauses, core.progress_at = pauses, core.now
        case events.Leave(finished):
            core.leaving, core.finished = True, finished
            core.leave_by = core.now + max(pace.patience_s(core, f) for f in core.fragments)
        case events.Alone():
            core.min_peers = 1
        case events.Discovered():
            core.settled_at = min(core.settled_at, core.now)


def get_ready(core: Facts) -> None:
    """Who comes listens first, and gets what the others have."""
    if core.ready or core.now < core.settled_at or core.lacks_peers():
        return
    core.goals = core.goals or [max([f.tip.key, *f.greater().values()]) for f in core.fragments]
    goals, shunned = zip(core.fragments, core.goals, strict=True), core.shunned.keys()
    there = all(f.tip.key >= goal or f.greater().keys() <= shunned for f, goal in goals)
    late = core.now > core.settled_at + core.settings.stuck_s
    if (there or late) and all(f.tip.head.prev for f in core.fragments):
        core.ready, core.goals, core.progress_at, core.min_peers = True, [], core.now, 1
        core.position = first_position(core)


def assemble(core: Facts) -> None:
    """All who are here are about to train before anybody does, or the first would be rounds ahead
    before the last have loaded their anchors. Who comes late waits for nobody."""
    if core.assembled or not core.trains_now:
        return
    limits = core.now, core.settings.stall_s, pace.first_step_s(core)
    others = [member for member in core.members.all() if member.hello.trains]
    idle = [member for member in others if not (member.status.trains or member.status.leaves)]
    waits = any(member.status.waits or not member.stalled(*limits) for member in idle)
    core.assembled = core.began() or not (waits or core.lacks_peers())


def first_position(core: Facts) -> int:
    """In step with the others, which have made steps since they said where they are."""
    ahead = [0]
    for member in core.members.all():
        status = member.status
        if status.trains:
            made = 0 if status.waits else (core.now - member.heard_at) * status.steps_per_s
            ahead.append(status.position + int(min(made, core.cycle)))
    return min(max(ahead), core.cycle - 1)


def latest_exit(core: Facts) -> float:
    """When a leaving peer that still serves others goes all the same."""
    return core.leave_by + 3 * max(pace.patience_s(core, f) for f in core.fragments)


def leave(core: Facts) -> None:
    """Who leaves sends what it has learned, and goes when others have that, and its heads."""
    if not core.leaving:
        return
    kept = lacks = making = False
    limit = core.leave_by
    for f in core.fragments:
        if any(core.now - at < pace.round_s(core, f) for at in f.served_at.values()):
            limit = latest_exit(core)
        if f.steps_left is not None or f.stale:
            f.forget()  # nothing is loaded any more, so what came after is lost
        without = [member.tips.get(f.index, (0, "")) < f.tip.key for member in core.members.all()]
        # when the run is over, all end with its last heads; else one of the others has to have them
        if core.finished:
            lacks = lacks or any(without) or bool(f.greater().keys() - core.shunned.keys())
        else:
            lacks = lacks or (bool(without) and all(without))
        making = making or bool(f.draft or f.merge or f.moving)
        useful = [one for one in f.pool.values() if not f.tip.objection(one.line)]
        kept = kept or (not core.over(f.tip) and any(one.held_since is None for one in useful))
    core.due = [f for f in core.fragments if f.unsent and not core.finished]
    if not (core.due or kept or making or lacks) or core.now > limit:
        core.exited = True
        core.out.append(events.Exit())
