"""What all conversations of one node share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from diloco.errors import PayloadError
from diloco.outer.replica import Replica
from diloco.protocol.actions import Action
from diloco.protocol.peer import Peer
from diloco.protocol.syncer import Syncer
from diloco.swarm.conversations.framing import UpdateRecord
from diloco.swarm.conversations.recorder import Recorder
from diloco.swarm.conversations.tasks import FragmentLock, Tasks
from diloco.swarm.wire.gate import Gate
from diloco.swarm.wire.streams import Stream, Traffic, open_bulk
from diloco.swarm.wire.transport import Transport

__all__ = ["Context", "OnEvent"]

OnEvent = Callable[[str, dict[str, object]], None]
"""Called with the kind and the fields of everything that happens in the swarm."""


@dataclass(eq=False)
class Context:
    """The protocol core of a node, its tensors, its network, and how its conversations wait and report.

    `locks`, by fragment, are held to read or move an anchor, and to fold in a whole contribution. `records` are the
    newest update records that this peer made, by fragment. `carry_out` does what the protocol asks for; the node sets
    it.
    """

    protocol: Peer
    replica: Replica
    transport: Transport
    manifest_text: str
    gate: Gate
    on_event: OnEvent
    traffic: Traffic = field(default_factory=Traffic)
    tasks: Tasks = field(default_factory=Tasks)
    records: dict[int, UpdateRecord] = field(default_factory=dict)
    carry_out: Callable[[Sequence[Action]], None] = field(init=False)
    locks: Sequence[FragmentLock] = field(init=False)
    recorder: Recorder = field(init=False)

    def __post_init__(self) -> None:
        self.recorder = Recorder(self.protocol, self.manifest_text)
        self.locks = [FragmentLock() for _ in self.replica.fragments]

    def now(self) -> float:
        """Seconds of the event loop's clock."""
        return asyncio.get_running_loop().time()

    def note(self, kind: str, **fields: object) -> None:
        """Hand one event to the log, and keep it for watchers."""
        self.recorder.note(kind, fields, self.now())
        self.on_event(kind, fields)

    def do(self, actions: Sequence[Action]) -> None:
        """Carry out what the protocol asks for; whatever waits for a change of the protocol looks again."""
        self.carry_out(actions)
        self.tasks.notify()

    def holds(self, syncer: Syncer) -> bool:
        """Whether this peer is still syncer under the same lease; asked again after whatever was awaited."""
        return self.protocol.fragments[syncer.fragment].syncer is syncer

    def open(self, peer: str) -> AbstractAsyncContextManager[Stream]:
        """A bulk stream to a peer, for the length of an `async with`."""
        return open_bulk(self.transport, peer, self.traffic)

    def check_run(self, manifest_hash: str) -> None:
        """`PayloadError` when a request comes from a run with another manifest."""
        if manifest_hash != self.protocol.manifest_hash:
            raise PayloadError(f"the manifest {manifest_hash[:12]} is not the one here")
