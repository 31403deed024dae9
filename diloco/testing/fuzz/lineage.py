"""What every version was made of, as nobody in the swarm knows it: the truth that beliefs are compared with.

A version is known by the digest of its anchor. Equal digests mean that the same contributions were merged in the same
order with the same outer state.
"""

from __future__ import annotations

import statistics
from collections import Counter
from typing import NamedTuple

from diloco.protocol.ledger import Units, count, union

__all__ = ["Contributed", "Lineage", "Made", "Total"]

CAP = 2.0  # times the median: what the tokens of one peer count as work at most


class Contributed(NamedTuple):
    """One contribution to a fragment. A process that restarts from its checkpoint makes the same one again."""

    peer: str
    base_version: int


class Made(NamedTuple):
    """One version: the digest before it, its author and term, and its contributions with the tokens of each."""

    before: str
    fragment: int
    version: int
    author: str
    term: int
    contributions: tuple[tuple[Contributed, int], ...]


class Total(NamedTuple):
    """What one peer gave to an anchor. The last version contains the peer's newest contribution."""

    contributions: int
    tokens: int
    first_version: int
    last_version: int


class Lineage:
    """All versions that were ever made, by digest; also those that no living peer has any more.

    `payloads` has the bytes that were merged into each version, `bases` the digests that contributions were learned
    from, `had` the anchors of the control fragment that each life had, `learned_from` the work units of each
    contribution to it. `units_twice` counts sequences that the syncers themselves know to be merged twice.
    """

    def __init__(self) -> None:
        self.made: dict[str, Made] = {}
        self.learned_from: dict[Contributed, Units] = {}
        self.payloads: dict[str, list[bytes]] = {}
        self.bases: dict[Contributed, set[str]] = {}
        self.had: dict[str, set[str]] = {}
        self.units_twice = 0
        self._totals: dict[str, dict[str, Total]] = {}

    def add(self, digest: str, made: Made) -> None:
        """Note a version. Two syncers may make the very same one: from the same contributions and outer state."""
        self.made.setdefault(digest, made)

    def of(self, digest: str) -> dict[str, Made]:
        """The versions that led to an anchor, by digest, the last first."""
        versions: dict[str, Made] = {}
        while digest in self.made:
            versions[digest] = self.made[digest]
            digest = versions[digest].before
        return versions

    def merged(self, digest: str) -> set[Contributed]:
        """The contributions that are in an anchor."""
        return {whose for made in self.of(digest).values() for whose, _ in made.contributions}

    def totals(self, digest: str) -> dict[str, Total]:
        """What each peer gave to an anchor, counted again from the versions that led to it."""
        if digest not in self.made:
            return {}
        if digest not in self._totals:
            made = self.made[digest]
            totals = self._totals[digest] = dict(self.totals(made.before))
            for (peer, _), tokens in made.contributions:
                known = totals.get(peer, Total(0, 0, made.version, made.version))
                totals[peer] = Total(known.contributions + 1, known.tokens + tokens, known.first_version, made.version)
        return self._totals[digest]

    def work(self, digest: str, other: str) -> float:
        """The work in an anchor since its history and another one parted: tokens that peers have more in it than in the
        other one, of each peer twice the median of both sides at most.
        """
        one, two = self.totals(digest), self.totals(other)
        leads = [(one[who].tokens if who in one else 0) - (two[who].tokens if who in two else 0) for who in one | two]
        sizes = [abs(lead) for lead in leads if lead]
        return sum(min(lead, CAP * statistics.median(sizes)) for lead in leads if lead > 0)

    def repeated(self, digest: str) -> list[Contributed]:
        """Contributions that are in an anchor more than once, in order."""
        count = Counter(whose for made in self.of(digest).values() for whose, _ in made.contributions)
        return sorted(whose for whose, number in count.items() if number > 1)

    def repeated_payloads(self, digest: str) -> int:
        """How many payloads are in an anchor more than once."""
        merged = [payload for version in self.of(digest) for payload in self.payloads.get(version, [])]
        return len(merged) - len(set(merged))

    def units(self, digest: str) -> list[Units]:
        """The work units of each contribution that is in an anchor of the control fragment."""
        return [self.learned_from.get(whose, []) for whose in sorted(self.merged(digest))]

    def repeated_sequences(self, digest: str) -> int:
        """How many sequences of the data an anchor of the control fragment has learned more than once."""
        units = self.units(digest)
        return sum(map(count, units)) - count(union(*units))
