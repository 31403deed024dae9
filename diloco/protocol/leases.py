"""Leases on fragments: which peer is syncer of which, under which term. Sans-IO.

A term is a fencing number: a contribution or a record that carries an older term is refused, so a syncer that was
frozen and comes back cannot author a version any more. Two peers that claim the same term at the same time (each not
yet knowing of the other) are told apart by rendezvous order, which everybody computes alike; the loser steps down. So
the resulting lease does not depend on the order in which claims arrive. It would, if the higher version won:

1. b and d claim term 3 at version 3. Everybody but b takes d, and d publishes version 4.
2. b's claim reaches a before that publication, and c after it. With c's knowledge d is ahead, with a's it is not.

This loses nothing: a syncer that is behind first catches up with the highest version that anyone has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from diloco.protocol.fragment import Fragment, Lease
from diloco.protocol.messages.control import Claim, Published
from diloco.protocol.rendezvous import score

__all__ = ["LEAP", "LeaseTable"]

LEAP = 2**20  # No honest claim is this far above the known term, so one message cannot exhaust the terms.


class LeaseTable:
    """The newest lease of each fragment, in `Fragment.lease`. A stale or lower-ranked claim changes nothing.

    Attributes:
        generation: grows whenever a fragment gets or loses a holder, so that what follows from that can be cached.
    """

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        self.generation = 0
        self._fragments = fragments
        self._held: dict[str, dict[int, None]] = {}  # holder -> the fragments it holds

    def get(self, fragment: int) -> Lease | None:
        """The lease of a fragment; None while nobody has claimed it, or when the run does not have it."""
        return self._fragments[fragment].lease if fragment < len(self._fragments) else None

    def held_by(self, peer: str) -> list[Lease]:
        """Leases of one peer, by fragment."""
        leases = (self._fragments[index].lease for index in sorted(self._held.get(peer, ())))
        return [lease for lease in leases if lease is not None]

    def load(self, peer: str) -> int:
        """How many fragments a peer holds."""
        return len(self._held.get(peer, ()))

    def term(self, fragment: int) -> int:
        """Highest term ever seen for a fragment; 0 when none was."""
        return self._fragments[fragment].term if fragment < len(self._fragments) else 0

    def see_term(self, fragment: int, term: int) -> None:
        """Remember a term (from a checkpoint or from the DHT), so that the next claim is above it."""
        if term - self.term(fragment) <= LEAP:
            self._fragments[fragment].term = max(term, self.term(fragment))

    def claim(self, peer: str, claim: Claim) -> bool:
        """Take in a claim on a fragment of the run; True when it changes the fragment's lease."""
        fragment = self._fragments[claim.fragment]
        current = fragment.lease
        if not 0 <= claim.term - fragment.term <= LEAP:
            return False
        if current is not None and claim.term == current.term:
            known = (score(current.holder, claim.fragment), current.holder, current.version)
            rank = (score(peer, claim.fragment), peer, claim.version)
            if rank < known or (rank == known and claim.digest == current.digest):
                return False
        fragment.term = claim.term
        if current is None or current.holder != peer:
            self.vacate(claim.fragment)
            self._held.setdefault(peer, {})[claim.fragment] = None
            self.generation += 1
        fragment.lease = Lease(
            claim.fragment, peer, claim.term, claim.version, claim.digest, applied_tokens=claim.applied_tokens
        )
        return True

    def published(self, message: Published) -> bool:
        """Note what the holder published; False when the term is not the lease's, or the version not newer."""
        lease = self.get(message.fragment)
        if lease is None or message.term != lease.term or message.version <= lease.version:
            return False
        self._fragments[message.fragment].lease = replace(
            lease, version=message.version, digest=message.digest, applied_tokens=message.applied_tokens
        )
        return True

    def vacate(self, fragment: int) -> None:
        """Forget the holder, because it is gone; the term stays known."""
        lease = self._fragments[fragment].lease
        if lease is None:
            return
        held = self._held[lease.holder]
        del held[fragment]
        if not held:
            del self._held[lease.holder]
        self._fragments[fragment].lease = None
        self.generation += 1
