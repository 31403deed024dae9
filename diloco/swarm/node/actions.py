"""What the protocol core asks for, carried out. Long work becomes a task that reports back to the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from diloco.protocol.actions import Action, Broadcast, CatchUp, Disconnect, Hold, Merge, Note, Release, Wake
from diloco.swarm.conversations.answer import BulkServer
from diloco.swarm.conversations.context import Context
from diloco.swarm.node.anchors import Anchors
from diloco.swarm.node.dht import DhtRecords
from diloco.swarm.node.merging import Merging
from diloco.swarm.node.mesh import ControlMesh

__all__ = ["Actions"]


class Actions:
    """The hands of a node: `carry_out` is what its context does with actions."""

    def __init__(
        self,
        context: Context,
        mesh: ControlMesh,
        anchors: Anchors,
        merging: Merging,
        server: BulkServer,
        dht: DhtRecords,
    ) -> None:
        self._context, self._mesh, self._anchors, self._merging = context, mesh, anchors, merging
        self._server, self._dht = server, dht
        context.carry_out = self.carry_out

    def carry_out(self, actions: Sequence[Action]) -> None:
        """Do what the protocol asked for."""
        for action in actions:
            self._carry_out(action)
        self.forget_records()

    def _carry_out(self, action: Action) -> None:
        context = self._context
        match action:
            case Broadcast():
                self._mesh.broadcast(action.message)
                context.recorder.heard(context.protocol, context.protocol.me, action.message, context.now())
            case Disconnect():
                self._mesh.disconnect(action.peer)
            case Note():
                context.note(action.kind, **action.fields)
            case Hold():
                self._take_over(action)
                context.tasks.spawn(self._dht.store_leases())
            case Release():
                context.replica.release(action.fragment)
                context.records.pop(action.fragment, None)
            case Merge():
                context.tasks.spawn(self._merging.merge(action.close))
            case Wake():
                asyncio.get_running_loop().call_at(action.at, self._wake)
            case CatchUp():
                context.tasks.spawn(self._anchors.catch_up(action.fragment, action.donors, action.outer))

    def forget_records(self) -> None:
        """Drop the updates that every connected peer has adopted; a peer that comes later gets the state."""
        members = self._context.protocol.members.all()
        for fragment, record in list(self._context.records.items()):
            adopted = all(member.status.versions[fragment] >= record.header.version for member in members)
            if adopted and self._server.serving == 0:
                del self._context.records[fragment]

    def _take_over(self, action: Hold) -> None:
        """Hold a fragment. One that had another syncer goes on with the momentum that is known here, or with none."""
        context, fragment = self._context, action.fragment
        if action.term > 1:
            version, standby = context.protocol.fragments[fragment].version, context.replica.standby.get(fragment)
            momentum = "kept" if fragment in context.replica.held else "restarted"
            if standby is not None:
                momentum = "kept" if standby.version == version else "stale"
            context.note("takeover", fragment=fragment, term=action.term, version=version, momentum=momentum)
        context.replica.hold(fragment)

    def _wake(self) -> None:
        context = self._context
        if not context.tasks.closed:
            context.do(context.protocol.tick(context.now()))
