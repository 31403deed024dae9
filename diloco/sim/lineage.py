"""What every version was made of, as nobody in the swarm knows it: the truth that beliefs are compared with.

The anchor of a fragment is only its digest, a hash of its whole history: equal digests mean that the same contributions
were merged in the same order with the same outer state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from hashlib import sha256
from typing import NamedTuple

__all__ = ["Contributed", "Lineage", "Made", "Total", "digest_of"]


def digest_of(*history: object) -> str:
    """Digest that stands for an anchor with that history."""
    return sha256(repr(history).encode()).hexdigest()


class Contributed(NamedTuple):
    """One contribution to a fragment. A process that restarts from its checkpoint makes the same one again."""

    peer: str
    base_version: int


class Made(NamedTuple):
    """One version: the anchor that it follows, who authored it under which term, the chunks that are in it, and its
    contributors with the tokens of each.
    """

    before: str
    fragment: int
    version: int
    author: str
    term: int
    chunks: tuple[tuple[Contributed, int], ...]
    contributors: tuple[tuple[str, int], ...] = ()


class Total(NamedTuple):
    """What one peer gave to an anchor; the last version is what its newest contribution is in."""

    contributions: int
    tokens: int
    first_version: int
    last_version: int


class Lineage:
    """All versions that were ever made, by digest; those that no living peer has any more too."""

    def __init__(self) -> None:
        self.made: dict[str, Made] = {}
        self._totals: dict[str, dict[str, Total]] = {}

    def add(self, digest: str, made: Made) -> None:
        """Note a version. Two syncers may make the very same one: from the same contributions and outer state."""
        self.made.setdefault(digest, made)

    def of(self, digest: str) -> list[Made]:
        """The versions that led to an anchor, the last first."""
        versions = []
        while digest in self.made:
            versions.append(self.made[digest])
            digest = versions[-1].before
        return versions

    def merged(self, digest: str, chunks: int) -> set[Contributed]:
        """Contributions that are in an anchor with all their chunks."""
        count = Counter(whose for made in self.of(digest) for whose, _ in made.chunks)
        return {whose for whose, number in count.items() if number >= chunks}

    def totals(self, digest: str) -> dict[str, Total]:
        """What each peer gave to an anchor, counted again from the versions that led to it."""
        if digest not in self.made:
            return {}
        if digest not in self._totals:
            made = self.made[digest]
            totals = self._totals[digest] = dict(self.totals(made.before))
            for peer, tokens in made.contributors:
                known = totals.get(peer, Total(0, 0, made.version, made.version))
                totals[peer] = Total(known.contributions + 1, known.tokens + tokens, known.first_version, made.version)
        return self._totals[digest]

    def repeated(self, digest: str) -> list[tuple[Contributed, int]]:
        """Chunks that are in an anchor more than once."""
        return repeated(chunk for made in self.of(digest) for chunk in made.chunks)


def repeated(items: Iterable[tuple[Contributed, int]]) -> list[tuple[Contributed, int]]:
    """What occurs more than once, in order."""
    return sorted(item for item, number in Counter(items).items() if number > 1)
