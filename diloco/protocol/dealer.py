"""Who knows what of the ledger: the last word on each version, and the ledger itself while this peer deals units out.

    Claim, Published, update record, state -> hear -> (this peer becomes syncer of the control fragment) -> resume
    lease, has, give_back <- requests, statuses, deaths       offered, published <- contributions

A word goes with a version of the control fragment. So a successor goes on from what is in *its* anchor, whatever else
it has heard of: a version that died with its author takes nothing with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from diloco.protocol.ledger import Ledger, Units, count, difference, intersection, union
from diloco.protocol.messages.base import MAX_RANGES

__all__ = ["Dealer", "Word", "fields_of"]

WORDS = 3  # versions of which the word is kept
LEAP = 2**24  # sequences past the cursor that no honest peer can have; so nobody uses up the list with one message

Word = tuple[int, Units]
"""Cursor, and what is open below it."""


class Spoken(Protocol):
    """A message about a version of the control fragment."""

    @property
    def version(self) -> int: ...
    @property
    def cursor(self) -> int: ...
    @property
    def open(self) -> list[list[int]]: ...


class Dealer:
    """One peer's part in dealing out the data.

    Attributes:
        ledger: what is leased to whom, while this peer is syncer of the control fragment.

    When a peer is lost, what it has is free for others, except for what is in a contribution that is here and may be
    merged yet. A successor that has not heard what a peer was given may give it to another one too: `published` counts
    that.
    """

    def __init__(self, version: int = 0) -> None:
        self.ledger: Ledger | None = None
        self._words: dict[int, Word] = {version: (0, [])}
        self._offered: dict[str, Units] = {}  # by peer: what its newest contribution was learned from

    # -- every peer ---------------------------------------------------------------------------------------------------

    def hear(self, said: Spoken) -> None:
        """The word that goes with a version; one about an older version than is known changes nothing."""
        self.know(said.version, (said.cursor, union(said.open)))

    def know(self, version: int, word: Word) -> None:
        """As `hear`, for a word from a checkpoint."""
        newest = max(self._words, default=version)
        if version > newest - WORDS:
            kept = {known: old for known, old in self._words.items() if known > max(version, newest) - WORDS}
            self._words = {**kept, version: word}

    def word(self, version: int) -> Word:
        """What is known of a version, or of the newest one before it."""
        if self.ledger is not None and version >= max(self._words):
            return self.ledger.cursor, self.ledger.open
        before = [known for known in self._words if known <= version]
        return self._words[max(before, default=min(self._words))]

    # -- the syncer of the control fragment ---------------------------------------------------------------------------

    def resume(self, version: int, said: Mapping[str, Iterable[Sequence[int]]]) -> None:
        """Deal from now on, from the anchor of a version and from what the live peers say that they have.

        1. p's units are in version 4, which is published; its syncer dies before p has said that they are not its any
           more.
        2. So what the word on version 4 does not call open is in the model, whatever p said before.
        """
        self.ledger = None
        cursor, open_ = self.word(version)
        possible = union(open_, [(cursor, cursor + LEAP)])
        self.ledger = Ledger()
        self.ledger.resume(cursor, open_, {peer: intersection(units, possible) for peer, units in said.items()})
        self._offered = {}
        self._words = {known: word for known, word in self._words.items() if known < version}  # later ones are lost
        self.know(version, (self.ledger.cursor, self.ledger.open))

    def step_down(self) -> None:
        """Another peer deals."""
        self.ledger = None

    def lease(self, peer: str, wanted: int, has: Iterable[Sequence[int]]) -> Units | None:
        """That many sequences more for a peer; None when another peer deals."""
        if self.ledger is None:
            return None
        self.has(peer, has)
        return self.ledger.grant(peer, wanted, has)

    def has(self, peer: str, units: Iterable[Sequence[int]]) -> None:
        """A peer says that it has these. It has them from a predecessor, perhaps: what nobody else has is its."""
        ledger = self.ledger
        if ledger is None or not units:
            return
        units = intersection(units, [(0, ledger.cursor + LEAP)])
        newest = max((stop for _, stop in units), default=0)
        if newest > ledger.cursor:
            ledger.open = union(ledger.open, [(ledger.cursor, newest)])
            ledger.cursor = newest
        mine = ledger.leased.get(peer, [])
        if difference(units, mine):
            ledger.leased[peer] = union(mine, intersection(units, ledger.free))

    def give_back(self, peer: str) -> None:
        """A peer is gone, or has stopped training."""
        if self.ledger is not None:
            self.ledger.leased[peer] = intersection(self.ledger.leased.get(peer, []), self._offered.get(peer, []))

    def offered(self, peer: str, units: Iterable[Sequence[int]]) -> None:
        """A contribution that was learned from these may be merged."""
        self._offered[peer] = union(units)

    def after(self, contributors: Collection[str]) -> Word:
        """The word on the version that these make."""
        assert self.ledger is not None
        applied = union(*(self._offered.get(peer, []) for peer in contributors))
        return self.ledger.cursor, difference(self.ledger.open, applied)

    def published(self, version: int, contributors: Collection[str], live: Collection[str]) -> int:
        """A version is made; returns how many of its sequences were not the contributor's.

        They were learned from twice, or will be: their contributor was given up, and came back.
        """
        if self.ledger is None:
            return 0
        foreign = 0
        for peer in contributors:
            units = self._offered.pop(peer, [])
            foreign += count(self.ledger.foreign(peer, units))
            self.ledger.apply(peer, units)
        for peer in self.ledger.leased.keys() - set(live):  # what was offered and not merged is free now
            self.ledger.lost(peer)
            self._offered.pop(peer, None)
        self.know(version, (self.ledger.cursor, self.ledger.open))
        return foreign


def fields_of(word: Word) -> dict[str, Any]:
    """A word as fields of a message. What does not fit is never handed out again, rather than twice."""
    cursor, open_ = word
    return {"cursor": cursor, "open": [list(unit) for unit in open_[:MAX_RANGES]]}
