"""What happens to the core, and what it asks its owner to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from diloco.core.history import Record
from diloco.messages.base import Message
from diloco.messages.bulk import Get
from diloco.messages.control import Hello
from diloco.messages.fields import Units
from diloco.messages.heads import Book, Head, Line

__all__ = [
    "Action", "Alone",
    "Applied",
    "Apply",
    "Ask",
    "Asked",
    "Begun",
    "Broadcast",
    "Broke",
    "Capture",
    "Captured",
    "Connected",
    "Delivered",
    "Disconnect",
    "Discovered",
    "Event",
    "Exit",
    "Gave",
    "Heard",
    "Leave",
    "Load",
    "Loaded",
    "Lost",
    "Merge",
    "Merged",
    "Note",
    "Part",
    "Paused",
    "Push",
    "Records",
    "Replace",
    "Reply",
    "Send",
    "Share",
    "Stepped",
    "Tick",
    "Wake",
    "Wanted",
]  # fmt: skip


# -- answers to a `Get` -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Records:
    """Heads in a row, with their updates."""

    records: tuple[Record, ...]


@dataclass(frozen=True)
class Part:
    """A part of the anchor of a head. The owner adds `values` when it sends one, and has checked its digest."""

    head: Head
    book: Book
    digests: tuple[str, ...]
    part: int
    values: Any = None


# -- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Connected:
    """A peer said hello."""

    peer: str
    hello: Hello


@dataclass(frozen=True)
class Lost:
    """The connection to a peer is gone for good, or it left."""

    peer: str
    why: str = ""


@dataclass(frozen=True)
class Heard:
    """A message of a member, on its control stream."""

    peer: str
    message: Message


@dataclass(frozen=True)
class Discovered:
    """Every peer that could be reached has said hello; or there is none."""


@dataclass(frozen=True)
class Delivered:
    """The payload of a contribution is here, whole, and has the digest of its line."""

    peer: str
    line: Line
    payload: Any


@dataclass(frozen=True)
class Asked:
    """A member asks; the core answers with one `Reply`."""

    peer: str
    get: Get


@dataclass(frozen=True)
class Gave:
    """A donor answered; None: not now."""

    peer: str
    get: Get
    answer: Records | Part | None


@dataclass(frozen=True)
class Broke:
    """The stream of a question ended without its answer, or with one that is no good (`bad`)."""

    peer: str
    question: Get | Line
    bad: bool = False


@dataclass(frozen=True)
class Stepped:
    """The training loop made an inner step of so many tokens, from these sequences of the run's list."""

    tokens: int
    units: Units = ()
    steps_per_s: float = 0.0


@dataclass(frozen=True)
class Wanted:
    """The training loop takes so many sequences of the run's list in a cycle, which has so many inner steps."""

    sequences: int
    cycle: int = 0


@dataclass(frozen=True)
class Begun:
    """The training loop is about to make inner steps in step with the others; or it is not, any more."""

    trains: bool = True


@dataclass(frozen=True)
class Alone:
    """Nobody else has to be there before this peer begins."""


@dataclass(frozen=True)
class Paused:
    """The training loop evaluates or saves; or it goes on."""

    pauses: bool = True


@dataclass(frozen=True)
class Captured:
    """The payload of the contribution that `Capture` asked for is made."""

    line: Line
    payload: Any
    norm: float
    root: str


@dataclass(frozen=True)
class Loaded:
    """Training goes on from the anchor of that head."""

    fragment: int
    head: str


@dataclass(frozen=True)
class Merged:
    """What `Merge` asked for is made. `left_out`: peers whose contributions were judged and left out."""

    fragment: int
    base: str
    update: Any = None
    digest: str = ""
    left_out: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Applied:
    """The anchor is moved, and its parts have these digests; else it is where it was, for the reason `why`.

    `damaged`: it was not what the tip says before.
    """

    fragment: int
    head: str
    parts: tuple[str, ...] = ()
    why: str = ""
    damaged: bool = False


@dataclass(frozen=True)
class Leave:
    """The training loop has ended, because the run is over (`finished`), or before."""

    finished: bool = False


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = (
    Alone | Begun | Connected | Lost | Heard | Discovered | Delivered | Asked | Gave | Broke | Stepped | Wanted
    | Paused | Captured | Loaded | Merged | Applied | Leave | Tick
)  # fmt: skip


# -- actions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """Say that to one member."""

    peer: str
    message: Message


@dataclass(frozen=True)
class Broadcast:
    """Say that to every member."""

    message: Message


@dataclass(frozen=True)
class Reply:
    """The answer to what `Asked` brought; None: not here, or not now."""

    peer: str
    get: Get
    answer: Records | Part | None


@dataclass(frozen=True)
class Push:
    """Send a payload on a stream of its own, from that byte on; `Broke` if that fails."""

    peer: str
    line: Line
    payload: Any
    at: int


@dataclass(frozen=True)
class Ask:
    """Ask a donor; `Gave` or `Broke` tells what came of it."""

    peer: str
    get: Get


@dataclass(frozen=True)
class Capture:
    """Take the pseudo-gradient of a fragment against the head `line.base`, and encode it: `Captured`."""

    line: Line


@dataclass(frozen=True)
class Load:
    """Training must go on from the anchor that is here, before the next inner step: `Loaded`."""

    fragment: int


@dataclass(frozen=True)
class Share:
    """One contribution to a version: its line, payload, weight, and the factor by which being late reduces it."""

    line: Line
    payload: Any
    weight: float
    discount: float


@dataclass(frozen=True)
class Merge:
    """Judge and average these contributions, take the outer step, and encode the update: `Merged`.

    The step leads to version `number`, `pushes` contributions of its momentum window of `delay` came before.
    """

    fragment: int
    base: str
    number: int
    shares: tuple[Share, ...]
    pushes: int
    delay: int


@dataclass(frozen=True)
class Apply:
    """Move the anchor by an update, if that is no longer than `limit` and leads to what the head says: `Applied`.

    `own`: this peer is the author, and signs the head when it knows what the update leads to.
    """

    fragment: int
    head: Head
    book: Book
    update: Any
    limit: float
    pushes: int
    own: bool = False


@dataclass(frozen=True)
class Replace:
    """Replace the anchor by these parts: `Applied`."""

    fragment: int
    head: Head
    parts: tuple[Any, ...]


@dataclass(frozen=True)
class Disconnect:
    """End the streams to and from a peer, which is no member any more; if it lives, it has to say hello again."""

    peer: str


@dataclass(frozen=True)
class Note:
    """One line for the log of events."""

    kind: str
    fields: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Wake:
    """Bring a `Tick` at that time."""

    at: float


@dataclass(frozen=True)
class Exit:
    """This peer may go: others have what it has, or it waited long enough."""


Action = (
    Send | Broadcast | Reply | Push | Ask | Capture | Load | Merge | Apply | Replace | Disconnect | Note | Wake | Exit
)
