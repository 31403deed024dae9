"""Rule 5. The author of the next version closes it when nobody is missing, or when enough contributions have been here
for a while; it takes all to which the book does not object. Sans-IO.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from diloco.core.events import Apply, Merge, Merged, Share
from diloco.core.facts import Facts, Fragment, Item, Moving
from diloco.core.history import follow
from diloco.core.members import Member
from diloco.core.units import NONE, overlaps, union
from diloco.messages.fields import MAX_LINES, MAX_TOKENS, at_most
from diloco.messages.heads import Head, Line

__all__ = ["close", "merged", "weights"]

HEAVIEST = 2.0  # times the median weight
WAITING_S = 5.0  # with a quorum: who has waited longer for another fragment may wait for ever


def close(core: Facts, f: Fragment) -> None:
    """Make the next version, if it is time."""
    if f.merge or f.moving or f.behind() or f.damaged or not core.ready or core.over(f.tip):
        return
    if core.now < f.again:
        return core.wake(f.again)
    here = {peer: item for peer, item in sorted(f.bag.items()) if not f.tip.objection(item.line)}
    whole = _without_collisions(here)
    missing = _missing(core, f, here)
    total, settings = len(whole) + len(missing), core.settings
    need = -(-total // 2) if settings.quorum is None else min(settings.quorum, total)
    if not whole or len(whole) < need:
        return
    f.enough = core.now if f.enough is None else f.enough
    rounds_s = {peer: _round_s(core, f, item) for peer, item in whole.items()}
    wait_s = f.patience.wait_s(list(rounds_s.values())) if settings.barrier else _grace_s(core, whole)
    pause_s = max((f.patience.pause_s(member, core.now) for member in missing.values()), default=0.0)
    ends_at = f.enough + wait_s + (pause_s if settings.barrier else 0.0)
    if missing and core.now < ends_at:
        return core.wake(ends_at)
    f.patience.closed(rounds_s, missing, core.now - f.enough - wait_s, core.now)
    if missing:
        core.note("missing", fragment=f.index, peers=sorted(missing))
    _merge(core, f, list(whole.values())[:MAX_LINES])


def _without_collisions(here: Mapping[str, Item]) -> dict[str, Item]:
    """Contributions no two of which have the same data."""
    whole, taken = dict[str, Item](), NONE
    for peer, item in here.items():
        if not item.line.units:
            whole[peer] = item
        elif not overlaps(taken, item.line.units):
            whole[peer], taken = item, union(taken, item.line.units)
    return whole


def _missing(core: Facts, f: Fragment, here: Mapping[str, Item]) -> dict[str, Member | None]:
    """Peers for which the version may wait: they train, make progress, and have nothing here."""
    settings, now = core.settings, core.now
    passed = {*here, *core.shunned} | (f.patience.slow if settings.barrier else set())
    missing: dict[str, Member | None] = {}
    for member in core.members.all():
        if member.status.trains and member.peer not in passed:
            if member.stalled(now, settings.stall_s, settings.first_step_s):
                continue
            if settings.quorum is not None and member.status.waits and now - member.moved > WAITING_S:
                continue
            missing[member.peer] = member
    if core.me not in passed and core.trains_now and not core.stalled():
        missing[core.me] = None
    return missing


def _round_s(core: Facts, f: Fragment, item: Item) -> float:
    """Seconds from the base, or from when the peer began its round, until its contribution was here."""
    member = core.members.get(item.line.peer)
    began = f.came.get(item.line.base, item.since)
    return item.since - (max(began, member.began_at) if member and member.began_at <= item.since else began)


def _grace_s(core: Facts, whole: Mapping[str, Item]) -> float:
    """With a quorum: a fixed time, or a part of what the overlap hides, so that no inner step waits.

    That is gamma (tau xi_step - (xi_quorum + xi_sync)) of Decoupled DiLoCo (arXiv 2604.21428), for the contributor
    with the least time: it needs the update tau inner steps of its own after it took its pseudo-gradient, xi_quorum
    have passed since then, and the update will be there xi_sync after the decision to close.
    """
    settings = core.settings
    if not settings.grace_slack:
        return settings.grace_s
    paces = {peer: core.pace_of(peer) for peer in whole}
    due_at = [whole[peer].taken + settings.overlap / pace for peer, pace in paces.items() if pace > 0]
    return max(0.0, settings.grace_slack * (min(due_at, default=core.now) - core.now - core.sync_s))


def _merge(core: Facts, f: Fragment, items: Sequence[Item]) -> None:
    book = f.tip.book
    recent = (*book.recent, f.tip.head.id)
    by_line = weights(core.settings.weights, [item.line for item in items])
    shares = []
    for item, weight in zip(items, by_line, strict=True):
        late = len(recent) - 1 - recent.index(item.line.base)
        shares.append(Share(item.line, item.payload, weight, (1.0 + late) ** -core.settings.staleness_exponent))
    delay = (core.settings.delay or core.num_trainers()) if core.settings.windowed else 1
    f.merge = Merge(
        f.index, f.tip.head.id, f.tip.head.number + 1, tuple(shares), book.pushes, book.delay if book.pushes else delay
    )
    core.out.append(f.merge)


def merged(core: Facts, event: Merged) -> None:
    """The update of the next version is made, unless the tip has moved meanwhile, or another peer is the author now."""
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
        f.index, f.tip.head.number + 1, f.tip.head.id, core.me, core.heir(f), lines, merge.delay,
        at_most(f.tip.head.work + tokens, MAX_TOKENS), event.digest, "0" * 64,
    )  # fmt: skip
    book, _ = follow(f.tip, head, core.settings.late, core.arithmetic)
    f.moving = Moving(head, book, event.update, own=True)
    core.out.append(Apply(f.index, head, book, event.update, float("inf"), f.tip.book.pushes, own=True))


def weights(kind: str, lines: Sequence[Line]) -> list[float]:
    """What contributions weigh (`outer.weights`), at most twice their median, over the weight of the first one.

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
