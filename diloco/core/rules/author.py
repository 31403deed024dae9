"""Rule 5 (`Closing`). The author of the next version closes it when nobody is missing, or when
enough contributions have been here for a while; it takes all to which the book does not object."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from math import inf

from diloco.core.events import Merge, Merged, Share
from diloco.core.facts import SHUNNED, Facts
from diloco.core.fragment import Contribution, FragmentState
from diloco.core.history import follow
from diloco.core.members import PAUSE_LIMIT_S, PAUSE_ROUNDS, Member
from diloco.core.rules import pace, tips
from diloco.messages.fields import MAX_LINES, MAX_TOKENS, at_most
from diloco.messages.heads import Head, Line
from diloco.ranges import NONE, count, overlaps, union

HEAVIEST = 2.0  # times the median weight
ON_PROBATION = 0.25  # times the weight; a power of two, so sums of payloads stay exact
LOOKS = 100  # in a round, whether a wait has ended of which nobody says so
WAITING_S = 5.0  # with a quorum: who waits longer, and a quarter of a round, may wait for ever


def close(core: Facts, f: FragmentState) -> None:
    """Make the next version, if it is time."""
    settings, patience, now = core.settings, f.round.patience, core.now
    moves = f.inbox.moving or f.inbox.behind() or f.inbox.damaged
    if moves or f.round.merge or core.over(f.tip) or core.hands_over() or not core.life.ready:
        return
    if now < f.round.merge_at:
        return core.wake(f.round.merge_at)
    here = {peer: item for peer, item in sorted(f.pool.items()) if not f.tip.objection(item.line)}
    chosen = _without_collisions(here, f.tip.head.id)
    since = f.adopted_at.get(f.tip.head.id, now)
    patience.forgive(
        [member.peer for member in core.members.all() if member.resumed_at > since], now
    )
    stalled = _stalled(core, f)
    missing = _missing(core, f, {*here, *stalled})
    total = len(chosen) + len(missing)
    need = -(-total // 2) if settings.quorum is None else min(settings.quorum, total)
    if not chosen or len(chosen) < need:
        return
    if f.round.quorum[0] != f.tip.head.id:
        f.round.quorum = (f.tip.head.id, now)
    quorum_at = f.round.quorum[1]
    if settings.quorum is not None and pace.is_under_way(core, f):
        return _look_again(core, f)
    round_s = pace.round_s(core, f)
    pause_limit_s = max(PAUSE_LIMIT_S, PAUSE_ROUNDS * round_s)
    myself = core.me in missing and core.loop.pauses and now - core.progress_at < pause_limit_s
    if settings.barrier and (patience.pauses(missing, now - quorum_at, now, round_s) or myself):
        f.round.quorum = (f.tip.head.id, now)  # the wait begins when the pause has ended
        return _look_again(core, f)
    if settings.barrier:
        rounds_s = [_round_s(core, f, item) for item in chosen.values()]
        closes_at = quorum_at + patience.wait_s(rounds_s)
    else:
        closes_at = _grace_until(core, quorum_at, chosen)
    if missing and now < closes_at:
        return core.wake(closes_at)
    if settings.barrier and any(pace.will_end(core, f, peer) for peer in missing):
        return _look_again(core, f)
    came = {peer: f.adopted_at.get(item.line.base, -inf) for peer, item in chosen.items()}
    patience.closed({peer: item.arrived_at - came[peer] for peer, item in chosen.items()}, missing)
    patience.slow |= stalled - here.keys()
    if missing:
        core.note("missing", fragment=f.index, peers=sorted(missing))
    _merge(core, f, list(chosen.values())[:MAX_LINES])


def _look_again(core: Facts, f: FragmentState) -> None:
    core.wake_after(core.now, max(core.settings.tick_s, pace.round_s(core, f) / LOOKS))


def _without_collisions(here: Mapping[str, Contribution], tip: str) -> dict[str, Contribution]:
    """Contributions of which no two have the same data; of two that have, a late one goes."""
    units = [item.line.units for item in here.values()]
    if count(union(*units)) == sum(map(count, units)):  # else it takes the square of the peers
        return dict(here)
    chosen, taken = dict[str, Contribution](), NONE
    for peer, item in sorted(here.items(), key=lambda item: (item[1].line.base != tip, item[0])):
        if not overlaps(taken, item.line.units):
            chosen[peer], taken = item, union(taken, item.line.units)
    return dict(sorted(chosen.items()))


def _missing(core: Facts, f: FragmentState, passed: set[str]) -> dict[str, Member | None]:
    """Peers for which the version may wait: they train, and none of them is to be `passed` over, as
    it has something here, or makes no progress."""
    passed |= core.shunned.keys()
    if core.settings.barrier:
        passed |= f.round.patience.slow
    missing: dict[str, Member | None] = {}
    waiting_s = max(WAITING_S, pace.round_s(core, f) / 4)
    for member in core.members.all():
        waits = member.status.waits and core.now - member.progress_at > waiting_s
        passed_over = member.peer in passed or (waits and core.settings.quorum is not None)
        if member.status.trains and not passed_over:
            missing[member.peer] = member
    if core.me not in passed and core.trains_now and not pace.is_stalled(core, f):
        missing[core.me] = None
    return missing


def _stalled(core: Facts, f: FragmentState) -> set[str]:
    """Members that train and make no progress. They are slow, as one that can never contribute
    stalls again and again: each version lets it make a few inner steps more."""
    limits = core.now, core.settings.stall_s, pace.first_step_s(core), pace.round_s(core, f)
    trainers = (member for member in core.members.all() if member.status.trains)
    stalled = {member.peer for member in trainers if member.stalled(*limits)}
    return {peer for peer in stalled if not pace.will_end(core, f, peer)}


def _round_s(core: Facts, f: FragmentState, item: Contribution) -> float:
    """Seconds from the base, or from when the peer began its round, until its contribution came.
    Who has sent it is in its next round already, which began less than these inner steps ago."""
    began, line = f.adopted_at.get(item.line.base, item.arrived_at), item.line
    member = core.members.get(line.peer)
    if member and member.status.steps_per_s:
        latest = item.captured_at - line.steps / member.status.steps_per_s / 2
        rounds = (member.began_at, member.began_before)
        began = max([began, *(at for at in rounds if at <= latest)])
    return item.arrived_at - began


def _grace_until(core: Facts, quorum_at: float, chosen: Mapping[str, Contribution]) -> float:
    """With a quorum: a fixed time, or a part of what the overlap hides, so no inner step waits.

    That is gamma (tau xi_step - xi_quorum) of Decoupled DiLoCo (arXiv 2604.21428), for the
    contributor with the least time: it needs the update tau inner steps of its own after it took
    its pseudo-gradient, xi_quorum ago. What is left of that when the version closes is at least
    1 / gamma of the grace, so that it can be sent. A fixed time: a wait that is planned anew at
    every look would need a look for each.
    """
    settings = core.settings
    if not settings.grace_slack:
        return quorum_at + settings.grace_s
    told = {member.peer: member.status.steps_per_s for member in core.members.all()}
    told[core.me] = core.loop.steps_per_s
    paces = ((item, told.get(peer, 0.0)) for peer, item in chosen.items())
    due_at = [item.captured_at + settings.overlap / pace for item, pace in paces if pace > 0]
    earliest = max(quorum_at, min(due_at, default=quorum_at))
    return (quorum_at + settings.grace_slack * earliest) / (1 + settings.grace_slack)


def _merge(core: Facts, f: FragmentState, items: Sequence[Contribution]) -> None:
    settings, head, book = core.settings, f.tip.head, f.tip.book
    recent, shares = (*book.recent, head.id), list[Share]()
    new = [book.contributions(item.line.peer) < settings.probation for item in items]
    by_line = weights(settings.weights, [item.line for item in items], new)
    for item, weight in zip(items, by_line, strict=True):
        late = len(recent) - 1 - recent.index(item.line.base)
        discount = (1.0 + late) ** -settings.staleness_exponent
        shares.append(Share(item.line, item.payload, weight, discount))
    delay = (settings.delay or core.num_trainers()) if settings.windowed else 1
    window = book.pushes, book.delay if book.pushes else delay
    f.round.merge = Merge(f.index, head.id, head.number + 1, tuple(shares), *window)
    core.act(f.round.merge)
    # What others carry arrives late, so rounds are long for all. Of a peer that has left since its
    # base they carry the last.
    carried = [item for item in items if item.carrier not in ("", item.line.peer)]
    began = {item.line.peer: f.adopted_at.get(item.line.base, core.now) for item in carried}
    far = [peer for peer, at in began.items() if not core.members.was_here(peer, at)]
    if 2 * len(far) >= sum(item.line.peer != core.me for item in items) > 0:
        core.stand_back(far, SHUNNED * pace.patience_s(core, f))


def merged(core: Facts, event: Merged) -> None:
    """The update is made; in vain if the tip has moved, or another peer is the author by now."""
    f = core.fragments[event.fragment]
    here, merge = f.tip.head, f.round.merge
    others = here.id != event.base or f.inbox.moving or core.author_of(f) != core.me
    f.round.merge = None
    if merge is None or others or core.over(f.tip):
        return
    left_out = event.left_out
    lines = tuple(
        (share.line, 0.0 if share.line.peer in left_out else share.weight * share.discount)
        for share in merge.shares
    )
    tokens = sum(line.tokens for line, weight in lines if weight)
    if event.update is None or not tokens:
        f.round.merge_at = core.now + core.settings.refresh_s
        return
    head = Head(
        fragment=f.index,
        number=merge.number,
        prev=here.id,
        author=core.me,
        next=core.heir(f),
        lines=lines,
        delay=merge.delay,
        work=at_most(here.work + tokens, MAX_TOKENS),
        update=event.digest,
        state="0" * 64,
    )
    book, _ = follow(f.tip, head, core.settings.late, core.arithmetic)
    tips.move_own(core, f, head, book, event.update)


def weights(kind: str, lines: Sequence[Line], on_probation: Sequence[bool]) -> list[float]:
    """Weights of contributions (`outer.weights`), at most twice their median, over the weight of
    the first: equal ones weigh 1, so that sums of 4- and 8-bit payloads are exact in fp32.

    One `on_probation` weighs a quarter. All of a swarm that begins are; they weigh as much as each
    other. A liar within norm and angle costs as much as its weight (`scripts/LOG.md`, liars).
    """
    match kind:
        case "tokens":
            raw = [float(line.tokens) for line in lines]
        case "tokens2_per_step":  # Decoupled DiLoCo, arXiv 2604.21428
            raw = [line.tokens**2 / line.steps for line in lines]
        case _:
            raw = [1.0 for _ in lines]
    most = HEAVIEST * statistics.median(raw)
    capped = [
        min(weight, most) * (ON_PROBATION if new else 1.0)
        for weight, new in zip(raw, on_probation, strict=True)
    ]
    return [weight / capped[0] for weight in capped]
