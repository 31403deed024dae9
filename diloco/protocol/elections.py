"""Whose claim on a fragment one peer believes. Sans-IO.

A claim is believed at once when this peer's own view allows it, so nobody whose view agrees waits for anything:

- nobody holds the fragment, or the holder is gone or leaving, and the claimant is the next in rendezvous order, or has
  waited as long as `succession` says;
- it comes in a hello, and nobody holds the fragment: the claimant has held it before this peer came;
- it renews the claimant's own lease;
- two peers claimed the same term at about the same time: the one that is first in rendezvous order has it.

Any other claim waits, without effect, until

- the holder believes it: two syncers of a swarm that was split have met, and one of the two gives way (`gives_way`); or
- most of the living holders believe it, of those that this peer sees. Each holder tells all others whose claim it
  believes (`Vote`). Every peer hears every other on a stream of its own, so nobody has to sign that; or
- what was in its way has changed: the holder goes, or its time has come.

So a claim against a holder that lives in everybody's view has no effect.
"""

from __future__ import annotations

from diloco.protocol.actions import Action, Broadcast, Note, Release
from diloco.protocol.fragment import CONTROL_FRAGMENT, Busy, Fragment
from diloco.protocol.messages.control import Claim, Published, Vote
from diloco.protocol.rendezvous import score
from diloco.protocol.succession import patience_s, turn
from diloco.protocol.view import View

__all__ = ["SAME_TIME_S", "Elector", "believes", "elected", "gives_way"]

CLAIMS_AGAINST_THE_LIVING = 8  # terms that one peer may claim of a fragment whose syncer lives

SAME_TIME_S = 10.0  # Claims that are made at the same time arrive within this time.


def believes(view: View, peer: str, claim: Claim, now: float) -> bool:
    """Whether this peer believes the claim of a peer now."""
    fragment = view.fragments[claim.fragment]
    lease = fragment.lease
    if peer == view.me or (lease is not None and lease.holder == peer):
        return True
    member = view.members.get(peer)
    if member is None or not member.holds:
        return False
    if elected(view, fragment, peer, claim.term):
        return True
    if lease is None or view.vacant(fragment):
        return fragment.term <= 1 or peer in view.greeting or _in_order(view, fragment, peer, now)
    if claim.term == lease.term and now - fragment.elected_at <= SAME_TIME_S:
        return True
    if lease.holder == view.me:
        return gives_way(view, fragment, peer, claim)
    return fragment.votes.get(lease.holder) == (claim.term, peer)


def elected(view: View, fragment: Fragment, peer: str, term: int) -> bool:
    """Whether most of the living holders believe that this peer holds the term; it believes that itself."""
    able = view.able()
    votes = [one for one in able if one == peer or fragment.votes.get(one) == (term, peer)]
    rivals = 2 if fragment.lease is not None and fragment.lease.holder == view.me else 0  # the others decide
    return 2 * (len(votes) - rivals // 2) > len(able) - rivals


def gives_way(view: View, fragment: Fragment, peer: str, claim: Claim) -> bool:
    """Whether this peer, which holds the fragment, leaves it to another that claims it too: two histories have met.

    The claim came in a hello, with which a split ends. The higher term stays; of equal terms, the first in order.
    """
    lease = fragment.lease
    assert lease is not None and lease.holder == view.me
    mine = (lease.term, score(view.me, fragment.index), view.me)
    return peer in view.greeting and (claim.term, score(peer, fragment.index), peer) > mine


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
        lease = fragment.lease
        if lease is not None and lease.holder == peer and vote.holder != peer and vote.term >= lease.term:
            self.leases.vacate(vote.fragment)  # its holder says so itself

    def _heard_claim(self, peer: str, claim: Claim, now: float) -> list[Action]:
        """Take in a claim, or keep it for the moment at which this peer believes it."""
        if claim.fragment >= len(self.fragments):
            return []
        fragment = self.fragments[claim.fragment]
        if believes(self, peer, claim, now):
            return self._believe(peer, claim, now)
        before, terms = fragment.claims.get(peer, (None, 0))
        new = before is None or claim.term > before.term
        fragment.claims[peer] = (claim, terms + new)
        if new and terms >= CLAIMS_AGAINST_THE_LIVING:
            return self._penalise(peer, f"claims fragment {claim.fragment} again and again, and its syncer lives", now)
        named = {"fragment": claim.fragment, "peer": peer, "term": claim.term}
        return [Note("claim_ignored", named)] if before is None else []

    def _reconsider(self, now: float) -> list[Action]:
        """Believe claims that waited until now."""
        actions: list[Action] = []
        for fragment in self.fragments:
            if not self.vacant(fragment):
                fragment.vacant_since = None
            elif fragment.vacant_since is None:
                fragment.vacant_since = now
            for peer, (claim, _) in sorted(fragment.claims.items()):
                if believes(self, peer, claim, now):
                    actions += self._believe(peer, claim, now)
        return actions

    def _believe(self, peer: str, claim: Claim, now: float) -> list[Action]:
        fragment = self.fragments[claim.fragment]
        before = fragment.lease
        most = peer != self.me and elected(self, fragment, peer, claim.term)
        changed = self.leases.claim(peer, claim, most)
        lease = fragment.lease
        if lease is not None and lease.holder == peer:
            fragment.claims.pop(peer, None)
        elif peer != self.me:
            fragment.claims.setdefault(peer, (claim, 0))  # another one ranks before it, which may change
        if lease is not None and (lease.holder, lease.term) == (peer, claim.term) and peer != self.me:
            self.accounts.hear_data_cursor(claim)
        if not changed:
            return []
        actions: list[Action] = [
            Note("claim", {"fragment": claim.fragment, "peer": peer, "term": claim.term, "version": claim.version})
        ]
        if before is None or (before.holder, before.term) != (peer, claim.term):
            fragment.elected_at = now
            if peer != self.me and claim.term > 1 and self.holds and not self.gone:
                actions.append(Broadcast(Vote(fragment=claim.fragment, term=claim.term, holder=peer)))
        if before is not None and before.holder == self.me and peer != self.me:
            fragment.syncer = None
            fragment.ended(Busy.MERGING)
            if claim.fragment == CONTROL_FRAGMENT:
                self.accounts.dealer.ledger = None
            actions.append(Release(claim.fragment))
        return actions

    def _heard_pending(self, peer: str, message: Published) -> None:
        """A peer whose claim waits has published a version."""
        waiting = self.fragments[message.fragment].claims.get(peer) if message.fragment < len(self.fragments) else None
        if waiting is not None and waiting[0].term == message.term:
            news = {"version": message.version, "digest": message.digest, "applied_tokens": message.applied_tokens}
            self.fragments[message.fragment].claims[peer] = (waiting[0].model_copy(update=news), waiting[1])

    def _penalise(self, peer: str, reason: str, now: float) -> list[Action]:
        refused_before = self.penalties.refusal(peer, now) is not None
        seconds = self.penalties.offence(peer, reason, now)
        note = Note("penalty", {"peer": peer, "why": reason, "seconds": round(seconds)})
        return [] if refused_before else [note]
