"""Rule 4. What a peer has learned flows to the author of the next version until it is in one.
Sans-IO.

inner steps -> due -> captured, signed -> offered to the author, or to a member that hears it -> in
a version
"""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from diloco.core import lifecycle
from diloco.core.events import Capture, Captured, Delivered, Loaded, Push, Stepped
from diloco.core.facts import CONTROL, SHUNNED, Facts, Fragment, Item
from diloco.core.history import is_signed, sign
from diloco.core.units import difference, sound, union
from diloco.messages.control import Answer, Offer
from diloco.messages.fields import MAX_TOKENS, MAX_UNIT_RANGES, at_most
from diloco.messages.heads import Line

# in the steps of one contribution; a peer that is in step sends one cycle, and after mishaps a few
MOST_CYCLES = 8
# tokens, where the manifest names none: larger batches are not known, and a lie ends no run
MOST_PER_STEP = 2**28
LATE_RETRY_S = 1.0  # before a contribution is offered again after a stream broke


# -- learning --------------------------------------------------------------------------------------


def stepped(core: Facts, event: Stepped) -> None:
    """The training loop made an inner step."""
    settings = core.settings
    core.processed, core.steps = at_most(core.processed + event.tokens, MAX_TOKENS), core.steps + 1
    core.steps_per_s, core.pauses, core.moved, core.made_step = (
        event.steps_per_s,
        False,
        core.now,
        True,
    )
    core.queue, core.changed_data = difference(core.queue, event.units), True
    if not core.begun:
        return  # it warms up beside the swarm
    core.position += 1
    for f in core.fragments:
        if not (f.stale or f.loading):  # else what it learned is about to be overwritten
            f.unsent, f.steps = f.unsent + event.tokens, f.steps + 1
        f.waiting = None if f.waiting is None else f.waiting - 1
    if not (core.control.stale or core.control.loading):
        core.control.units = union(core.control.units, event.units)
    if settings.staggered:
        turns = {
            -(-(turn + 1) * core.cycle // settings.fragments) for turn in range(settings.fragments)
        }
        core.turn = core.turn or core.position in turns
        core.due += [f for f in core.fragments if f not in core.due and _hurries(core, f)]
    elif core.position >= core.cycle or any(_hurries(core, f) for f in core.fragments):
        core.due, core.position = list(core.fragments), core.cycle
    core.position %= core.cycle


def _hurries(core: Facts, f: Fragment) -> bool:
    """Whether what was learned is as much as one line may claim, or would soon be late: a peer that
    is much slower than the rest sends after fewer steps.
    """
    if f.steps >= MOST_CYCLES * core.settings.sync_every:
        return True
    recent = f.tip.book.recent
    if not f.unsent or f.waiting is not None or f.base not in recent or own(core, f) is not None:
        return False
    behind = len(recent) - recent.index(f.base)
    # when training needs a head
    after = behind * (f.steps + core.settings.overlap) / f.steps if behind > 1 else behind
    return 2 * after >= core.settings.late


def loaded(core: Facts, event: Loaded) -> None:
    """Training goes on from an anchor."""
    f = core.fragments[event.fragment]
    behind = core.begun and core.settings.lockstep and f.waiting is None
    if f.stale or f.waiting is None:  # what was learned since is overwritten
        f.forget()
    f.base, f.waiting, f.loading, core.changed_data = event.head, None, False, True
    if behind:  # the others went on without it, and it would be late in every round
        core.position = lifecycle.first_position(core)


def own(core: Facts, f: Fragment) -> Line | None:
    """The newest contribution of this peer, while its fate is open in the history here."""
    item = f.pool.get(core.me)
    return f.draft or (item.line if item and not f.tip.objection(item.line) else None)


def take_turn(core: Facts) -> None:
    """Staggered fragments are sent one after another, in step with the others: each head is one
    turn."""
    if not core.turn:
        return
    free = [f for f in core.fragments if f.waiting is None and f.unsent and own(core, f) is None]
    if free:
        turn = (
            core.next
            if core.settings.quorum == 1
            else sum(f.tip.head.number for f in core.fragments)
        )
        core.due.append(min(free, key=lambda f: (f.index - turn) % len(core.fragments)))
    # else another history took what was learned
    core.turn = not free and any(f.unsent for f in core.fragments)


def contribute(core: Facts, f: Fragment) -> None:
    """Send what was learned, when it is due and the contribution before is settled."""
    if f not in core.due or own(core, f) is not None or f.needs_load():
        return
    core.due.remove(f)
    if not f.unsent or f.stale:
        return
    clock_ms = core.wall_ms + int(core.now * 1000)
    core.stamp = at_most(max(clock_ms, core.stamp + 1, f.tip.book.of(core.me)[0] + 1), MAX_TOKENS)
    said = core.stamp, f.base, f.steps, f.unsent, f.units[:MAX_UNIT_RANGES]
    f.draft = Line(f.index, core.me, *said, 0.0, "0" * 64, core.identity.name)
    # else a newer head is here already
    f.waiting = core.settings.overlap if f.base == f.tip.head.id else 0
    f.forget()
    core.next = f.index + 1
    core.out.append(Capture(f.draft))


def captured(core: Facts, event: Captured) -> None:
    """The payload of this peer's contribution is made."""
    f = core.fragments[event.line.fragment]
    if f.draft is None or f.draft.stamp != event.line.stamp:
        return
    line = sign(
        replace(f.draft, norm=event.norm, root=event.root),
        core.identity.signer,
        core.identity.run_id,
    )
    f.draft = None
    f.pool[core.me] = Item(line, event.payload, core.now, core.now)


# -- to the author ---------------------------------------------------------------------------------


def pass_on(core: Facts, f: Fragment, author: str) -> None:
    """Contributions go to the author: this peer's at once, what others have left here after a
    while."""
    patience_s, via = core.patience_s(f), core.next_hop(author)
    for item in f.pool.values():
        if item.got is not None and core.settings.barrier and core.members.any_pauses(core.now):
            item.got = core.now  # the author may wait for that peer
        known = item.got if item.to == via else None
        wait_s = 0.0 if item.line.peer == core.me or core.leaving else core.settings.refresh_s
        if core.now < item.since + wait_s or f.tip.objection(item.line):
            continue
        if known is not None and core.now - known > patience_s:
            core.shun(author, SHUNNED * patience_s)
            core.note("stuck", fragment=f.index, author=author, waited_s=round(core.now - known, 1))
        elif (
            via == author
            and item.line.peer == core.me
            and item.to == ""
            and item.got is None
            and not item.asked
        ):
            # it is wanted, as it is new
            item.to, item.again = via, core.now + core.deadline_s(f.sizes.payload)
            core.out.append(Push(via, item.line, item.payload, 0))
        elif via and (item.to != via or core.now >= item.again):
            item.to, item.again, item.got, item.asked = (
                via,
                core.now + core.settings.refresh_s,
                known,
                True,
            )
            core.send(via, Offer(item.line, min(core.now - item.taken, 1e8)))


def offered(core: Facts, peer: str, offer: Offer) -> None:
    """A peer has a contribution for the next version."""
    line = offer.line
    core.send(peer, Answer(line.fragment, line.peer, line.stamp, judged(core, line)))


def judged(core: Facts, line: Line) -> Literal["want", "got", "no"]:
    """Whether the payload of a contribution is wanted here."""
    if line.fragment >= len(core.fragments) or impossible(core, line):
        return "no"
    f = core.fragments[line.fragment]
    known = f.pool.get(line.peer)
    if known and known.line == line:
        return "got"
    if f.tip.objection(line) == "in" or (known and known.line.stamp > line.stamp):
        return "no"
    if not known and _is_full(core, f) and (f.tip.objection(line) or not _misfit(core, f)):
        return "no"
    return (
        "want" if is_signed(line, line.peer, core.identity.signer, core.identity.run_id) else "no"
    )


def _is_full(core: Facts, f: Fragment) -> bool:
    return len(f.pool.keys() - {core.me}) >= core.settings.pool


def _misfit(core: Facts, f: Fragment) -> str:
    """Whose contribution is for another tip, and makes room for one that fits this tip."""
    return next(
        (peer for peer, item in f.pool.items() if peer != core.me and f.tip.objection(item.line)),
        "",
    )


def impossible(core: Facts, line: Line) -> bool:
    """Whether no honest peer makes these claims."""
    claims = line.tokens > line.steps * (core.identity.tokens_per_step or MOST_PER_STEP)
    ranges = not sound(line.units) or (bool(line.units) and line.fragment != CONTROL)
    return claims or ranges or line.steps > MOST_CYCLES * core.settings.sync_every


def answered(core: Facts, peer: str, answer: Answer) -> None:
    """A peer says what it does with an offer."""
    if answer.fragment >= len(core.fragments):
        return
    f = core.fragments[answer.fragment]
    item = f.pool.get(answer.peer)
    if item and item.line.stamp == answer.stamp and item.to == peer:
        wants, item.asked = answer.says == "want" and item.asked, False
        if wants:
            item.again, item.got = core.now + core.deadline_s(f.sizes.payload), None
            core.out.append(Push(peer, item.line, item.payload, answer.at))
        elif answer.says == "got" and item.got is None:
            item.got = core.now


def delivered(core: Facts, event: Delivered) -> None:
    """The payload of a contribution that was wanted is here."""
    line = event.line
    if judged(core, line) == "want":
        f = core.fragments[line.fragment]
        if line.peer not in f.pool and _is_full(core, f):
            f.pool.pop(_misfit(core, f), None)
        f.pool[line.peer] = Item(line, event.payload, core.now, core.now)
        core.changed_data = core.changed_data or f is core.control
    offered(core, event.peer, Offer(line))


def not_sent(core: Facts, peer: str, line: Line) -> None:
    """The stream of a payload broke."""
    item = core.fragments[line.fragment].pool.get(line.peer)
    if item and item.line == line and item.to == peer:
        item.again, item.got = core.now + LATE_RETRY_S, None


# -- accounts --------------------------------------------------------------------------------------


def discarded(core: Facts, f: Fragment) -> int:
    """Tokens that this peer has processed, and that are neither in the history here nor on their
    way there."""
    open_ = own(core, f)
    return core.processed - f.tip.book.of(core.me)[1] - f.unsent - (open_.tokens if open_ else 0)


def account(core: Facts, f: Fragment) -> None:
    """Say it when that changes; by less than nothing when they are in the history after all."""
    lost = discarded(core, f)
    if lost < 0:  # the history knows of more than the checkpoint did
        core.processed, lost = core.processed - lost, 0
    # a round that is left out is said at its end
    if lost != f.discarded and (core.begun or core.leaving):
        core.note("discarded", fragment=f.index, tokens=lost - f.discarded)
        f.discarded = lost
