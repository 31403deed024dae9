"""Sets of numbers, such as those of sequences, as ranges [start, stop).

A set has disjoint ranges in ascending order, of which none is empty and no two touch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import chain

Ranges = tuple[tuple[int, int], ...]

NONE: Ranges = ()


def sound(ranges: Ranges) -> bool:
    """Return True if these ranges are a set."""
    return union(ranges) == ranges


def union(*parts: Iterable[tuple[int, int]]) -> Ranges:
    """Return all numbers in any of the parts, whose ranges may overlap and have any order."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(chain(*parts)):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        elif start < stop:
            merged.append((start, stop))
    return tuple(merged)


def difference(ranges: Ranges, without: Ranges) -> Ranges:
    """Return the numbers of the first set that are not in the second."""
    left = []
    for start, stop in ranges:
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


def overlaps(first_set: Ranges, second_set: Ranges) -> bool:
    """Return True if any number is in both."""
    few, many = sorted((first_set, second_set), key=len)
    for start, stop in few:
        after = bisect_left(many, (stop,))  # the one before it is the last to begin before `stop`
        if after and many[after - 1][1] > start:
            return True
    return False


def count(ranges: Ranges) -> int:
    """Count the numbers in a set."""
    return sum(stop - start for start, stop in ranges)


def first(ranges: Ranges, number: int) -> Ranges:
    """Return the lowest `number` numbers of a set."""
    kept = []
    for start, stop in ranges:
        if number > 0:
            kept.append((start, min(stop, start + number)))
            number -= stop - start
    return tuple(kept)


def gaps(ranges: Ranges) -> Ranges:
    """Return all other numbers, up to the largest number allowed."""
    return difference(((0, 2**50),), ranges)
