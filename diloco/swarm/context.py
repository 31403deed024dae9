"""The context that all parts of a node share: the core, the tensors, the network, and reports."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from diloco.core.events import Action, Event, Lost
from diloco.core.peer import Peer
from diloco.outer.replica import Replica
from diloco.swarm.limits import CAUSED_BY_OTHERS, EventLines, Penalties
from diloco.swarm.rpc.updates import Arrival
from diloco.swarm.wire.gate import Gate
from diloco.swarm.wire.streams import PeerStream, Traffic, open_bulk
from diloco.swarm.wire.tasks import FragmentLock, Tasks
from diloco.swarm.wire.transport import Transport

OnEvent = Callable[[str, dict[str, object]], None]
"""Called with the kind and the fields of everything that happens in the swarm."""


class FilePart(NamedTuple):
    """Bytes of a file that a peer gives to others; by default all of them."""

    path: Path
    offset: int = 0
    nbytes: int | None = None


@dataclass(eq=False)
class Context:
    """The core of a node, its tensors, its network, and what it gives to others.

    `locks`, by fragment, are held to read or move an anchor.
    """

    core: Peer
    replica: Replica
    transport: Transport
    gate: Gate
    on_event: OnEvent
    traffic: Traffic = field(default_factory=Traffic)
    manifest: str = "{}"  # JSON of the run
    files: Mapping[str, FilePart] = field(default_factory=dict)  # for joiners, by digest
    inner_state: Callable[[], Any] = lambda: None  # `InnerState` of the trainer; used in threads
    tap: Callable[[Event, float], None] = lambda event, now: None  # gets each event of the core
    tasks: Tasks = field(default_factory=Tasks)
    lines: EventLines = field(default_factory=EventLines)
    penalties: Penalties = field(default_factory=Penalties)
    # partly received payloads and their number of bytes, by fragment, peer and stamp
    partial: dict[tuple[int, str, int], tuple[Tensor, int]] = field(default_factory=dict)
    # payloads being sent: receiver, fragment, contributor and stamp
    sending: set[tuple[str, int, str, int]] = field(default_factory=set)
    # by fragment: the stream that receives records, and the newest record, complete or arriving
    fetching: dict[int, PeerStream] = field(default_factory=dict)
    arrivals: dict[int, Arrival] = field(default_factory=dict)
    locks: Sequence[FragmentLock] = field(init=False)
    _moving: dict[object, tuple[Callable[[], int], Callable[[int], object], int]] = field(
        default_factory=dict
    )
    _stopped_at: float | None = None
    _stood_s: float = 0.0
    # set by the node: carries out actions of the core; keeps events for watchers; makes a snapshot
    # for them; reads a part of an anchor by fragment, head and part (None if it is gone)
    carry_out: Callable[[Sequence[Action]], None] = field(init=False)
    watch: Callable[[str, dict[str, object], float], None] = lambda kind, fields, now: None
    packed_snapshot: Callable[[float], list[bytes]] = field(init=False)
    read_part: Callable[[int, str, int], Awaitable[Tensor | None]] = field(init=False)

    def __post_init__(self) -> None:
        self.locks = [FragmentLock() for _ in self.replica.fragments]

    def now(self) -> float:
        """Seconds of this node's clock: the event loop's, without the time for which it stood."""
        since = self._stopped_at
        return (asyncio.get_running_loop().time() if since is None else since) - self._stood_s

    def stop_clock(self) -> None:
        """Let the clock stand, while no peer could be heard: no deadline of the core passes."""
        if self._stopped_at is None:
            self._stopped_at = asyncio.get_running_loop().time()

    def start_clock(self) -> None:
        """Let the clock go on."""
        if self._stopped_at is not None:
            self._stood_s += asyncio.get_running_loop().time() - self._stopped_at
            self._stopped_at = None

    def note(self, kind: str, **fields: object) -> None:
        """Log an event and keep it for watchers; `limits` bounds those that others cause."""
        if kind in CAUSED_BY_OTHERS:
            cause = str(fields.get(CAUSED_BY_OTHERS[kind], ""))
            suppressed = self.lines.suppressed(kind, cause, self.now())
            if suppressed is None:
                return
            fields |= {"suppressed": suppressed} if suppressed else {}
        self.watch(kind, fields, self.now())
        if kind != "tip":  # versions are in the metrics
            self.on_event(kind, fields)

    def do(self, event: Event) -> Sequence[Action]:
        """Give the core an event, carry out the actions that it returns, and return them."""
        now = self.now()
        self.tap(event, now)
        actions = self.core.receive(event, now)
        self.carry_out(actions)
        self.tasks.notify()
        return actions

    def offence(self, peer: str, reason: str) -> None:
        """Remove a peer that sent what no honest peer sends, and refuse it for a while."""
        known = self.penalties.refusal(peer, self.now()) is not None
        seconds = self.penalties.offence(peer, reason, self.now())
        if not known:
            self.note("penalty", peer=peer, why=reason, seconds=round(seconds))
        self.do(Lost(peer, reason))

    @contextmanager
    def moving(self, nbytes: Callable[[], int], tell: Callable[[int], object]) -> Iterator[None]:
        """Call `tell` with the number of bytes once a heartbeat in the block, if it has changed."""
        here = object()
        self._moving[here] = (nbytes, tell, 0)
        try:
            yield
        finally:
            del self._moving[here]

    def tell_moved(self) -> None:
        """Call `tell` of each `moving` whose number of bytes has risen."""
        for here, (nbytes, tell, before) in list(self._moving.items()):
            if here in self._moving and nbytes() > before:
                self._moving[here] = (nbytes, tell, nbytes())
                tell(nbytes())

    def open(self, peer: str) -> AbstractAsyncContextManager[PeerStream]:
        """Open a bulk stream to a peer for an `async with` block."""
        return open_bulk(self.transport, peer, self.traffic)
