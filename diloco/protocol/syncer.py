"""The syncer of one fragment: collects contributions to the next version and decides when to close. Sans-IO.

    offer -> (payload arrives) -> arrived -> poll says close -> merge, publish -> advance -> the next version collects

Contributions are keyed by (peer, base version) under one term; a merged one is never merged again. Each is kept,
encoded, until the version closes.

A contribution that missed its version is merged into a later one where the mode has that (`OuterConfig.carries_late`).
Otherwise its tokens count as discarded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from diloco.config import OuterConfig
from diloco.protocol.membership import Member
from diloco.protocol.messages.bulk import Contribution, Verdict
from diloco.protocol.messages.heads import MAX_LINES, Line
from diloco.protocol.numbers import MAX_TOKENS, at_most, forget_oldest
from diloco.protocol.offers import Close, Offer
from diloco.protocol.patience import Arrival, Patience, about_to_send, active, grace_s
from diloco.protocol.work import weigh

__all__ = ["SYNC", "Syncer"]

COUNTED = 1024  # versions since each of which contributions are counted
WAITING_S = 5.0  # A peer that has waited longer than this may wait for ever.
LATE_EXPONENT = 0.5  # at a barrier: a contribution that is s rounds late counts (1 + s) ** -LATE_EXPONENT

SYNC = OuterConfig(method="diloco", sync_every=1)  # all expected peers at a barrier, a Nesterov step per version


class Syncer:
    """State of the fragment's next version.

    At a barrier a peer is expected while it is alive and makes progress: its inner steps or its chunks do (see
    `Member.stalled`). Once half of the expected contributions are there, the others' rounds say how long the version
    waits for the rest (`patience`). What the rest sends is collected beside the version, and merged into the next one.
    With a quorum, nobody waits longer than the grace period.

    The *staleness* of a contribution is counted in rounds: how many contributions were merged since its base version,
    over the number of active peers. Peers of one pace are then less than a round late, however far out of phase they
    are, and a peer of half their pace is about a round later. The papers count versions, where a version stands for one
    contribution (arXiv 2401.09135). `outer.staleness_limit` and `outer.staleness_exponent` are in this unit.

    Args:
        contributors: peers whose contributions made `version`.
        merged: for each peer the base version up to which its contributions are in the model, or were left out. A
            successor needs it, because a contributor's stream to the syncer before it may have broken before the
            contributor heard that.
        now: since when contributors can have `version`, as far as is known here.
    """

    def __init__(
        self,
        fragment: int,
        term: int,
        version: int,
        settings: OuterConfig = SYNC,
        contributors: Collection[str] = (),
        merged: Mapping[str, int] = MappingProxyType({}),
        now: float = 0.0,
    ) -> None:
        self.fragment = fragment
        self.term = term
        self.version = version
        self.last_contributors = frozenset(contributors)
        self.last_staleness = 0.0
        self.grace_until: float | None = None
        self._settings = settings
        self._offers: dict[str, Offer] = {}
        # By peer: base version of its newest contribution that is merged; that was left out.
        self._merged, self._spent = dict(merged), dict[str, int]()
        # Contributions merged until each version; of versions that others made one is counted each.
        self._pushed, self._pushed_at = version, {version: version}
        self._active = 1  # peers that train
        self._patience = Patience(version, now)
        self._closing: Close | None = None

    # -- contributions ------------------------------------------------------------------------------------------------

    def staleness(self, base_version: int) -> float:
        """How late a contribution from this version is, in rounds; 0 if it is from the newest version."""
        return (self._pushed - self._pushed_at.get(base_version, base_version)) / self._active

    def offer(
        self, peer: str, header: Contribution, active: int = 1, now: float = 0.0, carried: bool = True,
        before: int | None = None,
    ) -> Verdict:  # fmt: skip
        """Judge a contribution by its header, while so many peers are active.

        It is merged although it missed its version only if it is `carried`. It never raises: the verdict on a wrong
        one says the reason. The peer has so many tokens in the anchor `before`; one that counts otherwise learned from
        another history.
        """
        self._active = max(1, active)
        known = self._offers.get(peer)
        whole, base = known is not None and known.whole, header.base_version
        merged = self._merged.get(peer, -1) >= base
        counted = at_most((before or 0) + header.tokens, MAX_TOKENS)
        elsewhere = before is not None and header.total not in (0, counted)
        elsewhere = elsewhere and base <= self.version  # else the tokens in between are not here yet
        late = not merged and (self._too_late(base, carried) or self._spent.get(peer, -1) >= base or elsewhere)
        here, reason = f"fragment {self.fragment} is at version {self.version}", ""
        if header.term != self.term:
            reason = f"fragment {self.fragment} is under term {self.term}, not {header.term}"
        elif merged:
            reason = f"fragment {self.fragment}: what came from version {base} is merged already"
        elif elsewhere:
            reason = f"a total of {header.total} tokens is claimed, and {header.tokens} come to {before} here"
        elif len(self._offers) >= MAX_LINES and known is None:
            reason = f"fragment {self.fragment} has {MAX_LINES} contributions to version {self.version + 1}"
        elif late:
            reason = f"{here}, past base version {base}"
            self._patience.refused(peer, base, now)
        elif base > self.version:
            reason = f"{here}, {base} is in the future"
        elif self._closing and not whole and not self._is_beside(peer, header):
            reason = f"fragment {self.fragment} is closing version {self.version + 1} without this contribution"
        elif known is not None and whole and (known.tokens, known.base_version) != (header.tokens, base):
            reason = f"a contribution of {known.tokens} tokens is here already, this one claims {header.tokens}"
        if reason:
            return Verdict(
                accepted=False, reason=reason, version=self.version, term=self.term, merged=merged, late=late
            )
        if known is None:
            known = self._offers[peer] = Offer(header.base_version, header.tokens, header.steps)
        # Other numbers come from a peer that restarted; each chunk has a weight of its own.
        known.base_version, known.tokens, known.steps = header.base_version, header.tokens, header.steps
        known.taken_at = now - header.age_s
        known.late, known.beside = header.base_version < self.version, self._is_beside(peer, header)
        known.chunks = known.polled = 0
        return Verdict(accepted=True, version=self.version, term=self.term)

    def _is_beside(self, peer: str, header: Contribution) -> bool:
        """Whether it does not matter to it that a version closes meanwhile."""
        late = header.base_version < self.version
        return late or peer in self._patience.slow or not self._settings.barrier

    def discount(self, peer: str) -> float:
        """Factor by which staleness s reduces this contribution: (1 + s) ** -exponent (arXiv 2401.09135, section 4)."""
        exponent = LATE_EXPONENT if self._settings.barrier else self._settings.staleness_exponent
        return float((1 + self.staleness(self._offers[peer].base_version)) ** -exponent)

    def _too_late(self, base_version: int, carried: bool = True) -> bool:
        if self._settings.barrier:
            return base_version < self.version and not (carried and self._settings.carries_late)
        return self.staleness(base_version) > self._settings.staleness_limit

    def counted(self, peers: Collection[str]) -> tuple[dict[str, float], dict[str, float]]:
        """Weights (see `weigh`) and discounts of all contributions to a version."""
        counts = {peer: (self._offers[peer].tokens, self._offers[peer].steps) for peer in peers}
        return weigh(self._settings.weights, counts), {peer: self.discount(peer) for peer in peers}

    def leave_out(self, close: Close, peers: Collection[str]) -> Close:
        """Make the version without these whole contributions after all: they oppose the others (`outer.robust`)."""
        for peer in peers:
            self._offers[peer].whole = False
            self._spent[peer] = self._offers[peer].base_version
        kept = {peer: tokens for peer, tokens in close.contributors.items() if peer not in peers}
        return replace(close, contributors=kept, missing=tuple(sorted({*close.missing, *peers})))

    def wants(self, peer: str, base_version: int) -> bool:
        """Whether a payload from that version may be kept for the next one. It may not while that closes, or when it
        belongs to an earlier contribution whose stream was slow.
        """
        offer = self._offers.get(peer)
        if offer is None or self._closing or offer.whole or offer.base_version != base_version:
            return False
        return not self._too_late(base_version)

    def progressed(self, peer: str) -> None:
        """A chunk of this peer's payload has arrived."""
        if peer in self._offers:
            self._offers[peer].chunks += 1

    def keep(self, peer: str, payload: Any) -> None:
        """Keep a payload that the syncer wants; `arrived` comes next."""
        self._offers[peer].payload = payload

    def payload(self, peer: str) -> Any:
        """That of a contribution that is whole."""
        return self._offers[peer].payload

    def keeps(self, peer: str, base_version: int) -> bool:
        """Whether the contribution of this peer from that version may still go into the next one."""
        offer = self._offers.get(peer)
        return offer is not None and offer.base_version == base_version

    def arrived(self, peer: str, now: float = 0.0, began_at: float = 0.0, line: Line | None = None) -> None:
        """The payload of this peer is whole, and here is the line that it signed for it.

        It says that it began its round at `began_at`.
        """
        offer = self._offers.get(peer)
        if offer is None or self._closing:
            return
        if not offer.whole:
            offer.arrival = self._patience.arrival(offer.base_version, offer.late, now, began_at)
        offer.whole, offer.line = True, line

    def line(self, peer: str) -> Line | None:
        """The line of a contribution that is whole."""
        offer = self._offers.get(peer)
        return None if offer is None else offer.line

    def drop_late(self) -> None:
        """No later version will be made for those that missed theirs: the others are done."""
        if not self._closing:
            for peer in [peer for peer, offer in self._offers.items() if offer.late]:
                self._spent[peer] = self._offers.pop(peer).base_version

    # -- closing ------------------------------------------------------------------------------------------------------

    def may_close(self, now: float) -> bool:
        """Whether any contribution is whole, so that it is worth to `poll`; notes whose chunks make progress."""
        if self._closing:
            return False
        for offer in self._offers.values():
            if offer.chunks > offer.polled:
                offer.polled, offer.progress_at = offer.chunks, now
        return any(offer.whole for offer in self._offers.values())

    def poll(self, members: Mapping[str, Member], now: float, sync_s: float = 0.0) -> Close | None:
        """Decide whether to close; `grace_until` says when to ask again if nothing else happens.

        `members` are the live peers by id; this peer is one of them, for it waits for itself like for any other.
        `sync_s` are measured seconds from a decision to close until contributors have the update.
        """
        if not self.may_close(now):
            return None
        whole = {peer for peer, offer in self._offers.items() if offer.whole}
        if not self._enough(whole, members, now, sync_s):
            return None
        if self.grace_until is None or now < self.grace_until:
            rest = [m for peer, m in members.items() if peer not in whole and self._expected(m, now)]
            if rest and (not self._settings.barrier or self._patience.waits(self.version, self._arrivals(), rest, now)):
                return None
        return self._close(whole, members, now)

    def _arrivals(self) -> dict[str, Arrival]:
        return {peer: offer.arrival for peer, offer in self._offers.items() if offer.arrival is not None}

    def _enough(self, whole: set[str], members: Mapping[str, Member], now: float, sync_s: float) -> bool:
        """Whether the quorum is there; its grace period begins then. Without a quorum, only expected peers count."""
        quorum, until = self._settings.quorum, self.grace_until
        if quorum is None:
            return True
        if until is None:  # a peer that joins meanwhile does not end a grace period
            waiting = sum(peer not in whole and self._waits_elsewhere(member, now) for peer, member in members.items())
            if len(whole) < min(quorum, active(members) - waiting):
                return False
        taken_at = {peer: self._offers[peer].taken_at for peer in whole}
        ends_at = now + grace_s(self._settings, taken_at, members, now, sync_s)
        self.grace_until = ends_at if until is None else min(ends_at, until)
        return True

    def _waits_elsewhere(self, member: Member, now: float) -> bool:
        """Whether a peer has nothing to contribute to this version, and has waited for another fragment for some time.

        It has this round's update already:
        1. Of four peers three make the quorum of each fragment, and each time another one comes too late.
        2. So three wait, each for a fragment to which only it contributed, and which waits for the two others.

        Or its version was replaced by an equally high one of another history, so its contribution was discarded:
        1. A swarm of two is split, and each side makes the same number of versions. Then they meet.
        2. Each adopts the other's history of some fragments, and waits for the rest, to which only it contributed.
        """
        began = member.round_versions
        status, fragment = member.status, self.fragment
        if status.state != "exchanging" or began is None or member.peer in self._offers:
            return False
        has_update = status.versions[fragment] > began[fragment]
        return now - member.progress_at > (WAITING_S if has_update else member.stall_s())

    @property
    def closing(self) -> bool:
        """Whether the next version is being made of what is whole."""
        return self._closing is not None

    def closes(self, close: Close) -> bool:
        """Whether that version is still to be made. It is not once another anchor was adopted, at any version."""
        return self._closing is close

    def _close(self, whole: set[str], members: Mapping[str, Member], now: float) -> Close:
        missing: set[str] = set()
        if self._settings.barrier:
            begun = {peer for peer, offer in self._offers.items() if not offer.beside}
            missing = {*self.last_contributors, *begun} - whole
            awaited = [peer for peer, member in members.items() if peer not in whole and self._awaited(member, now)]
            self._patience.closed(self.version, self._arrivals(), awaited, members, now)
        contributors = {peer: self._offers[peer].tokens for peer in sorted(whole)}
        delay = (self._settings.delay or active(members)) if self._settings.windowed else 1
        self._closing = Close(self.fragment, self.version, contributors, tuple(sorted(missing)), delay)
        return self._closing

    def _expected(self, member: Member, now: float) -> bool:
        """Whether the version may wait for this peer: it makes progress towards a contribution."""
        chunk_at = self._offers[member.peer].progress_at if member.peer in self._offers else 0.0
        return not member.stalled(now, progress_at=chunk_at) and self._awaited(member, now)

    def _awaited(self, member: Member, now: float) -> bool:
        """Whether this peer should contribute to the version, as far as it says, and is not slow."""
        status = member.status
        base, offer = status.versions[self.fragment], self._offers.get(member.peer)
        sends = offer is not None and not offer.late
        if not member.trains or not status.counted_in or (member.peer in self._patience.slow and not sends):
            return False
        known = sends or member.peer in self.last_contributors
        if base == self.version:
            may_be_late = self._settings.staggered and self.last_contributors
            return known or not may_be_late or about_to_send(self._settings, self.fragment, member, now)
        # Right after a publication the contributors' statuses still name the version before.
        return known and base == self.version - 1

    def advance(self, version: int, merged: Mapping[str, int] | None = None, now: float = 0.0) -> None:
        """The next version is published, or a later one was fetched: forget what is in it, collect the one after it.

        For a version that was fetched, `merged` tells the contributors and what is in it.
        """
        published = version == self.version + 1 and self._closing is not None
        whole = {peer: offer for peer, offer in self._offers.items() if offer.whole}
        if published:
            self.last_contributors = frozenset(whole)
            self.last_staleness = max((self.staleness(offer.base_version) for offer in whole.values()), default=0.0)
            self._merged |= {peer: offer.base_version for peer, offer in whole.items()}
        else:
            self._merged = dict(merged or {})
            self.last_contributors = frozenset(peer for peer, base in self._merged.items() if base == version - 1)
        self._pushed += len(whole) if published else max(0, version - self.version)
        self.version = version
        self._pushed_at[version] = self._pushed
        forget_oldest(self._pushed_at, COUNTED)
        self._patience.opens(version, now)
        # A payload that is still on its way is no part of the version that closed.
        # A version that was fetched may contain what is on its way here as well.
        self._offers = {
            peer: offer
            for peer, offer in self._offers.items()
            if offer.beside and not offer.whole and offer.base_version > self._merged.get(peer, -1)
            if self._spent.get(peer, -1) < offer.base_version
        }
        for offer in self._offers.values():
            offer.late = offer.base_version < version
        self._closing = self.grace_until = None
