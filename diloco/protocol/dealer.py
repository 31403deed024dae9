"""One peer's part in dealing out the data: the data cursor of each version, and the ledger while this peer deals.

    Claim, Published, update record, state -> hear -> (this peer becomes syncer of the control fragment) -> resume
    lease, has, give_back <- requests, statuses, deaths       offered, published <- contributions

A *data cursor* belongs to one version of the control fragment: the first sequence that was never handed out, and the
sequences before it that are not in that version. A successor resumes from the cursor of *its own* anchor, whatever
newer version it has heard of. A version that died with its author therefore takes no data with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from diloco.protocol.ledger import Ledger, Units, count, difference, intersection, union
from diloco.protocol.messages.base import MAX_RANGES

__all__ = ["DataCursor", "Dealer", "fields_of"]

KEPT_VERSIONS = 3  # newest versions whose data cursors are kept
LEAP = 2**24  # No honest peer has sequences this far past the cursor, so one message cannot use up the list.

DataCursor = tuple[int, Units]
"""First sequence that was never handed out, and the ranges before it that are in no merged contribution."""


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
        ledger: what is leased to whom, while this peer is syncer of the control fragment; else None.

    When a peer is lost, its sequences become free for others, except those of a contribution that arrived here and may
    still be merged. A successor that has not heard of a lease may lease the same sequences again; `published` counts
    these.
    """

    def __init__(self, version: int = 0) -> None:
        self.ledger: Ledger | None = None
        self._cursors: dict[int, DataCursor] = {version: (0, [])}
        self._offered: dict[str, Units] = {}  # by peer: what its newest contribution was learned from

    # -- every peer ---------------------------------------------------------------------------------------------------

    def hear(self, said: Spoken) -> None:
        """Take in the data cursor of a version. The cursor of a version older than those kept changes nothing."""
        self.know(said.version, (said.cursor, union(said.open)))

    def know(self, version: int, cursor: DataCursor) -> None:
        """As `hear`, for a cursor from a checkpoint."""
        newest = max([version, *self._cursors])
        if version > newest - KEPT_VERSIONS:
            kept = {known: old for known, old in self._cursors.items() if known > newest - KEPT_VERSIONS}
            self._cursors = {**kept, version: cursor}

    def cursor_at(self, version: int) -> DataCursor:
        """The data cursor of a version, or of the newest earlier version that is known."""
        if self.ledger is not None and version >= max(self._cursors):
            return self.ledger.cursor, self.ledger.open
        before = [known for known in self._cursors if known <= version]
        return self._cursors[max(before, default=min(self._cursors))]

    # -- the syncer of the control fragment ---------------------------------------------------------------------------

    def resume(self, version: int, said: Mapping[str, Iterable[Sequence[int]]]) -> None:
        """Deal from now on, given the version of the anchor here and what the live peers say that they have.

        1. Version 4 is published and contains p's units. Its syncer dies before p has said that it gave them up.
        2. The cursor of version 4 does not list them as open, so they are in the model, whatever p said before.
        """
        self.ledger = None
        cursor, open_ = self.cursor_at(version)
        possible = union(open_, [(cursor, cursor + LEAP)])
        self.ledger = Ledger()
        self.ledger.resume(cursor, open_, {peer: intersection(units, possible) for peer, units in said.items()})
        self._offered = {}
        self._cursors = {known: old for known, old in self._cursors.items() if known < version}  # later ones died
        self.know(version, (self.ledger.cursor, self.ledger.open))

    def step_down(self) -> None:
        """Another peer deals from now on."""
        self.ledger = None

    def lease(self, peer: str, wanted: int, has: Iterable[Sequence[int]]) -> Units | None:
        """Lease that many more sequences to a peer; None when another peer deals."""
        if self.ledger is None:
            return None
        self.has(peer, has)
        return self.ledger.grant(peer, wanted, has)

    def has(self, peer: str, units: Iterable[Sequence[int]]) -> None:
        """A peer says that it has these units, perhaps from an earlier syncer. It keeps those that nobody else has."""
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
        """A peer is gone or has stopped training: all its units become free, except those that it contributed."""
        if self.ledger is not None:
            self.ledger.leased[peer] = intersection(self.ledger.leased.get(peer, []), self._offered.get(peer, []))

    def offered(self, peer: str, units: Iterable[Sequence[int]]) -> None:
        """A contribution that was learned from these units has arrived and may be merged."""
        self._offered[peer] = union(units)

    def after(self, contributors: Collection[str]) -> DataCursor:
        """The data cursor of the version that these contributors are about to make."""
        assert self.ledger is not None
        applied = union(*(self._offered.get(peer, []) for peer in contributors))
        return self.ledger.cursor, difference(self.ledger.open, applied)

    def published(self, version: int, contributors: Collection[str], live: Collection[str]) -> int:
        """A version is published; returns how many of its sequences were not leased to their contributor.

        The swarm learns from these twice: their contributor was given up, its units went to others, and it came back.
        """
        if self.ledger is None:
            return 0
        foreign = 0
        for peer in contributors:
            units = self._offered.pop(peer, [])
            foreign += count(self.ledger.foreign(peer, units))
            self.ledger.apply(peer, units)
        for peer in self.ledger.leased.keys() - set(live):  # what they offered and nobody merged is free now
            self.ledger.lost(peer)
            self._offered.pop(peer, None)
        self.know(version, (self.ledger.cursor, self.ledger.open))
        return foreign


def fields_of(cursor: DataCursor) -> dict[str, Any]:
    """A data cursor as fields of a message. Ranges that do not fit are never handed out again, rather than twice."""
    first, open_ = cursor
    return {"cursor": first, "open": [list(unit) for unit in open_[:MAX_RANGES]]}
