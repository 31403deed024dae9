"""What the sans-IO core asks its owner, a node, to do."""

from __future__ import annotations

from dataclasses import dataclass, field

from diloco.protocol.messages import Message
from diloco.protocol.offers import Close

__all__ = [
    "Action",
    "Broadcast",
    "CatchUp",
    "Disconnect",
    "Hold",
    "Merge",
    "Note",
    "Release",
    "Renumber",
    "Tell",
    "Wake",
]


@dataclass(frozen=True)
class Broadcast:
    """Send a message to every connected peer."""

    message: Message


@dataclass(frozen=True)
class Tell:
    """Send a message to one peer, if it is connected."""

    peer: str
    message: Message


@dataclass(frozen=True)
class Disconnect:
    """End the streams to and from a peer. It is no member (any more); if it is alive, it has to say hello again."""

    peer: str


@dataclass(frozen=True)
class Hold:
    """This peer is syncer of the fragment from now on: prepare the outer state and publish the lease in the DHT."""

    fragment: int
    term: int


@dataclass(frozen=True)
class Release:
    """This peer is not the fragment's syncer any more: drop the collected contributions and the outer state."""

    fragment: int


@dataclass(frozen=True)
class Merge:
    """Make the next version out of the collected contributions, publish it, and report it by `Peer.published`."""

    close: Close


@dataclass(frozen=True)
class CatchUp:
    """Fetch the fragment from one of the donors, in that order, and report it by `Peer.adopted`."""

    fragment: int
    donors: tuple[str, ...]


@dataclass(frozen=True)
class Renumber:
    """Give the fragment's anchor, which this peer's history goes on from, a number above this one, and report it by
    `Peer.adopted`.
    """

    fragment: int
    above: int


@dataclass(frozen=True)
class Wake:
    """Call `Peer.tick` at this time, in seconds of the clock that `now` comes from."""

    at: float


@dataclass(frozen=True)
class Note:
    """One line for the event log."""

    kind: str
    fields: dict[str, object] = field(default_factory=dict)


Action = Broadcast | CatchUp | Disconnect | Hold | Merge | Note | Release | Renumber | Tell | Wake
