"""A peer's view of the swarm, for `diloco status`, the dashboard, Prometheus and wandb.

    Snapshot -> pack (JSON, deflated) -> pieces -> unpack (bounded, validated) -> Snapshot

Times are unix seconds by the answering peer's clock. Histories go from old to new. All text is
printable.
"""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import astuple, dataclass
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from diloco.errors import PayloadError
from diloco.messages import fields
from diloco.messages.figures import PeerFigures, Shown
from diloco.text import plain

SHORT = 6  # last characters of a peer id; all ids begin alike
MAX_PEERS, MAX_ROWS = 1024, 4096  # rows of peers, of fragments
MAX_HISTORY = 512  # rounds, events, and points of the loss
MAX_PIECE_BYTES = 2**19  # the longest manifest is one piece
MAX_PACKED_BYTES = MAX_TEXT_BYTES = 16 * MAX_PIECE_BYTES

Unix = Annotated[float, Meta(ge=0, le=1e12)]
Text = Annotated[str, Meta(max_length=4096)]
Phase = Literal["compute", "wait", "comm", "outer"]
PHASES: tuple[Phase, ...] = get_args(Phase)


@dataclass(frozen=True)
class PhaseSeconds:
    """Wall seconds in each phase of a training loop; the fields stand in the order of `PHASES`.

    compute: inner steps and evaluation. wait: for other peers. comm: encoding, sending, receiving
        and adopting. outer: outer steps of this peer as author, as far as they delay its training.
    """

    compute: fields.Seconds = 0.0
    wait: fields.Seconds = 0.0
    comm: fields.Seconds = 0.0
    outer: fields.Seconds = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.wait + self.comm + self.outer

    @property
    def utilization(self) -> float:
        """The share of compute, T_inner / (T_inner + T_sync) of INTELLECT-1; 0 at first."""
        return self.compute / self.total if self.total > 0 else 0.0

    def __sub__(self, earlier: PhaseSeconds) -> PhaseSeconds:
        pairs = zip(astuple(self), astuple(earlier), strict=True)
        return PhaseSeconds(*(now - before for now, before in pairs))


class _Row(Struct, frozen=True):
    def __post_init__(self) -> None:
        texts = (name for name in self.__struct_fields__ if isinstance(getattr(self, name), str))
        fields.printable(self, *texts)


class RunInfo(_Row, frozen=True):
    """The run, its budgets (None: no limit), and who answers."""

    run_id: fields.Name
    mode: fields.Name
    model: fields.Name
    outer_steps: fields.Count | None
    tokens: fields.Tokens | None
    version: fields.Count  # outer steps that all fragments have seen
    applied_tokens: fields.Tokens  # the swarm clock
    at: Unix
    answered_by: fields.Name


class PeerRow(PeerFigures, _Row, frozen=True, kw_only=True):
    """A peer's last status. authors: may make versions. seconds: of its last round."""

    peer_id: Annotated[fields.Name, Shown("peer", "peer", first=True)]
    name: fields.Name
    state: Annotated[
        Literal["starting", "ready", "training", "exchanging", "evaluating", "leaving"],
        Shown("state", "state", first=True),
    ]
    trains: bool
    authors: bool
    device: Annotated[fields.Name, Shown("device", "text", rank=4, first=True)]
    version: fields.Count
    inner_step: Annotated[fields.Count, Shown("step", "step", rank=1, adds=False, first=True)]
    target_steps: fields.Count
    seconds: Annotated[PhaseSeconds | None, Shown("busy", "busy", adds=False)]
    version_lag: Annotated[
        fields.Count, Shown("lag", "", "Outer steps behind the swarm", adds=False, limit=0)
    ]
    steps_per_s: Annotated[
        fields.Rate, Shown("steps/s", "steps/s", "Inner steps per second", rank=3)
    ]
    last_seen_s: Annotated[
        fields.Seconds,
        Shown("seen", "s", "Seconds since its last word", adds=False, limit=5),
    ]
    addresses: fields.Addresses
    bulk: fields.Name = ""  # how payload goes there from who answers: "direct", by the "daemon"


FragmentPhase = Literal["following", "indirect", "collecting", "fetching", "settling", "alone"]


class FragmentRow(_Row, frozen=True):
    """The tip that this peer has. following: `author` is another peer; indirect: reached by
    way of others; collecting: this one; alone: none. fetching: others have more. settling: this
    peer has just come, and listens first."""

    fragment: Annotated[fields.Index, Shown("fragment")]
    version: Annotated[fields.Count, Shown("version")]
    work: Annotated[fields.Tokens, Shown("tokens", "tokens", rank=1)]
    id: Annotated[fields.Name, Shown("id", "id", rank=2)]
    next: fields.Name  # the author that it names
    author: Annotated[fields.Name | None, Shown("author", "peer")]  # the present author
    here: Annotated[fields.Count, Shown("here", rank=1)]  # contributions
    state: Annotated[FragmentPhase, Shown("state", "state")]


class Round(_Row, frozen=True):
    """A version: how many peers were connected, trained and were merged when it came."""

    fragment: fields.Index
    version: Annotated[fields.Count, Shown("version")]
    live: Annotated[fields.Count, Shown("live")]
    participating: Annotated[fields.Count, Shown("training")]
    merged: Annotated[fields.Count, Shown("merged")]
    staleness: Annotated[
        fields.Count, Shown("staleness", rank=1)
    ]  # of its oldest base, in versions
    seconds: Annotated[  # of the peers' rounds, on average
        PhaseSeconds | None, Shown("compute, wait, exchange", "spent")
    ]
    closed_at: Annotated[Unix, Shown("closed", "time")]


