"""What peers say on bulk streams about audits: a syncer shows parts of what it merged, and proofs travel.

A *part* is a leaf of the Merkle trees, or with `outer.merge=rda` a chunk; parts are numbered through the fragment.
Payload follows an `Opening` and a `ProofStep`; both sides know its length from the part.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, FailFast, Field

from diloco.protocol.messages.base import MEMBERS, Digest, Index, Message, Name, Place
from diloco.protocol.messages.heads import Head
from diloco.protocol.numbers import MAX_COUNT

__all__ = ["MAX_ASKED", "MAX_STEPS", "Accusation", "AuditRequest", "Opening", "ProofStep", "Wanted"]

MAX_ASKED = 64  # parts in one request
MAX_STEPS = 64  # versions in one proof; after twenty, a momentum from before them is forgotten

PartNumber = Annotated[int, Field(ge=0, le=2**26 - 1)]


def _whole(path: bytes) -> bytes:
    if len(path) % 32:
        raise ValueError("a path is made of hashes of 32 bytes")
    return path


Paths = Annotated[
    list[Annotated[bytes, Field(max_length=32 * 32), AfterValidator(_whole)]],
    Field(min_length=1, max_length=64),
    FailFast(),
]
"""Of each leaf of a part: the hashes on its way up (see `outer.merkle`), one after another."""


class AuditRequest(Message, kind="audit_request", place=Place.REQUEST, roles=MEMBERS):
    """Asks the author of a version for parts of the contributions to it.

    The answer is an `Opening` for each part and contribution: all contributions to the first part, by peer, then those
    to the next one.
    """

    manifest_hash: Digest
    fragment: Index
    version: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    numbers: Annotated[list[PartNumber], Field(min_length=1, max_length=MAX_ASKED), FailFast()]


class Opening(Message, kind="opening"):
    """A part of a contribution: the path of each of its leaves to the root that the contributor signed."""

    paths: Paths


class Accusation(Message, kind="accusation", place=Place.REQUEST, roles=MEMBERS):
    """Offers the proof that a syncer made a version of something else than its contributions.

    If it is `Wanted`, `steps` of `ProofStep` follow, with the version in question last; then its certificate, and an
    `Opening` of each contribution to it.
    """

    manifest_hash: Digest
    fragment: Index
    author: Name
    part: PartNumber
    steps: Annotated[int, Field(ge=1, le=MAX_STEPS)]


class Wanted(Message, kind="wanted"):
    """The proof is not known here."""


class ProofStep(Message, kind="proof_step"):
    """The part in the update of one version, with the path of each of its leaves to the root in the head."""

    head: Head
    paths: Paths
