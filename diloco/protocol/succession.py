"""Which vacant fragments a peer claims, and which anchors it has to fetch. Sans-IO."""

from __future__ import annotations

from dataclasses import asdict
from math import inf

from diloco.protocol.actions import Action, CatchUp, Note, Renumber
from diloco.protocol.belief import disputants, donors, doubt, number_to_pass
from diloco.protocol.fragment import CONTROL_FRAGMENT, Busy, Fragment, Lease, Waiting
from diloco.protocol.messages.control import Claim
from diloco.protocol.pace import STATUSES_PER_S
from diloco.protocol.patience import PAUSE_LIMIT_S, ROUNDS
from diloco.protocol.rendezvous import assign, order
from diloco.protocol.view import View

__all__ = [
    "CLAIM_PATIENCE_S", "catch_ups", "claim_again", "missed", "overtaken", "patience_s", "to_claim", "turn", "unseat",
    "watch",
]  # fmt: skip

CLAIM_PATIENCE_S = 3.0  # how long the next peer in order lets the one before it claim a vacant fragment


def to_claim(view: View, now: float) -> list[Fragment]:
    """Vacant fragments that this peer shall take now.

    All peers compute the same holders. If the right one does not claim its fragment in time, the others do, one after
    another.
    """
    vacant = []
    for fragment in view.fragments:
        if view.vacant(fragment):
            fragment.vacant_since = now if fragment.vacant_since is None else fragment.vacant_since
            vacant.append(fragment)
        else:
            fragment.vacant_since = None
    if not vacant:
        return []
    able = view.able()
    holders = assign((f.index for f in vacant), able, {peer: view.leases.load(peer) for peer in able})
    return [f for f in vacant if _my_turn(view, f, holders[f.index], able, now)]


def _my_turn(view: View, fragment: Fragment, holder: str, able: list[str], now: float) -> bool:
    waited_s = now - (now if fragment.vacant_since is None else fragment.vacant_since)
    patience = patience_s(view)
    if _newest_is_missing(view, fragment):
        waited_s -= patience  # everybody's turn comes later, the right holder's too
        if waited_s <= 0.0:
            return False
    if holder == view.me:
        return True
    return waited_s > patience * (1 + order(able, fragment.index).index(view.me))


def patience_s(view: View) -> float:
    """How long each peer in order lets the one before it claim a vacant fragment; everybody tells its versions then."""
    return CLAIM_PATIENCE_S + len(view.members) / STATUSES_PER_S


def turn(view: View, fragment: Fragment, peer: str) -> tuple[str | None, int]:
    """Who should claim a vacant fragment, and how many come before this peer should that one not do it."""
    able = view.able()
    vacant = {one.index for one in view.fragments if view.vacant(one)} | {fragment.index}
    holders = assign(vacant, able, {each: view.leases.load(each) for each in able})
    return holders.get(fragment.index), order(able, fragment.index).index(peer) if peer in able else len(able)


def _newest_is_missing(view: View, fragment: Fragment) -> bool:
    """Whether the dead syncer published a version that nobody is known to have; a peer may be about to say it has."""
    lease = fragment.lease
    have = max(fragment.version, view.members.highest_version(fragment.index))
    return lease is not None and lease.holder not in view.members and lease.version > have


def catch_ups(view: View) -> list[CatchUp | Renumber]:
    """Fetch the anchors that differ from the syncers', or as their syncer, pass the numbers of histories that do not go
    on. Each such fragment is `CATCHING_UP` from then on.

    While the training loop is at work this peer fetches nothing: the loop notices at its exchange. Only as a backup,
    where a contribution may be late, it fetches each version, as the syncer's own anchor moves while it trains.
    """
    # A peer that is done follows the last versions of the others, which may be late.
    at_work = view.trains and view.state in ("training", "exchanging", "leaving")
    found: list[CatchUp | Renumber] = []
    for fragment in view.fragments:
        lease = fragment.lease
        if lease is None or fragment.busy is not Busy.NO or view.vacant(fragment):
            continue
        if lease.holder == view.me:
            able = _with_another_history(view, fragment)
            if not able and (number := number_to_pass(view, fragment.index)) and not _in_use(view, fragment):
                fragment.busy = Busy.CATCHING_UP
                found.append(Renumber(fragment.index, number))
                continue
        elif lease.version < fragment.version or fragment.agrees() or fragment.lighter == lease.digest:
            continue
        elif at_work and fragment.index not in view.followed and not fragment.renumbered:
            continue
        else:
            able = (lease.holder,)
        if able:
            fragment.busy = Busy.CATCHING_UP
            found.append(CatchUp(fragment.index, able))
    return found


def _in_use(view: View, fragment: Fragment) -> bool:
    """Whether contributions may be on their way, which are from the number that the anchor has now."""
    others = (one.status for one in view.members.all() if one.trains)
    return view.lockstep and (
        view.state == "exchanging"
        or any(one.state == "exchanging" and one.versions[fragment.index] == fragment.version for one in others)
    )


