"""What a node stores in the DHT and reads from it. A DHT that does not answer is no error: it only gives hints."""

from __future__ import annotations

import logging

from diloco.swarm.conversations.context import Context
from diloco.swarm.wire.dht_records import LEASES, MAX_LEASES, leases_in
from diloco.swarm.wire.streams import BROKEN

__all__ = ["RECORD_PERIOD_S", "learn_terms", "read", "store", "store_leases"]

logger = logging.getLogger(__name__)

RECORD_LIFE_S = 60.0
RECORD_PERIOD_S = 15.0  # between two stores of the same record


async def store(context: Context, kind: str, value: object) -> None:
    """Put a record of a kind (see `wire.dht_records`) under this peer's name."""
    protocol = context.protocol
    try:
        await context.transport.store(f"{protocol.run_id}/{kind}", protocol.me, value, RECORD_LIFE_S)
    except BROKEN as error:
        logger.debug("the DHT did not take %s: %r", kind, error)


async def read(context: Context, kind: str) -> dict[str, object]:
    """The records of all peers by peer id, untrusted; none when the DHT does not answer."""
    try:
        return await context.transport.get(f"{context.protocol.run_id}/{kind}")
    except BROKEN as error:
        logger.debug("the DHT did not answer: %r", error)
        return {}


async def store_leases(context: Context) -> None:
    """Tell which fragments this peer holds under which terms."""
    protocol = context.protocol
    held = protocol.leases.held_by(protocol.me)[:MAX_LEASES]
    await store(context, LEASES, [[lease.fragment, lease.term] for lease in held])


async def learn_terms(context: Context) -> None:
    """Read which terms there were, so that this peer's claims are above all that were made before."""
    for record in (await read(context, LEASES)).values():
        for fragment, term in leases_in(record):
            if fragment < len(context.protocol.versions):
                context.protocol.leases.see_term(fragment, term)
