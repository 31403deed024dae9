"""Which part of a fragment is fetched from which donor: events of the donors in, the next part out. Sans-IO.

    recruit -> next_part -> arrived | lost | exclude -> ... -> complete

Every part is under way from at most one donor at a time, and a verified part is never asked for again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["MAX_DONORS", "PartPlan"]

MAX_DONORS = 4
"""Donors asked at a time. An uplink is often a tenth of a downlink, and while one donor hashes, or a request travels to
it, the others use the link. Every further donor would have to copy the fragment, and could at worst make this peer
fetch one more part twice."""


class PartPlan:
    """The parts of one anchor by their digests, and the donors that they come from.

    When a donor is lost, its part goes to the next donor that is free. It is recruited again only if its last stream
    brought a part, so that the attempts come to an end. A donor that lied, or has another anchor, is excluded for good.
    Nothing that donors do raises.

    Args:
        wanted: digest of every part.
        held: digests of the parts that are here already, None where there is none; a part with another digest than
            the wanted one is fetched.
    """

    def __init__(self, wanted: Sequence[str], held: Iterable[str | None] = ()) -> None:
        self.wanted = tuple(wanted)
        self._verified = {i for i, (want, have) in enumerate(zip(wanted, held, strict=False)) if want == have}
        self._missing = [part for part in range(len(wanted)) if part not in self._verified]  # and not under way
        self._asked: dict[str, int | None] = {}  # donors with a stream, and the part that is under way on it
        self._brought: dict[str, int] = {}  # parts that the last stream of a donor brought
        self._out: set[str] = set()

    @property
    def complete(self) -> bool:
        """Whether every part is here."""
        return len(self._verified) == len(self.wanted)

    def held(self) -> list[str | None]:
        """The digest of every part that is here; None for the others."""
        return [digest if part in self._verified else None for part, digest in enumerate(self.wanted)]

    def recruit(self, candidates: Iterable[str]) -> list[str]:
        """Choose candidates to open a stream to now, those never lost first; from here on they count as asked."""
        able = [c for c in dict.fromkeys(candidates) if c not in self._out and c not in self._asked]
        able.sort(key=lambda donor: donor in self._brought)
        idle = sum(part is None for part in self._asked.values())
        room = min(MAX_DONORS - len(self._asked), len(self._missing) - idle)
        recruits = able[: max(room, 0)]
        for donor in recruits:
            self._asked[donor] = None
            self._brought[donor] = 0
        return recruits

    def next_part(self, donor: str) -> int | None:
        """The part to ask this donor for; None while all missing parts are under way from others."""
        assert self._asked[donor] is None, "one part at a time"
        if not self._missing:
            return None
        part = self._asked[donor] = self._missing.pop(0)
        return part

    def arrived(self, donor: str, digest: str) -> bool:
        """The part under way is here, with this digest. False: it is not the wanted one, so `exclude` the donor."""
        part = self._asked[donor]
        assert part is not None, "nothing was under way"
        if digest != self.wanted[part]:
            return False
        self._asked[donor] = None
        self._verified.add(part)
        self._brought[donor] += 1
        return True

    def lost(self, donor: str) -> None:
        """The stream of a donor ended."""
        part = self._asked.pop(donor)
        if part is not None:
            self._missing = sorted([*self._missing, part])
        if not self._brought[donor]:
            self._out.add(donor)

    def exclude(self, donor: str) -> None:
        """Never ask this donor again in this download."""
        self.lost(donor)
        self._out.add(donor)
