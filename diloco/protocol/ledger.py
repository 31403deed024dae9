"""Which peer trains on which data, and which of it is in the model. Sans-IO.

The run has one endless list of sequences 0, 1, 2, ... A *work unit* is a range [start, stop) of them. The syncer of the
control fragment leases units to peers; a contribution that is merged says which units it was learned from.

    ....applied.... | open: leased to a peer, or given back and free | cursor: never handed out

Its update records carry the cursor and what is open below it. With what each live peer says it has, that is all that a
successor needs: what is open and nobody has belonged to the dead, and is handed out again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Ledger", "Units", "count", "difference", "intersection", "union"]

Units = list[tuple[int, int]]
"""Disjoint ranges of sequences, ascending, none empty, no two of them touching."""


def union(*parts: Iterable[Sequence[int]]) -> Units:
    """All sequences that are in any of the parts."""
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
    """Sequences that are in both."""
    units = union(one)
    return difference(units, difference(units, other))


def count(units: Iterable[Sequence[int]]) -> int:
    """How many sequences these are."""
    return sum(stop - start for start, stop in units)


class Ledger:
    """What the holder of the control fragment knows of the data.

    Attributes:
        cursor: the first sequence that was never handed out.
        open: below the cursor, and in no contribution that was merged.
        leased: the part of `open` that each peer has.

    A peer that is lost gives back what it has. Nothing is handed out twice before that, and nothing that is applied is
    handed out again; a contribution from units that are not the contributor's is told by `foreign`.
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
        """Go on where another holder stopped: its last word, and what the live peers say that they have.

        They may have got units after that word, so the cursor is behind all of them.
        """
        claimed = union(*said.values())
        self.cursor = max([cursor, *(stop for _, stop in claimed)])
        # Between the last word and the newest lease lies what was handed out since: to them, or to the dead.
        self.open = union(open_, [(cursor, self.cursor)], intersection(claimed, [(0, cursor)]))
        self.leased = {}
        for peer, units in sorted(said.items()):
            mine = difference(units, union(*self.leased.values()))
            if mine:
                self.leased[peer] = mine

    def grant(self, peer: str, wanted: int, has: Iterable[Sequence[int]]) -> Units:
        """Lease that many sequences more to a peer: what others gave back first. `has` is all that it has left."""
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
        """What of a contribution's units is not leased to the contributor: applied before, or somebody else's now."""
        return difference(units, self.leased.get(peer, []))

    def apply(self, peer: str, units: Iterable[Sequence[int]]) -> None:
        """A contribution from these units is in the model."""
        self.open = difference(self.open, units)
        self.leased[peer] = difference(self.leased.get(peer, []), units)

    def lost(self, peer: str) -> None:
        """The peer is gone: what it had is free."""
        self.leased.pop(peer, None)
