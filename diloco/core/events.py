"""Events, which the core takes in, and actions, which it has its owner carry out."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from diloco.core.history import Record
from diloco.messages.base import Message
from diloco.messages.bulk import Get
from diloco.messages.control import Hello
from diloco.messages.fields import Units
from diloco.messages.heads import Book, Head, Line

# -- answers to a `Get` ----------------------------------------------------------------------------


class Records(Struct, frozen=True):
    """Heads in a row, with their updates; None stands for one that is still arriving here."""

    records: tuple[Record, ...]


class AnchorPart(Struct, frozen=True):
    """A part of the anchor of a head. The owner adds `values`, or has checked their digest."""

    head: Head
    book: Book
    digests: tuple[str, ...]
    part: int
    values: Any = None


# -- events ----------------------------------------------------------------------------------------


class Event(Struct, frozen=True):
    """Base of what happens to a core."""


class Tick(Event, frozen=True):
    """Time has passed."""


class Connected(Event, frozen=True):
    """A peer said hello."""

    peer: str
    hello: Hello


class Lost(Event, frozen=True):
    """The connection to a peer is gone for good, or it left."""

    peer: str
    why: str = ""


class Heard(Event, frozen=True):
    """A message of a member, on its control stream."""

    peer: str
    message: Message


class Discovered(Event, frozen=True):
    """Every peer that could be reached has said hello; or there is none."""


class Delivered(Event, frozen=True):
    """The payload of a contribution is here, whole, and has the digest of its line."""

    peer: str
    line: Line
    payload: Any
    age_s: float = 0.0  # since its pseudo-gradient was taken


class Asked(Event, frozen=True):
    """A member asks; the core answers with one `Reply`."""

    peer: str
    get: Get


class Gave(Event, frozen=True):
    """A donor answered; None: not now."""

    peer: str
    get: Get
    answer: Records | AnchorPart | None


class Broke(Event, frozen=True):
    """The stream of a question ended without its answer, or with one that is no good (`bad`)."""

    peer: str
    question: Get | Line
    bad: bool = False


class Moved(Event, frozen=True):
    """Bytes came of what a `Get` asked for, or arrived of the payload of a line: so many by now."""

    peer: str
    question: Get | Line
    nbytes: int


class Arriving(Event, frozen=True):
    """The head of the record that a `Get` asked for is here, and the first part of its update."""

    peer: str
    get: Get
    head: Head


class Served(Event, frozen=True):
    """The records or parts of a `Reply` were sent, or their stream broke."""

    peer: str
    get: Get


class Stepped(Event, frozen=True):
    """The training loop made an inner step of so many tokens, from these sequences of the run."""

    tokens: int
    units: Units = ()
    steps_per_s: float = 0.0


class Wanted(Event, frozen=True):
    """The training loop takes so many sequences of the run in a cycle of so many inner steps."""

    sequences: int
    cycle: int = 0  # as before


class Begun(Event, frozen=True):
    """The training loop is about to make inner steps in step with the others."""


class Alone(Event, frozen=True):
    """Nobody else has to be there before this peer begins."""


class Paused(Event, frozen=True):
    """The training loop evaluates or saves; or it goes on."""

    pauses: bool = True


class Captured(Event, frozen=True):
    """The payload of the contribution that `Capture` asked for is made."""

    line: Line
    payload: Any
    norm: float
    root: str


class Loaded(Event, frozen=True):
    """Training goes on from the anchor of that head."""

    fragment: int
    head: str


class Merged(Event, frozen=True):
    """The update that `Merge` asked for, without the peers that are `left_out`; None: it failed."""

    fragment: int
    base: str
    update: Any = None
    digest: str = ""
    left_out: frozenset[str] = frozenset()


class Applied(Event, frozen=True):
    """The anchor is moved, and has these digests; or it is not (`why`)."""

    fragment: int
    head: str
    parts: tuple[str, ...] = ()
    why: str = ""
    damaged: bool = False  # it was not what its head says


class Leave(Event, frozen=True):
    """The training loop has ended, because the run is over (`finished`), or before."""

    finished: bool = False


# -- actions ---------------------------------------------------------------------------------------


class Send(Struct, frozen=True):
    """Say that to one member."""

    peer: str
    message: Message


class Broadcast(Struct, frozen=True):
    """Say that to every member."""

    message: Message


class Reply(Struct, frozen=True):
    """The answer to what `Asked` brought; None: not here, or not now."""

    peer: str
    get: Get
    answer: Records | AnchorPart | None


class SendPayload(Struct, frozen=True):
    """Send a payload on a stream of its own, from byte `at` on; `Broke` if that fails."""

    peer: str
    line: Line
    payload: Any
    at: int
    age_s: float = 0.0  # since its pseudo-gradient was taken


class AskDonor(Struct, frozen=True):
    """Ask a donor; `Gave` or `Broke` tells what came of it."""

    peer: str
    get: Get


class Capture(Struct, frozen=True):
    """Take the pseudo-gradient of a fragment against `line.base`, and encode it: `Captured`."""

    line: Line


class Load(Struct, frozen=True):
    """Have training go on from the anchor that is here, before the next inner step: `Loaded`."""

    fragment: int


class Share(Struct, frozen=True):
    """One contribution to a version, its weight, and the factor by which being late reduces it."""

    line: Line
    payload: Any
    weight: float
    discount: float


class Merge(Struct, frozen=True):
    """Judge and average contributions, take the outer step, and encode the update: `Merged`."""

    fragment: int
    base: str
    number: int  # of the version
    shares: tuple[Share, ...]
    pushes: int  # contributions of the momentum window that came before
    delay: int  # contributions in one window


class Apply(Struct, frozen=True):
    """Move the anchor by an update no longer than `limit`, to what the head says: `Applied`."""

    fragment: int
    head: Head
    book: Book
    update: Any
    limit: float
    pushes: int
    own: bool = False  # this peer is the author, and signs the head when the update is applied


class Replace(Struct, frozen=True):
    """Replace the anchor by these parts: `Applied`."""

    fragment: int
    head: Head
    parts: tuple[Any, ...]


class Disconnect(Struct, frozen=True):
    """End the streams to and from a peer, which is no member any more until it says hello again."""

    peer: str


class Note(Struct, frozen=True):
    """One line for the log of events."""

    kind: str
    fields: dict[str, object] = {}


class Wake(Struct, frozen=True):
    """Bring a `Tick` at that time."""

    at: float


class Exit(Struct, frozen=True):
    """This peer may go: others have what it has, or it waited long enough."""


Contact = Send | Broadcast | Reply | SendPayload | AskDonor | Disconnect
Action = Contact | Capture | Load | Merge | Apply | Replace | Note | Wake | Exit
