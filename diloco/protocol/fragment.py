"""What one peer knows of the fragments: the anchors here, the leases, and the work that is under way. Sans-IO.

A term is a fencing number: a contribution or a record that carries an older term is refused, so a syncer that was
frozen and comes back cannot author a version any more. Two peers that claim the same term at the same time (each not
yet knowing of the other) are told apart by rendezvous order, which everybody computes alike; the loser steps down. So
the resulting lease does not depend on the order in which claims arrive. It would, if the higher version won:

1. b and d claim term 3 at version 3. Everybody but b takes d, and d publishes version 4.
2. b's claim reaches a before that publication, and c after it. With c's knowledge d is ahead, with a's it is not.

This loses nothing: a syncer that is behind first catches up with the highest version that anyone has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from diloco.protocol.messages.control import Claim, Published
from diloco.protocol.messages.heads import MAX_LINES, Line, Record
from diloco.protocol.numbers import LEAP, at_most, forget_oldest, leaps_too_far
from diloco.protocol.rendezvous import score
from diloco.protocol.shares import OTHERS, Shares
from diloco.protocol.syncer import Syncer

__all__ = ["CONTROL_FRAGMENT", "LEAP", "Busy", "Fragment", "Lease", "LeaseTable", "Waiting"]

CONTROL_FRAGMENT = 0  # Its versions carry the swarm clock and the data cursor; its syncer deals out work units.
AUTHORS = 64  # terms whose holders are remembered
REMEMBERED = 128  # versions whose digests are kept: so late a contribution may be


@dataclass(frozen=True)
class Lease:
    """The claim on a fragment that this peer believes in, and the version and digest that the syncer published last.

    `applied_tokens` is the swarm clock at that version, for the control fragment. `skipped` of the numbers up to it
    were given to no version (see `forks`).
    """

    fragment: int
    holder: str
    term: int
    version: int
    digest: str
    applied_tokens: int = 0
    skipped: int = 0

    @property
    def steps(self) -> int:
        """How many outer steps led to that version."""
        return at_most(self.version - self.skipped)


class Waiting(NamedTuple):
    """A claim that is not believed, and whether this peer unseated its sender."""

    claim: Claim
    unseated: bool = False


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
        authors: who held the newest terms that were believed here, by term.
        record: the certificate of the version here; version 0 has none.
        lines: the newest line of each peer that contributed to the anchor here, as far as they are known.
        lease: the newest claim that counts; None while nobody has claimed the fragment.
        elected_at: when this peer began to believe it.
        claims: of peers that this one does not believe, by peer.
        votes: whom each peer believes to hold the fragment, with the term. met: whom it believed in its hello.
        term: the highest term that was ever seen.
        floor: this peer claims above it: it may have signed versions under lower terms, in a life before this one.
        vacant_since: since when the fragment has had no living syncer; None while it has one.
        syncer: collects the next version, while this peer holds the lease.
        busy: what is being done to the anchor.
        closed_at: when the merge that is under way was decided.
        past: digests of the versions before this one, as far as they were here in a row.
        lighter: digest of the last anchor of the syncer whose history was found to have less work than the one here.
        disputed_since: since when the syncer has gone on from a history with less work; None while it has not.
        missed_since: since when nobody has given this peer a version that the syncer announced. misses: that is long.
        stuck_since: since when most peers that train have waited for the next version.
        round_s: seconds from the last version but one to the last one; None if not both came here in a row.
        outweighed: peers whose other history was found to have less work than that of the anchor which is here now, or
            none that is proved, or that did not give it.
    """

    index: int
    version: int
    digest: str
    came_at: float | None = None
    shares: Shares = field(default_factory=dict)
    record: Record | None = None
    lines: dict[str, Line] = field(default_factory=dict)
    authors: dict[int, str] = field(default_factory=dict)
    lease: Lease | None = None
    elected_at: float = 0.0
    claims: dict[str, Waiting] = field(default_factory=dict)
    votes: dict[str, tuple[int, str]] = field(default_factory=dict)
    met: dict[str, tuple[int, str]] = field(default_factory=dict)
    term: int = 0
    floor: int = 0
    vacant_since: float | None = None
    syncer: Syncer | None = None
    busy: Busy = Busy.NO
    closed_at: float | None = None
    past: dict[int, str] = field(default_factory=dict)
    lighter: str = ""
    disputed_since: float | None = None
    missed_since: float | None = None
    misses: bool = False
    stuck_since: float | None = None
    round_s: float | None = None
    outweighed: set[str] = field(default_factory=set)

    def move(self, version: int, digest: str, now: float, leap: bool = False) -> None:
        """The anchor is at that version now: the next one of its history, or by a `leap` one of any history, maybe the
        same one under a higher number.
        """
        past = {} if leap and digest != self.digest else {**self.past, self.version: self.digest}
        forget_oldest(past, REMEMBERED)
        self.past = past
        self.disputed_since = self.missed_since = self.stuck_since = None
        self.outweighed, self.misses = set(), False
        self.round_s = None if leap or self.came_at is None else now - self.came_at
        self.version, self.digest, self.came_at = version, digest, now

    def certified(self, record: Record | None, lines: Iterable[Line] | None = None) -> None:
        """That is the certificate of the anchor here. `lines` came with another anchor, beside its certificate."""
        self.record = record
        known = self.lines if lines is None else {line.peer: line for line in lines}
        for line in () if record is None else record.lines:
            known.pop(line.peer, None)  # the newest lines are last
            known[line.peer] = line
        forget_oldest(known, MAX_LINES)
        self.lines = known

    def further_lines(self) -> list[Line]:
        """The lines that are not in the certificate of the anchor here."""
        certified = () if self.record is None else self.record.contributors
        return [line for peer, line in self.lines.items() if peer not in certified]

    def follows(self, version: int, digest: str) -> bool:
        """Whether the anchor here is that one, or came from it version by version."""
        return digest == (self.digest if version == self.version else self.past.get(version))

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

    @property
    def skipped(self) -> int:
        """Numbers up to `version` that were given to no version of this history (see `forks`)."""
        return 0 if self.record is None else self.record.head.skipped

    @property
    def steps(self) -> int:
        """How many outer steps led to the anchor here."""
        return at_most(self.version - self.skipped)

    @property
    def disputed(self) -> bool:
        """Whether the fragment's syncer goes on from a history with less work than the one here."""
        return self.disputed_since is not None

    @property
    def renumbered(self) -> bool:
        """Whether the fragment's syncer has the anchor that is here, under a higher number."""
        lease = self.lease
        if lease is None or self.syncer is not None or lease.version <= self.version:
            return False
        return (lease.digest, lease.steps) == (self.digest, self.steps)

    def agrees(self) -> bool:
        """Whether the anchor here is the one that the syncer published last."""
        lease = self.lease
        return lease is not None and lease.version == self.version and lease.digest == self.digest


