"""The owner's list of what is revoked: spread among the peers, and enforced."""

from __future__ import annotations

from diloco.errors import SwarmError
from diloco.protocol.messages.control import Revocations
from diloco.swarm.conversations.context import Context
from diloco.swarm.node.dht import DhtRecords
from diloco.swarm.node.mesh import ControlMesh
from diloco.swarm.wire.dht_records import REVOKED, pack_revoked, revoked_in

__all__ = ["RevocationRelay"]


class RevocationRelay:
    """Tells everybody of a newer list, and puts out the peers that are on it. This peer itself may be one of them."""

    def __init__(self, context: Context, mesh: ControlMesh, dht: DhtRecords) -> None:
        self._context, self._mesh, self._dht = context, mesh, dht
        context.gate.on_revoked = self.spread

    def spread(self, revoked: Revocations) -> None:
        """A newer list came in. The peers on it are told too, before they are put out."""
        context = self._context
        context.note("revoked", number=revoked.number, token_ids=revoked.token_ids, peer_ids=revoked.peer_ids)
        self._mesh.broadcast(revoked)
        context.tasks.spawn(self._dht.store(REVOKED, pack_revoked(revoked)))
        self.expel()

    def expel(self) -> None:
        """Drop the peers that are no longer admitted; fail when this peer is not."""
        context, gate = self._context, self._context.gate
        for peer, reason in gate.expel().items():
            self._mesh.disconnect(peer)
            context.do(context.protocol.lost(peer, context.now(), reason))
        lapsed = gate.lapsed()
        if lapsed is not None:
            context.tasks.fail(SwarmError(f"the swarm refused this peer: {lapsed}"))

    async def compare(self) -> None:
        """Take in the newest list in the DHT, and store the one here; for peers that were away when it was spread."""
        gate = self._context.gate
        if gate.admission is None:
            return
        for record in (await self._dht.read(REVOKED)).values():
            revoked = revoked_in(record)
            if revoked is not None:
                gate.hear(revoked)
        if gate.revocations is not None:
            await self._dht.store(REVOKED, pack_revoked(gate.revocations))
