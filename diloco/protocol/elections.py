"""Whose claim on a fragment one peer believes. Sans-IO.

A claim is believed at once when this peer's own view allows it, so nobody whose view agrees waits for anything:

- this peer has just come, or has believed nobody yet to hold the fragment;
- the holder is gone or leaving, and the claimant is the next in rendezvous order, or has waited as long as
  `succession` says;
- it renews the claimant's own lease;
- two peers claimed the same term at about the same time: the one that is first in rendezvous order has it.

Any other claim waits, without effect, until

- the holder believes it, and says so (`Vote`); or
- most of the living holders believe it, of those that this peer sees. Each holder tells all others whose claim it
  believes. Every peer hears every other on a stream of its own, so nobody has to sign that; or
- what was in its way has changed: the holder goes, or its time has come.

So a claim against a holder that lives in everybody's view has no effect. When a split ends, two holders meet: one of
them gives way (`gives_way`), says so, and its followers go with it. A claim in a hello has no other privilege, because
anybody can connect again. The claim of a syncer that this peer unseated waits as well, at least `UNSEATED_S`.
"""

from __future__ import annotations

from diloco.protocol.actions import Action, Broadcast, Note, Release, Tell
from diloco.protocol.fragment import CONTROL_FRAGMENT, Busy, Fragment, Lease, Waiting
from diloco.protocol.messages.control import Claim, Published, Vote
from diloco.protocol.rendezvous import score
from diloco.protocol.succession import claim_again, patience_s, turn
from diloco.protocol.view import View

__all__ = ["SAME_TIME_S", "Elector", "believes", "decided", "gives_way"]

SAME_TIME_S = 10.0  # Claims that are made at the same time arrive within this time.
UNSEATED_S = 20.0  # in which the others unseat a syncer, too; if most go on with it after that, so does this peer


def believes(view: View, peer: str, claim: Claim, now: float) -> bool:
    """Whether this peer believes the claim of a peer now."""
    fragment = view.fragments[claim.fragment]
    lease = fragment.lease
    if peer == view.me or (lease is not None and lease.holder == peer):
        return True
    member, waiting = view.members.get(peer), fragment.claims.get(peer)
    if member is None or not member.holds:
        return False
    changed_at = fragment.vacant_since if lease is None else fragment.elected_at
    if waiting is not None and waiting.unseated and (changed_at is None or now - changed_at <= UNSEATED_S):
        return False
    if decided(view, fragment, peer, claim):
        return True
    if peer in view.deposed:
        return False  # only most of all can have it hold something again
    if lease is None or view.vacant(fragment):
        return not (view.opened and fragment.authors) or _in_order(view, fragment, peer, now)
    at_once = claim.term == lease.term and now - fragment.elected_at <= SAME_TIME_S
    return at_once and not decided(view, fragment, lease.holder, lease)


def decided(view: View, fragment: Fragment, peer: str, claim: Claim | Lease) -> bool:
    """Whether others have decided that this peer holds the term: most of the living holders, or the holder itself."""
    lease = view.live_lease(fragment.index)
    if lease is not None and fragment.votes.get(lease.holder) == (claim.term, peer):
        return True
    holders = {*view.able(), peer} | ({lease.holder} if lease is not None else set())
    if lease is not None and lease.holder == view.me:
        holders -= {view.me, peer}  # the others decide
    agree = [one for one in holders if one == peer or fragment.votes.get(one) == (claim.term, peer)]
    return 2 * len(agree) > len(holders) or gives_way(view, fragment, peer, claim)


def gives_way(view: View, fragment: Fragment, peer: str, claim: Claim | Lease) -> bool:
    """Whether this peer, which holds the fragment, leaves it to another that holds it too: two histories have met.

    The one whom more holders believe stays; of two equal ones that with the higher term, then the first in order. Who
    believes none of those that claim the fragment counts for this peer. So all but one of the claimants give way,
    however many parts the swarm was in, and a peer that nobody believes moves nobody who is believed.
    """
    lease = fragment.lease
    if lease is None or lease.holder != view.me:
        return False
    others = [one.peer for one in view.members.all() if one.holds and one.peer != peer]  # also those that are done
    rivals = {(waiting.claim.term, one) for one, waiting in fragment.claims.items()} | {(claim.term, peer)}
    votes = [fragment.votes.get(one) for one in others]
    theirs, mine = votes.count((claim.term, peer)), sum(vote not in rivals for vote in votes)
    return (theirs, claim.term, score(peer, fragment.index), peer) > (
        mine, lease.term, score(view.me, fragment.index), view.me,
    )  # fmt: skip


