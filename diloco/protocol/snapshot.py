"""What one peer knows of the swarm, for watchers: `diloco status --json`, the dashboard, Prometheus and wandb.

    Snapshot -> pack (JSON, deflated) -> pieces of SnapshotReply -> unpack (bounded, validated) -> Snapshot

Times are unix seconds by the answering peer's clock. Lists that are over their limits lose their ends; `left_out` says
how many peers are missing.
"""

from __future__ import annotations

import zlib
from collections import Counter
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, ValidationError

from diloco.errors import PayloadError
from diloco.protocol.messages.base import Index
from diloco.protocol.messages.watching import MAX_SNAPSHOT_PIECE_BYTES
from diloco.protocol.numbers import Bytes, Count, Rate, Seconds, Tokens, Version
from diloco.protocol.phase_seconds import PhaseSeconds
from diloco.protocol.shares import Contributor
from diloco.protocol.states import State
from diloco.text import plain

__all__ = [
    "MAX_FRAGMENTS", "MAX_HISTORY", "MAX_PACKED_BYTES", "MAX_PEERS", "MAX_TEXT_BYTES", "SHORT",
    "Event", "FragmentRow", "LedgerTotals", "LossPoint", "PeerRow", "Round", "RunInfo",
    "Snapshot", "pack", "unpack",
]  # fmt: skip

SHORT = 6  # last characters of a peer id; all ids begin alike
MAX_PEERS = 1024
MAX_HISTORY = 512  # rounds, events, and points of the loss
MAX_FRAGMENTS = 4096
MAX_PACKED_BYTES = 16 * MAX_SNAPSHOT_PIECE_BYTES
MAX_TEXT_BYTES = MAX_PACKED_BYTES

Finite = Annotated[float, Field(allow_inf_nan=False)]
# Neither the answering peer nor the peers that it names can put anything but printable text into a terminal or a page.
Name = Annotated[str, Field(max_length=128), AfterValidator(plain)]
Text = Annotated[str, Field(max_length=512), AfterValidator(plain)]
Lines = Annotated[str, Field(max_length=4096), AfterValidator(lambda text: "\n".join(map(plain, text.split("\n"))))]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class RunInfo(_Part):
    """Which run it is, how far it is, and which peer says so."""

    run_id: Name
    manifest_hash: Name
    wire_version: Count
    mode: Name
    model: Name
    outer_steps: Count | None = Field(description="Budget; null is without limit.")
    tokens: Tokens | None = Field(description="Budget; null is without limit.")
    version: Version = Field(description="Outer steps that every fragment has seen.")
    applied_tokens: Tokens = Field(description="The swarm clock.")
    at: Finite
    answered_by: Name


class PeerRow(_Part):
    """A peer's last status, `last_seen_s` ago; `seconds` are those of its last round; `addresses` is where it may be
    called, as far as who answers knows.
    """

    peer_id: Name
    short_id: Name
    name: Name
    state: State
    trains: bool
    holds: bool
    device: Name
    version: Version
    version_lag: Count
    inner_step: Count
    target_steps: Count
    steps_per_s: Rate
    tokens: Tokens
    loss: Finite | None
    bytes_sent: Bytes
    bytes_received: Bytes
    last_seen_s: Seconds
    seconds: PhaseSeconds | None
    addresses: list[Annotated[str, Field(max_length=256)]] = Field(default_factory=list, max_length=4)


class FragmentRow(_Part):
    """A fragment. `syncer` is None while nobody holds it; `backup` is the peer that would claim it next."""

    fragment: Index
    syncer: Name | None
    term: Count
    version: Version
    backup: Name | None


class Round(_Part):
    """A version of a fragment: connected, training and merged peers when it was published.

    `seconds` are the means over the peers that have told theirs; None while none has.
    """

    fragment: Index
    version: Version
    live: Count
    participating: Count
    merged: Count
    staleness: Finite
    seconds: PhaseSeconds | None
    closed_at: Finite


class LedgerTotals(_Part):
    """Where the tokens are: processed = applied + discarded + in_flight."""

    processed: Tokens
    applied: Tokens
    discarded: Tokens
    in_flight: Tokens
    contributions: Annotated[list[Contributor], Field(max_length=MAX_PEERS), FailFast()]


class LossPoint(_Part):
    """Mean training loss of the peers that train (nats per token), and the lowest and highest of them."""

    at: Finite
    tokens: Tokens
    loss: Finite
    low: Finite
    high: Finite


class Event(_Part):
    """A line of the answering peer's event log."""

    at: Finite
    kind: Name
    text: Text


class Snapshot(_Part):
    """The swarm as one of its peers sees it.

    `components` are the disjoint groups of peers: first that of the answering peer, then those that the DHT still names
    and nobody here can reach. Histories go from old to new. `samples` are a version, a prompt, and what its model wrote
    after it when the answering peer evaluated last.
    """

    run: RunInfo
    peers: Annotated[list[PeerRow], Field(max_length=MAX_PEERS), FailFast()]
    fragments: Annotated[list[FragmentRow], Field(max_length=MAX_FRAGMENTS), FailFast()]
    rounds: Annotated[list[Round], Field(max_length=MAX_HISTORY), FailFast()]
    ledger: LedgerTotals
    loss: Annotated[list[LossPoint], Field(max_length=MAX_HISTORY), FailFast()]
    events: Annotated[list[Event], Field(max_length=MAX_HISTORY), FailFast()]
    components: Annotated[
        list[Annotated[list[Name], Field(max_length=MAX_PEERS), FailFast()]], Field(max_length=64), FailFast()
    ]
    left_out: Count = 0
    samples: Annotated[list[tuple[Version, Lines, Lines]], Field(max_length=16), FailFast()] = Field(
        default_factory=list
    )

    def names(self) -> dict[str, str]:
        """A display name for each peer, also of those that are gone; equal names are followed by the end of the id."""
        named = {row.peer_id: row.name for row in self.ledger.contributions}
        named |= {row.peer_id: row.name for row in self.peers}
        often = Counter(named.values())
        return {
            peer: name if name and often[name] == 1 else f"{name}-{peer[-SHORT:]}".lstrip("-")
            for peer, name in named.items()
        }


def pack(snapshot: Snapshot) -> list[bytes]:
    """The pieces of a snapshot, one for each reply."""
    packed = zlib.compress(snapshot.model_dump_json().encode(), 3)
    assert len(packed) <= MAX_PACKED_BYTES, "the limits of a snapshot's lists are too wide"
    return [packed[at : at + MAX_SNAPSHOT_PIECE_BYTES] for at in range(0, len(packed), MAX_SNAPSHOT_PIECE_BYTES)]


def unpack(packed: bytes) -> Snapshot:
    """The snapshot that untrusted bytes hold; `PayloadError` when they hold none, or one that is too large."""
    inflating = zlib.decompressobj()
    try:
        text = inflating.decompress(packed, MAX_TEXT_BYTES)
    except zlib.error as error:
        raise PayloadError(f"a snapshot cannot be inflated: {error}") from None
    if not inflating.eof or inflating.unused_data:
        raise PayloadError(f"a snapshot is cut off, or longer than {MAX_TEXT_BYTES} bytes")
    try:
        return Snapshot.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PayloadError(f"a snapshot does not fit its schema: {where[:100]}: {first['msg'][:200]}") from None
