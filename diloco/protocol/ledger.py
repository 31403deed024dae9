"""Which peer trains on which data, and which data is in the model. Sans-IO.

The run has one endless list of sequences 0, 1, 2, ... A *work unit* is a range [start, stop) of them. The syncer of the
control fragment leases units to peers, and every contribution says which units it was learned from.

    ....applied.... | open: leased to a peer, or given back and free | cursor: never handed out

The syncer's update records carry the cursor and the open units below it. A successor needs only these, and what each
live peer says that it has: open units that nobody has belonged to dead peers, and are handed out again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Ledger", "Units", "count", "difference", "intersection", "union"]

Units = list[tuple[int, int]]
"""Disjoint ranges of sequences in ascending order; no range is empty, and no two touch."""


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


class Ledger:
    """What the syncer of the control fragment knows of the data.

    Attributes:
        cursor: the first sequence that was never handed out.
        open: sequences below the cursor that are in no merged contribution.
        leased: the part of `open` that each peer has.

    When a peer is lost, its units become free. Until then nothing is handed out twice, and applied units never are.
    `foreign` finds the units of a contribution that were not leased to its contributor.
    """

    def __init__(self, cursor: int = 0, open_: Iterable[Sequence[int]] = ()) -> None:
        self.cursor = cursor
        self.open = union(open_)
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
        missing = wanted - count(granted)
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
        """A contribution from these units is in the model."""
        self.open = difference(self.open, units)
        self.leased[peer] = difference(self.leased.get(peer, []), units)

    def lost(self, peer: str) -> None:
        """The peer is gone: its units are free."""
        self.leased.pop(peer, None)
