"""Ranges of sequences, as sets. Sans-IO."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import chain

from diloco.messages.fields import Units

NONE: Units = ()


def sound(units: Units) -> bool:
    """Whether these ranges are disjoint, ascending, not empty, and no two touch."""
    return union(units) == units


def union(*parts: Iterable[tuple[int, int]]) -> Units:
    """All sequences in any of the parts."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(chain(*parts)):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        elif start < stop:
            merged.append((start, stop))
    return tuple(merged)


def difference(units: Units, without: Units) -> Units:
    """Sequences of the first that are not in the second."""
    left = []
    for start, stop in units:
        at = max(0, bisect_right(without, (start, start)) - 1)
        while at < len(without) and without[at][0] < stop:
            if without[at][1] > start:
                if without[at][0] > start:
                    left.append((start, without[at][0]))
                start = without[at][1]
            at += 1
        if start < stop:
            left.append((start, stop))
    return tuple(left)


def intersection(one: Units, other: Units) -> Units:
    """Sequences in both."""
    return difference(one, difference(one, other))


def overlaps(one: Units, other: Units) -> bool:
    """Whether any sequence is in both."""
    return bool(one and other) and difference(one, other) != one


def count(units: Units) -> int:
    """How many sequences these are."""
    return sum(stop - start for start, stop in units)


def first(units: Units, number: int) -> Units:
    """So many of these sequences, from the lowest on."""
    kept = []
    for start, stop in units:
        if number > 0:
            kept.append((start, min(stop, start + number)))
            number -= stop - start
    return tuple(kept)


def gaps(units: Units) -> Units:
    """The endless rest, up to the largest number there may be."""
    return difference(((0, 2**50),), units)
