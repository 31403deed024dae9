"""The sequences that each peer trains on (`DataQueue`). Sans-IO.

The run has one endless list of sequences 0, 1, 2, ... `merged` in the book of the control fragment
says which of them are in the anchor, so none is merged twice in one history, whoever dealt it.
Leases only avoid collisions: the author of that fragment deals the lowest sequences that are not
merged, that no status names, and that were not dealt since. So those of the dead, and of discarded
contributions, are free without being given back.
"""

from __future__ import annotations

from math import inf

from diloco.core.facts import Facts
from diloco.core.members import MAX_PEERS
from diloco.core.rules import pace
from diloco.messages.control import MAX_WANTED, Dealt, Lease
from diloco.messages.fields import MAX_RANGES, MAX_UNIT_RANGES, Units, forget_oldest
from diloco.ranges import NONE, count, difference, first, gaps, union

# No honest peer has sequences this far past the merged ones, so one message cannot use up the list.
LEAP = 2**24


def has(core: Facts) -> Units:
    """Data that nobody else should learn from: this peer's, and that of its pool."""
    if core.data.held is None:
        f, draft = core.control, core.control.learned.draft
        here = [item.line.units for item in f.pool.values() if not f.tip.objection(item.line)]
        mine = core.data.queue, f.learned.units, draft.units if draft else NONE
        core.data.held = union(*mine, *here)
    return core.data.held


def lease(core: Facts) -> None:
    """Ask for data when it runs short."""
    dealer = core.author_of(core.control)
    if dealer != core.me:
        core.data.dealt.clear()
    wanted = core.data.wanted
    if not core.trains_now or not wanted or count(core.data.queue) >= wanted // 2:
        return
    if dealer == core.me:
        _queue(core, deal(core, core.me, core.data.wanted, has(core)))
    elif (via := core.next_hop(dealer)) and core.now >= core.data.lease_again:
        core.data.lease_from = via
        core.data.lease_again = core.now + core.settings.refresh_s
        core.send(via, Lease(core.me, min(core.data.wanted, MAX_WANTED), has(core)[:MAX_RANGES]))


def want(core: Facts, sequences: int) -> None:
    """Training wants so many sequences ahead; 0 if it has data of its own."""
    core.data.wanted = sequences


def consumed(core: Facts, units: Units) -> None:
    """An inner step has learned from these."""
    core.data.queue = difference(core.data.queue, units)
    changed(core)


def adopted(core: Facts) -> None:
    """The tip of the control fragment moved: its data needs nobody any more."""
    f = core.control
    core.data.queue = NONE if f.stale else difference(core.data.queue, f.tip.book.merged)
    changed(core)


def give_back(core: Facts) -> None:
    """Train on nothing that was dealt before."""
    core.data.queue = NONE
    changed(core)


def changed(core: Facts) -> None:
    """Note that what `has` returns may have changed."""
    core.data.changed, core.data.held = True, None


def take_changed(core: Facts) -> bool:
    """Return True if what `has` says may have changed since the last call."""
    core.data.changed, before = False, core.data.changed
    return before


def _queue(core: Facts, new: Units) -> None:
    core.data.queue = union(core.data.queue, new)
    changed(core)


def deal(core: Facts, peer: str, want: int, its: Units) -> Units:
    """The lowest sequences that are not in the model, and that nobody has."""
    f = core.control
    if core.author_of(f) != core.me or f.inbox.behind() or not core.life.ready:
        return NONE
    merged = f.tip.book.merged
    possible = ((0, (merged[-1][1] if merged else 0) + LEAP),)
    theirs = [member.units for member in core.members.all() if member.peer != peer]
    granted = ((units, until) for other, (units, until) in core.data.dealt.items() if other != peer)
    dealt = [units for units, until in granted if core.now < until]
    named = difference(union(its, *theirs, *dealt), gaps(possible))
    taken = union(merged, has(core), named)
    new = first(gaps(taken), want)[:MAX_UNIT_RANGES]
    if peer != core.me:
        until = inf if peer in core.members else core.now + pace.patience_s(core, f)
        core.data.dealt[peer] = (union(its, new), until)
        forget_oldest(core.data.dealt, MAX_PEERS)
    return new


def answer(core: Facts, peer: str, message: Lease) -> None:
    """A peer asks for data, for itself or for one that does not hear the dealer."""
    dealer = core.author_of(core.control)
    if message.peer == peer and dealer in core.members:
        core.send(dealer, message)
    else:
        core.send(peer, Dealt(message.peer, deal(core, message.peer, message.want, message.has)))


def receive(core: Facts, peer: str, message: Dealt) -> None:
    """Data for this peer, which has asked for it once, or for one that asked by way of it."""
    if message.peer == core.me and peer == core.data.lease_from:
        new = difference(union(message.units), union(core.control.tip.book.merged, has(core)))
        core.data.lease_from = ""
        _queue(core, first(new, core.data.wanted))
    elif message.peer in core.members:
        core.send(message.peer, message)


def lost(core: Facts, peer: str) -> None:
    """A peer is gone from here; others may hear it, so what it was granted is kept for a while."""
    if peer in core.data.dealt:
        until = core.now + pace.patience_s(core, core.control)
        core.data.dealt[peer] = core.data.dealt[peer][0], until
    core.data.lease_again = core.now
