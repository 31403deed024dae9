"""The protocol of one peer, whole and sans-IO: events and `now` in, actions out.

    connected / heard / lost / tick  ->  membership, leases, syncers  ->  Broadcast, Hold, Release, Merge, CatchUp, Note

It never sleeps, opens a socket or reads a clock; the owner passes monotonic seconds and carries out the actions. Life
of a peer:

1. `starting`: it hears the others' hellos. With enough peers connected, vacant fragments are claimed; what differs from
   the syncers' published anchors is fetched.
2. `ready`: it agrees with every syncer on version and digest, and is in step with the round under way. It may train
   when others do, or when no connected trainer is still starting.
3. `training`, `exchanging`: in turn.
4. `leaving`, `done`: it trains no more; its fragments go to others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

from diloco.protocol.accounts import CONTROL_FRAGMENT, Accounts
from diloco.protocol.actions import Action, Broadcast, CatchUp, Disconnect, Hold, Merge, Note, Release, Wake
from diloco.protocol.leases import Lease
from diloco.protocol.membership import STALL_FACTOR, Member
from diloco.protocol.messages import Message
from diloco.protocol.messages.bulk import Contribution, Verdict
from diloco.protocol.messages.control import Claim, Hello, Published, State, Status
from diloco.protocol.penalties import Penalties
from diloco.protocol.plausible import implausible
from diloco.protocol.rendezvous import assign, order
from diloco.protocol.shares import Share
from diloco.protocol.syncer import Syncer
from diloco.protocol.view import WIRE_VERSION

__all__ = ["CONTROL_FRAGMENT", "WIRE_VERSION", "Peer"]

CLAIM_PATIENCE_S = 3.0  # how long the next peer in order lets the one before it claim a vacant fragment


class Peer(Accounts):
    """One peer's part in the swarm; arguments as of `View`.

    On failure of other peers: a lost member is expected no more and its fragments are claimed anew under a higher term.
    Messages that do not fit (unknown fragment, stale term) are ignored; nothing from the network makes this raise.
    """

    def _begin(self) -> None:
        super()._begin()
        self.syncers: dict[int, Syncer] = {}
        self.sync_s = 0.0  # moving average from a decision to close to its publication
        self.heals = 0
        self.takeovers = 0
        self._catching_up: set[int] = set()
        self._merging: set[int] = set()
        self._handed_over: set[int] = set()
        self.penalties = Penalties()
        self._version_at: dict[int, tuple[int, float]] = {}  # fragment -> its newest version, and since when
        self._closed_at: dict[int, float] = {}
        self._contributors: dict[int, tuple[str, ...]] = {}  # of each fragment's newest version
        self._wakes_at = 0.0
        self._vacant_since: dict[int, float] = {}
        self._myself: Member | None = None
        self._opened = False
        # A cold peer trains by itself, or fetches what it begins with: nobody expects anything of one that is starting.
        self.warming = False

    # -- events from the network --------------------------------------------------------------------------------------

    def connected(self, peer: str, hello: Hello, now: float) -> list[Action]:
        """A peer said hello (and `objection` had none)."""
        actions: list[Action] = []
        if self.members.join(peer, hello, now):
            actions.append(Note("join", {"peer": peer, "name": hello.name, "live": len(self.members) + 1}))
        self.address_book.hear(peer, hello.addresses)
        self._heard_units(peer, hello.status)
        claimed = {(claim.fragment, claim.term) for claim in hello.claims}
        for lease in self.leases.held_by(peer):
            if (lease.fragment, lease.term) not in claimed:
                self.leases.vacate(lease.fragment)  # the peer restarted, and does not know of it
        for claim in hello.claims:
            actions += self._heard_claim(peer, claim)
        return actions + self.tick(now)

    def heard(self, peer: str, message: Message, now: float) -> list[Action]:
        """A message arrived on the control stream of a connected peer."""
        member = self.members.get(peer)
        if member is None:
            return [Disconnect(peer)]  # we gave it up, and it does not know
        actions: list[Action] = []
        match message:
            case Status():
                if len(message.versions) == len(self.versions):
                    member.hear(message, now)
                    self._heard_units(peer, message)
            case Claim():
                actions += self._heard_claim(peer, message)
            case Published():
                actions += self._heard_published(peer, message)
        return actions + self.tick(now)

    def discovered(self, now: float) -> list[Action]:
        """Every peer that could be reached has said hello, so what nobody holds is vacant."""
        self.newcomer = False
        return self.tick(now)

    def lost(self, peer: str, now: float, why: str) -> list[Action]:
        """The connection to a peer is gone for good, or it left."""
        member = self.members.get(peer)
        if member is None:
            return []
        self.members.remove(peer)
        self.dealer.give_back(peer)
        kind = "leave" if member.status.state in ("leaving", "done") else "lost"
        note = Note(kind, {"peer": peer, "name": member.name, "why": why, "live": len(self.members) + 1})
        return [note, *self.tick(now)]

    def tick(self, now: float) -> list[Action]:
        """Let time pass: silent members go, vacant fragments are claimed, rounds close, gaps are caught up with."""
        for peer in self.members.silent(now):
            return [Disconnect(peer), *self.lost(peer, now, "silent")]  # ends in another tick
        actions = self._claim_vacant(now)
        actions += self._close_rounds(now)
        actions += self._catch_up()
        if (self.state == "starting" and not self.warming) or (self.state == "ready" and self.trains):
            agrees = all(map(self.near, range(len(self.versions))))
            state: State = "ready" if self._opened and agrees and self.in_step(now) else "starting"
            if state != self.state:
                self.state = state
                actions.append(Broadcast(self.status()))
        return actions

    def _heard_claim(self, peer: str, claim: Claim) -> list[Action]:
        if claim.fragment >= len(self.versions):
            return []
        before = self.leases.get(claim.fragment)
        changed = self.leases.claim(peer, claim)
        lease = self.leases.get(claim.fragment)
        if lease is not None and (lease.holder, lease.term) == (peer, claim.term) and peer != self.me:
            self.hear_data_cursor(claim)
            if claim.fragment == CONTROL_FRAGMENT and claim.version >= lease.version:
                self.swarm_tokens = claim.applied_tokens  # fewer when versions died with the syncer before
        if not changed:
            return []
        actions: list[Action] = [
            Note("claim", {"fragment": claim.fragment, "peer": peer, "term": claim.term, "version": claim.version})
        ]
        if before is not None and before.holder == self.me and peer != self.me:
            del self.syncers[claim.fragment]
            self._merging.discard(claim.fragment)
            if claim.fragment == CONTROL_FRAGMENT:
                self.dealer.step_down()
            actions.append(Release(claim.fragment))
        return actions

    def _heard_published(self, peer: str, message: Published) -> list[Action]:
        lease = self.leases.get(message.fragment)
        if lease is None or lease.holder != peer:
            return []
        if self.leases.published(message.fragment, message.term, message.version, message.digest):
            self._contributors[message.fragment] = tuple(message.contributors)
            self.hear_data_cursor(message)
            if message.fragment == CONTROL_FRAGMENT:
                self.swarm_tokens = message.applied_tokens
        return []

    # -- events from the training loop --------------------------------------------------------------------------------

    def enter(self, state: State, now: float) -> list[Action]:
        """This peer's training loop is in another state now."""
        self.state = state
        return [Broadcast(self._hear_myself(now)), *self.tick(now)]

    def progress(self, inner_step: int, target_steps: int, steps_per_s: float, tokens: int) -> None:
        """Figures for the next heartbeat."""
        self._progress = (inner_step, target_steps, steps_per_s, tokens)

    def between_rounds(self, limit_s: float) -> None:
        """The training loop evaluates or saves. It counts as stalled only after that many seconds without progress.

        The others derive that time from the pace that this peer reports, so until the next `progress` it reports a slow
        one.
        """
        inner_step, target_steps, _, tokens = self._progress
        self._progress = (inner_step, target_steps, STALL_FACTOR / limit_s, tokens)

    def measured(self, loss: float, rounds: int, seconds: Sequence[float], discarded: int = 0) -> None:
        """Figures for whoever watches, with the next heartbeat; a loss that is negative or not finite is none."""
        self._measured = (loss if isfinite(loss) and loss > 0 else 0.0, rounds, list(seconds), discarded)

    def adopted(
        self,
        fragment: int,
        version: int,
        digest: str,
        applied_tokens: int,
        now: float,
        contributors: Mapping[str, int] | None = None,
        shares: Mapping[str, Share] | None = None,
    ) -> list[Action]:
        """The anchor of a fragment moved to a version: by an update record, which names its `contributors` and the
        tokens of each, or by fetching its state, which says whose `shares` are in it.
        """
        self._catching_up.discard(fragment)
        if shares is not None:
            self._shares[fragment] = dict(shares)
        if contributors is not None:
            self._contributors[fragment] = tuple(sorted(contributors))  # its announcement may come later
            self._credit(fragment, version, contributors)
        if version == self.versions[fragment] and digest != self.digests[fragment] and version > 0:
            self.heals += 1
        self.versions[fragment] = version
        self.digests[fragment] = digest
        self._version_at[fragment] = (version, now)
        if fragment == CONTROL_FRAGMENT:
            self.applied_tokens = applied_tokens
        actions: list[Action] = [Broadcast(self.status())]
        syncer = self.syncers.get(fragment)
        if syncer is not None and version >= syncer.version:
            # What was collected went with the anchor that it was relative to.
            syncer.advance(version, self.merged(fragment))
            self._merging.discard(fragment)
            self._deal(fragment)
            claim = self.claim_of(Lease(fragment, self.me, syncer.term, version, digest))
            self.leases.claim(self.me, claim)
            actions.append(Broadcast(claim))  # others go by what the syncer says it stands on
        return [*actions, *self.tick(now)]

    def num_merged(self) -> int:
        """How many peers the control fragment's newest version is made of, as far as this peer has heard."""
        return len(self._contributors.get(CONTROL_FRAGMENT, ()))

    def catch_up_failed(self, fragment: int) -> None:
        """No donor answered; the next tick asks again."""
        self._catching_up.discard(fragment)

    def handed_over(self, fragment: int) -> None:
        """This peer leaves, and gave the fragment's outer state away: a version made after that would not be in it."""
        if self.state == "leaving":
            self._handed_over.add(fragment)

    def merging(self, fragment: int) -> bool:
        """Whether a `Merge` of this fragment has been asked for and not reported as published."""
        return fragment in self._merging

    # -- syncer's side ------------------------------------------------------------------------------------------------

    def offer(self, peer: str, header: Contribution) -> Verdict:
        """Judge a contribution to a fragment by its header."""
        if header.manifest_hash != self.manifest_hash:
            return Verdict(accepted=False, reason=f"the manifest {header.manifest_hash[:12]} is not the one here")
        syncer = self.syncers.get(header.fragment)
        if syncer is None:
            term = self.leases.term(header.fragment)
            return Verdict(accepted=False, reason=f"not the syncer of fragment {header.fragment}", term=term)
        verdict = syncer.offer(peer, header)
        if verdict.accepted and header.fragment == CONTROL_FRAGMENT:
            self.dealer.offered(peer, header.units)
        return verdict

    def implausible(self, peer: str, header: Contribution, now: float) -> str | None:
        """What cannot be true of a contribution's claims, in one line; None when they can be."""
        member = self.members.get(peer)
        pace = 0.0 if member is None else member.status.steps_per_s
        version, since = self._version_at.get(header.fragment, (-1, now))
        known = version == header.base_version and member is not None
        since_base_s = now - since if known else None
        return implausible(header, self.tokens_per_step, self.outer.sync_every, pace, since_base_s)

    def offence(self, peer: str, reason: str, now: float) -> list[Action]:
        """A peer sent what no honest one sends: it is refused for a while, and nobody waits for it meanwhile."""
        refused_before = self.penalties.refusal(peer, now) is not None
        seconds = self.penalties.offence(peer, reason, now)
        note = Note("penalty", {"peer": peer, "why": reason, "seconds": round(seconds)})
        return [*([] if refused_before else [note]), *self.tick(now)]

    def arrived(self, peer: str, fragment: int, now: float) -> list[Action]:
        """The whole payload of a contribution is folded in."""
        syncer = self.syncers.get(fragment)
        if syncer is not None:
            syncer.arrived(peer)
        return self.tick(now)

    def published(self, fragment: int, digest: str, contributors: Mapping[str, int], now: float) -> list[Action]:
        """The merge that `Merge` asked for is done: announce the new version, made of so many tokens of each peer."""
        self._merging.discard(fragment)
        syncer = self.syncers.get(fragment)
        if syncer is None:
            return []
        took_s = now - self._closed_at.pop(fragment, now)
        self.sync_s = took_s if self.sync_s == 0.0 else 0.8 * self.sync_s + 0.2 * took_s
        syncer.advance(syncer.version + 1)
        self.versions[fragment] = syncer.version
        self.digests[fragment] = digest
        self._version_at[fragment] = (syncer.version, now)
        if fragment == CONTROL_FRAGMENT:
            self.applied_tokens += sum(contributors.values())
        self.leases.published(fragment, syncer.term, syncer.version, digest)
        self._contributors[fragment] = tuple(sorted(contributors))
        self._credit(fragment, syncer.version, contributors)
        twice = self._apply_units(syncer.version, contributors) if fragment == CONTROL_FRAGMENT else []
        message = Published(
            fragment=fragment,
            term=syncer.term,
            version=syncer.version,
            digest=digest,
            contributors=sorted(contributors),
            applied_tokens=self.applied_tokens,
            staleness=syncer.last_staleness,
            **self.data_cursor(fragment),
        )
        return [*twice, Broadcast(message), Broadcast(self.status()), *self.tick(now)]

    def _close_rounds(self, now: float) -> list[Action]:
        if not self.syncers:
            return []
        self._hear_myself(now)
        everybody = (*self.members.all(), self._myself)
        members = {m.peer: m for m in everybody if m is not None and not self.penalties.refusal(m.peer, now)}
        actions: list[Action] = []
        for fragment, syncer in sorted(self.syncers.items()):
            if fragment in self._merging or fragment in self._catching_up or fragment in self._handed_over:
                continue
            close = syncer.poll(members, now, self.sync_s)
            if close is None:
                if syncer.grace_until is not None and not now <= self._wakes_at <= syncer.grace_until:
                    self._wakes_at = syncer.grace_until
                    actions.append(Wake(syncer.grace_until))
                continue
            self._merging.add(fragment)
            self._closed_at[fragment] = now
            if close.missing:
                actions.append(Note("missing", {"fragment": fragment, "peers": list(close.missing)}))
            actions.append(Merge(close))
        return actions

    def _hear_myself(self, now: float) -> Status:
        """A syncer waits for itself like for any other, and must know from where it began its round."""
        status = self.status()
        self._myself = self._myself or Member(
            self.me, self.name, self.trains, self.holds, status, now, now, device=self.device
        )
        self._myself.hear(status, now)
        return status

    # -- leases -------------------------------------------------------------------------------------------------------

    def _claim_vacant(self, now: float) -> list[Action]:
        vacant = [f for f in range(len(self.versions)) if self._vacant(f)]
        self._opened = self._opened or (not self.newcomer and len(self.members) + 1 >= self.min_peers)
        if not (self._opened and self.holds) or self.state in ("leaving", "done"):
            return []
        self._vacant_since = {fragment: self._vacant_since.get(fragment, now) for fragment in vacant}
        if not vacant:
            return []
        able = [m.peer for m in self.members.all() if m.holds and self._live(m.peer)] + [self.me]
        load = {peer: len(self.leases.held_by(peer)) for peer in able}
        holders = assign(vacant, able, load)
        actions: list[Action] = []
        for fragment in vacant:
            waited_s = now - self._vacant_since[fragment]
            turn_s = CLAIM_PATIENCE_S * order(able, fragment).index(self.me)
            if waited_s <= CLAIM_PATIENCE_S and self._newest_is_missing(fragment):
                continue
            if holders[fragment] == self.me or waited_s > CLAIM_PATIENCE_S + turn_s:
                actions += self._take(fragment)
        return actions

    def _vacant(self, fragment: int) -> bool:
        lease = self.leases.get(fragment)
        if lease is None or lease.holder == self.me:
            return lease is None
        holder = self.members.get(lease.holder)
        # A peer that is done keeps its fragments while it is connected: there is no next version to make.
        return holder is None or holder.status.state == "leaving"

    def _newest_is_missing(self, fragment: int) -> bool:
        """Whether the last syncer published a version that nobody is known to have: who got it may be about to say."""
        lease = self.leases.get(fragment)
        have = max(self.versions[fragment], self.members.highest_version(fragment))
        return lease is not None and lease.holder not in self.members and lease.version > have

    def _take(self, fragment: int) -> list[Action]:
        """Claim a vacant fragment, or first catch up with the highest version that anyone has."""
        if fragment in self._catching_up:
            return []
        lease = self.leases.get(fragment)
        leaver = lease.holder if lease is not None and lease.holder in self.members else None
        behind = self.members.highest_version(fragment) > self.versions[fragment]
        if behind or leaver is not None:
            self._catching_up.add(fragment)
            if leaver is not None:
                self.leases.vacate(fragment)  # the outer state is asked for once; if that fails, we go on without
                return [CatchUp(fragment, (leaver,), outer=True)]
            return [CatchUp(fragment, tuple(self.members.donors(fragment, self.versions[fragment] + 1)), outer=False)]
        term = self.leases.term(fragment) + 1
        if term > 1:
            self.takeovers += 1
        version = self.versions[fragment]
        self._deal(fragment)
        claim = self.claim_of(Lease(fragment, self.me, term, version, self.digests[fragment]))
        if fragment == CONTROL_FRAGMENT:
            self.swarm_tokens = self.applied_tokens
        actions = self._heard_claim(self.me, claim)
        self.syncers[fragment] = Syncer(
            fragment, term, version, self.outer, self._contributors.get(fragment, ()),
            merged=self.merged(fragment),
        )  # fmt: skip
        return [*actions, Hold(fragment, term), Broadcast(claim)]

    def _ended(self) -> bool:
        """Done, and in lockstep everybody is done with the same version; else the others' last ones are followed."""
        return self.state == "done" and self.lockstep

    def _catch_up(self) -> list[Action]:
        """What differs from the syncers is fetched, unless the training loop is at work: it notices at its exchange."""
        actions: list[Action] = []
        for fragment, version in enumerate(self.versions):
            lease = self.leases.get(fragment)
            if lease is None or fragment in self._catching_up or fragment in self._merging or self._vacant(fragment):
                continue
            if lease.holder == self.me:
                donors = self.members.donors(fragment, version + 1)
            elif self.trains and (self.state in ("training", "exchanging", "leaving") or self._ended()):
                continue
            elif lease.version < version or self.agrees(fragment):
                continue
            else:
                donors = [lease.holder]
            if donors:
                self._catching_up.add(fragment)
                actions.append(CatchUp(fragment, tuple(donors), outer=False))
        return actions
