"""Rule 4. What a peer has learned flows to the author of the next version until it is in one.

captured, signed -> sent to the author, or offered to a member that hears it -> in a version
"""

from __future__ import annotations

from math import inf
from typing import Literal

from msgspec.structs import replace

from diloco.core.events import Captured, Delivered, SendPayload
from diloco.core.facts import CONTROL, SHUNNED, Facts
from diloco.core.fragment import Contribution, FragmentState, Transfer
from diloco.core.members import MAX_PEERS
from diloco.core.rules import data, learning, pace
from diloco.messages.control import Answer, Offer
from diloco.messages.fields import MAX_SECONDS, forget_oldest
from diloco.messages.heads import Line
from diloco.ranges import sound

MOST_PER_STEP = 2**28  # tokens, where the manifest names none: a lie ends no run
LATE_RETRY_S = 1.0  # before a contribution is offered again after a stream broke


def captured(core: Facts, event: Captured) -> None:
    """The payload of this peer's contribution is made."""
    f = core.fragments[event.line.fragment]
    if draft := learning.take_draft(f, event):
        line = core.sign(replace(draft, norm=event.norm, root=event.root))
        f.pool[core.me] = Contribution(line, event.payload, core.now, core.now)
        if line.units:  # which are free again if it is late
            data.changed(core)


def prune(f: FragmentState) -> None:
    """Drop what cannot be in a version after the tip any more."""
    f.pool = {peer: item for peer, item in f.pool.items() if not f.tip.objection(item.line)}


# -- to the author ---------------------------------------------------------------------------------


def pass_on(core: Facts, f: FragmentState, author: str) -> None:
    """Contributions go to the author: this peer's at once, those of others after a while.

    1. The author makes the run's last version, so it is over, and leaves. 2. Others hear of it, but
    lack it yet, and for them another peer is the author. 3. It gets nothing that may be in there.
    """
    if f.inbox.behind() and author != f.tip.head.next:
        return
    patience_s, via, now = pace.patience_s(core, f), core.next_hop(author), core.now
    round_s = pace.round_s(core, f)
    if core.settings.barrier and core.members.any_moves(now - core.settings.stall_s):
        patience_s *= 2  # the author may wait for that peer
    for item in f.pool.values():
        mine = item.line.peer == core.me
        # the author may wait for a peer that pauses, or has made versions that are still to come
        if item.held_since is not None and (f.inbox.behind() or _waits_for_pauses(core, round_s)):
            item.held_since = now
        known = item.held_since if item.sent_to == via else None
        wait_s = 0.0 if mine or core.life.leaving else core.settings.refresh_s
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
            core.note_way(author, via)
            item.sent_to = via
            item.offer_at = now + core.settings.refresh_s
            item.held_since = known
            item.unanswered = True
            core.send(via, Offer(item.line))


def _waits_for_pauses(core: Facts, round_s: float) -> bool:
    return core.settings.barrier and core.members.any_pauses(core.now, round_s)


def _send(core: Facts, f: FragmentState, item: Contribution, at: int) -> None:
    """Send a payload. It is offered again if no byte of it arrives; else its stream may break."""
    item.offer_at = core.now + pace.deadline_s(core, f)
    item.sending_since = core.now
    item.sent_bytes = at
    age_s = min(core.now - item.captured_at, MAX_SECONDS)
    core.act(SendPayload(item.sent_to, item.line, item.payload, at, age_s))


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
        item.offer_at = inf
        item.sent_bytes = nbytes


def offered(core: Facts, peer: str, offer: Offer) -> None:
    """A peer has a contribution for the next version."""
    line = offer.line
    core.send(peer, Answer(line.fragment, line.peer, line.stamp, judged(core, line)))


def judged(core: Facts, line: Line) -> Literal["want", "got", "no"]:
    """Say if the payload of a contribution is wanted here; or it is here, or of no use."""
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
    """A peer whose contribution is for another tip, and makes room for one that fits this tip."""
    others = ((peer, item.line) for peer, item in f.pool.items() if peer != core.me)
    return next((peer for peer, line in others if f.tip.objection(line)), "")


def impossible(core: Facts, line: Line) -> bool:
    """Return True if no honest peer makes these claims."""
    claims = line.tokens > line.steps * (core.identity.tokens_per_step or MOST_PER_STEP)
    ranges = not sound(line.units) or (bool(line.units) and line.fragment != CONTROL)
    return claims or ranges or line.steps > learning.MOST_CYCLES * core.settings.sync_every


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
    """Take in a payload that was wanted. Return True if a version may be due."""
    line = event.line
    if judged(core, line) == "want":
        f = core.fragments[line.fragment]
        if line.peer not in f.pool and _is_full(core, f):
            f.pool.pop(_misfit(core, f), None)
        captured_at = core.now - event.age_s
        f.pool[line.peer] = Contribution(line, event.payload, core.now, captured_at, event.peer)
        f.transfers.pop(line.peer, None)
        if f is core.control:
            data.changed(core)
    offered(core, event.peer, Offer(line))
    enough = core.settings.quorum or core.num_trainers()
    return any(len(f.pool) >= enough for f in core.fragments if f.index == line.fragment)


def not_sent(core: Facts, peer: str, line: Line) -> None:
    """The stream of a payload broke."""
    item = core.fragments[line.fragment].pool.get(line.peer)
    if item and item.line == line and item.sent_to == peer:
        item.offer_at = core.now + LATE_RETRY_S
        item.held_since = None
        item.sending_since = inf


def lost(f: FragmentState, peer: str) -> None:
    """A peer is gone: what it was sent is offered to another one."""
    f.transfers.pop(peer, None)
    for item in f.pool.values():
        if item.sent_to == peer:
            item.sent_to = ""
            item.held_since = None
            item.sending_since = inf
