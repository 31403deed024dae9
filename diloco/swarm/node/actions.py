"""What the protocol core asks for, and the owner's list of what is revoked, carried out.

Long work becomes a task that reports back to the protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from diloco.errors import SwarmError
from diloco.protocol.actions import (
    Action,
    Broadcast,
    CatchUp,
    Disconnect,
    Hold,
    Merge,
    Note,
    Release,
    Renumber,
    Tell,
    Wake,
)
from diloco.protocol.messages.control import Revocations
from diloco.swarm.conversations.answer import BulkServer
from diloco.swarm.conversations.context import Context
from diloco.swarm.node.anchors import Anchors
from diloco.swarm.node.merging import Merging
from diloco.swarm.node.mesh import ControlMesh

__all__ = ["Actions"]


class Actions:
    """The hands of a node: its context calls `carry_out` with actions, and its gate `spread` with a newer list."""

    def __init__(
        self, context: Context, mesh: ControlMesh, anchors: Anchors, merging: Merging, server: BulkServer
    ) -> None:
        self._context, self._mesh, self._anchors = context, mesh, anchors
        self._merging, self._server = merging, server
        context.carry_out = self.carry_out
        context.gate.on_revoked = self.spread

    def carry_out(self, actions: Sequence[Action]) -> None:
        """Do what the protocol asked for."""
        for action in actions:
            self._carry_out(action)
        self._server.forget_records()

    def _carry_out(self, action: Action) -> None:
        context = self._context
        match action:
            case Broadcast():
                self._mesh.broadcast(action.message)
                context.recorder.heard(context.protocol.me, action.message, context.now())
            case Tell():
                self._mesh.tell(action.peer, action.message)
            case Disconnect():
                self._mesh.disconnect(action.peer)
            case Note():
                context.note(action.kind, **action.fields)
            case Hold():
                self._take_over(action)
            case Release():
                context.replica.release(action.fragment)
                context.records.pop(action.fragment, None)
            case Merge():
                context.tasks.spawn(self._merging.merge(action.close))
            case Wake():
                asyncio.get_running_loop().call_at(action.at, self._wake)
            case Renumber():
                context.tasks.spawn(self._anchors.renumber(action.fragment, action.above))
            case CatchUp():
                context.tasks.spawn(self._anchors.catch_up(action.fragment, action.donors))

    def _take_over(self, action: Hold) -> None:
        """Hold a fragment. One that had another syncer goes on with the momentum that is known here, or with none."""
        context, fragment = self._context, action.fragment
        if action.term > 1:
            version, state = context.protocol.fragments[fragment].version, context.replica.states.get(fragment)
            momentum = "restarted" if state is None else "kept" if state.version == version else "stale"
            context.note("takeover", fragment=fragment, term=action.term, version=version, momentum=momentum)
        context.replica.hold(fragment)

    def _wake(self) -> None:
        if not self._context.tasks.closed:
            self._context.do(self._context.protocol.tick(self._context.now()))

    def spread(self, revoked: Revocations) -> None:
        """A newer list came in. The peers on it are told too, before they are put out."""
        context = self._context
        context.note("revoked", number=revoked.number, token_ids=revoked.token_ids, peer_ids=revoked.peer_ids)
        self._mesh.broadcast(revoked)
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
