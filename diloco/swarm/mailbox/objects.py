"""The objects of a mailbox, their names, and their bytes. Each has one writer.

    run                            manifest and seal, of whoever began the run
    peers/PEER                     a `Box`: the peer's state, and what it says; overwritten
    payload/FRAGMENT/BASE/PEER-STAMP    a contribution: `ContributionHeader`, payload
    record/FRAGMENT/NUMBER-HEAD         a version: `RecordHeader`, update
    part/FRAGMENT/NUMBER-HEAD/N         a part of its anchor: `PartHeader`, values
    file/DIGEST                    a file that joiners need

Whoever may write to the store may write any bytes under any name. So nothing is believed for its
name or place: a box has the signature of its peer, a payload the digest in its signed line, a
record and a part those in a signed head, a file its own digest.
"""

from __future__ import annotations

import json
from typing import Annotated

from msgspec import Meta

from diloco.config.manifest import hash_of
from diloco.errors import PayloadError
from diloco.messages import fields
from diloco.messages.base import MAX_FRAME_BYTES, Message
from diloco.messages.bulk import MAX_RECORDS
from diloco.messages.codec import decode, encode
from diloco.messages.control import Greeting, Hello
from diloco.messages.heads import Head, Line

MAX_LETTERS = 128  # that a box holds; the oldest go
MAX_LETTER_BYTES, MAX_LETTERS_BYTES = 2**17, 2**20  # each, and all in a box
MAX_CHAIN = 64  # versions of a fragment that a box names
MAX_SIGNATURE_BYTES = 1024
MAX_RUN_BYTES = 2**24
READ_AT_ONCE = MAX_RECORDS  # records

Link = tuple[fields.Count, fields.Digest]
"""Number and id of a head."""


class Letter(Message, frozen=True, tag="letter"):
    """A message to one peer, or to all (`to` is empty). The numbers of a writer's letters rise."""

    number: fields.Stamp
    to: fields.Name
    content: Annotated[bytes, Meta(max_length=MAX_LETTER_BYTES)]


class Box(Message, frozen=True, tag="box"):
    """The state of a peer, and what it says.

    Attributes:
        number: greater in each box of this peer, over all of its lives. over: it has left.
        period_s: after which it writes the next one, at most.
        hello: with a whole status, that has figures.
        chains: by fragment, heads in a row to its tip; the store has the records of all but the
            first. bases: of these, the newest whose whole anchor the store has.
    """

    number: fields.Stamp
    over: bool
    period_s: fields.Seconds
    hello: Hello
    greeting: Greeting
    letters: Annotated[list[Letter], Meta(max_length=MAX_LETTERS)]
    chains: Annotated[
        dict[fields.Index, Annotated[list[Link], Meta(max_length=MAX_CHAIN)]],
        Meta(max_length=fields.MAX_FRAGMENTS),
    ]
    bases: Annotated[dict[fields.Index, Link], Meta(max_length=fields.MAX_FRAGMENTS)]


def payload_name(line: Line) -> str:
    """The name of a contribution's payload."""
    return f"payload/{line.fragment}/{line.base[:32]}/{line.peer}-{line.stamp}"


def record_name(fragment: int, link: Link) -> str:
    """The name of a version's record."""
    return f"record/{fragment}/{link[0]:013d}-{link[1][:32]}"


def part_name(fragment: int, link: Link, part: int) -> str:
    """The name of a part of a version's anchor."""
    return f"part/{fragment}/{link[0]:013d}-{link[1][:32]}/{part}"


def link_of(head: Head) -> Link:
    """Number and id of a head."""
    return head.number, head.id


def packed(header: Message) -> bytes:
    """The first bytes of an object: the length of a message, and the message."""
    content = encode(header)
    return len(content).to_bytes(4) + content


def unpacked(name: str, content: memoryview) -> tuple[Message, memoryview]:
    """Return the message that an object begins with, and the rest. Raises `PayloadError`."""
    nbytes = int.from_bytes(content[:4])
    if len(content) < 4 + nbytes or nbytes > MAX_FRAME_BYTES:
        raise PayloadError(f"{name} is cut off")
    return decode(bytes(content[4 : 4 + nbytes])), content[4 + nbytes :]


def signed_content(run_id: str, peer: str, body: bytes) -> bytes:
    """The bytes that a peer signs for its box: of this run, and under this name."""
    return b"\0".join((b"diloco box", run_id.encode(), peer.encode(), body))


def pack_box(body: bytes, signature: bytes) -> list[bytes]:
    """The bytes of a box object."""
    return [len(signature).to_bytes(2), signature, body]


def split_box(name: str, content: memoryview) -> tuple[bytes, bytes]:
    """Return body and signature of a box object. Raises `PayloadError`."""
    nbytes = int.from_bytes(content[:2])
    if nbytes > MAX_SIGNATURE_BYTES or len(content) < 2 + nbytes:
        raise PayloadError(f"{name} is cut off")
    return bytes(content[2 + nbytes :]), bytes(content[2 : 2 + nbytes])


def pack_run(manifest: str, seal: str) -> bytes:
    """The bytes of the `run` object."""
    return json.dumps({"manifest": manifest, "seal": seal}).encode()


def unpack_run(content: memoryview) -> tuple[str, str, str]:
    """Return manifest (untrusted JSON), its seal and its hash. Raises `PayloadError`."""
    try:
        values = json.loads(bytes(content))
        manifest, seal = str(values["manifest"]), str(values["seal"])
        return manifest, seal, hash_of(manifest)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise PayloadError("run is no description of a run") from None
