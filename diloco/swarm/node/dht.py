"""What a node stores in the DHT and reads from it. A DHT that does not answer is no error: it only gives hints."""

from __future__ import annotations

import logging

from diloco.swarm.conversations.context import Context
from diloco.swarm.wire.dht_records import LEASES, leases_in
from diloco.swarm.wire.streams import BROKEN

__all__ = ["RECORD_PERIOD_S", "DhtRecords"]

logger = logging.getLogger(__name__)

RECORD_LIFE_S = 60.0
RECORD_PERIOD_S = 15.0  # between two stores of the same record


class DhtRecords:
    """The records of this run, by their kind (see `wire.dht_records`)."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def store(self, kind: str, value: object) -> None:
        """Put a record under this peer's name."""
        protocol = self._context.protocol
        try:
            await self._context.transport.store(f"{protocol.run_id}/{kind}", protocol.me, value, RECORD_LIFE_S)
        except BROKEN as error:
            logger.debug("the DHT did not take %s: %r", kind, error)

    async def read(self, kind: str) -> dict[str, object]:
        """The records of all peers by peer id, untrusted; none when the DHT does not answer."""
        try:
            return await self._context.transport.get(f"{self._context.protocol.run_id}/{kind}")
        except BROKEN as error:
            logger.debug("the DHT did not answer: %r", error)
            return {}

    async def store_leases(self) -> None:
        """Tell which fragments this peer holds under which terms."""
        protocol = self._context.protocol
        await self.store(LEASES, [[lease.fragment, lease.term] for lease in protocol.leases.held_by(protocol.me)])

    async def learn_terms(self) -> None:
        """Read which terms there were, so that this peer's claims are above all that were made before."""
        protocol = self._context.protocol
        for record in (await self.read(LEASES)).values():
            for fragment, term in leases_in(record):
                if fragment < len(protocol.versions):
                    protocol.leases.see_term(fragment, term)
