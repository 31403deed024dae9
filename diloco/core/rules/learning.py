"""The progress of inner steps, from a base until it is a contribution (`Loop`, `Learned`).

inner steps -> due -> drafted: the owner makes the payload -> `contributions.captured`
"""

from __future__ import annotations

from diloco.core.events import Capture, Captured, Load, Loaded, Paused, Stepped, Wanted
from diloco.core.facts import Facts
from diloco.core.fragment import FragmentState
from diloco.core.rules import data
from diloco.messages.fields import MAX_TOKENS, MAX_UNIT_RANGES, at_most
from diloco.messages.heads import Line
from diloco.ranges import NONE, union

MOST_CYCLES = 8  # in one contribution; a peer that is in step sends one, and after mishaps a few


# -- the training loop says ------------------------------------------------------------------------


def wanted(core: Facts, event: Wanted) -> None:
    """It wants data, and makes so many inner steps in a cycle."""
    core.loop.cycle = event.cycle or core.loop.cycle
    data.want(core, event.sequences)


def paused(core: Facts, event: Paused) -> None:
    """It evaluates or saves, or goes on after that."""
    core.loop.pauses = event.pauses
    core.made_progress()


def stepped(core: Facts, event: Stepped) -> None:
    """It made an inner step."""
    settings, loop = core.settings, core.loop
    loop.processed = at_most(loop.processed + event.tokens, MAX_TOKENS)
    loop.steps += 1
    loop.pauses = False
    loop.steps_per_s = event.steps_per_s
    core.made_progress(step=True)
    data.consumed(core, event.units)
    if not core.life.begun:
        return  # it warms up beside the swarm
    loop.position += 1
    for f in core.fragments:
        learned = f.learned
        if not (f.stale or learned.loading):  # else what it learned is about to be overwritten
            learned.tokens += event.tokens
            learned.steps += 1
            if f is core.control:
                learned.units = union(learned.units, event.units)
        if learned.steps_left is not None:
            learned.steps_left -= 1
    hurry = [f for f in core.fragments if _hurries(core, f)]
    if settings.staggered:
        number = settings.fragments
        turns = {-(-turn * loop.cycle // number) for turn in range(1, number + 1)}
        loop.turn_due = loop.turn_due or loop.position in turns
        loop.due += [f for f in hurry if f not in loop.due]
    elif loop.position >= loop.cycle or hurry:
        loop.due = [f for f in core.fragments if f in hurry or not _is_ahead(core, f)]
        loop.position = loop.cycle
    loop.position %= loop.cycle


def loaded(core: Facts, event: Loaded) -> None:
    """It goes on from an anchor."""
    f = core.fragments[event.fragment]
    learned = f.learned
    unsent = learned.steps_left is None
    if f.stale or unsent:  # what was learned since is overwritten
        forget(f)
    learned.base = event.head
    learned.steps_left = None
    learned.loading = False
    data.changed(core)
    if unsent and core.life.begun and core.settings.lockstep:
        get_in_step(core)  # the others went on without it, and it would be late in every round


# -- in step with the others -----------------------------------------------------------------------


def first_position(core: Facts) -> int:
    """The position of the others, which have made steps since they told theirs."""
    ahead = [0]
    for member in core.members.all():
        status = member.status
        if status.trains:
            made = 0 if status.waits else (core.now - member.heard_at) * status.steps_per_s
            ahead.append(status.position + int(min(made, core.loop.cycle)))
    return min(max(ahead), core.loop.cycle - 1)


def get_in_step(core: Facts) -> None:
    """Take the position of the others."""
    core.loop.position = first_position(core)


def _hurries(core: Facts, f: FragmentState) -> bool:
    """Return True if what was learned is as much as a line may claim, or would soon be late: a peer
    that is much slower than the rest sends after fewer steps."""
    learned, recent = f.learned, f.tip.book.recent
    if learned.steps >= MOST_CYCLES * core.settings.sync_every:
        return True
    if not learned.tokens or learned.steps_left is not None or own(core, f) is not None:
        return False
    if learned.base not in recent:
        return False
    behind = len(recent) - recent.index(learned.base)
    # versions until training needs a head
    steps = learned.steps
    after = behind * (steps + core.settings.overlap) / steps if behind > 1 else behind
    return 2 * after >= core.settings.late


def _is_ahead(core: Facts, f: FragmentState) -> bool:
    """Return True if other fragments have to catch up with this one first, at a barrier.

    1. The author of fragment 1 freezes, with fragment 0 made. 2. A newcomer learns from both, while
    the others wait for fragment 1, which it sends in the same round as fragment 0. 3. From then on
    its round of each would begin when the others have half of theirs behind them, for ever: they
    wait for its fragment 1, and it waits for their fragment 0.

    What was learned from an older head is in step with the other fragments.
    """
    if not core.settings.barrier or f.learned.base != f.tip.head.id:
        return False
    return f.tip.head.number > min(fragment.tip.head.number for fragment in core.fragments)


def load(core: Facts, f: FragmentState) -> None:
    """Have training go on from the new anchor, but throw no inner step under way away for it."""
    if f.learned.loading or not (core.identity.trains and f.needs_load()):
        return
    in_step = f.learned.steps_left is None and not (f.stale or core.waits or core.loop.pauses)
    if not in_step:
        f.learned.loading = True
        core.act(Load(f.index))


def forget(f: FragmentState) -> None:
    """Forget what was learned here since the base: it is lost, or sent."""
    f.learned.tokens = 0
    f.learned.steps = 0
    f.learned.units = NONE


# -- to a contribution -----------------------------------------------------------------------------


def own(core: Facts, f: FragmentState) -> Line | None:
    """The newest contribution of this peer, while its fate is open in the history here."""
    item = f.pool.get(core.me)
    return f.learned.draft or (item.line if item and not f.tip.objection(item.line) else None)


def take_turn(core: Facts) -> None:
    """Send staggered fragments in turn, in step with the others: each head is one turn."""
    if not core.loop.turn_due:
        return
    learned = [f for f in core.fragments if f.learned.tokens]
    free = [f for f in learned if f.learned.steps_left is None and own(core, f) is None]
    if free:
        heads = sum(f.tip.head.number for f in core.fragments)
        turn = core.loop.next_turn if core.settings.quorum == 1 else heads
        core.loop.due.append(min(free, key=lambda f: (f.index - turn) % len(core.fragments)))
    # else another history took what was learned
    core.loop.turn_due = not free and bool(learned)


def contribute(core: Facts, f: FragmentState) -> None:
    """Send what was learned, when it is due and the contribution before is settled."""
    learned, loop = f.learned, core.loop
    if f not in loop.due or own(core, f) is not None or f.needs_load():
        return
    loop.due.remove(f)
    if not learned.tokens or f.stale:
        return
    clock_ms = core.wall_ms + int(core.now * 1000)
    newest = max(loop.stamp, f.tip.book.of(core.me)[0])
    loop.stamp = at_most(max(clock_ms, newest + 1), MAX_TOKENS)
    learned.draft = Line(
        fragment=f.index,
        peer=core.me,
        stamp=loop.stamp,
        base=learned.base,
        steps=learned.steps,
        tokens=learned.tokens,
        units=learned.units[:MAX_UNIT_RANGES],
        norm=0.0,
        root="0" * 64,
        name=core.identity.name,
    )
    newer = learned.base != f.tip.head.id  # a head that training can go on from at once
    learned.steps_left = 0 if newer else core.settings.overlap
    if core.settings.lockstep and learned.base in f.tip.book.recent[-1:]:
        learned.base = f.tip.head.id  # a version late: in step again, if it waits for the next
    forget(f)
    loop.next_turn = f.index + 1
    core.act(Capture(learned.draft))


def take_draft(f: FragmentState, event: Captured) -> Line | None:
    """The line whose payload is made, and is a draft no more; None if it is out of date."""
    draft = f.learned.draft
    if draft is None or draft.stamp != event.line.stamp:
        return None
    f.learned.draft = None
    return draft


def send_rest(core: Facts) -> None:
    """A peer that leaves sends what it has learned, unless its run has ended."""
    for f in core.fragments:
        if f.learned.steps_left is not None or f.stale:
            if f.learned.units:
                data.changed(core)
            forget(f)  # nothing is loaded any more, so what came after is lost
    core.loop.due = [f for f in core.fragments if f.learned.tokens and not core.life.finished]


# -- accounts --------------------------------------------------------------------------------------


def discarded(core: Facts, f: FragmentState) -> int:
    """Tokens of this peer that are neither in the history here nor on their way there."""
    line = own(core, f)
    under_way = f.learned.tokens + (line.tokens if line else 0)
    return core.loop.processed - f.tip.book.of(core.me)[1] - under_way


def account(core: Facts, f: FragmentState) -> None:
    """Note how `discarded` changes; it becomes less when they are in the history after all."""
    lost = discarded(core, f)
    if lost < 0:  # the history knows of more than the checkpoint did
        core.loop.processed -= lost
        lost = 0
    # a round that is left out is noted at its end
    if lost != f.learned.discarded and (core.life.begun or core.life.leaving):
        core.note("discarded", fragment=f.index, tokens=lost - f.learned.discarded)
        f.learned.discarded = lost
