"""One peer's exchange of one fragment: from the pseudo-gradient to the adopted update, whoever is syncer. Sans-IO.

    CONTRIBUTE -> verdict accepted -> payload -> record or state with it -> DONE
        |             refused: one version late -> record -> DONE (merged, if its contributors name this peer)
        |             refused: merged already -> CATCH_UP -> DONE
        |             refused: later still -> CATCH_UP -> DONE (the contribution is discarded)
        |             refused: other term -> WAIT for the lease -> CONTRIBUTE
        |---- record does not fit --------> CATCH_UP -> DONE
        `---- stream breaks -------------> WAIT for the lease -> CONTRIBUTE again (the syncer knows what it has)

The owner asks `next_step`, does what it says, and reports every outcome. Every exchange ends in DONE, with a record or
with the state of a later version. If the later version is lost with all peers that had it, the contribution is made
again, under the next term.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from diloco.protocol.fragment import Lease
from diloco.protocol.ledger import Units
from diloco.protocol.messages.bulk import Contribution, Verdict
from diloco.protocol.numbers import MAX_SECONDS, MAX_TOKENS, at_most, within_bounds

__all__ = ["Exchange", "Step"]


class Step(Enum):
    """What the owner of an exchange has to do next."""

    CONTRIBUTE = "contribute"
    WAIT = "wait"
    CATCH_UP = "catch_up"
    DONE = "done"


@dataclass
class Exchange:
    """State of one exchange. Once it is DONE, `discarded` says that the swarm went on without this contribution.

    Where a contribution `may_be_late`, versions may be published between its base and its merge, as many as the syncer
    allows. The owner may change its mind about that when its anchor is replaced by one of another history. The syncer's
    own contribution may then be from an older version too, because its anchor moves while it trains.
    """

    fragment: int
    base_version: int
    base_digest: str
    steps: int
    tokens: int
    manifest_hash: str
    may_be_late: bool = False
    begun_at: float = 0.0
    discarded: bool = False
    units: Units = field(default_factory=list)
    _recorded: bool = False
    _failed_term: int = 0
    _merged_by: int = 0  # the syncer said that the contribution is in this version

    def next_step(self, lease: Lease | None, version: int, merged: int, now: float, retry_at: float = 0.0) -> Step:
        """Decide from the lease believed in, this peer's own version of the fragment, and the time.

        Args:
            lease: the current lease; None while the fragment has no syncer.
            version: this peer's anchor version; above the base version means that the update is adopted.
            merged: base version up to which this peer's contributions are in its anchor (`Fragment.merged`); else -1.
            retry_at: the term that failed last is not tried before this time, since its syncer may be restarting.
        """
        settled = self.discarded or self._recorded
        if version > self.base_version and (settled or not self.may_be_late):
            there = version if lease is None else lease.version
            if there > version and (not self.may_be_late or version < self._merged_by <= there):
                return Step.CATCH_UP
            self.discarded = merged < self.base_version and self._merged_by <= version
            return Step.DONE
        if settled:
            lost = lease is not None and lease.term > self._failed_term and lease.version <= self.base_version
            return Step.CONTRIBUTE if lost else Step.CATCH_UP
        if lease is None or (lease.term <= self._failed_term and now < retry_at):
            return Step.WAIT
        return Step.CONTRIBUTE

    def header(self, lease: Lease, now: float = 0.0, before: int = 0) -> Contribution:
        """Header of the contribution under that lease, by a peer that has so many tokens in its anchor `before`."""
        self.discarded = self._recorded = False
        tokens = at_most(self.tokens, MAX_TOKENS)
        return Contribution(
            manifest_hash=self.manifest_hash, fragment=self.fragment, term=lease.term, steps=at_most(self.steps),
            base_version=self.base_version, base_digest=self.base_digest, tokens=tokens,
            total=at_most(before + tokens, MAX_TOKENS), age_s=within_bounds(now - self.begun_at, MAX_SECONDS),
            units=[list(unit) for unit in self.units],
        )  # fmt: skip

    def refused(self, verdict: Verdict, lease: Lease) -> None:
        """The syncer refused. A stale base means that the swarm went on; after other reasons the owner tries again."""
        if verdict.merged and not verdict.record_follows:
            self.merged(verdict.version)
        elif verdict.late and not verdict.record_follows:
            self.discarded = True
        self._failed_term = lease.term

    def recorded(self, contributors: Collection[str], me: str) -> None:
        """The update record is here, made with or without this contribution; the owner adopts it next, if it fits."""
        self.discarded = me not in contributors
        self._recorded = True

    def merged(self, version: int) -> None:
        """The contribution is known to be in this version, which the owner adopts next, or has."""
        self.discarded = False
        self._recorded = True
        self._merged_by = version

    def broke(self, lease: Lease) -> None:
        """The stream to the syncer broke before the record was here."""
        self._failed_term = lease.term
