"""The syncer of one fragment: collects contributions to the next version and decides when to close. Sans-IO.

    offer -> (payload arrives) -> arrived -> poll says close -> merge, publish -> advance -> the next version collects

Contributions are keyed by (peer, base version) under one term; a merged one is never merged again. How their payloads
are taken in depends on when a version closes:

- at a barrier (no quorum) each chunk is folded in on arrival, or kept until `outer.robust` judges all contributions
  (`leave_out`); "folded in" covers both here. When a stream breaks midway, its chunks stay folded in (each chunk has
  its own weight), and a retry goes on with the next chunk; so no byte travels twice and no chunk counts twice. A peer
  whose payload never became whole is not a contributor: its tokens count as discarded.
- with a quorum a version may close at any moment, so a payload is collected whole, then folded in (`folds_whole`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from diloco.config import OuterConfig
from diloco.protocol.ledger import Units, union
from diloco.protocol.membership import Member
from diloco.protocol.messages.bulk import Contribution, Verdict
from diloco.protocol.messages.heads import MAX_LINES, Line
from diloco.protocol.numbers import MAX_TOKENS, at_most

__all__ = ["SYNC", "Close", "Syncer"]

COUNTED = 1024  # versions since each of which contributions are counted
WAITING_S = 5.0  # A peer that has waited longer than this may wait for ever.

SYNC = OuterConfig(method="diloco", sync_every=1)
"""All expected peers at a barrier, and a Nesterov step per version."""


@dataclass(frozen=True)
class Close:
    """Decision to make the next version out of these whole contributions.

    Attributes:
        contributors: the tokens of each contribution.
        missing: peers that were expected and are left out.
        delay: contributions per momentum step, if a window of a windowed optimizer begins with this version (Delayed
            Nesterov, arXiv 2401.09135, Algorithm 3: N changes between two momentum steps only).
    """

    fragment: int
    base_version: int
    contributors: Mapping[str, int]
    missing: tuple[str, ...]
    delay: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of all contributions together."""
        return sum(self.contributors.values())


@dataclass
class _Offer:
    base_version: int
    tokens: int
    steps: int
    chunks: int = 0
    whole: bool = False
    line: Line | None = None  # once it is whole
    polled: int = 0  # chunks at the last poll
    progress_at: float = 0.0
    taken_at: float = 0.0  # when the peer took its pseudo-gradient
    units: Units = field(default_factory=list)


