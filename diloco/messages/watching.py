"""Requests on bulk streams of peers that take no part, or not yet. They may not know the manifest's
hash."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from diloco.messages.base import EVERYBODY, Message, Place
from diloco.messages.fields import MAX_COUNT, Addresses, Count, Name, Seal, printable

MAX_PIECE_BYTES = 2**19  # the longest manifest is one piece
MAX_PROBE_BYTES = 2**22  # each way: a second of a 32 Mbit/s link

ProbeBytes = Annotated[int, Meta(ge=0, le=MAX_PROBE_BYTES)]


class Ask(Message, frozen=True, tag="ask"):
    """Asks for the manifest of the run, a snapshot of the swarm, or a file that the manifest names
    by this digest."""

    place, roles = Place.REQUEST, EVERYBODY
    what: Annotated[str, Meta(pattern=r"^(manifest|snapshot|[0-9a-f]{64})\Z")]


class Piece(Message, frozen=True, tag="piece"):
    """A piece of what was asked for: canonical JSON, a packed `snapshot.Snapshot`, or bytes of a
    file. Another one follows if there is `more`.
    """

    wire_version: Count
    data: Annotated[bytes, Meta(max_length=MAX_PIECE_BYTES)]
    more: bool = False
    seal: Seal = ""


class Probe(Message, frozen=True, tag="probe"):
    """Asks whether a peer is well and how well it is connected. `sends` meaningless bytes follow,
    and `wants` bytes come back behind the reply. The asker wants to be called at the addresses in
    `call`, over a new connection.
    """

    place, roles = Place.REQUEST, EVERYBODY
    sends: ProbeBytes = 0
    wants: ProbeBytes = 0
    call: Addresses = field(default_factory=list)


class ProbeReply(Message, frozen=True, tag="probe_reply"):
    """What a peer says of itself: its clock (`unix_s`), where others reach it, ids of some peers
    that it is connected to (`known`); and of the asker: the multiaddr from which it comes
    (`observed`; empty where nobody knows), where it answered a call (`reached`), and why it did not
    elsewhere.
    """

    wire_version: Count
    run_id: Name
    name: Name
    unix_s: Annotated[float, Meta(ge=0, le=MAX_COUNT)]
    addresses: Addresses
    known: Annotated[list[Name], Meta(max_length=64)]
    observed: Annotated[str, Meta(max_length=256)] = ""
    reached: Addresses = field(default_factory=list)
    why: Annotated[str, Meta(max_length=512)] = ""

    def __post_init__(self) -> None:
        printable(self, "run_id", "name", "observed", "why")