def _in_order(view: View, fragment: Fragment, peer: str, now: float) -> bool:
    since = now if fragment.vacant_since is None else fragment.vacant_since
    holder, rank = turn(view, fragment, peer)
    return holder == peer or now - since > patience_s(view) * (1 + rank)


class Elector(View):
    """Hears claims and votes. What it does not believe has no effect, and is kept until its sender is lost."""

    def _heard_vote(self, peer: str, vote: Vote) -> None:
        if vote.fragment >= len(self.fragments):
            return
        fragment = self.fragments[vote.fragment]
        fragment.votes[peer] = (vote.term, vote.holder)
        if vote.holder != peer:
            fragment.claims.pop(peer, None)  # it claims that no more

    def _heard_claim(self, peer: str, claim: Claim, now: float) -> list[Action]:
        """Take in a claim, or keep it for the moment at which this peer believes it."""
        if claim.fragment >= len(self.fragments):
            return []
        fragment = self.fragments[claim.fragment]
        fragment.votes[peer] = (claim.term, peer)  # whatever it believed before
        if believes(self, peer, claim, now):
            return self._believe(peer, claim, now)
        before = fragment.claims.get(peer)
        new = before is None or claim.term > before.claim.term
        fragment.claims[peer] = Waiting(claim, before is not None and before.unseated)
        named = {"fragment": claim.fragment, "peer": peer, "term": claim.term}
        told = [Tell(peer, vote) for vote in self.vote(fragment)] if new else []  # of the first terms nobody told it
        return [*told, Note("claim_ignored", named)] if before is None else [*told]

    def _reconsider(self, now: float) -> list[Action]:
        """Believe claims that waited until now."""
        actions: list[Action] = []
        for fragment in self.fragments:
            if not self.vacant(fragment):
                fragment.vacant_since = None
            elif fragment.vacant_since is None and self.opened:  # nobody is waited for before anybody may claim
                fragment.vacant_since = now
            for peer, waiting in sorted(fragment.claims.items()):
                if believes(self, peer, waiting.claim, now):
                    actions += self._believe(peer, waiting.claim, now)
        return actions

    def _believe(self, peer: str, claim: Claim, now: float) -> list[Action]:
        fragment = self.fragments[claim.fragment]
        before = fragment.lease
        changed = self.leases.claim(peer, claim, peer != self.me and decided(self, fragment, peer, claim))
        lease = fragment.lease
        if lease is not None and lease.holder == peer:
            fragment.claims.pop(peer, None)
        elif peer != self.me:
            fragment.claims.setdefault(peer, Waiting(claim))  # another one ranks before it, which may change
        if lease is not None and (lease.holder, lease.term) == (peer, claim.term) and peer != self.me:
            self.accounts.hear_data_cursor(claim)
        if not changed:
            return []
        if before is not None and before.holder not in (peer, self.me) and self._claims(fragment, before):
            # It may hold the fragment in the eyes of all others.
            fragment.claims.setdefault(before.holder, Waiting(claim_again(self, before)))
        actions: list[Action] = [
            Note("claim", {"fragment": claim.fragment, "peer": peer, "term": claim.term, "version": claim.version})
        ]
        if before is None or (before.holder, before.term) != (peer, claim.term):
            fragment.elected_at = now
            if peer != self.me and (claim.term > 1 or before is not None) and self.holds and not self.gone:
                actions.append(Broadcast(Vote(fragment=claim.fragment, term=claim.term, holder=peer)))
        if before is not None and before.holder == self.me and peer != self.me:
            fragment.syncer = None
            fragment.ended(Busy.MERGING)
            if claim.fragment == CONTROL_FRAGMENT:
                self.accounts.dealer.ledger = None
            actions.append(Release(claim.fragment))
        return actions

    def _claims(self, fragment: Fragment, lease: Lease) -> bool:
        """Whether another peer that was believed to hold a lease still says so, as far as was heard."""
        own = (lease.term, lease.holder)
        return lease.holder in self.members and fragment.votes.get(lease.holder, own) == own

    def _heard_pending(self, peer: str, message: Published) -> None:
        """A peer whose claim waits has published a version."""
        waiting = self.fragments[message.fragment].claims.get(peer) if message.fragment < len(self.fragments) else None
        if waiting is not None and waiting.claim.term == message.term:
            news = {"version": message.version, "digest": message.digest, "applied_tokens": message.applied_tokens}
            claim = waiting.claim.model_copy(update=news)
            self.fragments[message.fragment].claims[peer] = waiting._replace(claim=claim)
