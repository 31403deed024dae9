"""What every version was made of, which nobody in the swarm knows; what peers say is compared with
it."""

from __future__ import annotations

from typing import NamedTuple

from diloco.core.history import Tip
from diloco.messages.heads import Head
from diloco.ranges import count, union


class Made(NamedTuple):
    """One version: its head, and the digests of what is in its anchor and its book."""

    head: Head
    parts: tuple[str, ...]
    book: str
    at: float  # seconds of the loop


class Versions:
    """All versions that were ever made, by the id of their head; also lost ones."""

    def __init__(self) -> None:
        self.made: dict[str, Made] = {}

    def add(self, tip: Tip, at: float) -> None:
        """Note a version."""
        self.made[tip.head.id] = Made(tip.head, tip.parts, tip.book.digest, at)

    def chain(self, head: Head) -> list[Head]:
        """The heads that led to this one, itself included, the last first."""
        found = [head]
        while found[-1].number:
            found.append(self.made[found[-1].prev].head)
        return found

    def late(self, lost: Head, last: Head) -> float:
        """Seconds from the first version that the way to `last` has beside this one; below zero for
        a version that was made before it.
        """
        way = self.chain(last)
        known = {head.id for head in way}
        first = next(head for head in self.chain(lost) if head.prev in known)
        beside = next(head for head in way if head.prev == first.prev)
        return self.made[lost.id].at - self.made[beside.id].at

    def tokens(self, head: Head, peer: str, until: int = 2**62) -> int:
        """Tokens of a peer in an anchor, of contributions with stamps up to that one."""
        lines = [line for one in self.chain(head) for line in one.counted]
        return sum(line.tokens for line in lines if line.peer == peer and line.stamp <= until)

    def wrong(self, head: Head) -> str:
        """What is wrong with the history that leads to this head; empty if nothing is."""
        before = self.made[head.prev].head
        if (head.fragment, head.number) != (before.fragment, before.number + 1):
            return "it does not follow the one before"
        chain = self.chain(head)
        lines = [line for one in chain for line, _ in one.lines]
        names = [(line.peer, line.stamp) for line in lines]
        if again := sorted({name for name in names if names.count(name) > 1}):
            return f"contributions are in it twice: {again}"
        counted = [line for one in chain for line in one.counted]
        if head.work != sum(line.tokens for line in counted):
            return f"its work is {head.work}, which is not the tokens in it"
        if not {line.base for line in lines} <= {one.id for one in chain}:
            return "something in it was learned in another history"
        units = [line.units for line in counted]
        twice = sum(map(count, units)) - count(union(*units))
        return f"{twice} sequences are in it twice" if twice else ""
