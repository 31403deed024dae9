"""How a peer comes and goes: it listens, has what the others have, begins with them, and leaves
nothing behind."""

from __future__ import annotations

from diloco.core import events
from diloco.core.facts import Facts


def get_ready(core: Facts) -> None:
    """Who comes listens first, and gets what the others have."""
    if core.ready or core.now < core.settled_at or core.lacks_peers():
        return
    core.goals = core.goals or [max([f.tip.key, *f.greater().values()]) for f in core.fragments]
    there = all(
        f.tip.key >= goal or f.greater().keys() <= core.shunned.keys()
        for f, goal in zip(core.fragments, core.goals, strict=True)
    )
    late = core.now > core.settled_at + core.settings.stuck_s
    if (there or late) and all(f.tip.head.prev for f in core.fragments):
        core.ready, core.goals, core.moved, core.min_peers = True, [], core.now, 1
        core.position = first_position(core)


def assemble(core: Facts) -> None:
    """All who are here have to be about to train before anybody does; who comes late waits for
    nobody. Without that the first ones would be rounds ahead before the last ones have loaded their
    anchors.
    """
    if core.assembled or not core.trains_now:
        return
    stall_s, first_step_s = core.settings.stall_s, core.settings.first_step_s
    waits = any(
        one.status.waits or not one.stalled(core.now, stall_s, first_step_s)
        for one in core.members.all()
        if one.hello.trains and not (one.status.trains or one.status.leaves)
    )
    core.assembled = core.began() or not (waits or core.lacks_peers())


def first_position(core: Facts) -> int:
    """In step with the others, which have made steps since they said where they are."""
    ahead = [0]
    for member in core.members.all():
        status = member.status
        if status.trains:
            made = 0 if status.waits else (core.now - member.heard) * status.steps_per_s
            ahead.append(status.position + int(min(made, core.cycle)))
    return min(max(ahead), core.cycle - 1)


def leave(core: Facts) -> None:
    """Who leaves sends what it has learned, and goes when others have that, and its heads."""
    if not core.leaving:
        return
    for f in core.fragments:
        # nothing is loaded any more, so what came after is lost
        if f.waiting is not None or f.stale:
            f.forget()
    core.due = [f for f in core.fragments if f.unsent and not core.finished]
    others = core.members.all()
    kept = any(
        item.got is None and not f.tip.objection(item.line) and not core.over(f.tip)
        for f in core.fragments
        for item in f.pool.values()
    )
    making = any(f.draft or f.merge or f.moving for f in core.fragments)
    lacks = [
        [one for one in others if tuple(one.tips.get(f.index, (0, ""))) < f.tip.key]
        for f in core.fragments
    ]
    # When the run is over, all others want its last heads; else it is enough that somebody has
    # them.
    alone = bool(others) and any(
        missing if core.finished else len(missing) == len(others) for missing in lacks
    )
    if not (core.due or kept or making or alone) or core.now > core.leave_by:
        core.exited = True
        core.out.append(events.Exit())
