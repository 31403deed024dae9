"""The work units of a peer, on all ranks of an island: rank 0 takes them, and the others hear which."""

from __future__ import annotations

from collections.abc import Callable

from diloco.protocol.ledger import Units, first
from diloco.swarm.conversations.units import LeasedData
from diloco.train.island import Island

__all__ = ["IslandLeases"]


class IslandLeases:
    """What the swarm leases to a peer (`data.Leases`).

    All ranks call `take` at the same point of their training, because it is a collective; `ahead` is none. Without a
    node, before and after the swarm, there are no units.

    Args:
        island: the ranks.
        leased: rank 0's units, or None while there is no node; on the other ranks it is not called.
        batches_ahead: how many batches' units `ahead` can say.
    """

    def __init__(self, island: Island, leased: Callable[[], LeasedData | None], batches_ahead: int) -> None:
        self._island = island
        self._leased = leased
        self._batches_ahead = batches_ahead
        self._coming: Units = []

    def take(self, number: int) -> Units | None:
        """All ranks: the next `number` sequences, or None while so many are not leased."""
        said: list[int] = []
        data = self._leased() if self._island.leads else None
        if data is not None and (taken := data.take(number)) is not None:
            said = [len(taken), *_flat(taken), *_flat(data.ahead(self._batches_ahead * number))]
        said = self._island.share_integers(said)
        units = list(zip(said[1::2], said[2::2], strict=True))
        ranges = said[0] if said else 0
        self._coming = units[ranges:]
        return units[:ranges] or None

    def ahead(self, number: int) -> Units:
        """Up to `number` sequences that would be taken after the last ones."""
        return first(self._coming, number)


def _flat(units: Units) -> list[int]:
    return [bound for unit in units for bound in unit]
