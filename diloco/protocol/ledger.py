"""Which peer trains on which data, and which data is in the model. Sans-IO.

The run has one endless list of sequences 0, 1, 2, ... A *work unit* is a range [start, stop) of them. The syncer of the
control fragment leases units to peers, and every contribution says which units it was learned from.

    ....applied.... | open: leased to a peer, or given back and free | cursor: never handed out

A *data cursor* belongs to one version of the control fragment: the first sequence that was never handed out, and the
open units below it, which are not in that version. Messages about a version carry it. A successor needs only the
cursor, and what each live peer says that it has: open units that nobody has belonged to dead peers, and are handed out
again. It resumes from the cursor of *its own* anchor, whatever newer version it has heard of. A version that died with
its author therefore takes no data with it.

    Claim, Published, update record, state -> know -> (this peer becomes syncer of the control fragment) -> resume
    lease, has, give_back <- requests, statuses, deaths       offered, published <- contributions
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence

from diloco.protocol.limits import MAX_PEERS
from diloco.protocol.numbers import MAX_TOKENS, forget_oldest

__all__ = ["DataCursor", "Dealer", "Ledger", "Units", "count", "difference", "first", "intersection", "union"]

KEPT_VERSIONS = 3  # newest versions whose data cursors are kept
MOST_WANTED = 4  # times what others ask for: data ahead, under way, and sent
LEAP = 2**24  # No honest peer has sequences this far past the cursor, so one message cannot use up the list.

Units = list[tuple[int, int]]
"""Disjoint ranges of sequences in ascending order; no range is empty, and no two touch."""

DataCursor = tuple[int, Units]
"""First sequence that was never handed out, and the ranges before it that are in no merged contribution."""


def union(*parts: Iterable[Sequence[int]]) -> Units:
    """All sequences in any of the parts."""
    merged: Units = []
    for start, stop in sorted((int(start), int(stop)) for part in parts for start, stop in part if start < stop):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def difference(units: Iterable[Sequence[int]], without: Iterable[Sequence[int]]) -> Units:
    """Sequences of the first that are not in the second."""
    left: Units = []
    holes = union(without)
    for start, stop in union(units):
        for hole_start, hole_stop in holes:
            if hole_stop <= start or hole_start >= stop:
                continue
            if hole_start > start:
                left.append((start, hole_start))
            start = max(start, hole_stop)
        if start < stop:
            left.append((start, stop))
    return left


def intersection(one: Iterable[Sequence[int]], other: Iterable[Sequence[int]]) -> Units:
    """Sequences in both."""
    units = union(one)
    return difference(units, difference(units, other))


def count(units: Iterable[Sequence[int]]) -> int:
    """How many sequences these are."""
    return sum(stop - start for start, stop in units)


def first(units: Units, number: int) -> Units:
    """So many of these sequences, from the lowest on."""
    kept: Units = []
    for start, stop in units:
        if number > 0:
            kept.append((start, min(stop, start + number)))
            number -= stop - start
    return kept


class Ledger:
    """What the syncer of the control fragment knows of the data.

    Attributes:
        cursor: the first sequence that was never handed out.
        open: sequences below the cursor that are in no merged contribution.
        leased: the part of `open` that each peer has.

    When a peer is lost, its units become free. Until then nothing is handed out twice, and applied units never are.
    `foreign` finds the units of a contribution that were not leased to its contributor.
    """

    def __init__(self) -> None:
        self.cursor = 0
        self.open: Units = []
        self.leased: dict[str, Units] = {}

    @property
    def free(self) -> Units:
        """Open units that nobody has."""
        return difference(self.open, union(*self.leased.values()))

    def resume(self, cursor: int, open_: Iterable[Sequence[int]], said: Mapping[str, Iterable[Sequence[int]]]) -> None:
        """Go on where another syncer stopped, from its last data cursor and the units that live peers `said` they have.

        Peers may have got units after that cursor was announced, so the new cursor is behind all of these.
        """
        claimed = union(*said.values())
        self.cursor = max([cursor, *(stop for _, stop in claimed)])
        # The units between the announced cursor and the newest lease were handed out since: to them, or to the dead.
        self.open = union(open_, [(cursor, self.cursor)], intersection(claimed, [(0, cursor)]))
        self.leased = {}
        for peer, units in sorted(said.items()):
            mine = difference(units, union(*self.leased.values()))
            if mine:
                self.leased[peer] = mine

    def grant(self, peer: str, wanted: int, has: Iterable[Sequence[int]]) -> Units:
        """Lease `wanted` more sequences to a peer, first those that others gave back. `has` is all that it has left."""
        kept = intersection(self.leased.get(peer, []), has)
        self.leased[peer] = kept
        granted: Units = []
        for start, stop in self.free:
            take = min(stop - start, wanted - count(granted))
            if take > 0:
                granted.append((start, start + take))
        missing = min(wanted - count(granted), MAX_TOKENS - self.cursor)  # no honest run comes to the end of the list
        if missing > 0:
            granted = union(granted, [(self.cursor, self.cursor + missing)])
            self.open = union(self.open, [(self.cursor, self.cursor + missing)])
            self.cursor += missing
        self.leased[peer] = union(kept, granted)
        return granted

    def foreign(self, peer: str, units: Iterable[Sequence[int]]) -> Units:
        """Units of a contribution that are not leased to its contributor: applied before, or leased to another peer."""
        return difference(units, self.leased.get(peer, []))

    def apply(self, peer: str, units: Iterable[Sequence[int]]) -> None:
        """A contribution from these units is in the model, as far as they were leased to its contributor."""
        leased = self.leased.get(peer, [])
        self.open = difference(self.open, intersection(units, leased))
        self.leased[peer] = difference(leased, units)

    def lost(self, peer: str) -> None:
        """The peer is gone: its units are free."""
        self.leased.pop(peer, None)


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
        self._wanted: dict[str, int] = {}  # by peer: the most that it asked for at a time

    # -- every peer ---------------------------------------------------------------------------------------------------

    def know(self, version: int, cursor: DataCursor) -> None:
        """Take in the data cursor of a version. The cursor of a version older than those kept changes nothing."""
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

    def lease(self, peer: str, wanted: int, has: Iterable[Sequence[int]]) -> Units | None:
        """Lease that many more sequences to a peer; None when another peer deals."""
        if self.ledger is None:
            return None
        self.has(peer, has)
        self._wanted[peer] = max(wanted, self._wanted.pop(peer, 0))
        forget_oldest(self._wanted, MAX_PEERS)
        kept = count(intersection(self.ledger.leased.get(peer, []), has))
        return self.ledger.grant(peer, max(0, min(wanted, self._most(peer) - kept)), has)

    def _most(self, peer: str) -> int:
        """How many sequences a peer may have: a few times what the others ask for at a time, who train as much."""
        others = [wanted for other, wanted in self._wanted.items() if other != peer]
        return MOST_WANTED * statistics.median_high(others) if others else LEAP

    def has(self, peer: str, units: Iterable[Sequence[int]]) -> None:
        """A peer says that it has these units, perhaps from an earlier syncer. It keeps those that nobody else has."""
        ledger = self.ledger
        if ledger is None or not units:
            return
        units = first(intersection(units, [(0, ledger.cursor + LEAP)]), self._most(peer))
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
        leased = self.ledger.leased
        applied = union(*(intersection(self._offered.get(peer, []), leased.get(peer, [])) for peer in contributors))
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