class LeaseTable:
    """The newest lease of each fragment, in `Fragment.lease`. A stale or lower-ranked claim changes nothing.

    `generation` grows whenever a fragment gets or loses a holder, so that what follows from that can be cached.
    """

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        self.generation = 0
        self._fragments = fragments
        self._held: dict[str, dict[int, None]] = {}  # holder -> the fragments it holds

    def get(self, fragment: int) -> Lease | None:
        """The lease of a fragment; None while nobody has claimed it, or when the run does not have it."""
        return self._fragments[fragment].lease if fragment < len(self._fragments) else None

    def held_by(self, peer: str) -> list[Lease]:
        """Leases of one peer, by fragment."""
        leases = (self._fragments[index].lease for index in sorted(self._held.get(peer, ())))
        return [lease for lease in leases if lease is not None]

    def load(self, peer: str) -> int:
        """How many fragments a peer holds."""
        return len(self._held.get(peer, ()))

    def term(self, fragment: int) -> int:
        """Highest term ever seen for a fragment; 0 when none was."""
        return self._fragments[fragment].term if fragment < len(self._fragments) else 0

    def see_term(self, fragment: int, term: int) -> None:
        """Remember a term (from a checkpoint or from the DHT), so that the next claim is above it."""
        if term - self.term(fragment) <= LEAP:
            self._fragments[fragment].term = max(term, self.term(fragment))

    def claim(self, peer: str, claim: Claim, elected: bool = False) -> bool:
        """Take in a claim on a fragment of the run; True when it changes the fragment's lease.

        One that most believe (`elected`) counts against a lease of any term.
        """
        fragment = self._fragments[claim.fragment]
        current = fragment.lease
        if claim.term - fragment.term > LEAP or (claim.term < fragment.term and not elected):
            return False
        if leaps_too_far(fragment.version, claim.version):
            return False
        elected = elected and current is not None and current.holder != peer
        if not elected and current is not None and claim.term == current.term:
            known = (score(current.holder, claim.fragment), current.holder, current.version)
            rank = (score(peer, claim.fragment), peer, claim.version)
            if rank < known or (rank == known and claim.digest == current.digest):
                return False
        fragment.term = max(fragment.term, claim.term)
        fragment.authors[claim.term] = peer
        forget_oldest(fragment.authors, AUTHORS)
        if current is None or current.holder != peer:
            self.vacate(claim.fragment)
            self._held.setdefault(peer, {})[claim.fragment] = None
            self.generation += 1
        fragment.lease = Lease(
            claim.fragment, peer, claim.term, claim.version, claim.digest, claim.applied_tokens, claim.skipped
        )
        return True

    def published(self, message: Published) -> bool:
        """Note what the holder published; False when the term is not the lease's, or the version not newer."""
        lease = self.get(message.fragment)
        if lease is None or message.term != lease.term or message.version <= lease.version:
            return False
        if leaps_too_far(self._fragments[message.fragment].version, message.version):
            return False
        self._fragments[message.fragment].lease = replace(
            lease, version=message.version, digest=message.digest, applied_tokens=message.applied_tokens
        )
        return True

    def vacate(self, fragment: int) -> None:
        """Forget the holder, because it is gone; the term stays known."""
        lease = self._fragments[fragment].lease
        if lease is None:
            return
        held = self._held[lease.holder]
        del held[fragment]
        if not held:
            del self._held[lease.holder]
        known = self._fragments[fragment]
        known.lease = known.disputed_since = known.missed_since = known.stuck_since = None
        known.misses = False
        self.generation += 1
