"""The work units of a peer, on all ranks of a peer: rank 0 takes them, and the others hear which."""

from __future__ import annotations

from collections.abc import Callable

from diloco.attach.ranks import RankGroup
from diloco.core.units import first
from diloco.messages.fields import Units
from diloco.swarm.node.leases import LeasedData

__all__ = ["RankLeases"]


class RankLeases:
    """What the swarm leases to a peer (`data.Leases`).

    All ranks call `take` at the same point of their training, because it is a collective; `ahead` is none. Without a
    node, before and after the swarm, there are no units.

    `leased` gives rank 0's units, or None while there is no node; on the other ranks it is not called. `ahead` can say
    the units of `batches_ahead` batches.
    """

    def __init__(self, ranks: RankGroup, leased: Callable[[], LeasedData | None], batches_ahead: int) -> None:
        self._ranks = ranks
        self._leased = leased
        self._batches_ahead = batches_ahead
        self._coming: Units = ()

    def take(self, number: int) -> Units | None:
        """All ranks: the next `number` sequences, or None while so many are not leased."""
        data = self._leased() if self._ranks.is_rank0 else None
        taken = None if data is None else data.take(number)
        coming = () if data is None or taken is None else data.ahead(self._batches_ahead * number)
        taken, self._coming = self._ranks.broadcast((taken, coming))
        return taken

    def ahead(self, number: int) -> Units:
        """Up to `number` sequences that would be taken after the last ones."""
        return first(self._coming, number)