def _with_another_history(view: View, fragment: Fragment) -> tuple[str, ...]:
    """Peers that may have a history of more work than that of this peer's fragment: of a higher version, or they say
    that they have.
    """
    disputing = [one for one in disputants(view, fragment) if one not in fragment.outweighed]
    return tuple(dict.fromkeys([*donors(view, fragment.index, fragment.version + 1), *disputing]))


def overtaken(view: View, fragment: Fragment) -> bool:
    """Whether a member says that it has a later version than the syncer here, and was not asked for it in vain.

    A dying syncer may have given its last version to one peer, which says so when its successor is about to make one.
    """
    return any(one not in fragment.outweighed for one in donors(view, fragment.index, fragment.version + 1))


def missed(view: View, index: int, now: float) -> None:
    """Once more nobody could give this peer the version that the fragment's syncer announced."""
    fragment = view.fragments[index]
    lease = fragment.lease
    holder = None if lease is None else view.members.get(lease.holder)
    if lease is None or holder is None or lease.version <= fragment.version:
        return
    if fragment.missed_since is None:
        fragment.missed_since = now
    fragment.misses = now - fragment.missed_since > holder.silence_s()


def watch(view: View, now: float) -> None:
    """Note since when most peers that train have waited for the next version of each fragment, as they say."""
    trainers = {one.peer: one.status for one in view.members.all() if one.trains and one.status.counted_in}
    if view.trains:
        trainers[view.me] = view.status()
    for fragment in view.fragments:
        holder = None if fragment.lease is None else fragment.lease.holder
        others = [status for peer, status in trainers.items() if peer != holder]
        waiting = [one for one in others if one.state == "exchanging"]
        here = sum(status.versions[fragment.index] == fragment.version for status in waiting)
        if holder in (None, view.me) or 2 * here <= len(others):
            fragment.stuck_since = None
        elif fragment.stuck_since is None:
            fragment.stuck_since = now


def unseat(view: View, now: float) -> list[Action]:
    """Syncers that live, and count as gone here, because most holders find for long that they do not do their work.

    One goes on from a history with less work than theirs. Or it announced a version that nobody can have, or makes none
    for longer than it may wait for the slowest peer (never while no round was seen from its start); that one holds
    nothing any more, as long as this peer lives.

    Its claim is kept: should most peers go on with it (`elections`), this one comes back.
    """
    actions: list[Action] = []
    for fragment in view.fragments:
        if not fragment.misses and fragment.disputed_since is None and fragment.stuck_since is None:
            continue
        lease = fragment.lease
        holder = None if lease is None else view.members.get(lease.holder)
        if lease is None or holder is None:
            continue
        others = {one for one in view.able() if one != holder.peer}
        left = {peer for peer, (_, believed) in fragment.votes.items() if believed != holder.peer}
        missing = {one.peer for one in view.members.all() if fragment.index in one.status.missed}
        # Another peer has got a later version than the one here, as it says: then the syncer is only busy.
        given = any(m.status.versions[fragment.index] > fragment.version for m in view.members.all() if m is not holder)
        stuck_s = 0.0 if fragment.stuck_since is None else now - fragment.stuck_since
        for_long = fragment.disputed_since is not None and now - fragment.disputed_since > holder.silence_s()
        if for_long and _most(others, {*disputants(view, fragment), *left, view.me}):
            why = "goes on from a history with less work"
        elif fragment.misses and not given and _most(others, {*missing, *left, view.me}):
            why = f"announced version {lease.version}, which nobody can have"
            doubt(view, fragment.index, holder.peer, 0)
            view.deposed.add(holder.peer)
        elif stuck_s > PAUSE_LIMIT_S + ROUNDS * (inf if fragment.round_s is None else fragment.round_s):
            why = f"has not made version {fragment.version + 1}, for which most have long waited"
            view.deposed.add(holder.peer)
        else:
            continue
        view.leases.vacate(fragment.index)
        fragment.claims[holder.peer] = Waiting(claim_again(view, lease), unseated=True)
        actions.append(Note("unseated", {"fragment": fragment.index, "peer": holder.peer, "why": why}))
    return actions


def claim_again(view: View, lease: Lease) -> Claim:
    """The claim from which this peer knows a lease, at the version that its holder published last."""
    known = asdict(lease)
    del known["holder"]
    if lease.fragment == CONTROL_FRAGMENT:
        cursor, open_ = view.accounts.dealer.cursor_at(lease.version)
        known |= {"cursor": cursor, "open": [list(unit) for unit in open_]}
    return Claim(**known)


def _most(others: set[str], agree: set[str]) -> bool:
    return 2 * len(agree & others) > len(others)
