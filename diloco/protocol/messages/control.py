"""What peers say on control streams, one in each direction between any two: `Hello` first, then `Status`, `Claim`,
`Published`, `Revocations`. Before that, they exchange a `Greeting`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field

from diloco.admission.invitation import MAX_CHARACTERS
from diloco.admission.revocations import MAX_REVOKED
from diloco.protocol.messages.base import Addresses, Count, Digest, FewUnits, Index, Message, Name, Names, Rate, Units

__all__ = [
    "MAX_GREETING_BYTES",
    "Claim",
    "Figures",
    "Greeting",
    "Hello",
    "Published",
    "Revocations",
    "State",
    "Status",
]

MAX_GREETING_BYTES = 4 * MAX_CHARACTERS  # read of who is not known yet: a credential, or 2048 characters of a refusal

State = Literal["starting", "ready", "training", "exchanging", "leaving", "done"]
Versions = Annotated[list[Count], Field(max_length=2**20), FailFast()]


class Revocations(Message):
    """The list of the run's owner of what counts no more, under its growing number; see `diloco.admission`."""

    kind: Literal["revocations"] = "revocations"
    number: Annotated[int, Field(ge=1, lt=2**62)]
    token_ids: Annotated[
        list[Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]], Field(max_length=MAX_REVOKED), FailFast()
    ]
    peer_ids: Annotated[list[Name], Field(max_length=MAX_REVOKED), FailFast()]
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


class Greeting(Message):
    """Who is there and why it may be: each side shows its credential, if it has one.

    `revoked` is the number of the newest `Revocations` that it has. They may be long, so they come once both are known,
    and only to the side that has an older number.
    """

    kind: Literal["greeting"] = "greeting"
    credential: Annotated[str, Field(max_length=MAX_CHARACTERS)] = ""
    revoked: Count = 0


class Figures(BaseModel):
    """What only those who watch want to know of a peer.

    Attributes:
        discarded: tokens that it processed and that are in no version, and will not be.
        loss: of its last inner steps, in nats per token; 0 while there is no measurement.
        bytes_sent, bytes_received: of this process, with every stream.
        rounds: how many rounds (exchanges and the inner steps before them) it has measured.
        seconds: of the last of them: compute, wait, comm, outer; empty before the first.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    discarded: Count = 0
    loss: Rate = 0.0
    bytes_sent: Count = 0
    bytes_received: Count = 0
    rounds: Count = 0
    seconds: Annotated[list[Rate], Field(max_length=4), FailFast()] = Field(default_factory=list)


class Status(Message):
    """What a peer is doing; sent on every change and as the heartbeat.

    Attributes:
        versions: anchor version of each fragment.
        inner_step, target_steps: inner steps done since the last exchange, and how many there will be before the next.
        steps_per_s: measured inner steps per second; 0 while there is no measurement.
        tokens: tokens this peer has processed in this run.
        units: ranges of sequences that this peer has and that are not in the model, as far as it knows.
        figures: with the heartbeat; None on a change, where they are those of before.
    """

    kind: Literal["status"] = "status"
    state: State
    versions: Versions
    inner_step: Count = 0
    target_steps: Count = 0
    steps_per_s: Rate = 0.0
    tokens: Count = 0
    units: FewUnits = Field(default_factory=list)
    figures: Figures | None = None


class Claim(Message):
    """A syncer's lease on a fragment: `term` is its fencing number, `digest` names the anchor it stands on.

    `applied_tokens`, for the control fragment, is the swarm clock there.
    """

    kind: Literal["claim"] = "claim"
    fragment: Index
    term: Annotated[int, Field(ge=1, lt=2**62)]
    version: Count
    digest: Digest
    applied_tokens: Count = 0
    cursor: Count = 0
    open: Units = Field(default_factory=list)


class Hello(Message):
    """First message on a control stream: which run this peer is in, what it can do, and where the others are."""

    kind: Literal["hello"] = "hello"
    wire_version: Count
    run_id: Name
    manifest_hash: Digest
    name: Name
    trains: bool
    holds: bool
    device: Name = ""
    peers: Names
    addresses: Annotated[dict[Name, Addresses], Field(max_length=4097)] = Field(default_factory=dict)
    status: Status
    claims: Annotated[list[Claim], Field(max_length=2**20), FailFast()]


class Published(Message):
    """Announcement of an update record: the fragment is now at `version`.

    `applied_tokens` is the swarm clock: tokens merged into the model since version 0. `staleness` is that of the oldest
    contribution in this version.
    """

    kind: Literal["published"] = "published"
    fragment: Index
    term: Annotated[int, Field(ge=1, lt=2**62)]
    version: Count
    digest: Digest
    contributors: Names
    applied_tokens: Count
    staleness: Count = 0
    cursor: Count = 0
    open: Units = Field(default_factory=list)
