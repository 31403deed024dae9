"""Leases on fragments: who is syncer of what, under which term. Sans-IO.

A term is a fencing number: a contribution or a record that carries an older term is refused, so a syncer that was
frozen and comes back cannot author a version any more. Two peers that claim the same term at the same time (each not
yet knowing of the other) are told apart by version, then by rendezvous order, which everybody computes alike; the loser
steps down.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from diloco.protocol.messages import Claim
from diloco.protocol.rendezvous import score

__all__ = ["Lease", "LeaseTable"]


@dataclass(frozen=True)
class Lease:
    """The claim on a fragment that this peer believes in, and the version and digest the syncer has published."""

    fragment: int
    holder: str
    term: int
    version: int
    digest: str


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
        return [lease for _, lease in sorted(self._leases.items()) if lease.holder == peer]

    def term(self, fragment: int) -> int:
        """Highest term ever seen for a fragment; 0 when none was."""
        return self._terms.get(fragment, 0)

    def see_term(self, fragment: int, term: int) -> None:
        """Remember a term (from a checkpoint or from the DHT), so that the next claim is above it."""
        self._terms[fragment] = max(term, self.term(fragment))

    def claim(self, peer: str, claim: Claim) -> bool:
        """Take in a claim; True when it is the fragment's lease from now on."""
        current = self._leases.get(claim.fragment)
        if claim.term < self.term(claim.fragment):
            return False
        if current is not None and claim.term == current.term and peer != current.holder:
            mine = (current.version, score(current.holder, claim.fragment))
            if (claim.version, score(peer, claim.fragment)) <= mine:
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
