"""The protocol of one peer, whole and sans-IO: events and `now` in, actions out.

    connected / heard / lost / tick  ->  membership, leases, syncers  ->  Broadcast, Hold, Release, Merge, CatchUp, Note

It never sleeps, opens a socket or reads a clock; the owner passes monotonic seconds and carries out the actions. A peer
that is `starting` hears hellos. Once enough peers are there, it claims vacant fragments and fetches others' anchors. It
is `ready` when it agrees with every syncer, and is in step with the round under way (`states` has the rest).

A status or publication only changes what this peer knows, and leads to a `tick` soon; claims, losses and contributions
act at once (`pace` says why).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf

from diloco.protocol.actions import Action, Broadcast, CatchUp, Disconnect, Hold, Merge, Note
from diloco.protocol.belief import donors, doubt
from diloco.protocol.elections import Elector
from diloco.protocol.fragment import CONTROL_FRAGMENT, Busy, Fragment, Lease
from diloco.protocol.ledger import Units, difference
from diloco.protocol.limits import MAX_PEERS
from diloco.protocol.membership import Member
from diloco.protocol.messages import Message
from diloco.protocol.messages.bulk import Contribution, Verdict
from diloco.protocol.messages.control import Claim, Hello, Published, Status, Vote
from diloco.protocol.messages.heads import Line, Record
from diloco.protocol.numbers import (
    MAX_BYTES,
    MAX_COUNT,
    MAX_LOSS,
    MAX_RATE,
    MAX_SECONDS,
    MAX_TOKENS,
    MIN_RATE,
    at_most,
    forget_oldest,
    within_bounds,
)
from diloco.protocol.shares import OTHERS, Share
from diloco.protocol.states import State, may_follow
from diloco.protocol.succession import catch_ups, overtaken, to_claim, unseat, watch
from diloco.protocol.syncer import Syncer

__all__ = ["Peer"]

MAX_RAISE = 1000  # times what was typed here
OTHER_DATA = (
    "peers share sequences out by number, and on each a number is other text, so some is trained on twice or never, "
    "and perhaps some that the other holds out; give both the same files, or set data.shard=0 data.shards=1 on each"
)


def _short(data: str) -> str:
    digest, _, shape = data.partition("-")
    count = int(shape.partition("x")[0])
    return (f"{count:,} sequences, " if count else "") + digest[:8]


class Peer(Elector):
    """One peer's part in the swarm.

    When another peer fails, nobody expects it any more, and its fragments are claimed anew under a higher term.
    Messages that do not fit (unknown fragment, stale term) are ignored; nothing from the network makes this raise. An
    `enter` that the table of `states` forbids is a bug of the owner, and fails an assertion.
    """

    # -- events from the network --------------------------------------------------------------------------------------

    def connected(self, peer: str, hello: Hello, now: float) -> list[Action]:
        """A peer said hello (and `objection` had none)."""
        actions: list[Action] = []
        if self.members.join(peer, hello, now):
            actions.append(Note("join", {"peer": peer, "name": hello.name, "live": len(self.members) + 1}))
        actions += self._compare_data(peer, hello)
        actions += self._heard_plan(peer, hello.status.planned)
        self.address_book.hear(peer, hello.addresses)
        self.accounts.heard_units(peer, hello.status)
        claimed = {(claim.fragment, claim.term) for claim in hello.claims}
        for lease in self.leases.held_by(peer):
            if (lease.fragment, lease.term) not in claimed:
                self.leases.vacate(lease.fragment)  # the peer restarted and does not know of its lease
        for fragment in self.fragments:
            fragment.votes.pop(peer, None)
            fragment.met.pop(peer, None)
            if (waiting := fragment.claims.get(peer)) and (fragment.index, waiting.claim.term) not in claimed:
                del fragment.claims[peer]
        for vote in hello.votes:
            self._heard_vote(peer, vote)
            if vote.fragment < len(self.fragments):
                self.fragments[vote.fragment].met[peer] = (vote.term, vote.holder)
        for claim in hello.claims:
            actions += self._heard_claim(peer, claim, now)
        return actions + self.tick(now)

    def _compare_data(self, peer: str, hello: Hello) -> list[Action]:
        """Name a peer where numbers of sequences stand for other text, once."""
        here, there = self.data, hello.sequences
        if not (here and there) or here == there or peer in self.other_data:
            return []
        self.other_data[peer] = None
        forget_oldest(self.other_data, MAX_PEERS)
        sides = {"there": _short(there), "here": _short(here)}
        return [Note("other_data", {"peer": peer, "name": hello.name, **sides, "so": OTHER_DATA})]

    def heard(self, peer: str, message: Message, now: float) -> list[Action]:
        """A message arrived on the control stream of a connected peer."""
        if peer not in self.members:
            return [Disconnect(peer)]  # we gave it up, and it does not know
        match message:
            case Status():
                if len(message.versions) == len(self.fragments):
                    self.members.hear(peer, message, now)
                    self.accounts.heard_units(peer, message)
                if plan := self._heard_plan(peer, message.planned):
                    return plan + self.tick(now)
            case Claim():
                return self._heard_claim(peer, message, now) + self.tick(now)
            case Vote():
                self._heard_vote(peer, message)
            case Published():
                self._heard_pending(peer, message)
                lease = self.leases.get(message.fragment)
                if lease is not None and lease.holder == peer and self.leases.published(message):
                    self.accounts.hear_data_cursor(message)
        due = self._pace.tick_due
        return self.tick(now) if now >= due else [*self._pace.wake(due)]

    def _heard_plan(self, peer: str, said: list[int]) -> list[Action]:
        """The run is as long as whoever may make its versions says, within reason: nobody makes it endless for all."""
        higher = [max(here, there) if here else 0 for here, there in zip(self.planned, said, strict=True)]
        if higher == self.planned or not self.may_author(peer):
            return []
        if any(there > MAX_RAISE * typed for there, typed in zip(higher, self.typed, strict=True)):
            return [Note("plan_ignored", {"peer": peer, "planned": higher})]
        self.planned = higher
        self.on_planned(higher)
        return [Note("planned", {"peer": peer, "planned": higher}), Broadcast(self.status())]

    def discovered(self, now: float) -> list[Action]:
        """Every peer that could be reached has said hello; a fragment that nobody claimed is vacant."""
        self.newcomer = False
        return self.tick(now)

    def lost(self, peer: str, now: float, why: str) -> list[Action]:
        """The connection to a peer is gone for good, or it left."""
        return [*self._forget(peer, why), *self.tick(now)] if peer in self.members else []

    def _forget(self, peer: str, why: str) -> list[Action]:
        member = self.members.remove(peer)
        for fragment in self.fragments:
            self.doubted.pop((fragment.index, peer), None)
            fragment.claims.pop(peer, None)
            fragment.votes.pop(peer, None)
            fragment.met.pop(peer, None)
        self.accounts.dealer.give_back(peer)
        kind = "leave" if member.status.gone else "lost"
        return [Note(kind, {"peer": peer, "name": member.name, "why": why, "live": len(self.members) + 1})]

    # -- time ---------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """Let time pass: silent members go, vacant fragments are claimed, rounds close, gaps are caught up with."""
        self._pace.ticks(now)
        if self.blank and all(fragment.came_at is not None or fragment.agrees() for fragment in self.fragments):
            self.blank, self.holds = False, self.may_hold
        actions: list[Action] = []
        for peer in self.members.silent(now) if self._pace.looks(now) else ():
            actions += [Disconnect(peer), *self._forget(peer, "silent")]
        if unseated := unseat(self, now):
            actions += [*unseated, *self._tell(now, at_once=True)]
        actions += self._reconsider(now)
        actions += self._claim_vacant(now)
        actions += [*self._close_versions(now), *catch_ups(self)]
        if (self.state == "starting" and not self.warming) or (self.state == "ready" and self.trains):
            agrees = not self.blank and all(self.near(fragment.index) for fragment in self.fragments)
            state: State = "ready" if self.opened and agrees and self.in_step(now) else "starting"
            if state != self.state:
                self.state, self.ready_at = state, now if state == "ready" else inf
                actions += self._tell(now, at_once=True)
        return actions + self._tell(now) if self._pace.untold else actions

    def heartbeat(self, now: float, traffic: tuple[int, int] = (0, 0)) -> list[Action]:
        """The owner calls this at the heartbeats of a small swarm; `traffic` is all bytes that it sent and received."""
        actions: list[Action] = []
        if self._pace.beats(now, len(self.members)):
            sent, received = (at_most(nbytes, MAX_BYTES) for nbytes in traffic)
            self._figures |= {"bytes_sent": sent, "bytes_received": received}
            actions.append(Broadcast(self.status(figures=True)))
            watch(self, now)
        return actions + self.tick(now)

    def _tell(self, now: float, at_once: bool = False) -> list[Action]:
        """Tell the others this peer's status: at once, or in a large swarm together with the next changes."""
        if self._pace.tells(now, len(self.members), at_once):
            return [Broadcast(self.status())]
        return [*self._pace.wake(self._pace.tell_due(len(self.members)))]

    # -- events from the training loop --------------------------------------------------------------------------------

    def enter(self, state: State, now: float) -> list[Action]:
        """This peer's training loop is in another state now."""
        assert may_follow(state, self.state), f"{state} does not follow {self.state}"
        # A round begins and ends with each of many fragments; all other changes are rare, and others act upon them.
        ordinary = {self.state, state} <= {"training", "exchanging"}
        self.state = state
        self._hear_myself(now)
        return [*self._tell(now, at_once=not ordinary), *self.tick(now)]

    def progress(self, inner_step: int, target_steps: int, steps_per_s: float, tokens: int) -> None:
        """Figures for the next status, cut to the bounds of their types."""
        pace = within_bounds(steps_per_s, MAX_RATE, MIN_RATE)
        self._progress = (at_most(inner_step), at_most(target_steps), pace, at_most(tokens, MAX_TOKENS))

    def measured(self, loss: float, rounds: int, seconds: Sequence[float], discarded: int = 0) -> None:
        """Figures for watchers, with the next heartbeat, cut to the bounds of their types."""
        self._figures |= {
            "loss": within_bounds(loss, MAX_LOSS),
            "rounds": at_most(rounds),
            "seconds": [within_bounds(spent, MAX_SECONDS) for spent in seconds],
            "discarded": at_most(discarded, MAX_TOKENS),
        }

    def has_units(self, units: Units, now: float) -> list[Action]:
        """All units that this peer has now. New ones are told at once: only its status tells the next syncer of the
        control fragment that they are not free.
        """
        new = difference(units, self.accounts.units)
        self.accounts.units = units
        return self._tell(now, at_once=True) if new else []

    def adopted(
        self,
        index: int,
        version: int,
        digest: str,
        now: float,
        contributors: Mapping[str, int] | None = None,
        shares: Mapping[str, Share] | None = None,
        record: Record | None = None,
        lines: Iterable[Line] | None = None,
    ) -> list[Action]:
        """The anchor of a fragment moved to a version: by an update record, which names the tokens of its
        `contributors`, or by fetching its state, which brings the `shares` in it, and `lines`. `record` is its
        certificate.
        """
        fragment = self.fragments[index]
        fragment.ended(Busy.CATCHING_UP)
        fragment.certified(record, lines)
        if shares is not None:
            fragment.shares = dict(shares)
        if contributors is not None:
            fragment.shares = self.accounts.shares_after(fragment, version, contributors)
        if version == fragment.version and digest != fragment.digest and version > 0:
            self.heals += 1
        fragment.move(version, digest, now, leap=contributors is None)
        fragment.closed_at = None  # of a version that was made here
        actions = self._tell(now)
        syncer = fragment.syncer
        if syncer is not None and version >= syncer.version:
            # The contributions that were collected refer to the anchor that was replaced.
            syncer.advance(version, fragment.merged(), now)
            fragment.busy = Busy.NO
            if index == CONTROL_FRAGMENT:
                self.accounts.deal()
            claim = self.claim_of(Lease(index, self.me, syncer.term, version, digest, skipped=fragment.skipped))
            self.leases.claim(self.me, claim)
            actions.append(Broadcast(claim))  # others go by the version that the syncer says it has
        return [*actions, *self.tick(now)]

    def catch_up_failed(self, fragment: int) -> None:
        """No donor answered; the next tick asks again."""
        self.fragments[fragment].ended(Busy.CATCHING_UP)

    def outweighs(self, index: int, donor: str, version: int, digest: str, now: float) -> list[Action]:
        """The history here goes on, and not that of this donor, which has a certificate of another anchor.

        If the donor is the syncer, it is told so, and fetches the anchor from here. Should it not, and most holders
        dispute it, the fragment is claimed from it.
        """
        self.catch_up_failed(index)
        fragment = self.fragments[index]
        doubt(self, index, donor, version)
        told: list[Action] = []
        if fragment.lease is not None and fragment.lease.holder == donor:
            fragment.lighter = digest
            if fragment.disputed:
                return self.tick(now)
            fragment.disputed_since = now
            told = self._tell(now, at_once=True)
        return [Note("lighter_history", {"fragment": index, "peer": donor, "version": version}), *told, *self.tick(now)]

    # -- syncer's side ------------------------------------------------------------------------------------------------

    def offer(self, peer: str, header: Contribution, now: float = 0.0) -> Verdict:
        """Judge a contribution to a fragment by its header."""
        if header.manifest_hash != self.manifest_hash:
            return Verdict(accepted=False, reason=f"the manifest {header.manifest_hash[:12]} is not the one here")
        syncer = self.syncers.get(header.fragment)
        if syncer is None:
            term = self.leases.term(header.fragment)
            return Verdict(accepted=False, reason=f"not the syncer of fragment {header.fragment}", term=term)
        fragment = self.fragments[header.fragment]
        if header.base_version == fragment.version and header.base_digest != fragment.digest:
            reason = f"version {fragment.version} of fragment {header.fragment} is another anchor here"
            return Verdict(accepted=False, reason=reason, version=syncer.version, term=syncer.term)
        share = fragment.shares.get(peer)
        before = None if OTHERS in fragment.shares else 0 if share is None else share.tokens
        carried = fragment.follows(header.base_version, header.base_digest) and not self.over()
        verdict = syncer.offer(peer, header, self.num_trainers(), now, carried, before)
        if verdict.accepted and header.fragment == CONTROL_FRAGMENT:
            self.accounts.dealer.offered(peer, header.units)
        return verdict

    def offence(self, peer: str, reason: str, now: float) -> list[Action]:
        """A peer sent what no honest one sends: it is refused for a while, and nobody waits for it meanwhile."""
        refused_before = self.penalties.refusal(peer, now) is not None
        seconds = self.penalties.offence(peer, reason, now)
        note = Note("penalty", {"peer": peer, "why": reason, "seconds": round(seconds)})
        return [*([] if refused_before else [note]), *self.tick(now)]

    def arrived(self, peer: str, fragment: int, now: float, line: Line | None = None) -> list[Action]:
        """The whole payload of a contribution is here, and its contributor has signed this line."""
        syncer = self.fragments[fragment].syncer
        member = self.members.get(peer)
        if syncer is not None:
            syncer.arrived(peer, now, 0.0 if member is None else member.began_at, line)
        return self.tick(now)

    def published(
        self, index: int, digest: str, contributors: Mapping[str, int], now: float, record: Record | None = None
    ) -> list[Action]:
        """The merge that `Merge` asked for is done: announce the new version, made of so many tokens of each peer."""
        fragment = self.fragments[index]
        fragment.ended(Busy.MERGING)
        syncer = fragment.syncer
        if syncer is None:
            return []
        took_s = 0.0 if fragment.closed_at is None else now - fragment.closed_at
        self.sync_s = max(took_s, self.sync_s)
        syncer.advance(syncer.version + 1, now=now)
        fragment.certified(record)
        fragment.move(syncer.version, digest, now)
        fragment.shares = self.accounts.shares_after(fragment, syncer.version, contributors)
        twice = self.accounts.apply_units(syncer.version, contributors) if index == CONTROL_FRAGMENT else []
        message = self.publication(fragment, syncer, contributors)
        self.leases.published(message)
        return [*twice, Broadcast(message), *self._tell(now), *self.tick(now)]

    def delivered(self, seconds: float) -> None:
        """A contributor has an update, so long after the decision to close its version."""
        self.sync_s = max(seconds, 0.8 * self.sync_s + 0.2 * seconds)  # who waits once longer waits in vain

    def _close_versions(self, now: float) -> list[Action]:
        """Close what can be closed; each such fragment is `MERGING` from then on."""
        if self.retired or all(fragment.syncer is None for fragment in self.fragments):
            return []
        self._hear_myself(now)
        waited_for: dict[str, Member] | None = None  # found only if a version may close
        actions: list[Action] = []
        grace_ends = []
        for fragment in self.fragments:
            syncer = fragment.syncer
            if syncer is not None and self.lockstep and self.over():
                syncer.drop_late()
            idle = syncer is not None and fragment.busy is Busy.NO
            if syncer is None or not idle or not syncer.may_close(now) or overtaken(self, fragment):
                continue
            if waited_for is None:
                everyone = (*self.members.all(), self._myself)
                waited_for = {m.peer: m for m in everyone if m is not None and not self.penalties.refusal(m.peer, now)}
            here = {peer: m for peer, m in waited_for.items() if not self.contributes_elsewhere(fragment, peer)}
            if (close := syncer.poll(here, now, self.sync_s)) is not None:
                fragment.busy, fragment.closed_at = Busy.MERGING, now
                if close.missing:
                    actions.append(Note("missing", {"fragment": close.fragment, "peers": list(close.missing)}))
                actions.append(Merge(close))
            elif syncer.grace_until is not None:
                grace_ends.append(syncer.grace_until)
        return actions + [wake for at in grace_ends for wake in self._pace.wake(at)]

    def _hear_myself(self, now: float) -> None:
        """A syncer waits for itself like for any other, and must know from where it began its round."""
        status = self.status()
        if self._myself is None:
            self._myself = Member(self.me, self.name, self.trains, self.holds, status, now, now, self.device)
        self._myself.hear(status, now)

    # -- leases -------------------------------------------------------------------------------------------------------

    def _claim_vacant(self, now: float) -> list[Action]:
        enough = len(self.members) + 1 >= self.min_peers or self.under_way()
        self.opened = self.opened or (not self.newcomer and enough)
        if not (self.opened and self.holds) or self.gone:
            return []
        return [action for fragment in to_claim(self, now) for action in self._take(fragment, now)]

    def _take(self, fragment: Fragment, now: float) -> list[Action]:
        """Claim a vacant fragment, or first catch up with the highest version that anyone has."""
        index, lease = fragment.index, fragment.lease
        if fragment.busy is not Busy.NO:
            return []
        if lease is not None and lease.holder in self.members:
            self.leases.vacate(index)  # its holder leaves: its claim is not kept beside the one that follows
        if ahead := donors(self, index, fragment.version + 1):
            fragment.busy = Busy.CATCHING_UP
            return [CatchUp(index, tuple(ahead))]
        term = max(fragment.term, fragment.floor) + 1
        if term > MAX_COUNT:
            return []
        self.takeovers += term > 1
        if index == CONTROL_FRAGMENT:
            self.accounts.deal()
        claim = self.claim_of(Lease(index, self.me, term, fragment.version, fragment.digest, skipped=fragment.skipped))
        actions = self._believe(self.me, claim, now)
        made_by, merged = fragment.contributors(), fragment.merged()
        opened_at = now if fragment.came_at is None else fragment.came_at
        fragment.syncer = Syncer(index, term, fragment.version, self.outer, made_by, merged, opened_at)
        return [*actions, Hold(index, term), Broadcast(claim)]
