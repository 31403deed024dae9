"""What peers say on control streams, one in each direction between any two: `Hello` first, then `Status`, `Claim`,
`Published`, `Vote`, `Revocations`. Before that they exchange a `Greeting`, on a stream of its own.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import FailFast, Field, model_validator

from diloco.admission.invitation import MAX_CHARACTERS
from diloco.admission.keys import MAX_REVOKED
from diloco.protocol.messages.base import (
    EVERYBODY,
    MAX_NAMED,
    MEMBERS,
    Addresses,
    Digest,
    FewUnits,
    Index,
    Message,
    Name,
    Names,
    Place,
    Seal,
    Units,
    at_most_keys,
)
from diloco.protocol.numbers import Bytes, Count, Late, Loss, Rate, Seconds, Sequence, SomeSteps, Term, Tokens, Version
from diloco.protocol.states import STATES, State

__all__ = [
    "MAX_GREETING_BYTES",
    "Claim",
    "Figures",
    "Greeting",
    "Hello",
    "Published",
    "Revocations",
    "Status",
    "Vote",
    "mark",
]

MAX_GREETING_BYTES = 4 * MAX_CHARACTERS  # room for a credential, or for a refusal of 2048 characters

Versions = Annotated[list[Version], Field(max_length=2**20), FailFast()]


Instance = Annotated[str, Field(pattern=r"^([0-9a-f]{16})?$")]


class Revocations(Message, kind="revocations", place=Place.CONTROL):
    """The newest list of what the run's owner has revoked, under its growing number; see `diloco.admission`."""

    number: SomeSteps
    token_ids: Annotated[
        list[Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]], Field(max_length=MAX_REVOKED), FailFast()
    ]
    peer_ids: Annotated[list[Name], Field(max_length=MAX_REVOKED), FailFast()]
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


class Greeting(Message, kind="greeting", place=Place.GREETING, roles=EVERYBODY):
    """Each side shows its credential, if it has one, so that both know why the other may be there.

    `revoked` is the number of the newest `Revocations` that the sender has. These lists may be long, so a side sends
    its list only after both are admitted, and only to a side whose number is lower. `instance` is as in a hello; a peer
    that only asks has none.
    """

    credential: Annotated[str, Field(max_length=MAX_CHARACTERS)] = ""
    revoked: Count = 0
    instance: Instance = ""


MARK_BYTES = 16


def mark(digest: str) -> bytes:
    """The beginning of a digest, by which statuses name an anchor. Nobody can make two anchors with the same one."""
    return bytes.fromhex(digest[: 2 * MARK_BYTES])


class Figures(Message):
    """Figures of a peer that only watchers read.

    Attributes:
        discarded: tokens that it processed and that no version contains or will contain.
        loss: mean loss of its last inner steps, in nats per token; 0 while there is no measurement.
        bytes_sent, bytes_received: of this process, over all streams.
        rounds: how many rounds (exchanges and the inner steps before them) it has measured.
        seconds: of the last round: compute, wait, comm, outer; empty before the first.
    """

    discarded: Tokens = 0
    loss: Loss = 0.0
    bytes_sent: Bytes = 0
    bytes_received: Bytes = 0
    rounds: Count = 0
    seconds: Annotated[list[Seconds], Field(max_length=4), FailFast()] = Field(default_factory=list)


