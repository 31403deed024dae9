"""What peers say on control streams, one in each direction between any two: `Hello` first, then the
rest. Before that they exchange a `Greeting`, on a stream of its own.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from diloco.admission.invitation import MAX_CHARACTERS
from diloco.admission.keys import MAX_REVOKED
from diloco.messages.base import EVERYBODY, MEMBERS, Message, Place
from diloco.messages.fields import (
    MAX_FRAGMENTS,
    MAX_NAMED,
    MAX_RANGES,
    Addresses,
    Bytes,
    Count,
    Digest,
    Index,
    Instance,
    Loss,
    Name,
    Names,
    Range,
    Rate,
    Seal,
    Seconds,
    SomeSteps,
    Tokens,
)
from diloco.messages.heads import Key, Line

# room for a credential, or for a refusal of 2048 characters
MAX_GREETING_BYTES = 4 * MAX_CHARACTERS
MAX_WANTED = 2**20  # sequences in one lease

Ranges = Annotated[tuple[Range, ...], Meta(max_length=MAX_RANGES)]
Planned = tuple[Tokens, Tokens, Tokens]
"""How long the run is: the numbers of `config.manifest.RISING`; 0 is no limit."""


class Greeting(Message, frozen=True, tag="greeting"):
    """Each side shows its credential, if it has one. `revoked` is the number of its newest
    `Revocations`, which may be
    long: a side sends them once both are admitted, to a side whose number is lower. `instance`: as
        in a hello.
    """

    place, roles = Place.GREETING, EVERYBODY
    credential: Annotated[str, Meta(max_length=MAX_CHARACTERS)] = ""
    revoked: Count = 0
    instance: Instance = ""


class Revocations(Message, frozen=True, tag="revocations"):
    """The newest list of the run's owner (`admission.Revoked`)."""

    place = Place.CONTROL
    number: SomeSteps
    token_ids: Annotated[
        list[Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]], Meta(max_length=MAX_REVOKED)
    ]
    peer_ids: Annotated[list[Name], Meta(max_length=MAX_REVOKED)]
    signature: Annotated[str, Meta(pattern=r"^[0-9a-f]{128}\Z")]


class Figures(Message, frozen=True, tag="figures"):
    """Figures of a peer that only watchers read.

    Attributes:
        tokens, discarded: that it has processed in this run, and those of them that no version
            contains.
        loss: mean of its last inner steps, in nats per token; 0 while there is no measurement.
        bytes_sent, bytes_received: of this process, over all streams.
        rounds: that it has measured. seconds: of the last one, as in `snapshot.PHASES`; empty
            before the first.
    """

    tokens: Tokens = 0
    discarded: Tokens = 0
    loss: Loss = 0.0
    bytes_sent: Bytes = 0
    bytes_received: Bytes = 0
    rounds: Count = 0
    seconds: Annotated[list[Seconds], Meta(max_length=4)] = field(default_factory=list)


class Status(Message, frozen=True, tag="status"):
    """What a peer has and does; a heartbeat (with `figures`), or news.

    Attributes:
        whole: all is said; else `tips`, `hears` and `deaf` are what changed since the last status.
        tips: by fragment, work and id of the head whose anchor it has.
        steps: inner steps made. position: of these in the cycle. cycle: how many there are in one.
        trains: makes inner steps, or is about to; none now, because it waits for a head (`waits`),
            or evaluates or saves (`pauses`).
        authors: may be an author now. hears, deaf: members that may, which it hears, and hears no
            more.
        units: sequences that it has, its own and its pool's, and that are not in the model; None:
            as before.
        planned: how long the run is, as far as it knows.
    """

    place = Place.CONTROL
    whole: bool = False
    tips: Annotated[dict[Index, Key], Meta(max_length=MAX_FRAGMENTS)] = field(default_factory=dict)
    steps: Count = 0
    position: Count = 0
    cycle: Count = 0
    steps_per_s: Rate = 0.0
    trains: bool = False
    waits: bool = False
    pauses: bool = False
    leaves: bool = False
    authors: bool = False
    hears: Names = field(default_factory=list)
    deaf: Names = field(default_factory=list)
    units: Ranges | None = None
    planned: Planned = (0, 0, 0)
    figures: Figures | None = None


class Hello(Message, frozen=True, tag="hello"):
    """First message on a control stream: which run this peer is in, what it can do, and where the
    others are.

    Attributes:
        status: a whole one.
        seal: the run key's signature of the manifest's hash.
        sequences: those that numbers stand for here, as DIGEST-NxT; empty where others take no part
            of them.
        instance: a random number of the process: two at once under one identity are told from one
            that calls again.
    """

    place, roles = Place.HELLO, MEMBERS
    opens_with_version = True
    wire_version: Count
    run_id: Name
    manifest_hash: Digest
    name: Name
    trains: bool
    authors: bool
    status: Status
    device: Name = ""
    peers: Annotated[list[Name], Meta(max_length=MAX_NAMED)] = field(default_factory=list)
    addresses: Annotated[dict[Name, Addresses], Meta(max_length=MAX_NAMED + 1)] = field(
        default_factory=dict
    )
    seal: Seal = ""
    sequences: Annotated[str, Meta(pattern=r"^([0-9a-f]{16}-[0-9]{1,15}x[0-9]{1,7})?\Z")] = ""
    instance: Instance = ""


class Welcome(Message, frozen=True, tag="welcome"):
    """The sender of a hello may go on."""


class Offer(Message, frozen=True, tag="offer"):
    """A contribution that the sender has. `age_s`: since its pseudo-gradient was taken."""

    place = Place.CONTROL
    line: Line
    age_s: Seconds = 0.0


class Answer(Message, frozen=True, tag="answer"):
    """To an offer of that peer's contribution, which its stamp names.

    want: send it, from this byte on. got: it is here, whole, or not needed. no: not now.
    """

    place = Place.CONTROL
    fragment: Index
    peer: Name
    stamp: Tokens
    says: Literal["want", "got", "no"]
    at: Bytes = 0


class Lease(Message, frozen=True, tag="lease"):
    """That peer asks for so many more sequences; `has` is all that it has left."""

    place = Place.CONTROL
    peer: Name
    want: Annotated[int, Meta(ge=0, le=MAX_WANTED)]
    has: Ranges = ()


class Grant(Message, frozen=True, tag="grant"):
    """Sequences for that peer, which nobody else is given meanwhile."""

    place = Place.CONTROL
    peer: Name
    units: Ranges
