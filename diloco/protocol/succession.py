"""Which vacant fragments a peer claims, and which anchors it has to fetch. Sans-IO."""

from __future__ import annotations

from diloco.protocol.actions import CatchUp
from diloco.protocol.fragment import Busy, Fragment
from diloco.protocol.pace import STATUSES_PER_S
from diloco.protocol.rendezvous import assign, order
from diloco.protocol.view import View

__all__ = ["CLAIM_PATIENCE_S", "catch_ups", "settle_disputes", "to_claim"]

CLAIM_PATIENCE_S = 3.0  # how long the next peer in order lets the one before it claim a vacant fragment


def to_claim(view: View, now: float) -> list[Fragment]:
    """Vacant fragments that this peer shall take now.

    All peers compute the same holders. If the right one does not claim its fragment in time, the others do, one after
    another.
    """
    vacant = []
    for fragment in view.fragments:
        if not _vacant(view, fragment):
            fragment.vacant_since = None
            continue
        fragment.vacant_since = now if fragment.vacant_since is None else fragment.vacant_since
        vacant.append(fragment)
    if not vacant:
        return []
    able = view.able()
    holders = assign((f.index for f in vacant), able, {peer: view.leases.load(peer) for peer in able})
    return [f for f in vacant if _my_turn(view, f, holders[f.index], able, now)]


def _my_turn(view: View, fragment: Fragment, holder: str, able: list[str], now: float) -> bool:
    waited_s = now - (now if fragment.vacant_since is None else fragment.vacant_since)
    patience_s = CLAIM_PATIENCE_S + len(view.members) / STATUSES_PER_S  # by then everybody has told its versions
    if _newest_is_missing(view, fragment):
        waited_s -= patience_s  # everybody's turn comes later, the right holder's too
        if waited_s <= 0.0:
            return False
    if holder == view.me:
        return True
    return waited_s > patience_s * (1 + order(able, fragment.index).index(view.me))


def _vacant(view: View, fragment: Fragment) -> bool:
    lease = fragment.lease
    if lease is None or lease.holder == view.me:
        return lease is None
    holder = view.members.get(lease.holder)
    # A peer that is done keeps its fragments while it is connected: there is no next version to make.
    return holder is None or holder.status.state == "leaving"


def _newest_is_missing(view: View, fragment: Fragment) -> bool:
    """Whether the dead syncer published a version that nobody is known to have; a peer may be about to say it has."""
    lease = fragment.lease
    have = max(fragment.version, view.members.highest_version(fragment.index))
    return lease is not None and lease.holder not in view.members and lease.version > have


def catch_ups(view: View) -> list[CatchUp]:
    """Fetch the anchors that differ from the syncers'; each such fragment is `CATCHING_UP` from then on.

    While the training loop is at work this peer fetches nothing: the loop notices at its exchange. Only as a backup,
    where a contribution may be late, it fetches each version, as the syncer's own anchor moves while it trains.
    """
    # A peer that is done follows the last versions of the others, which may be late.
    at_work = view.trains and view.state in ("training", "exchanging", "leaving")
    found = []
    for fragment in view.fragments:
        lease = fragment.lease
        if lease is None or fragment.busy is not Busy.NO or _vacant(view, fragment):
            continue
        if lease.holder == view.me:
            donors = _with_another_history(view, fragment)
        elif lease.version < fragment.version or fragment.agrees() or fragment.lighter == lease.digest:
            continue
        elif at_work and fragment.index not in view.followed and not fragment.renumbered:
            continue
        else:
            donors = (lease.holder,)
        if donors:
            fragment.busy = Busy.CATCHING_UP
            found.append(CatchUp(fragment.index, donors, outer=False))
    return found


def _with_another_history(view: View, fragment: Fragment) -> tuple[str, ...]:
    """Peers that may have a history of more work than that of this peer's fragment: of a higher version, or they say
    that they have.
    """
    higher = view.members.donors(fragment.index, fragment.version + 1)
    disputing = [member.peer for member in view.members.all() if fragment.index in member.status.disputed]
    found = dict.fromkeys([*higher, *disputing])
    return tuple(peer for peer in found if peer not in fragment.outweighed)


def settle_disputes(view: View, now: float) -> bool:
    """A syncer that goes on for long from a history with less work loses its lease here; whether one does."""
    settled = False
    for fragment in view.fragments:
        holder = None if fragment.lease is None else view.members.get(fragment.lease.holder)
        if fragment.disputed_since is None or holder is None:
            continue
        if now - fragment.disputed_since > holder.silence_s():
            view.leases.vacate(fragment.index)
            settled = True
    return settled