class Status(Message, kind="status", place=Place.CONTROL):
    """What a peer is doing; sent when that changes, and as the heartbeat.

    Attributes:
        versions, marks: version of each fragment's anchor, and the beginning of its digest (see `mark`).
        inner_step, target_steps: inner steps done since the last exchange, and how many there will be before the next.
        steps_per_s: measured inner steps per second; 0 while there is no measurement.
        tokens: tokens this peer has processed in this run.
        units: ranges of sequences that this peer has and that are not in the model, as far as it knows.
        disputed: fragments whose syncer goes on from a history with less work than the one here (see `forks`).
        missed: fragments whose syncer has announced a version that this peer has not been given for long.
        figures: only in a heartbeat; None says that those of the last heartbeat still hold.
        blank: the peer has not got what the run starts from yet, and holds no fragment (see `View`).
        planned: how long the run is: the numbers in `config.manifest.RISING`, as far as the peer knows.
    """

    state: State
    versions: Versions
    marks: bytes = b""
    inner_step: Count = 0
    target_steps: Count = 0
    steps_per_s: Rate = 0.0
    tokens: Tokens = 0
    units: FewUnits = Field(default_factory=list)
    disputed: Annotated[list[Index], Field(max_length=2**20), FailFast()] = Field(default_factory=list)
    missed: Annotated[list[Index], Field(max_length=2**20), FailFast()] = Field(default_factory=list)
    figures: Figures | None = None
    blank: bool = False
    planned: Annotated[list[Tokens], Field(min_length=3, max_length=3)] = Field(default_factory=lambda: [0, 0, 0])

    @property
    def in_round(self) -> bool:
        """Whether the peer is between the beginning of a round and the adoption of its update."""
        return STATES[self.state].in_round

    @property
    def counted_in(self) -> bool:
        """Whether others count on contributions of the peer, if it trains at all."""
        return STATES[self.state].counted_in

    @property
    def gone(self) -> bool:
        """Whether the peer takes part no more."""
        return STATES[self.state].gone

    @model_validator(mode="after")
    def _marks_each_version_or_none(self) -> Status:
        if len(self.marks) not in (0, len(self.versions) * MARK_BYTES):
            raise ValueError("a status marks the anchors of all fragments, or of none")
        return self

    def mark(self, fragment: int) -> bytes:
        """The beginning of the digest of a fragment's anchor; empty when the peer names none."""
        return self.marks[fragment * MARK_BYTES : (fragment + 1) * MARK_BYTES]

    def misfit(self, fragments: int) -> str | None:
        """A status names a version of each fragment, and disputes and misses no other ones."""
        said = max([len(self.versions), *(fragment + 1 for fragment in [*self.disputed, *self.missed])])
        return None if said == fragments else f"a status of {said} fragments, and the run has {fragments}"


class _AboutFragment(Message):
    """What the syncer of a fragment says of the fragment.

    `applied_tokens`, `cursor` and `open` belong to the version of the control fragment: the swarm clock (tokens that
    are in the model since version 0) and the data cursor (see `ledger`). Messages about other fragments leave the
    data cursor empty.
    """

    fragment: Index
    term: Term
    version: Version
    digest: Digest
    cursor: Sequence = 0
    open: Units = Field(default_factory=list)

    def misfit(self, fragments: int) -> str | None:
        """The run has that fragment."""
        known = self.fragment < fragments
        return None if known else f"a message about fragment {self.fragment}, and the run has {fragments}"


class Vote(Message, kind="vote", place=Place.CONTROL):
    """A holder believes that this peer is syncer of a fragment under that term (see `elections`)."""

    fragment: Index
    term: Term
    holder: Name

    def misfit(self, fragments: int) -> str | None:
        """The run has that fragment."""
        known = self.fragment < fragments
        return None if known else f"a vote about fragment {self.fragment}, and the run has {fragments}"


class Claim(_AboutFragment, kind="claim", place=Place.CONTROL):
    """A syncer's lease on a fragment: `term` is its fencing number, `digest` names the anchor that it starts from.

    `skipped` of the numbers up to `version` were given to no version of its history (see `forks`).
    """

    applied_tokens: Tokens = 0
    skipped: Count = 0


class Hello(Message, kind="hello", place=Place.HELLO, roles=MEMBERS):
    """First message on a control stream: which run this peer is in, what it can do, and where the others are.

    `seal` is the run key's signature of the manifest's hash, which every peer shows to newcomers. `sequences` names
    those that numbers stand for here, as DIGEST-NxT; it is empty where it has none that others take a part of.
    `instance` is a random number of the process: two at once under one identity are told from one that calls again.
    """

    wire_version: Count
    run_id: Name
    manifest_hash: Digest
    name: Name
    trains: bool
    holds: bool
    device: Name = ""
    peers: Annotated[list[Name], Field(max_length=MAX_NAMED), FailFast()]
    addresses: Annotated[dict[Name, Addresses], at_most_keys(MAX_NAMED + 1)] = Field(default_factory=dict)
    status: Status
    seal: Seal = ""
    sequences: Annotated[str, Field(pattern=r"^([0-9a-f]{16}-[0-9]{1,15}x[0-9]{1,7})?$")] = ""
    instance: Instance = ""
    claims: Annotated[list[Claim], Field(max_length=2**20), FailFast()]
    votes: Annotated[list[Vote], Field(max_length=2**20), FailFast()] = Field(default_factory=list)

    def misfit(self, fragments: int) -> str | None:
        """Its status and all its claims and votes fit."""
        parts = (self.status, *self.claims, *self.votes)
        return next(filter(None, (part.misfit(fragments) for part in parts)), None)


class Published(_AboutFragment, kind="published", place=Place.CONTROL):
    """Announcement of an update record: the fragment is now at `version`, whose oldest contribution was so many rounds
    late.
    """

    contributors: Names
    applied_tokens: Tokens
    staleness: Late = 0.0
