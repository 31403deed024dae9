"""Watches a swarm without joining it: it listens nowhere, has no lasting identity, and leaves no
trace in the DHT."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from diloco.config.address import address_error, is_mailbox
from diloco.errors import ConfigError, PayloadError, SwarmError
from diloco.messages.snapshot import Snapshot
from diloco.swarm.rpc.watch import request_snapshot
from diloco.swarm.wire.streams import BROKEN
from diloco.swarm.wire.transport import Transport

logger = logging.getLogger(__name__)

ANSWER_S = 10.0
RECONNECT_S = 10.0  # while nobody answers
SILENT = "does not answer"
MAX_KNOWN = 64  # peers to ask when the one that answered last is gone


class SwarmWatcher:
    """Asks one peer at a time for its view of the swarm; an asynchronous context manager.

    It asks the peer that answered last for as long as that lives, so that histories have no breaks,
    then the others that this peer has named, and then those of the address.
    """

    def __init__(self, addresses: Sequence[str], token: str | None = None) -> None:
        if store := next(filter(is_mailbox, addresses), None):
            why = f"{store} is a bucket, whose peers answer no questions"
            raise ConfigError(f"{why}; diloco doctor looks into it, and a terminal shows its peer")
        self._addresses, self._token = addresses, token
        self._transport: Transport | None = None
        self._known: dict[str, list[str]] = {}  # addresses of the peers to ask, the best first
        self._connected_at = 0.0

    async def __aenter__(self) -> SwarmWatcher:
        """Connect; raises as `ask`."""
        await self._connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection; the next `ask` makes a new one."""
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.close()

    async def ask(self) -> Snapshot:
        """Return the swarm's state now; `SwarmError` if no peer of this version answers."""
        transport, now = self._transport or await self._connect(), asyncio.get_running_loop().time
        try:
            snapshot = await self._ask_all(transport)
        except SwarmError:
            if now() < self._connected_at + RECONNECT_S:
                raise
            # Other peers may be at the address by now; those that were known may come back where
            # they were.
            self._connected_at = now()
            snapshot = await self._ask_all(await self._connect(instead_of=transport))
        self._known = _places(snapshot)
        return snapshot

    async def _ask_all(self, transport: Transport) -> Snapshot:
        """Return the first answer of any known peer."""
        reasons: dict[str, str] = {}
        for peer in dict.fromkeys((*self._known, *transport.seeds)):
            try:
                async with asyncio.timeout(ANSWER_S):
                    return await request_snapshot(transport, peer)
            except BROKEN as error:
                reasons[peer] = "is no diloco peer" if "not supported" in str(error) else SILENT
                logger.debug("%s told nothing of the swarm: %r", peer, error)
            except PayloadError as error:
                reasons[peer] = f"cannot be understood: {error}"
        peer, why = max(reasons.items(), key=lambda reason: reason[1] != SILENT)
        raise SwarmError(f"{','.join(self._addresses)}: peer {peer[-6:]} {why}; check the address")

    async def _connect(self, instead_of: Transport | None = None) -> Transport:
        from diloco.swarm.wire.gate import observer_gate
        from diloco.swarm.wire.libp2p import Libp2p

        met = [addresses[0] for addresses in self._known.values() if addresses]
        gate = observer_gate("", self._token)
        self._transport = await Libp2p.client([*self._addresses, *met], gate)
        self._transport.addresses_of = lambda peer: self._known.get(peer, ())
        self._connected_at = asyncio.get_running_loop().time()
        if instead_of is not None:
            await instead_of.close()
        return self._transport


def _places(snapshot: Snapshot) -> dict[str, list[str]]:
    """Return valid addresses by peer, the answering peer first; peers may name anything as one."""
    rows = sorted(snapshot.peers, key=lambda row: row.peer_id != snapshot.run.answered_by)
    return {
        row.peer_id: [address for address in row.addresses if address_error(address) is None]
        for row in rows[:MAX_KNOWN]
    }
