"""Rule 4. What a peer has learned flows to the author of the next version until it is in one.

inner steps -> due -> captured, signed -> offered to the author, or to a member that hears it -> in
"""

from __future__ import annotations

from math import inf
from typing import Literal

from msgspec.structs import replace

from diloco.core import lifecycle, pace
from diloco.core.events import Capture, Captured, Delivered, Loaded, SendPayload, Stepped
from diloco.core.facts import CONTROL, SHUNNED, Contribution, Facts, FragmentState, Transfer
from diloco.core.members import MAX_PEERS
from diloco.messages.control import Answer, Offer
from diloco.messages.fields import MAX_SECONDS, MAX_TOKENS, MAX_UNIT_RANGES, at_most, forget_oldest
from diloco.messages.heads import Line
from diloco.ranges import difference, sound, union

MOST_CYCLES = 8  # in one contribution; a peer that is in step sends one, and after mishaps a few
MOST_PER_STEP = 2**28  # tokens, where the manifest names none: a lie ends no run
LATE_RETRY_S = 1.0  # before a contribution is offered again after a stream broke


# -- learning --------------------------------------------------------------------------------------


def stepped(core: Facts, event: Stepped) -> None:
    """The training loop made an inner step."""
    settings, control = core.settings, core.control
    core.processed, core.steps = at_most(core.processed + event.tokens, MAX_TOKENS), core.steps + 1
    core.progress_at, core.made_step, core.pauses = core.now, True, False
    core.steps_per_s, core.changed_data = event.steps_per_s, True
    core.queue = difference(core.queue, event.units)
    if not core.begun:
        return  # it warms up beside the swarm
    core.position += 1
    if not (control.stale or control.loading):  # else what it learned is about to be overwritten
        control.units = union(control.units, event.units)
    for f in core.fragments:
        if not (f.stale or f.loading):
            f.unsent, f.steps = f.unsent + event.tokens, f.steps + 1
        f.steps_left = None if f.steps_left is None else f.steps_left - 1
    hurry = [f for f in core.fragments if _hurries(core, f)]
    if settings.staggered:
        number = settings.fragments
        turns = {-(-turn * core.cycle // number) for turn in range(1, number + 1)}
        core.turn_due = core.turn_due or core.position in turns
        core.due += [f for f in hurry if f not in core.due]
    elif core.position >= core.cycle or hurry:
        core.due, core.position = list(core.fragments), core.cycle
    core.position %= core.cycle


def _hurries(core: Facts, f: FragmentState) -> bool:
    """Whether what was learned is as much as a line may claim, or would soon be late: a peer that
    is much slower than the rest sends after fewer steps."""
    if f.steps >= MOST_CYCLES * core.settings.sync_every:
        return True
    recent = f.tip.book.recent
    if not f.unsent or f.steps_left is not None or f.base not in recent or own(core, f) is not None:
        return False
    behind = len(recent) - recent.index(f.base)
    # versions until training needs a head
    after = behind * (f.steps + core.settings.overlap) / f.steps if behind > 1 else behind
    return 2 * after >= core.settings.late


def loaded(core: Facts, event: Loaded) -> None:
    """Training goes on from an anchor."""
    f = core.fragments[event.fragment]
    behind = core.begun and core.settings.lockstep and f.steps_left is None
    if f.stale or f.steps_left is None:  # what was learned since is overwritten
        f.forget()
    f.base, f.steps_left, f.loading, core.changed_data = event.head, None, False, True
    if behind:  # the others went on without it, and it would be late in every round
        core.position = lifecycle.first_position(core)


def own(core: Facts, f: FragmentState) -> Line | None:
    """The newest contribution of this peer, while its fate is open in the history here."""
    item = f.pool.get(core.me)
    return f.draft or (item.line if item and not f.tip.objection(item.line) else None)


def take_turn(core: Facts) -> None:
    """Send staggered fragments in turn, in step with the others: each head is one turn."""
    if not core.turn_due:
        return
    free = [f for f in core.fragments if f.steps_left is None and f.unsent and own(core, f) is None]
    if free:
        heads = sum(f.tip.head.number for f in core.fragments)
        turn = core.next_turn if core.settings.quorum == 1 else heads
        core.due.append(min(free, key=lambda f: (f.index - turn) % len(core.fragments)))
    # else another history took what was learned
    core.turn_due = not free and any(f.unsent for f in core.fragments)


def contribute(core: Facts, f: FragmentState) -> None:
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
    newer = f.base != f.tip.head.id  # a head that training can go on from at once
    f.steps_left = 0 if newer else core.settings.overlap
    f.forget()
    core.next_turn = f.index + 1
    core.out.append(Capture(f.draft))


def captured(core: Facts, event: Captured) -> None:
    """The payload of this peer's contribution is made."""
    f = core.fragments[event.line.fragment]
    if f.draft is not None and f.draft.stamp == event.line.stamp:
        line = core.sign(replace(f.draft, norm=event.norm, root=event.root))
        f.pool[core.me], f.draft = Contribution(line, event.payload, core.now, core.now), None


# -- to the author ---------------------------------------------------------------------------------


def pass_on(core: Facts, f: FragmentState, author: str) -> None:
    """Contributions go to the author: this peer's at once, those of others after a while.

    1. The author makes the run's last version, so it is over, and leaves. 2. Others hear of it, but
    lack it yet, and for them another peer is the author. 3. It gets nothing that may be in there.
    """
    if f.behind() and author != f.tip.head.next:
        return
    patience_s, via, now = pace.patience_s(core, f), core.next_hop(author), core.now
    round_s = pace.round_s(core, f)
    if core.settings.barrier and core.members.any_moves(now - core.settings.stall_s):
        patience_s *= 2  # the author may wait for that peer
    for item in f.pool.values():
        mine = item.line.peer == core.me
        # the author may wait for a peer that pauses, or has made versions that are still to come
        pauses = core.settings.barrier and core.members.any_pauses(now, round_s)
        if item.held_since is not None and (pauses or f.behind()):
            item.held_since = now
        known = item.held_since if item.sent_to == via else None
        wait_s = 0.0 if mine or core.leaving else core.settings.refresh_s
        if now < item.arrived_at + wait_s or f.tip.objection(item.line):
            continue
        is_new = mine and not item.sent_to and item.held_since is None and not item.unanswered
        if known is not None and now - known > patience_s:
            core.shun(author, SHUNNED * pace.patience_s(core, f))
            core.note("stuck", fragment=f.index, author=author, waited_s=round(now - known, 1))
        elif via == author and is_new:  # it is wanted
            item.sent_to = via
            _send(core, f, item, 0)
        elif via and (item.sent_to != via or now >= item.offer_at):
            item.sent_to, item.offer_at = via, now + core.settings.refresh_s
            item.held_since, item.unanswered = known, True
            core.send(via, Offer(item.line))


def _send(core: Facts, f: FragmentState, item: Contribution, at: int) -> None:
    """Send a payload. It is offered again if no byte of it arrives; else its stream may break."""
    item.offer_at, item.sending_since = core.now + pace.deadline_s(core, f), core.now
    item.sent_bytes = at
    age_s = min(core.now - item.captured_at, MAX_SECONDS)
    core.out.append(SendPayload(item.sent_to, item.line, item.payload, at, age_s))


def moved(core: Facts, peer: str, line: Line, nbytes: int) -> None:
    """So many bytes of a payload have arrived: there, or from that peer here."""
    f = core.fragments[line.fragment]
    item = f.pool.get(line.peer)
    if item is None or item.line != line:
        transfer = f.transfers.get(line.peer)
        since = transfer.since if transfer and transfer.stamp == line.stamp else core.now
        f.transfers[line.peer] = Transfer(line.stamp, since, core.now, nbytes)
        forget_oldest(f.transfers, MAX_PEERS)
    elif item.sent_to == peer and item.sending_since < inf:
        if line.peer == core.me:
            core.progress(nbytes - item.sent_bytes)
        item.offer_at, item.sent_bytes = inf, nbytes


def offered(core: Facts, peer: str, offer: Offer) -> None:
    """A peer has a contribution for the next version."""
    line = offer.line
    core.send(peer, Answer(line.fragment, line.peer, line.stamp, judged(core, line)))


def judged(core: Facts, line: Line) -> Literal["want", "got", "no"]:
    """Whether the payload of a contribution is wanted here."""
    if line.fragment >= len(core.fragments) or impossible(core, line):
        return "no"
    f = core.fragments[line.fragment]
    known, objection = f.pool.get(line.peer), f.tip.objection(line)
    if known and known.line == line:
        return "got"
    if objection == "in" or (known and known.line.stamp > line.stamp):
        return "no"
    if not known and _is_full(core, f) and (objection or not _misfit(core, f)):
        return "no"
    return "want" if core.signed_by(line, line.peer) else "no"


def _is_full(core: Facts, f: FragmentState) -> bool:
    return len(f.pool.keys() - {core.me}) >= core.settings.pool


def _misfit(core: Facts, f: FragmentState) -> str:
    """Whose contribution is for another tip, and makes room for one that fits this tip."""
    others = ((peer, item.line) for peer, item in f.pool.items() if peer != core.me)
    return next((peer for peer, line in others if f.tip.objection(line)), "")


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
    if item and item.line.stamp == answer.stamp and item.sent_to == peer:
        wants, item.unanswered = answer.says == "want" and item.unanswered, False
        if wants:
            item.held_since = None
            return _send(core, f, item, answer.at)
        if answer.says == "want":
            return  # it is on its way
        item.offer_at = min(item.offer_at, core.now + core.settings.refresh_s)
        if answer.says == "got" and item.held_since is None:
            item.held_since = core.now
            f.sent_s = core.now - item.sending_since if item.sending_since < inf else f.sent_s
        item.sending_since = inf


def delivered(core: Facts, event: Delivered) -> bool:
    """The payload of a contribution that was wanted is here; whether a version may be due."""
    line = event.line
    if judged(core, line) == "want":
        f = core.fragments[line.fragment]
        if line.peer not in f.pool and _is_full(core, f):
            f.pool.pop(_misfit(core, f), None)
        f.pool[line.peer] = Contribution(line, event.payload, core.now, core.now - event.age_s)
        f.transfers.pop(line.peer, None)
        core.changed_data = core.changed_data or f is core.control
    offered(core, event.peer, Offer(line))
    enough = core.settings.quorum or core.num_trainers()
    return any(len(f.pool) >= enough for f in core.fragments if f.index == line.fragment)


def not_sent(core: Facts, peer: str, line: Line) -> None:
    """The stream of a payload broke."""
    item = core.fragments[line.fragment].pool.get(line.peer)
    if item and item.line == line and item.sent_to == peer:
        item.offer_at, item.held_since = core.now + LATE_RETRY_S, None
        item.sending_since = inf


# -- accounts --------------------------------------------------------------------------------------


def discarded(core: Facts, f: FragmentState) -> int:
    """Tokens of this peer that are neither in the history here nor on their way there."""
    line = own(core, f)
    return core.processed - f.tip.book.of(core.me)[1] - f.unsent - (line.tokens if line else 0)


def account(core: Facts, f: FragmentState) -> None:
    """Note how `discarded` changes; it becomes less when they are in the history after all."""
    lost = discarded(core, f)
    if lost < 0:  # the history knows of more than the checkpoint did
        core.processed, lost = core.processed - lost, 0
    # a round that is left out is noted at its end
    if lost != f.discarded and (core.begun or core.leaving):
        core.note("discarded", fragment=f.index, tokens=lost - f.discarded)
        f.discarded = lost
