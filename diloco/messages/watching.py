"""Requests on bulk streams of peers that take no part, or not yet. They may not know the manifest's hash."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from diloco.messages.base import EVERYBODY, MAX_FRAME_BYTES, Message, Place
from diloco.messages.fields import MAX_COUNT, Addresses, Count, Name, Seal, printable

__all__ = ["MAX_PIECE_BYTES", "MAX_PROBE_BYTES", "Ask", "DialBack", "DialBackReply", "Piece", "Probe", "ProbeReply"]

MAX_PIECE_BYTES = MAX_FRAME_BYTES // 2  # the longest manifest is one piece
MAX_PROBE_BYTES = 2**22  # each way: a second of a 32 Mbit/s link

ProbeBytes = Annotated[int, Meta(ge=0, le=MAX_PROBE_BYTES)]


class Ask(Message, frozen=True, tag="ask"):
    """Asks for the manifest of the run, a snapshot of the swarm, or a file that the manifest names by this digest."""

    place, roles = Place.REQUEST, EVERYBODY
    what: Annotated[str, Meta(pattern=r"^(manifest|snapshot|[0-9a-f]{64})\Z")]


class Piece(Message, frozen=True, tag="piece"):
    """A piece of what was asked for: canonical JSON, a packed `snapshot.Snapshot`, or bytes of a file. The next message
    is the next piece if there is `more`. `seal` goes with a manifest: the run key's signature of its hash.
    """

    wire_version: Count
    data: Annotated[bytes, Meta(max_length=MAX_PIECE_BYTES)]
    more: bool = False
    seal: Seal = ""


class Probe(Message, frozen=True, tag="probe"):
    """Asks whether a peer is well and how well it is connected. `sends` meaningless bytes follow, and `wants` bytes
    come back behind the reply; the time that they take gives the bandwidth.
    """

    place, roles = Place.REQUEST, EVERYBODY
    sends: ProbeBytes = 0
    wants: ProbeBytes = 0


class ProbeReply(Message, frozen=True, tag="probe_reply"):
    """Its clock, where others reach it, whom it knows, and from where the asker's connection comes, if it can tell."""

    wire_version: Count
    run_id: Name
    name: Name
    unix_s: Annotated[float, Meta(ge=0, le=MAX_COUNT)]
    addresses: Addresses
    known: Annotated[list[Name], Meta(max_length=64)]
    observed: Annotated[str, Meta(max_length=256)] = ""

    def __post_init__(self) -> None:
        printable(self, "run_id", "name", "observed")


class DialBack(Message, frozen=True, tag="dial_back"):
    """Asks to be called at these addresses over a new connection: can others reach the asker? Called are only addresses
    with the IP that its connection comes from, and only the asker answers to its id: nobody turns this against others.
    """

    place, roles = Place.REQUEST, EVERYBODY
    addresses: Addresses


class DialBackReply(Message, frozen=True, tag="dial_back_reply"):
    """The addresses at which the asker answered, why it did not at others, and from where its connection comes."""

    reached: Addresses
    why: Annotated[str, Meta(max_length=512)] = ""
    observed: Annotated[str, Meta(max_length=256)] = ""

    def __post_init__(self) -> None:
        printable(self, "why", "observed")
