"""Leases on fragments: who is syncer of what, under which term. Sans-IO.

A term is a fencing number: a contribution or a record that carries an older term is refused, so a syncer that was
frozen and comes back cannot author a version any more. Two peers that claim the same term at the same time (each not
yet knowing of the other) are told apart by rendezvous order, which everybody computes alike; the loser steps down. So
the lease that results does not depend on the order in which claims arrive. It would, if the higher version won:

1. b and d claim term 3 at version 3. Everybody but b takes d, and d publishes version 4.
2. b's claim reaches a before that news, and c after it. With c's knowledge d is ahead, with a's it is not.

Nothing is lost by this, for a syncer that is behind first catches up with the highest version that anyone has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import attrgetter

from diloco.protocol.messages.control import Claim
from diloco.protocol.rendezvous import score

__all__ = ["Lease", "LeaseTable"]

LEAP = 2**20  # further above the known term no honest claim can be; so nobody exhausts the terms with one message


@dataclass(frozen=True)
class Lease:
    """The claim on a fragment that this peer believes in, and the version and digest the syncer has published."""

    fragment: int
    holder: str
    term: int
    version: int
    digest: str


_fragment_of = attrgetter("fragment")


class LeaseTable:
    """The newest lease of each fragment. A stale or lower-ranked claim changes nothing."""

    def __init__(self) -> None:
        self._leases: dict[int, Lease] = {}
        self._terms: dict[int, int] = {}

    def get(self, fragment: int) -> Lease | None:
        """The lease of a fragment, or None while nobody has claimed it."""
        return self._leases.get(fragment)

    def held_by(self, peer: str) -> list[Lease]:
        """Leases of one peer, by fragment."""
        return sorted((lease for lease in self._leases.values() if lease.holder == peer), key=_fragment_of)

    def term(self, fragment: int) -> int:
        """Highest term ever seen for a fragment; 0 when none was."""
        return self._terms.get(fragment, 0)

    def see_term(self, fragment: int, term: int) -> None:
        """Remember a term (from a checkpoint or from the DHT), so that the next claim is above it."""
        if term - self.term(fragment) <= LEAP:
            self._terms[fragment] = max(term, self.term(fragment))

    def claim(self, peer: str, claim: Claim) -> bool:
        """Take in a claim; True when it changes the fragment's lease."""
        current = self._leases.get(claim.fragment)
        if not 0 <= claim.term - self.term(claim.fragment) <= LEAP:
            return False
        if current is not None and claim.term == current.term:
            known = (score(current.holder, claim.fragment), current.holder, current.version)
            rank = (score(peer, claim.fragment), peer, claim.version)
            if rank < known or (rank == known and claim.digest == current.digest):
                return False
        self.see_term(claim.fragment, claim.term)
        self._leases[claim.fragment] = Lease(claim.fragment, peer, claim.term, claim.version, claim.digest)
        return True

    def published(self, fragment: int, term: int, version: int, digest: str) -> bool:
        """Note that the holder published a version; False when the term or the version is not newer than what is
        known.
        """
        lease = self._leases.get(fragment)
        if lease is None or term != lease.term or version <= lease.version:
            return False
        self._leases[fragment] = replace(lease, version=version, digest=digest)
        return True

    def vacate(self, fragment: int) -> None:
        """Forget the holder (it is gone); the term stays known."""
        self._leases.pop(fragment, None)
