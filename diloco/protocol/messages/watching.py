"""Requests on bulk streams of peers that take no part, or not yet: the manifest, a snapshot of the swarm, a probe."""

from __future__ import annotations

from typing import Annotated

from pydantic import FailFast, Field

from diloco.protocol.messages.base import (
    EVERYBODY,
    MAX_FRAME_BYTES,
    Addresses,
    Digest,
    Message,
    Name,
    Place,
    Said,
    Seal,
)
from diloco.protocol.numbers import MAX_COUNT, Count

__all__ = [
    "MAX_FILE_PIECE_BYTES", "MAX_PROBE_BYTES", "MAX_SNAPSHOT_PIECE_BYTES", "DialBack", "DialBackReply", "FileReply",
    "FileRequest", "ManifestReply", "ManifestRequest", "Probe", "ProbeReply", "SnapshotReply", "SnapshotRequest",
]  # fmt: skip

MAX_SNAPSHOT_PIECE_BYTES = MAX_FILE_PIECE_BYTES = MAX_FRAME_BYTES // 2
MAX_PROBE_BYTES = 2**22  # each way: a second of a 32 Mbit/s link


class ManifestRequest(Message, kind="manifest_request", place=Place.REQUEST, roles=EVERYBODY):
    """Asks for the manifest of the run; it has no manifest hash, because newcomers learn that from the answer."""


class ManifestReply(Message, kind="manifest"):
    """The manifest as canonical JSON, and in a closed run its seal: the run key's signature of its hash."""

    text: Annotated[str, Field(max_length=MAX_FRAME_BYTES // 2)]
    seal: Seal = ""


class SnapshotRequest(Message, kind="snapshot_request", place=Place.REQUEST, roles=EVERYBODY):
    """Asks what the peer knows of the swarm; it has no manifest hash, because watchers take no part."""


class SnapshotReply(Message, kind="snapshot"):
    """A piece of a `snapshot.Snapshot`, packed; the next message is the next piece if there is `more`."""

    wire_version: Count
    data: Annotated[bytes, Field(max_length=MAX_SNAPSHOT_PIECE_BYTES)]
    more: bool = False


class FileRequest(Message, kind="file_request", place=Place.REQUEST, roles=EVERYBODY):
    """Asks for one of the small files that the manifest names by digests; a newcomer needs them before it can train."""

    digest: Digest


class FileReply(Message, kind="file"):
    """A piece of a file; the next message is the next piece if there is `more`."""

    data: Annotated[bytes, Field(max_length=MAX_FILE_PIECE_BYTES)]
    more: bool = False


class Probe(Message, kind="probe", place=Place.REQUEST, roles=EVERYBODY):
    """Asks whether a peer is well and how well it is connected. `sends` meaningless bytes follow, and `wants` bytes
    come back behind the reply; the time that they take gives the bandwidth.
    """

    sends: Annotated[int, Field(ge=0, le=MAX_PROBE_BYTES)] = 0
    wants: Annotated[int, Field(ge=0, le=MAX_PROBE_BYTES)] = 0


class ProbeReply(Message, kind="probe_reply"):
    """What a peer says of itself to one that does not know it yet.

    Attributes:
        unix_s: its clock when it sends the reply.
        addresses: where others reach it. known: ids of some peers that it is connected to.
        observed: multiaddr from which the asker's connection comes; empty where the peer does not know it.
    """

    wire_version: Count
    run_id: Name
    name: Annotated[Said, Field(max_length=128)]
    unix_s: Annotated[float, Field(ge=0, le=MAX_COUNT, allow_inf_nan=False)]
    addresses: Addresses
    known: Annotated[list[Name], Field(max_length=64), FailFast()]
    observed: Annotated[Said, Field(max_length=256)] = ""


class DialBack(Message, kind="dial_back", place=Place.REQUEST, roles=EVERYBODY):
    """Asks to be called at these addresses over a new connection: the asker wants to know whether others can reach it.

    The peer calls only addresses with the IP that the asker's connection comes from, and only the asker itself answers
    to its id, so nobody can turn this against others.
    """

    addresses: Addresses


class DialBackReply(Message, kind="dial_back_reply"):
    """The addresses at which the asker answered; `why` says why it did not at the others.

    `observed` is the multiaddr from which the asker's connection comes.
    """

    reached: Addresses
    why: Annotated[Said, Field(max_length=512)] = ""
    observed: Annotated[Said, Field(max_length=256)] = ""
