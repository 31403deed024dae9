"""What all conversations of one node share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path

from diloco.errors import PayloadError
from diloco.outer.replica import Replica
from diloco.protocol.actions import Action
from diloco.protocol.limits import CAUSED_BY_OTHERS, EventLines
from diloco.protocol.peer import Peer
from diloco.protocol.syncer import Syncer
from diloco.swarm.conversations.framing import UpdateRecord, anchor_codec
from diloco.swarm.conversations.recorder import Recorder
from diloco.swarm.conversations.tasks import FragmentLock, Tasks
from diloco.swarm.wire.gate import Gate
from diloco.swarm.wire.streams import Stream, Traffic, open_bulk
from diloco.swarm.wire.transport import Transport
from diloco.text import plain

__all__ = ["Context", "OnEvent"]

logger = logging.getLogger(__name__)

OnEvent = Callable[[str, dict[str, object]], None]
"""Called with the kind and the fields of everything that happens in the swarm."""


@dataclass(eq=False)
class Context:
    """The protocol core of a node, its tensors, its network, and how its conversations wait and report.

    `locks`, by fragment, are held to read or move an anchor, and to fold in a whole contribution. `records` are the
    newest update records that this peer made, by fragment, the oldest first. `contributing` are the streams on which
    contributions arrive, by peer and fragment. `files` are those that the manifest names, by digest.
    `carry_out` does what the protocol asks for; the node sets it.
    """

    protocol: Peer
    replica: Replica
    transport: Transport
    manifest_text: str
    gate: Gate
    on_event: OnEvent
    files: Mapping[str, Path] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    tasks: Tasks = field(default_factory=Tasks)
    records: dict[int, list[UpdateRecord]] = field(default_factory=dict)
    lines: EventLines = field(default_factory=EventLines)
    contributing: dict[tuple[str, int], Stream] = field(default_factory=dict)
    carry_out: Callable[[Sequence[Action]], None] = field(init=False)
    locks: Sequence[FragmentLock] = field(init=False)
    recorder: Recorder = field(init=False)

    def __post_init__(self) -> None:
        self.recorder = Recorder(self.protocol, self.manifest_text)
        self.recorder.on_failure = self._recorder_failed
        self.locks = [FragmentLock() for _ in self.replica.fragments]

    def now(self) -> float:
        """Seconds of the event loop's clock."""
        return asyncio.get_running_loop().time()

    def note(self, kind: str, **fields: object) -> None:
        """Hand one event to the log, and keep it for watchers; of those that others cause only so many (`limits`)."""
        if kind in CAUSED_BY_OTHERS:
            suppressed = self.lines.suppressed(kind, str(fields.get(CAUSED_BY_OTHERS[kind], "")), self.now())
            if suppressed is None:
                return
            fields |= {"suppressed": suppressed} if suppressed else {}
        self.recorder.note(kind, fields, self.now())
        self.on_event(kind, fields)
        if kind == "other_data":  # nobody would look for that in a log of events
            who = f"{plain(str(fields['name']))} ...{str(fields['peer'])[-6:]}"
            logger.warning("%s has other data (%s; here %s): %s", who, fields["there"], fields["here"], fields["so"])

    def _recorder_failed(self, why: str) -> None:
        if self.lines.suppressed("recorder_failed", "", self.now()) is not None:  # the recorder itself cannot keep it
            self.on_event("recorder_failed", {"why": why})

    def do(self, actions: Sequence[Action]) -> None:
        """Carry out what the protocol asks for; whatever waits for a change of the protocol looks again."""
        self.carry_out(actions)
        self.tasks.notify()

    def holds(self, syncer: Syncer) -> bool:
        """Whether this peer is still syncer under the same lease; asked again after whatever was awaited."""
        return self.protocol.fragments[syncer.fragment].syncer is syncer

    def keep_record(self, record: UpdateRecord) -> None:
        """Keep the record of a version that this peer made, and those before it that are smaller than a state together.

        That is one fp32 copy of the fragment at most: 3 records with int8, 7 with e3m0; and with fp16 and fp32, whose
        records are as large as the state, the newest one. All of them are dropped as soon as every connected peer has
        the version (see `answer`).
        """
        fragment = record.header.fragment
        kept = self.records.get(fragment, [])
        follows = kept and kept[-1].header.digest == record.header.digest_before
        state_nbytes = anchor_codec(self.replica, 1).nbytes(self.replica.fragments[fragment].numel)
        most = max(1, (state_nbytes - 1) // self.replica.update_nbytes(fragment))
        self.records[fragment] = [*(kept if follows else ()), record][-most:]

    def records_since(self, fragment: int, version: int) -> list[UpdateRecord]:
        """The records that lead from a version to the anchor here; empty when one of them is not kept."""
        newer = [record for record in self.records.get(fragment, ()) if record.header.version > version]
        leads_here = newer and newer[-1].header.digest == self.protocol.fragments[fragment].digest
        return newer if leads_here and newer[-1].header.version == version + len(newer) else []

    def open(self, peer: str) -> AbstractAsyncContextManager[Stream]:
        """A bulk stream to a peer, for the length of an `async with`."""
        return open_bulk(self.transport, peer, self.traffic)

    def check_run(self, manifest_hash: str) -> None:
        """`PayloadError` when a request comes from a run with another manifest."""
        if manifest_hash != self.protocol.manifest_hash:
            raise PayloadError(f"the manifest {manifest_hash[:12]} is not the one here")
