"""The protocol core and the context of a node, made from its options once its transport is open."""

from __future__ import annotations

from diloco.outer.replica import Replica
from diloco.protocol.fragment import CONTROL_FRAGMENT
from diloco.protocol.ledger import union
from diloco.protocol.peer import Peer
from diloco.swarm.conversations.context import Context, OnEvent
from diloco.swarm.node.options import NodeOptions
from diloco.swarm.wire.streams import Traffic
from diloco.swarm.wire.threads import in_thread
from diloco.swarm.wire.transport import Transport

__all__ = ["make_context"]


async def make_context(options: NodeOptions, replica: Replica, transport: Transport, on_event: OnEvent) -> Context:
    """What the conversations of a node share. The replica and the protocol go on where `options.saved` stopped."""
    if options.saved is not None:
        await in_thread(options.saved.load_, replica)
    protocol = _protocol(options, replica, transport, await in_thread(replica.digests))
    _restore(protocol, options)
    protocol.address_book.hear(transport.me, {transport.me: transport.addresses if transport.reachable else []})
    transport.where = protocol.address_book.of
    context = Context(
        protocol=protocol,
        replica=replica,
        transport=transport,
        manifest_text=options.run.manifest_text,
        gate=options.gate,
        on_event=on_event,
        traffic=Traffic(upload_limit=options.network.upload_limit),
    )
    options.gate.on_refused = lambda peer, why: context.note("refused", peer=peer, why=why)
    return context


def _protocol(options: NodeOptions, replica: Replica, transport: Transport, digests: list[str]) -> Peer:
    saved = options.saved
    return Peer(
        me=transport.me,
        name=options.name,
        run_id=options.run.id,
        manifest_hash=options.run.manifest_hash,
        digests=digests,
        versions=None if saved is None else list(saved.versions),
        applied_tokens=0 if saved is None else saved.applied_tokens,
        trains=options.trains,
        holds=transport.reachable,
        min_peers=options.network.min_peers,
        newcomer=bool(transport.seeds),
        outer=replica.settings,
        tokens_per_step=options.run.tokens_per_step,
        device=options.device,
        payload_bytes=[replica.payload_numel(fragment) for fragment in range(len(replica.fragments))],
    )


def _restore(protocol: Peer, options: NodeOptions) -> None:
    """What a checkpoint kept of the protocol beside the versions."""
    saved = options.saved
    if saved is None:
        return
    for fragment, term in enumerate(saved.terms):
        protocol.leases.see_term(fragment, term)
    protocol.accounts.restore_shares(saved.shares)
    protocol.accounts.dealer.know(protocol.versions[CONTROL_FRAGMENT], (saved.units[0], union(saved.units[1])))
