"""Events of simulated peers: `crash:3@120`, `leave:1@90`, `join:4@60`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diloco.errors import ConfigError


@dataclass(frozen=True)
class SimEvent:
    """A peer (by number, from 0) crashes, leaves or joins at a virtual second."""

    kind: str
    peer: int
    at_s: float


def parse_events(texts: Sequence[str], peers: int) -> list[SimEvent]:
    """Parse `sim.events`, sorted by time; those of equal time keep their order.

    `peers` are there at second 0, except those that join before anything else happens to them.
    Raises ConfigError if a peer that is not there leaves or crashes, or one that is there joins.
    """
    events = []
    for text in texts:
        kind, _, rest = text.partition(":")
        peer, _, at_s = rest.partition("@")
        events.append(SimEvent(kind, int(peer), float(at_s)))
    events.sort(key=lambda event: event.at_s)
    present = set(starters(events, peers))
    for event in events:
        if (event.kind == "join") == (event.peer in present):
            shown, number = f"{event.kind}:{event.peer}@{event.at_s:g}", event.peer
            state = "is there already" if event.kind == "join" else "is not there"
            start = f"peers 0 to {peers - 1} are there from the start, unless they join first"
            why = f"but peer {number} {state}; with local.peers={peers}, {start}"
            raise ConfigError(f"sim.events: {shown}, {why}")
        present ^= {event.peer}
    return events


def starters(events: Sequence[SimEvent], peers: int) -> list[int]:
    """List the peers that are there at second 0."""
    first = {event.peer: event.kind for event in reversed(events)}
    return [peer for peer in range(peers) if first.get(peer) != "join"]
