"""How long things may take, by the pace of this run: steps, sizes and rates as they were measured.

The constants under these are about a process that answers or not: the same run a hundred times
slower merges the same contributions. Sans-IO; seconds.
"""

from __future__ import annotations

from diloco.core.facts import Facts
from diloco.core.fragment import FragmentState
from diloco.core.members import STALL_STEPS


def round_s(core: Facts, f: FragmentState) -> float:
    """Between two versions of a fragment; at least a cycle of inner steps here, and sending what
    was learned in it."""
    times = sorted(f.adopted_at.values())
    versions_s = (times[-1] - times[0]) / max(1, len(times) - 1)
    cycle_s = core.loop.cycle / core.loop.steps_per_s if core.loop.steps_per_s else 0.0
    return max(versions_s, cycle_s + f.sent_s)


def patience_s(core: Facts, f: FragmentState) -> float:
    """How long an author may have a contribution without a version: four rounds at least."""
    return max(core.settings.stuck_s, 4 * round_s(core, f))


def deadline_s(core: Facts, f: FragmentState) -> float:
    """In which the first bytes of an answer come: on thin links they queue behind others."""
    return max(core.settings.deadline_s, round_s(core, f) / 8)


def will_end(core: Facts, f: FragmentState, peer: str) -> bool:
    """Return True if the payload of a contribution arrives here, and at this rate in time."""
    transfer = f.transfers.get(peer)
    if transfer is None or core.now - transfer.moved_at > core.settings.stall_s:
        return False
    took_s = core.now - transfer.since
    return took_s * f.sizes.payload <= patience_s(core, f) * max(1, transfer.nbytes)


def is_under_way(core: Facts, f: FragmentState) -> bool:
    """Return True if nobody else has the tip, while versions are sent from here. With a quorum,
    what comes meanwhile is merged together:

    1. On a thin link a version takes longer to send than an inner step takes. 2. The author's own
    contributions need no link, so it would make version after version of these alone. 3. Those of
    others would be late, and all that the link carries would be out of date.
    """
    since = core.now - patience_s(core, f)
    if any(member.tips.get(f.index) == f.tip.key for member in core.members.all()):
        return False
    if core.settings.looks and len(core.members):
        return f.adopted_at.get(f.tip.head.id, since) > since
    return any(at > since for at in f.outbox.served_at.values())


def first_step_s(core: Facts) -> float:
    """How long a first step may take: where the others' take longer, ten of theirs."""
    paces = [core.loop.steps_per_s, *(member.status.steps_per_s for member in core.members.all())]
    fastest = max(paces, default=0.0)
    return max(core.settings.first_step_s, STALL_STEPS / fastest if fastest else 0.0)


def is_stalled(core: Facts, f: FragmentState) -> bool:
    """Return True if this peer makes no progress, as `Member.stalled` says of others."""
    pace = core.loop.steps_per_s
    limit_s = max(core.settings.stall_s, STALL_STEPS / pace) if pace else first_step_s(core)
    limit_s = max(limit_s, round_s(core, f) if core.waits else 0.0)
    return not core.loop.pauses and core.now - core.progress_at > limit_s
