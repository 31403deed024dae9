"""What is asked on bulk streams by who takes no part, or not yet: the manifest, a snapshot of the swarm, a probe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import FailFast, Field

from diloco.protocol.messages.base import MAX_FRAME_BYTES, Addresses, Count, Message, Name

__all__ = [
    "MAX_PROBE_BYTES",
    "MAX_SNAPSHOT_PIECE_BYTES",
    "DialBack",
    "DialBackReply",
    "ManifestReply",
    "ManifestRequest",
    "Probe",
    "ProbeReply",
    "SnapshotReply",
    "SnapshotRequest",
]

MAX_SNAPSHOT_PIECE_BYTES = MAX_FRAME_BYTES // 2
MAX_PROBE_BYTES = 2**22  # each way: a second of a 32 Mbit/s link


class ManifestRequest(Message):
    """Asks for the manifest of the run; needs no manifest hash, for it is how a newcomer learns it."""

    kind: Literal["manifest_request"] = "manifest_request"


class ManifestReply(Message):
    """The manifest as canonical JSON."""

    kind: Literal["manifest"] = "manifest"
    text: Annotated[str, Field(max_length=MAX_FRAME_BYTES // 2)]


class SnapshotRequest(Message):
    """Asks what the peer knows of the swarm; needs no manifest hash, for who watches takes no part."""

    kind: Literal["snapshot_request"] = "snapshot_request"


class SnapshotReply(Message):
    """A piece of a `snapshot.Snapshot`, packed; the next message is the next piece if there is `more`."""

    kind: Literal["snapshot"] = "snapshot"
    wire_version: Count
    data: Annotated[bytes, Field(max_length=MAX_SNAPSHOT_PIECE_BYTES)]
    more: bool = False


class Probe(Message):
    """Asks whether a peer is well and how well it is connected; `sends` bytes of no meaning follow.

    With `wants`, as many come back behind the reply: their time is the bandwidth.
    """

    kind: Literal["probe"] = "probe"
    sends: Annotated[int, Field(ge=0, le=MAX_PROBE_BYTES)] = 0
    wants: Annotated[int, Field(ge=0, le=MAX_PROBE_BYTES)] = 0


class ProbeReply(Message):
    """What a peer says of itself to one that does not know it yet.

    Attributes:
        unix_s: its clock as the reply is sent.
        addresses: where others reach it. known: ids of some peers that it is connected to.
        observed: multiaddr from which the asker's connection comes; empty where it is not known.
    """

    kind: Literal["probe_reply"] = "probe_reply"
    wire_version: Count
    run_id: Name
    name: Name
    unix_s: Annotated[float, Field(ge=0, lt=2**40, allow_inf_nan=False)]
    addresses: Addresses
    known: Annotated[list[Name], Field(max_length=64), FailFast()]
    observed: Annotated[str, Field(max_length=256)] = ""


class DialBack(Message):
    """Asks to be called at these addresses, anew: the asker wants to know whether others can reach it.

    Only addresses with the IP that the asker's connection comes from are called, and only the asker itself answers to
    its id, so this cannot be turned against others.
    """

    kind: Literal["dial_back"] = "dial_back"
    addresses: Addresses


class DialBackReply(Message):
    """Those addresses under which the asker answered; `why` says what became of the others.

    `observed` is the multiaddr from which its connection comes.
    """

    kind: Literal["dial_back_reply"] = "dial_back_reply"
    reached: Addresses
    why: Annotated[str, Field(max_length=512)] = ""
    observed: Annotated[str, Field(max_length=256)] = ""
