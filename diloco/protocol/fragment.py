"""What one peer knows of one fragment: its anchor here, its syncer, and the work on it that is under way. Sans-IO."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from diloco.protocol.shares import OTHERS, Shares
from diloco.protocol.syncer import Syncer

__all__ = ["CONTROL_FRAGMENT", "Busy", "Fragment", "Lease"]

CONTROL_FRAGMENT = 0  # Its versions carry the swarm clock and the data cursor; its syncer deals out work units.


@dataclass(frozen=True)
class Lease:
    """The claim on a fragment that this peer believes in, and the version and digest that the syncer published last.

    `applied_tokens` is the swarm clock at that version, for the control fragment.
    """

    fragment: int
    holder: str
    term: int
    version: int
    digest: str
    applied_tokens: int = 0


class Busy(Enum):
    """What the owner of the protocol is doing to a fragment; nothing else begins meanwhile."""

    NO = "no"
    MERGING = "merging"
    CATCHING_UP = "catching up"


@dataclass(eq=False)
class Fragment:
    """One fragment, as one peer knows it.

    Attributes:
        version, digest: of the anchor here.
        came_at: when that version came; None for the version that the peer started with.
        shares: which peer contributed how much to the anchor here.
        lease: the newest claim that counts; None while nobody has claimed the fragment.
        term: the highest term that was ever seen.
        vacant_since: since when the fragment has had no living syncer; None while it has one.
        syncer: collects the next version, while this peer holds the lease.
        busy: what is being done to the anchor.
        handed_over: this peer leaves and gave the outer state away; a later version would be missing from that.
        closed_at: when the merge that is under way was decided.
    """

    index: int
    version: int
    digest: str
    came_at: float | None = None
    shares: Shares = field(default_factory=dict)
    lease: Lease | None = None
    term: int = 0
    vacant_since: float | None = None
    syncer: Syncer | None = None
    busy: Busy = Busy.NO
    handed_over: bool = False
    closed_at: float | None = None

    def move(self, version: int, digest: str, now: float) -> None:
        """The anchor is at that version now."""
        self.version, self.digest, self.came_at = version, digest, now

    def ended(self, work: Busy) -> None:
        """That work on the anchor is over, if it was under way."""
        if self.busy is work:
            self.busy = Busy.NO

    def merged(self) -> dict[str, int]:
        """For each peer the base version up to which its contributions are in the anchor here, or were left out."""
        return {peer: share.last_version - 1 for peer, share in self.shares.items() if peer != OTHERS}

    def contributors(self) -> tuple[str, ...]:
        """Peers whose contributions made the version here."""
        made = (peer for peer, share in self.shares.items() if share.last_version == self.version and peer != OTHERS)
        return tuple(sorted(made)) if self.version else ()

    def agrees(self) -> bool:
        """Whether the anchor here is the one that the syncer published last."""
        lease = self.lease
        return lease is not None and lease.version == self.version and lease.digest == self.digest
