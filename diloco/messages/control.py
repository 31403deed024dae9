"""Messages on control streams, one in each direction between any two peers: `Hello`, then the rest.
Before that they exchange a `Greeting`, on a stream of its own."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from diloco.messages import fields
from diloco.messages.base import EVERYBODY, MEMBERS, Message, Place
from diloco.messages.figures import PeerFigures
from diloco.messages.heads import Key, Line
from diloco.protocol import MAX_CHARACTERS, MAX_REVOKED

MAX_GREETING_BYTES = 4 * MAX_CHARACTERS  # a credential, or a refusal of 2048 characters
MAX_WANTED = 2**20  # sequences in one lease

Planned = tuple[fields.Tokens, fields.Tokens, fields.Tokens]
"""How long the run is: the numbers of `config.manifest.RISING`; 0 is no limit."""


class Greeting(Message, frozen=True, tag="greeting"):
    """Each side shows its credential, if it has one, and the number of its newest `Revocations`.
    When both are admitted, it sends these to the other side, if that has a lower number."""

    place, roles = Place.GREETING, EVERYBODY
    credential: Annotated[str, Meta(max_length=MAX_CHARACTERS)] = ""
    revoked: fields.Count = 0
    instance: fields.Instance = ""  # as in a hello


class Revocations(Message, frozen=True, tag="revocations"):
    """The newest list of the run's owner (`admission.Revoked`)."""

    place = Place.CONTROL
    number: fields.SomeSteps
    token_ids: Annotated[
        list[Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]], Meta(max_length=MAX_REVOKED)
    ]
    peer_ids: Annotated[list[fields.Name], Meta(max_length=MAX_REVOKED)]
    signature: Annotated[str, Meta(pattern=r"^[0-9a-f]{128}\Z")]


class Figures(PeerFigures, Message, frozen=True, tag="figures"):
    """Figures that only watchers read; `seconds` are those of the last round, as in
    `snapshot.PHASES`."""

    seconds: Annotated[list[fields.Seconds], Meta(max_length=4)] = []


class Status(Message, frozen=True, tag="status"):
    """The state of a peer; a heartbeat (with `figures`), or news.

    Attributes:
        whole: all is said; else `tips`, `hears` and `deaf` are what changed since the last status.
        tips: by fragment, work and id of the head whose anchor it has.
        steps: inner steps made. position: of these in the cycle. cycle: how many one has.
        trains: makes inner steps, or is about to. waits: not now, as it lacks a head.
        pauses: not now, as it evaluates or saves.
        authors: may be an author now. hears, deaf: members that may, and that it (no more) hears.
        units: sequences outside of the model, its own and its pool's; None: as before.
        planned: how long the run is, as far as it knows.
        moved: bytes of payload for its own training, which it received, or others have of it.
        arriving: by fragment, the head whose update is arriving; its parts can be asked for.
    """

    place = Place.CONTROL
    whole: bool = False
    tips: Annotated[dict[fields.Index, Key], Meta(max_length=fields.MAX_FRAGMENTS)] = {}
    steps: fields.Count = 0
    position: fields.Count = 0
    cycle: fields.Count = 0
    steps_per_s: fields.Rate = 0.0
    trains: bool = False
    waits: bool = False
    pauses: bool = False
    leaves: bool = False
    authors: bool = False
    hears: fields.Names = []
    deaf: fields.Names = []
    units: fields.Ranges | None = None
    planned: Planned = (0, 0, 0)
    moved: fields.Bytes = 0
    arriving: Annotated[dict[fields.Index, Key], Meta(max_length=fields.MAX_FRAGMENTS)] = {}
    figures: Figures | None = None


class Hello(Message, frozen=True, tag="hello"):
    """First on a control stream: which run this is, what the sender can do, where the others are.

    Attributes:
        status: a whole one.
        seal: the run key's signature of the manifest's hash.
        sequences: those that numbers stand for here, as DIGEST-NxT; empty without any.
        instance: random, of the process: it tells two under one identity from one that calls again.
    """

    place, roles = Place.HELLO, MEMBERS
    opens_with_version = True
    wire_version: fields.Count
    run_id: fields.Name
    manifest_hash: fields.Digest
    name: fields.Name
    trains: bool
    authors: bool
    status: Status
    device: fields.Name = ""
    peers: Annotated[list[fields.Name], Meta(max_length=fields.MAX_NAMED)] = []
    addresses: Annotated[
        dict[fields.Name, fields.Addresses], Meta(max_length=fields.MAX_NAMED + 1)
    ] = {}
    seal: fields.Seal = ""
    sequences: Annotated[str, Meta(pattern=r"^([0-9a-f]{16}-[0-9]{1,15}x[0-9]{1,7})?\Z")] = ""
    instance: fields.Instance = ""


class Welcome(Message, frozen=True, tag="welcome"):
    """The sender of a hello may go on."""


class Offer(Message, frozen=True, tag="offer"):
    """The sender has this contribution to offer."""

    place = Place.CONTROL
    line: Line


class Answer(Message, frozen=True, tag="answer"):
    """To an offer of that peer's contribution, which its stamp names. want: send it, from byte `at`
    on. got: it is here, whole, or not needed. no: not now."""

    place = Place.CONTROL
    fragment: fields.Index
    peer: fields.Name
    stamp: fields.Tokens
    says: Literal["want", "got", "no"]
    at: fields.Bytes = 0


class Lease(Message, frozen=True, tag="lease"):
    """Request of that peer for so many more sequences; `has` counts those that it has left."""

    place = Place.CONTROL
    peer: fields.Name
    want: Annotated[int, Meta(ge=0, le=MAX_WANTED)]
    has: fields.Ranges = ()


class Dealt(Message, frozen=True, tag="grant"):
    """Sequences leased to that peer; no other peer gets them meanwhile."""

    place = Place.CONTROL
    peer: fields.Name
    units: fields.Ranges
