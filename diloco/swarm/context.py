"""What all parts of a node share: the core, the tensors, the network, and how to report."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from diloco.core.events import Action, Event, Lost
from diloco.core.limits import CAUSED_BY_OTHERS, EventLines, Penalties
from diloco.core.peer import Peer
from diloco.outer.replica import Replica
from diloco.swarm.wire.gate import Gate
from diloco.swarm.wire.streams import Stream, Traffic, open_bulk
from diloco.swarm.wire.tasks import FragmentLock, Tasks
from diloco.swarm.wire.transport import Transport
from diloco.text import plain

logger = logging.getLogger(__name__)

OnEvent = Callable[[str, dict[str, object]], None]
"""Called with the kind and the fields of everything that happens in the swarm."""


@dataclass(eq=False)
class Context:
    """The core of a node, its tensors and its network.

    `locks`, by fragment, are held to read or move an anchor. The node sets `carry_out`, which does
    what the core asks for, and `watch`, which keeps events for watchers. `tap` sees every event
    before the core does.
    """

    core: Peer
    replica: Replica
    transport: Transport
    gate: Gate
    on_event: OnEvent
    traffic: Traffic = field(default_factory=Traffic)
    tasks: Tasks = field(default_factory=Tasks)
    lines: EventLines = field(default_factory=EventLines)
    penalties: Penalties = field(default_factory=Penalties)
    watch: Callable[[str, dict[str, object], float], None] = lambda kind, fields, now: None
    tap: Callable[[Event, float], None] = lambda event, now: None
    carry_out: Callable[[Sequence[Action]], None] = field(init=False)
    locks: Sequence[FragmentLock] = field(init=False)

    def __post_init__(self) -> None:
        self.locks = [FragmentLock() for _ in self.replica.fragments]

    def now(self) -> float:
        """Seconds of the event loop's clock."""
        return asyncio.get_running_loop().time()

    def note(self, kind: str, **fields: object) -> None:
        """Log one event and keep it for watchers; of those that others cause only so many
        (`limits`)."""
        if kind in CAUSED_BY_OTHERS:
            suppressed = self.lines.suppressed(
                kind, str(fields.get(CAUSED_BY_OTHERS[kind], "")), self.now()
            )
            if suppressed is None:
                return
            fields |= {"suppressed": suppressed} if suppressed else {}
        self.watch(kind, fields, self.now())
        if kind != "tip":  # the log of metrics has the versions
            self.on_event(kind, fields)
        if kind == "other_data":  # nobody would look for that in a log of events
            who = f"{plain(str(fields['name']))} ...{str(fields['peer'])[-6:]}"
            logger.warning(
                "%s has other data (%s; here %s): %s",
                who,
                fields["there"],
                fields["here"],
                fields["so"],
            )

    def do(self, event: Event) -> Sequence[Action]:
        """Tell the core what happened, and do what it asks for, which is returned. Whoever waits
        looks again."""
        now = self.now()
        self.tap(event, now)
        actions = self.core.receive(event, now)
        self.carry_out(actions)
        self.tasks.notify()
        return actions

    def offence(self, peer: str, reason: str) -> None:
        """A peer sent what no honest one sends: it is refused for a while, and is no member
        meanwhile."""
        known = self.penalties.refusal(peer, self.now()) is not None
        seconds = self.penalties.offence(peer, reason, self.now())
        if not known:
            self.note("penalty", peer=peer, why=reason, seconds=round(seconds))
        self.do(Lost(peer, reason))

    def open(self, peer: str) -> AbstractAsyncContextManager[Stream]:
        """A bulk stream to a peer, for the length of an `async with`."""
        return open_bulk(self.transport, peer, self.traffic)