class Contributor(_Row, frozen=True):
    """A line of the public record: a peer's part in the control fragment; "" is many peers."""

    peer_id: Annotated[fields.Name, Shown("peer", "peer", first=True)]
    name: fields.Name
    outer_steps: Annotated[fields.Count, Shown("steps", rank=1)]
    tokens: Annotated[fields.Tokens, Shown("tokens", "tokens")]
    bytes: Annotated[fields.Bytes, Shown("payload", "bytes", rank=2)]  # for all fragments
    first_version: Annotated[fields.Count, Shown("first", rank=3)]
    last_version: Annotated[fields.Count, Shown("last", rank=3)]


class Standing(Contributor, frozen=True):
    """A line of the board: that record, and what who answers knows of the peer besides.

    recent_tokens: in the last `LedgerTotals.recent_s`. trained_s: as the peer said last.
    """

    device: Annotated[fields.Name, Shown("device", "text", first=True)] = ""
    recent_tokens: Annotated[fields.Tokens, Shown("lately", "share", first=True)] = 0
    trained_s: Annotated[fields.Seconds | None, Shown("days", "days")] = None


class Tokens(_Row, frozen=True):
    """Tokens that peers trained on, by their fate: processed = applied + discarded + in_flight."""

    processed: fields.Tokens = 0
    applied: fields.Tokens = 0
    discarded: fields.Tokens = 0
    in_flight: fields.Tokens = 0


FATES = Tokens.__struct_fields__


class LedgerTotals(Tokens, frozen=True):
    """Tokens of the swarm, and who contributed how many."""

    contributions: Annotated[list[Standing], Meta(max_length=MAX_PEERS)] = []
    recent_s: fields.Seconds = 0.0  # at most a day; less where who answers is not here for so long


class LossPoint(_Row, frozen=True):
    """Losses of the peers, in nats per token: mean, lowest and highest."""

    at: Unix
    tokens: fields.Tokens
    loss: fields.Loss
    low: fields.Loss
    high: fields.Loss


class LoggedEvent(_Row, frozen=True):
    """A line of the answering peer's event log."""

    at: Annotated[Unix, Shown("when", "time")]
    kind: Annotated[fields.Name, Shown("event", "text")]
    text: Annotated[Text, Shown("text", "event")]


class Snapshot(_Row, frozen=True):
    """The swarm as one peer sees it."""

    run: RunInfo
    peers: Annotated[list[PeerRow], Meta(max_length=MAX_PEERS)]
    fragments: Annotated[list[FragmentRow], Meta(max_length=MAX_ROWS)]
    rounds: Annotated[list[Round], Meta(max_length=MAX_HISTORY)]
    ledger: LedgerTotals
    loss: Annotated[list[LossPoint], Meta(max_length=MAX_HISTORY)]
    events: Annotated[list[LoggedEvent], Meta(max_length=MAX_HISTORY)]
    left_out: fields.Count = 0  # peers that are missing
    # version, prompt, and what the model wrote after it at the last evaluation
    samples: Annotated[list[tuple[fields.Count, Text, Text]], Meta(max_length=16)] = []
    held_out: Annotated[list[LossPoint], Meta(max_length=MAX_HISTORY)] = []  # as one peer measures

    def __post_init__(self) -> None:
        self.samples[:] = [(version, _lines(a), _lines(b)) for version, a, b in self.samples]

    def names(self) -> dict[str, str]:
        """Return display names, also of peers that are gone; equal ones get part of the id."""
        named = {row.peer_id: row.name for row in self.ledger.contributions}
        named |= {row.peer_id: row.name for row in self.peers}
        often = Counter(named.values())
        return {
            peer: name if name and often[name] == 1 else f"{name}-{peer[-SHORT:]}".lstrip("-")
            for peer, name in named.items()
        }

    def newest_round(self) -> Round | None:
        """Return the newest version of the control fragment."""
        return next((row for row in reversed(self.rounds) if row.fragment == 0), None)

    def json(self, indent: int = -1) -> bytes:
        """Encode the snapshot as one object, on one line or indented."""
        return msgspec.json.format(msgspec.json.encode(self), indent=indent)


def _lines(text: str) -> str:
    return "\n".join(map(plain, text.split("\n")))


def pack_snapshot(snapshot: Snapshot) -> list[bytes]:
    """Cut a snapshot into pieces, one for each reply."""
    packed = zlib.compress(snapshot.json(), 3)
    assert len(packed) <= MAX_PACKED_BYTES, "the limits of a snapshot's lists are too wide"
    return [packed[at : at + MAX_PIECE_BYTES] for at in range(0, len(packed), MAX_PIECE_BYTES)]


def unpack_snapshot(packed: bytes) -> Snapshot:
    """Decode untrusted bytes; `PayloadError` if they are no snapshot, or too large."""
    inflating = zlib.decompressobj()
    try:
        text = inflating.decompress(packed, MAX_TEXT_BYTES)
        if inflating.eof and not inflating.unused_data:
            return msgspec.json.decode(text, type=Snapshot)
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PayloadError(f"that is no snapshot: {plain(str(error)[:200])}") from None
    raise PayloadError(f"a snapshot is cut off, or longer than {MAX_TEXT_BYTES} bytes")
