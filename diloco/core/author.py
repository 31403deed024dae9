"""Rule 5. The author of the next version closes it when nobody is missing, or when enough
contributions have been here for a while; it takes all to which the book does not object. Sans-IO.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from math import inf

from diloco.core.events import Apply, Merge, Merged, Share
from diloco.core.facts import Facts, Fragment, Item, Moving
from diloco.core.history import follow
from diloco.core.members import PAUSE_LIMIT_S, Member
from diloco.core.units import NONE, overlaps, union
from diloco.messages.fields import MAX_LINES, MAX_TOKENS, at_most
from diloco.messages.heads import Head, Line

HEAVIEST = 2.0  # times the median weight
LOOK_S = 1.0  # between two looks whether a pause has ended
WAITING_S = 5.0  # with a quorum: who has waited longer for another fragment may wait for ever


def close(core: Facts, f: Fragment) -> None:
    """Make the next version, if it is time."""
    if (
        f.merge
        or f.moving
        or f.behind()
        or f.damaged
        or not core.ready
        or core.over(f.tip)
        or core.hands_over()
    ):
        return
    if core.now < f.again:
        return core.wake(f.again)
    here = {peer: item for peer, item in sorted(f.pool.items()) if not f.tip.objection(item.line)}
    whole = _without_collisions(here, f.tip.head.id)
    since = f.adopted_at.get(f.tip.head.id, core.now)
    f.patience.forgive([one.peer for one in core.members.all() if one.resumed_at > since], core.now)
    missing = _missing(core, f, here)
    total, settings = len(whole) + len(missing), core.settings
    need = -(-total // 2) if settings.quorum is None else min(settings.quorum, total)
    if not whole or len(whole) < need:
        return
    f.quorum_at = core.now if f.quorum_at is None else f.quorum_at
    myself = core.me in missing and core.pauses and core.now - core.moved < PAUSE_LIMIT_S
    if settings.barrier and (
        f.patience.pauses(missing, core.now - f.quorum_at, core.now) or myself
    ):
        f.quorum_at = core.now  # the wait begins when the pause has ended
        return core.wake(core.now + LOOK_S)
    rounds_s = {peer: _round_s(core, f, item) for peer, item in whole.items()}
    wait_s = (
        f.patience.wait_s(list(rounds_s.values())) if settings.barrier else _grace_s(core, whole)
    )
    ends_at = f.quorum_at + wait_s
    if missing and core.now < ends_at:
        return core.wake(ends_at)
    since_base_s = {
        peer: item.since - f.adopted_at.get(item.line.base, -inf) for peer, item in whole.items()
    }
    f.patience.closed(since_base_s, missing)
    f.patience.slow |= {one.peer for one in _stalled(core) if one.peer not in here}
    if missing:
        core.note("missing", fragment=f.index, peers=sorted(missing))
    _merge(core, f, list(whole.values())[:MAX_LINES])


def _without_collisions(here: Mapping[str, Item], tip: str) -> dict[str, Item]:
    """Contributions no two of which have the same data; of two that have, a late one is left
    out."""
    whole, taken = dict[str, Item](), NONE
    for peer, item in sorted(here.items(), key=lambda one: (one[1].line.base != tip, one[0])):
        if not item.line.units:
            whole[peer] = item
        elif not overlaps(taken, item.line.units):
            whole[peer], taken = item, union(taken, item.line.units)
    return dict(sorted(whole.items()))


def _missing(core: Facts, f: Fragment, here: Mapping[str, Item]) -> dict[str, Member | None]:
    """Peers for which the version may wait: they train, make progress, and have nothing here."""
    settings, now = core.settings, core.now
    passed = {*here, *core.shunned} | (f.patience.slow if settings.barrier else set())
    missing: dict[str, Member | None] = {}
    passed |= {member.peer for member in _stalled(core)}
    for member in core.members.all():
        if member.status.trains and member.peer not in passed:
            if (
                settings.quorum is not None
                and member.status.waits
                and now - member.moved > WAITING_S
            ):
                continue
            missing[member.peer] = member
    if core.me not in passed and core.trains_now and not core.stalled():
        missing[core.me] = None
    return missing


def _stalled(core: Facts) -> list[Member]:
    """Members that train and make no progress. Who can never contribute stalls again and again, as
    any version lets it make a few inner steps more; so it is slow like who was waited for in vain.
    """
    stall_s, first_step_s = core.settings.stall_s, core.settings.first_step_s
    trainers = [member for member in core.members.all() if member.status.trains]
    return [member for member in trainers if member.stalled(core.now, stall_s, first_step_s)]


def _round_s(core: Facts, f: Fragment, item: Item) -> float:
    """Seconds from the base, or from when the peer began its round, until its contribution was
    here."""
    member = core.members.get(item.line.peer)
    began = f.adopted_at.get(item.line.base, item.since)
    return item.since - (
        max(began, member.began_at) if member and member.began_at <= item.since else began
    )


def _grace_s(core: Facts, whole: Mapping[str, Item]) -> float:
    """With a quorum: a fixed time, or a part of what the overlap hides, so that no inner step
    waits.

    That is gamma (tau xi_step - xi_quorum) of Decoupled DiLoCo (arXiv 2604.21428), for the
    contributor with the least
    time: it needs the update tau inner steps of its own after it took its pseudo-gradient,
        xi_quorum ago.
    """
    settings = core.settings
    if not settings.grace_slack:
        return settings.grace_s
    paces = {peer: core.pace_of(peer) for peer in whole}
    due_at = [
        whole[peer].taken + settings.overlap / pace for peer, pace in paces.items() if pace > 0
    ]
    return max(0.0, settings.grace_slack * (min(due_at, default=core.now) - core.now))


def _merge(core: Facts, f: Fragment, items: Sequence[Item]) -> None:
    book = f.tip.book
    recent = (*book.recent, f.tip.head.id)
    by_line = weights(core.settings.weights, [item.line for item in items])
    shares = []
    for item, weight in zip(items, by_line, strict=True):
        late = len(recent) - 1 - recent.index(item.line.base)
        shares.append(
            Share(
                item.line, item.payload, weight, (1.0 + late) ** -core.settings.staleness_exponent
            )
        )
    delay = (core.settings.delay or core.num_trainers()) if core.settings.windowed else 1
    f.merge = Merge(
        f.index,
        f.tip.head.id,
        f.tip.head.number + 1,
        tuple(shares),
        book.pushes,
        book.delay if book.pushes else delay,
    )
    core.out.append(f.merge)


def merged(core: Facts, event: Merged) -> None:
    """The update of the next version is made, unless the tip has moved meanwhile, or another peer
    is the author now."""
    f = core.fragments[event.fragment]
    merge, f.merge = f.merge, None
    if merge is None or f.tip.head.id != event.base or f.moving or core.author_of(f) != core.me:
        return
    lines = tuple(
        (share.line, 0.0 if share.line.peer in event.left_out else share.weight * share.discount)
        for share in merge.shares
    )
    tokens = sum(line.tokens for line, weight in lines if weight)
    if event.update is None or not tokens:
        f.again = core.now + core.settings.refresh_s
        return
    head = Head(
        f.index,
        f.tip.head.number + 1,
        f.tip.head.id,
        core.me,
        core.heir(f),
        lines,
        merge.delay,
        at_most(f.tip.head.work + tokens, MAX_TOKENS),
        event.digest,
        "0" * 64,
    )
    book, _ = follow(f.tip, head, core.settings.late, core.arithmetic)
    f.moving = Moving(head, book, event.update, own=True)
    core.out.append(
        Apply(f.index, head, book, event.update, float("inf"), f.tip.book.pushes, own=True)
    )


def weights(kind: str, lines: Sequence[Line]) -> list[float]:
    """What contributions weigh (`outer.weights`), at most twice their median, over the weight of
    the first one.

    So equal contributions have weight 1, and sums of 4- and 8-bit payloads are exact in fp32.
    """
    match kind:
        case "tokens":
            raw = [float(line.tokens) for line in lines]
        case "tokens2_per_step":  # Decoupled DiLoCo, arXiv 2604.21428
            raw = [line.tokens**2 / line.steps for line in lines]
        case _:
            raw = [1.0 for _ in lines]
    most = HEAVIEST * statistics.median(raw)
    capped = [min(one, most) for one in raw]
    return [one / capped[0] for one in capped]
