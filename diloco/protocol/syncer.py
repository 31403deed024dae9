"""The syncer of one fragment: collects contributions to the next version and decides when to close. Sans-IO.

    offer -> (payload arrives) -> arrived -> poll says close -> merge, publish -> advance -> the next version collects

Contributions are keyed by (peer, base version) under one term; a merged one is never merged again. How their payloads
are taken in depends on when a version closes:

- at a barrier (no quorum) each chunk is folded in on arrival, or kept until `outer.robust` judges all contributions
  (`leave_out`); "folded in" covers both here. When a stream breaks midway, its chunks stay folded in (each chunk has
  its own weight), and a retry goes on with the next chunk; so no byte travels twice and no chunk counts twice.
- with a quorum a version may close at any moment, so a payload is collected whole, then folded in (`collects`). So is
  at a barrier the payload of a peer for which nobody waits.

A contribution that missed its version is merged into a later one where the mode has that (`OuterConfig.carries_late`).
Otherwise its tokens count as discarded.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

from diloco.config import OuterConfig
from diloco.protocol.ledger import Units, union
from diloco.protocol.membership import Member
from diloco.protocol.messages.bulk import Contribution, Verdict
from diloco.protocol.work import HEAVIEST, Credit, capped, patience_ends, too_long

__all__ = ["SYNC", "Close", "Syncer"]

COUNTED = 1024  # versions since each of which contributions are counted
WAITING_S = 5.0  # A peer that has waited longer than this may wait for ever.
LATE_EXPONENT = 0.5  # at a barrier: a contribution that is s rounds late counts (1 + s) ** -LATE_EXPONENT
WEIGHTS_KNOWN = 4  # fewer weights say nothing of another one
MEMORY = 8  # weights that are remembered

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
    collects: bool = False  # its payload is collected whole, then folded in
    late: bool = False  # it missed its version
    counts_at: float = 0.0  # when its steps are paid for; see `Credit`
    polled: int = 0  # chunks at the last poll
    progress_at: float = 0.0
    taken_at: float = 0.0  # when the peer took its pseudo-gradient
    arrived: tuple[float, float] | None = None  # when it was whole, and after a round of how many seconds
    units: Units = field(default_factory=list)


class _Opened(NamedTuple):
    pushed: int  # contributions merged until then; of versions that others made one is counted each
    at: float


class Syncer:
    """State of the fragment's next version.

    At a barrier a peer is expected while it is alive and makes progress: its inner steps or its chunks do (see
    `Member.stalled`). Once half of the expected contributions are there, the version waits for the rest until
    `patience_ends`: the others' rounds say how long, and never a peer's own word. A peer that was missing then, or whose
    round took too long beside the others', is expected again after a contribution that took no longer than that.
    Meanwhile what it sends is collected beside the version, and merged into the one that is next. With a quorum, nobody
    waits longer than the grace period.

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
        self._offers: dict[str, _Offer] = {}
        self._merged = dict(merged)  # peer -> base version of its newest merged contribution
        self._pushed, self._opened = version, {version: _Opened(version, now)}  # by version
        self._taken: dict[str, int] = {}  # peer -> base version of a contribution that is not taken again
        self._credit = Credit(settings.sync_every)
        self._rounds: dict[str, float] = {}  # seconds of the newest round of each peer
        self._slow: set[str] = set()  # peers for which nobody waits
        self._raw: deque[float] = deque(maxlen=MEMORY)  # capped weights of the newest contributions
        self._active = 1  # peers that train
        self._unit = 0.0
        self._closing: Close | None = None

    # -- contributions ------------------------------------------------------------------------------------------------

    def staleness(self, base_version: int) -> float:
        """How late a contribution from this version is, in rounds; 0 if it is from the newest version."""
        opened = self._opened.get(base_version)
        return (self._pushed - (base_version if opened is None else opened.pushed)) / self._active

    def offer(
        self, peer: str, header: Contribution, active: int = 1, now: float = 0.0, rate: float = math.inf,
        carried: bool = True,
    ) -> Verdict:  # fmt: skip
        """Judge a contribution by its header, while so many peers are active.

        Its steps are paid for at this `rate` (see `Credit`). It is merged although it missed its version only if it is
        `carried`. It never raises: the verdict on a wrong one says the reason.
        """
        self._active = max(1, active)
        known = self._offers.get(peer)
        whole = known is not None and known.whole
        merged = self._merged.get(peer, -1) >= header.base_version
        late = self._too_late(header.base_version, carried) or self._taken.get(peer, -1) >= header.base_version
        reason = ""
        if header.term != self.term:
            reason = f"fragment {self.fragment} is under term {self.term}, not {header.term}"
        elif merged:
            reason = (
                f"the contribution from version {header.base_version} of fragment {self.fragment} is merged already"
            )
        elif late:
            reason = f"fragment {self.fragment} is at version {self.version}, past base version {header.base_version}"
        elif header.base_version > self.version:
            reason = f"fragment {self.fragment} is at version {self.version}, {header.base_version} is in the future"
        elif self._closing and not whole and not self._to_collect(peer, header):
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
        known.late = header.base_version < self.version
        known.counts_at = self._credit.counts_at(peer, header.base_version, header.steps, rate, now)
        known.collects = known.collects or (not known.chunks and self._to_collect(peer, header, known.counts_at > now))
        self._unit = self._unit or self._weight_alone(known)
        return Verdict(accepted=True, first_chunk=known.chunks, version=self.version, term=self.term)

    def _to_collect(self, peer: str, header: Contribution, indebted: bool = False) -> bool:
        return not self._settings.barrier or header.base_version < self.version or peer in self._slow or indebted

    def collects(self, peer: str) -> bool:
        """Whether the payload of this peer's contribution is collected whole, then folded in."""
        offer = self._offers.get(peer)
        return not self._settings.barrier or (offer is not None and offer.collects)

    def counts_at(self, peer: str) -> float:
        """When the steps that this peer claims are paid for; its contribution is folded in no earlier."""
        return self._offers[peer].counts_at if peer in self._offers else 0.0

    def weight(self, peer: str) -> float:
        """Weight of a contribution that is folded in, over that of the first contribution to this version.

        Equal contributions thus have weight 1, and sums of 4- and 8-bit payloads are exact in fp32, in any order of
        arrival. (`tokens2_per_step`: Decoupled DiLoCo, arXiv 2604.21428.) The weights of the whole version are not known
        yet, so the cap is twice the median of the newest ones before it.
        """
        weight = self._weight_alone(self._offers[peer])
        self._unit = self._unit or weight  # unset if this one was offered for the version before
        return weight / self._unit

    def _weight_alone(self, offer: _Offer) -> float:
        raw = self._raw_weight(offer)
        return raw if len(self._raw) < WEIGHTS_KNOWN else min(raw, HEAVIEST * statistics.median(self._raw))

    def discount(self, peer: str) -> float:
        """Factor by which staleness s reduces this contribution: (1 + s) ** -exponent (arXiv 2401.09135, section 4)."""
        exponent = LATE_EXPONENT if self._settings.barrier else self._settings.staleness_exponent
        return float((1 + self.staleness(self._offers[peer].base_version)) ** -exponent)

    def _too_late(self, base_version: int, carried: bool = True) -> bool:
        if self._settings.barrier:
            return base_version < self.version and not (carried and self._settings.carries_late)
        return self.staleness(base_version) > self._settings.staleness_limit

    def weights(self, peers: Collection[str]) -> dict[str, float]:
        """Weights of all contributions to a version, at most twice their median.

        They are over the weight of the first peer by name, independent of the order of arrival.
        """
        kept = capped({peer: self._raw_weight(self._offers[peer]) for peer in sorted(peers)})
        unit = next(iter(kept.values()))
        return {peer: weight / unit for peer, weight in kept.items()}

    def counted(self, peers: Collection[str]) -> tuple[dict[str, float], dict[str, float]]:
        """Weights and discounts of all contributions to a version."""
        return self.weights(peers), {peer: self.discount(peer) for peer in peers}

    def units(self, peer: str) -> Units:
        """Sequences from which this peer says it learned its contribution."""
        return self._offers[peer].units

    def leave_out(self, close: Close, peers: Collection[str]) -> Close:
        """Make the version without these whole contributions after all: they oppose the others (`outer.robust`), or
        raise the loss (`outer.spot_check`).
        """
        for peer in peers:
            self._taken[peer] = self._offers.pop(peer).base_version
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

    def keeps(self, peer: str, base_version: int) -> bool:
        """Whether the contribution of this peer from that version may still go into the next one."""
        offer = self._offers.get(peer)
        return offer is not None and offer.base_version == base_version

    def arrived(self, peer: str, now: float = 0.0, began_at: float = 0.0) -> None:
        """The payload of this peer is whole. It says that it began its round at `began_at`."""
        offer = self._offers.get(peer)
        if offer is None or self._closing:
            return
        opened = self._opened.get(offer.base_version)
        if not offer.whole and self._settings.barrier:
            self._note_round(peer, None if opened is None else now - opened.at, offer.late)
        since = self._opened[self.version].at
        offer.whole, offer.arrived = True, (now, now - (since if offer.late else max(since, began_at)))

    def _note_round(self, peer: str, round_s: float | None, late: bool) -> None:
        """A peer's round took so long, counted from when its base version was there for all; None if nobody knows."""
        others = [seconds for other, seconds in self._rounds.items() if other != peer]
        if round_s is not None:
            self._rounds[peer] = round_s
        if late if round_s is None or not others else too_long(round_s, others):
            self._slow.add(peer)
        else:
            self._slow.discard(peer)

    def drop_late(self) -> None:
        """No later version will be made for those that missed theirs: the others are done."""
        if not self._closing:
            for peer in [peer for peer, offer in self._offers.items() if offer.late]:
                self._taken[peer] = self._offers.pop(peer).base_version

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
            waited_for = sum(peer not in whole and self._expected(member, now) for peer, member in members.items())
            if waited_for and now < self._patience_ends(waited_for):
                return None
        return self._close(whole, members)

    def _patience_ends(self, waited_for: int) -> float:
        arrivals = [offer.arrived for offer in self._offers.values() if offer.arrived and not offer.late]
        return patience_ends(arrivals, len(arrivals) + waited_for)

    def _enough(self, whole: set[str], members: Mapping[str, Member], now: float, sync_s: float) -> bool:
        """Whether the quorum is there; its grace period begins then. Without a quorum, only expected peers count."""
        quorum, until = self._settings.quorum, self.grace_until
        if quorum is None:
            return True
        if until is None:  # a peer that joins meanwhile does not end a grace period
            waiting = sum(peer not in whole and self._waits_elsewhere(member, now) for peer, member in members.items())
            active = _active(members) - waiting
            if len(whole) < min(quorum, active) and now < self._patience_ends(max(0, active - len(whole))):
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
        missing: set[str] = set()
        if self._settings.barrier:
            begun = {peer for peer, o in self._offers.items() if not o.collects}
            missing = {*self.last_contributors, *begun} - whole
            self._rounds = {peer: seconds for peer, seconds in self._rounds.items() if peer in members}
            self._slow |= {peer for peer, member in members.items() if peer not in whole and self._could_come(member)}
            self._taken |= {peer: o.base_version for peer, o in self._offers.items() if self._is_spoilt(o)}
        contributors = {peer: self._offers[peer].tokens for peer in sorted(whole)}
        delay = (self._settings.delay or _active(members)) if self._settings.windowed else 1
        self._closing = Close(self.fragment, self.version, contributors, tuple(sorted(missing)), delay)
        return self._closing

    def _is_spoilt(self, offer: _Offer) -> bool:
        """Whether a part of this contribution is in the sum already, and the rest will be in no version."""
        return not (offer.whole or offer.collects or self._settings.judged_together) and offer.chunks > 0

    def _could_come(self, member: Member) -> bool:
        """Whether a peer trains from this version, as far as it says."""
        return member.trains and member.status.counted_in and member.status.versions[self.fragment] == self.version

    def _expected(self, member: Member, now: float) -> bool:
        status = member.status
        if not member.trains or not status.counted_in or member.peer in self._slow:
            return False
        offer = self._offers.get(member.peer)
        if member.stalled(now, progress_at=0.0 if offer is None else offer.progress_at):
            return False
        base = status.versions[self.fragment]
        known = member.peer in self.last_contributors
        if base == self.version:
            may_be_late = self._settings.staggered and self.last_contributors
            return known or not may_be_late or self._about_to_send(member, now)
        # Right after a publication the contributors' statuses still name the version before.
        return known and base == self.version - 1

    def _about_to_send(self, member: Member, now: float) -> bool:
        """Whether a newcomer is near the step at which this fragment is due.

        With staggered fragments a newcomer may be too late for this version, and is expected only after its first
        contribution. A newcomer that is a step behind the others would never deliver one in time; so this syncer waits
        for it as long as the overlap hides.
        """
        status, settings = member.status, self._settings
        due_at = -(-(self.fragment + 1) * status.target_steps // settings.fragments)
        left = due_at - status.inner_step - (now - member.heard_at) * status.steps_per_s
        return status.steps_per_s > 0 and abs(left) <= settings.overlap + 1

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
            self._raw.extend(capped({peer: self._raw_weight(offer) for peer, offer in whole.items()}).values())
        else:
            self._merged = dict(merged or {})
            self.last_contributors = frozenset(peer for peer, base in self._merged.items() if base == version - 1)
        self._pushed += len(whole) if published else max(0, version - self.version)
        self.version = version
        self._opened[version] = _Opened(self._pushed, now)
        while len(self._opened) > COUNTED:
            del self._opened[next(iter(self._opened))]
        # A payload that is still on its way is no part of the version that closed, unless its first chunks were.
        # A version that was fetched may contain what is on its way here as well.
        self._offers = {
            peer: offer
            for peer, offer in self._offers.items()
            if self.collects(peer) and not offer.whole and offer.base_version > self._merged.get(peer, -1)
        }
        for offer in self._offers.values():
            offer.late = offer.base_version < version
        self._unit = 0.0
        self._closing = None
        self.grace_until = None


def _active(members: Mapping[str, Member]) -> int:
    """Peers that train, at least 1."""
    return max(1, sum(m.trains and m.status.counted_in for m in members.values()))
