"""One peer's exchange of one fragment: from the pseudo-gradient to the adopted update, whoever is syncer. Sans-IO.

    CONTRIBUTE -> verdict accepted -> payload -> record -> DONE
        |             refused: one version late -> record -> DONE (merged, if its contributors name this peer)
        |             refused: later still -> CATCH_UP -> DONE (the contribution is discarded)
        |             refused: other term -> WAIT for the lease -> CONTRIBUTE
        `---- stream breaks -------------> WAIT for the lease -> CONTRIBUTE again (the syncer knows what it has)

The owner asks `next_step` and does what it says; every outcome is reported back. It ends in DONE in every case: a
record, or the state of a later version.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from diloco.protocol.leases import Lease
from diloco.protocol.messages import Contribution, Verdict

__all__ = ["Exchange", "Step"]


class Step(Enum):
    """What the owner of an exchange has to do next."""

    CONTRIBUTE = "contribute"
    WAIT = "wait"
    CATCH_UP = "catch_up"
    DONE = "done"


@dataclass
class Exchange:
    """State of one exchange. `discarded` becomes true when the swarm went on without this contribution."""

    fragment: int
    base_version: int
    steps: int
    tokens: int
    manifest_hash: str
    discarded: bool = False
    attempts: int = 0
    _failed_term: int = 0

    def next_step(self, lease: Lease | None, version: int, now: float, retry_at: float = 0.0) -> Step:
        """Decide from the lease believed in, this peer's own version of the fragment, and the time.

        Args:
            lease: the current lease, or None while the fragment has no syncer.
            version: this peer's anchor version; above the base version means that the update is adopted.
            now: seconds of a monotonic clock.
            retry_at: not before this time under the term that failed last (the syncer may be restarting its stream).
        """
        if version > self.base_version:
            return Step.DONE
        if self.discarded:
            return Step.CATCH_UP
        if lease is None or (lease.term <= self._failed_term and now < retry_at):
            return Step.WAIT
        return Step.CONTRIBUTE

    def header(self, lease: Lease) -> Contribution:
        """Header of the contribution under that lease."""
        self.attempts += 1
        return Contribution(
            manifest_hash=self.manifest_hash,
            fragment=self.fragment,
            term=lease.term,
            base_version=self.base_version,
            steps=self.steps,
            tokens=self.tokens,
        )

    def refused(self, verdict: Verdict, lease: Lease) -> None:
        """The syncer refused: a stale base means that the swarm went on; anything else is tried again."""
        if verdict.version > self.base_version and not verdict.record_follows:
            self.discarded = True
        self._failed_term = lease.term

    def recorded(self, contributors: Collection[str], me: str) -> None:
        """The update is here; it was made with this contribution, or without."""
        self.discarded = me not in contributors

    def broke(self, lease: Lease) -> None:
        """The stream to the syncer broke before the record was here."""
        self._failed_term = lease.term