class Syncer:
    """State of the fragment's next version.

    At a barrier a peer is expected while it is alive and makes progress: its inner steps or its chunks do (see
    `Member.stalled`). So nobody waits for a dead peer, nor for one that stopped, and there is no time-out to tune. With
    a quorum, nobody waits longer than the grace period.

    The *staleness* of a contribution is counted in rounds: how many contributions were merged since its base version,
    over the number of active peers. Peers of one pace are then less than a round late, however far out of phase they
    are, and a peer of half their pace is about a round later. The papers count versions, where a version stands for
    one contribution (arXiv 2401.09135) or for a buffer of them (FedBuff, arXiv 2106.06639); with a buffer of as many
    contributions as there are peers, that is the unit here. `outer.staleness_limit` and `outer.staleness_exponent`
    are in this unit.

    Args:
        contributors: peers whose contributions made `version`.
        merged: for each peer the base version up to which its contributions are in the model, or were left out. A
            successor needs it, because a contributor's stream to the syncer before it may have broken before the
            contributor heard that.
    """

    def __init__(
        self,
        fragment: int,
        term: int,
        version: int,
        settings: OuterConfig = SYNC,
        contributors: Collection[str] = (),
        merged: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.fragment = fragment
        self.term = term
        self.version = version
        self.folds_whole = settings.quorum is not None
        self.last_contributors = frozenset(contributors)
        self.last_staleness = 0.0
        self.grace_until: float | None = None
        self._settings = settings
        self._offers: dict[str, _Offer] = {}
        self._merged = dict(merged)  # peer -> base version of its newest merged contribution
        # Contributions merged until each version; of versions that others made one is counted each.
        self._pushed, self._pushed_at = version, {version: version}
        self._active = 1  # peers that train
        self._unit = 0.0
        self._closing: Close | None = None

    # -- contributions ------------------------------------------------------------------------------------------------

    def staleness(self, base_version: int) -> float:
        """How late a contribution from this version is, in rounds; 0 if it is from the newest version."""
        return (self._pushed - self._pushed_at.get(base_version, base_version)) / self._active

    def offer(
        self, peer: str, header: Contribution, active: int = 1, now: float = 0.0, before: int | None = None
    ) -> Verdict:
        """Judge a contribution by its header, while so many peers are active.

        It never raises: the verdict on a wrong one says the reason. The peer has so many tokens in the anchor `before`;
        one that counts otherwise learned from another history.
        """
        self._active = max(1, active)
        known = self._offers.get(peer)
        whole = known is not None and known.whole
        merged = self._merged.get(peer, -1) >= header.base_version
        counted = at_most((before or 0) + header.tokens, MAX_TOKENS)
        elsewhere = before is not None and header.total not in (0, counted)
        elsewhere = elsewhere and header.base_version <= self.version  # else the tokens in between are not here yet
        late = self._too_late(header.base_version) or elsewhere
        reason = ""
        if header.term != self.term:
            reason = f"fragment {self.fragment} is under term {self.term}, not {header.term}"
        elif merged:
            reason = (
                f"the contribution from version {header.base_version} of fragment {self.fragment} is merged already"
            )
        elif elsewhere:
            reason = f"a total of {header.total} tokens is claimed, and {header.tokens} come to {before} here"
        elif len(self._offers) >= MAX_LINES and known is None:
            reason = f"fragment {self.fragment} has {MAX_LINES} contributions to version {self.version + 1}"
        elif late:
            reason = f"fragment {self.fragment} is at version {self.version}, past base version {header.base_version}"
        elif header.base_version > self.version:
            reason = f"fragment {self.fragment} is at version {self.version}, {header.base_version} is in the future"
        elif self._closing and not whole and not self.folds_whole:
            reason = f"fragment {self.fragment} is closing version {self.version + 1} without this contribution"
        elif known is not None and whole and (known.tokens, known.base_version) != (header.tokens, header.base_version):
            reason = f"a contribution of {known.tokens} tokens is here already, this one claims {header.tokens}"
        if reason:
            return Verdict(
                accepted=False, reason=reason, version=self.version, term=self.term, merged=merged,
                late=late and not merged,
            )  # fmt: skip
        if known is None:
            known = self._offers[peer] = _Offer(header.base_version, header.tokens, header.steps)
        # Other numbers come from a peer that restarted; each chunk has a weight of its own.
        known.base_version, known.tokens, known.steps = header.base_version, header.tokens, header.steps
        known.units, known.taken_at = union(header.units), now - header.age_s
        self._unit = self._unit or self._raw_weight(known)
        return Verdict(accepted=True, first_chunk=known.chunks, version=self.version, term=self.term)

    def weight(self, peer: str) -> float:
        """Weight of this peer's contribution, over that of the first contribution to this version.

        Equal contributions thus have weight 1, and sums of 4- and 8-bit payloads are exact in fp32, in any order of
        arrival. (`tokens2_per_step`: Decoupled DiLoCo, arXiv 2604.21428.)
        """
        raw = self._raw_weight(self._offers[peer])
        self._unit = self._unit or raw  # unset if this one was offered for the version before
        return raw / self._unit

    def discount(self, peer: str) -> float:
        """Factor by which staleness s reduces this contribution: (1 + s) ** -exponent (arXiv 2401.09135, section 4)."""
        return float((1 + self.staleness(self._offers[peer].base_version)) ** -self._settings.staleness_exponent)

    def _too_late(self, base_version: int) -> bool:
        return self.staleness(base_version) > self._settings.staleness_limit

    def weights(self, peers: Collection[str]) -> dict[str, float]:
        """Weights of these contributions over that of the first peer by name, independent of the order of arrival."""
        raw = {peer: self._raw_weight(self._offers[peer]) for peer in sorted(peers)}
        unit = next(iter(raw.values()))
        return {peer: weight / unit for peer, weight in raw.items()}

    def units(self, peer: str) -> Units:
        """Sequences from which this peer says it learned its contribution."""
        return self._offers[peer].units

    def leave_out(self, close: Close, peers: Collection[str]) -> Close:
        """Make the version without these whole contributions after all: they oppose the others (`outer.robust`), or
        raise the loss (`outer.spot_check`).
        """
        for peer in peers:
            self._offers[peer].whole = False
        kept = {peer: tokens for peer, tokens in close.contributors.items() if peer not in peers}
        return replace(close, contributors=kept, missing=tuple(sorted({*close.missing, *peers})))

    def _raw_weight(self, offer: _Offer) -> float:
        match self._settings.weights:
            case "tokens":
                return float(offer.tokens)
            case "tokens2_per_step":
                return offer.tokens**2 / offer.steps
            case _:
                return 1.0

    def wants(self, peer: str, chunk: int, base_version: int) -> bool:
        """Whether this chunk may be folded in. It may not when the version has closed, when the chunk was folded in
        before, or when it belongs to an earlier contribution whose stream was slow.
        """
        offer = self._offers.get(peer)
        if offer is None or self._closing or (chunk, base_version) != (offer.chunks, offer.base_version):
            return False
        return not self._too_late(offer.base_version)

    def folded(self, peer: str) -> None:
        """The next chunk of this peer is folded in."""
        self._offers[peer].chunks += 1

    def arrived(self, peer: str, line: Line | None = None) -> None:
        """The payload of this peer is whole, and here is the line that it signed for it."""
        offer = self._offers.get(peer)
        if offer is not None and not self._closing:
            offer.whole, offer.line = True, line

    def line(self, peer: str) -> Line | None:
        """The line of a contribution that is whole."""
        offer = self._offers.get(peer)
        return None if offer is None else offer.line

    def forget(self, peer: str) -> None:
        """Parts of two payloads came under one name: the peer restarted. It sends all of the new one."""
        if not self._closing:
            self._offers.pop(peer, None)

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
            if any(peer not in whole and self._expected(member, now) for peer, member in members.items()):
                return None
        return self._close(whole, members)

    def _enough(self, whole: set[str], members: Mapping[str, Member], now: float, sync_s: float) -> bool:
        """Whether the quorum is there; its grace period begins then. Without a quorum, only expected peers count."""
        quorum, until = self._settings.quorum, self.grace_until
        if quorum is None:
            return True
        if until is None:  # a peer that joins meanwhile does not end a grace period
            waiting = sum(peer not in whole and self._waits_elsewhere(member, now) for peer, member in members.items())
            if len(whole) < min(quorum, _active(members) - waiting):
                return False
        ends_at = now + self._grace_s(whole, members, now, sync_s)
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

    def _grace_s(self, whole: set[str], members: Mapping[str, Member], now: float, sync_s: float) -> float:
        """A fixed time, or a part of what the overlap hides, so that no inner step waits.

        That is gamma (tau xi_step - (xi_quorum + xi_sync)) of Decoupled DiLoCo (arXiv 2604.21428), for the contributor
        with the least time: it needs the update tau inner steps of its own after it took its pseudo-gradient, xi_quorum
        have passed since then, and the update will be there xi_sync after the decision to close.
        """
        settings = self._settings
        if not settings.grace_slack:
            return settings.grace_s
        paces = {peer: members[peer].status.steps_per_s for peer in whole if peer in members}
        due_at = [self._offers[peer].taken_at + settings.overlap / pace for peer, pace in paces.items() if pace > 0]
        return max(0.0, settings.grace_slack * (min(due_at, default=now) - now - sync_s))

    def closes(self, close: Close) -> bool:
        """Whether that version is still to be made. It is not once another anchor was adopted, at any version."""
        return self._closing is close

    def _close(self, whole: set[str], members: Mapping[str, Member]) -> Close:
        missing = (self.last_contributors | set(self._offers)) - whole if self._settings.quorum is None else set()
        contributors = {peer: self._offers[peer].tokens for peer in sorted(whole)}
        delay = (self._settings.delay or _active(members)) if self._settings.windowed else 1
        self._closing = Close(self.fragment, self.version, contributors, tuple(sorted(missing)), delay)
        return self._closing

    def _expected(self, member: Member, now: float) -> bool:
        status = member.status
        if not member.trains or not status.counted_in:
            return False
        offer = self._offers.get(member.peer)
        if member.stalled(now, progress_at=0.0 if offer is None else offer.progress_at):
            return False
        base = status.versions[self.fragment]
        known = member.peer in self.last_contributors
        if base == self.version:
            may_be_late = self._settings.staggered and self.last_contributors
            sends = offer is not None and offer.base_version == base
            return known or sends or not may_be_late or self._about_to_send(member, now)
        # Right after a publication the contributors' statuses still name the version before.
        return known and base == self.version - 1

    def _about_to_send(self, member: Member, now: float) -> bool:
        """Whether a newcomer is near the step at which this fragment is due.

        With staggered fragments a newcomer may be too late for this version, and is expected only after its first
        contribution. A newcomer that is a step behind the others would never deliver one in time; so this syncer waits
        for it as long as the overlap hides. It does not while the newcomer waits for the update of a fragment before
        this one: that one's syncer may wait for contributors to this one.
        """
        status, settings = member.status, self._settings
        exchanges = status.state == "exchanging"
        inner_step = status.inner_step + (0.0 if exchanges else (now - member.heard_at) * status.steps_per_s)
        left = -(-(self.fragment + 1) * status.target_steps // settings.fragments) - inner_step
        if member.ended_cycle and 2 * left > status.target_steps:  # it was due before the steps began again with 0
            left -= status.target_steps
        return status.steps_per_s > 0 and abs(left) <= settings.overlap + 1 and not (exchanges and left > 0)

    def advance(self, version: int, merged: Mapping[str, int] | None = None) -> None:
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
        while len(self._pushed_at) > COUNTED:
            del self._pushed_at[next(iter(self._pushed_at))]
        # A payload that is still on its way is no part of the version that closed, unless its first chunks were.
        # A version that was fetched may contain what is on its way here as well.
        self._offers = {
            peer: offer
            for peer, offer in self._offers.items()
            if self.folds_whole and not offer.whole and offer.base_version > self._merged.get(peer, -1)
        }
        self._unit = 0.0
        self._closing = None
        self.grace_until = None


def _active(members: Mapping[str, Member]) -> int:
    """Peers that train, at least 1."""
    return max(1, sum(m.trains and m.status.counted_in for m in members.values()))
