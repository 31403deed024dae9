"""One peer's knowledge of the swarm, and questions to it. Sans-IO; no question changes anything."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import inf
from statistics import median_low
from typing import Any

from diloco.config import WIRE_VERSION, OuterConfig
from diloco.protocol.accounts import Accounts
from diloco.protocol.fragment import CONTROL_FRAGMENT, Busy, Fragment, Lease, LeaseTable
from diloco.protocol.heads import Signer
from diloco.protocol.membership import AddressBook, Member, Membership
from diloco.protocol.messages import Message, objection_to_wire
from diloco.protocol.messages.base import MAX_NAMED, MAX_UNIT_RANGES, Place
from diloco.protocol.messages.control import Claim, Figures, Hello, Published, Status, Vote, mark
from diloco.protocol.numbers import MAX_COUNT, MAX_TOKENS, at_most, within_bounds
from diloco.protocol.pace import Pace
from diloco.protocol.penalties import Penalties
from diloco.protocol.rendezvous import assign, score
from diloco.protocol.states import STATES, State
from diloco.protocol.syncer import SYNC, Syncer

__all__ = ["View"]

FASTEST = 4.0  # times the median pace: DyLU plans with no faster peer


class View:
    """What a peer knows, and what follows from that; `Peer` changes it with each event.

    Args:
        me, name: id and display name of this peer.
        run_id, manifest_hash: the same on all peers of the run.
        digests: digest of each fragment's anchor; its length is the number of fragments.
        signer: signs as this peer, and checks signatures.
        versions: anchor version of each fragment (all 0 in a new run).
        applied_tokens: swarm clock at these versions.
        trains, holds: whether this peer contributes, and whether it can be a syncer; not while it is `blank`.
        min_peers: connected peers, this one included, before anything is claimed; not waited for where others train.
        newcomer: this peer joins others. It claims nothing until `Peer.discovered` says that it has heard all of them;
            else it would take every fragment for vacant.
        outer: when versions close, and how far behind a contribution may be.
        tokens_per_step: tokens of any peer's inner step, from the manifest; None where the manifest does not say it.
        device: what it trains on, for watchers.
        data: names the sequences that numbers stand for here (see `Hello`).
        payload_bytes: length of a contribution to each fragment, for the record of who contributed how much.
        planned: how long the run is by the settings here (see `Status`); others may raise it.

    Attributes:
        state: what its training loop is doing.
        blank: it has not got what the run starts from, such as the weights of a checkpoint. Until it has an anchor of
            each fragment from another peer it holds none and does not train, and says so: nobody waits for its claims,
            and its own random values reach nobody.
        fragments: what it knows of each fragment. leases: a table over them, by holder.
        accounts: what the anchors are made of. members: the other peers. address_book: where to call them.
    """

    def __init__(
        self,
        me: str,
        name: str,
        run_id: str,
        manifest_hash: str,
        digests: Sequence[str],
        signer: Signer,
        versions: Sequence[int] | None = None,
        applied_tokens: int = 0,
        trains: bool = True,
        holds: bool = True,
        min_peers: int = 1,
        newcomer: bool = False,
        outer: OuterConfig = SYNC,
        tokens_per_step: int | None = None,
        device: str = "",
        data: str = "",
        payload_bytes: Sequence[int] = (),
        planned: Sequence[int] = (0, 0, 0),
    ) -> None:
        self.signer = signer
        self.me, self.name, self.device, self.data = me, name, device, data
        self.run_id, self.manifest_hash = run_id, manifest_hash
        self.trains, self.holds, self.may_hold, self.blank = trains, holds, holds, False
        self.min_peers, self.newcomer = min_peers, newcomer
        self.outer, self.tokens_per_step = outer, tokens_per_step
        self.planned = self.typed = [at_most(number, MAX_TOKENS) for number in planned]
        self.on_planned: Callable[[list[int]], None] = lambda planned: None
        self.state: State = "starting"
        self.ready_at = inf  # when it became ready last
        self.warming = False  # It trains by itself or fetches its inner state; nobody expects anything of it yet.
        known = zip(digests, versions or [0] * len(digests), strict=True)
        self.fragments = [Fragment(index, version, digest) for index, (digest, version) in enumerate(known)]
        self.leases = LeaseTable(self.fragments)
        self.members = Membership()
        self.accounts = Accounts(me, name, self.fragments, self.members, applied_tokens, payload_bytes)
        self.address_book = AddressBook()
        self.penalties = Penalties()
        self.sync_s = 0.0  # from a decision to close until contributors have the update; rises at once, falls slowly
        self.heals = self.takeovers = 0
        self.retired = False  # it is about to leave, and makes no more versions: its heirs would miss them
        self.followed: set[int] = set()  # fragments whose versions are fetched at once, also while this peer trains
        self.deposed: set[str] = set()  # peers that hold nothing any more, unless most believe them
        self.doubted: dict[tuple[int, str], tuple[int, int]] = {}  # by fragment and peer; see `belief.doubt`
        self.other_data: dict[str, None] = {}  # peers whose data differ, each named once
        self.may_author: Callable[[str], bool] = lambda peer: True  # by admission
        self.opened = False  # enough peers were connected once, and all that could be reached said hello
        self._myself: Member | None = None
        self._progress = (0, 0, 0.0, 0)
        self._figures: dict[str, Any] = {}
        self._heirs: tuple[tuple[object, ...], dict[int, str]] = ((), {})
        self._pace = Pace()

    @property
    def versions(self) -> list[int]:
        """Anchor version of each fragment here."""
        return [fragment.version for fragment in self.fragments]

    @property
    def steps(self) -> int:
        """How many outer steps led to the anchors here, to that with the fewest."""
        return min(fragment.steps for fragment in self.fragments)

    @property
    def digests(self) -> list[str]:
        """Digest of each fragment's anchor here."""
        return [fragment.digest for fragment in self.fragments]

    @property
    def syncers(self) -> dict[int, Syncer]:
        """The fragments that this peer is syncer of, with what collects their next versions."""
        return {fragment.index: fragment.syncer for fragment in self.fragments if fragment.syncer is not None}

    @property
    def applied_tokens(self) -> int:
        """The swarm clock at the anchors here."""
        return self.accounts.applied_tokens

    @property
    def gone(self) -> bool:
        """Whether this peer takes part no more."""
        return STATES[self.state].gone

    # -- what this peer says ------------------------------------------------------------------------------------------

    def status(self, figures: bool = False) -> Status:
        """This peer's status as the others shall see it, at a heartbeat with figures for watchers."""
        inner_step, target_steps, pace, tokens = self._progress
        return Status(
            state=self.state, versions=self.versions, marks=b"".join(mark(digest) for digest in self.digests),
            inner_step=inner_step, target_steps=target_steps, steps_per_s=pace, tokens=tokens,
            units=[list(unit) for unit in self.accounts.units[:MAX_UNIT_RANGES]],
            disputed=[fragment.index for fragment in self.fragments if fragment.disputed],
            missed=[fragment.index for fragment in self.fragments if fragment.misses],
            figures=Figures(**self._figures) if figures else None, blank=self.blank, planned=self.planned,
        )  # fmt: skip

    def hello(self) -> Hello:
        """First message to a newly connected peer."""
        peers = [member.peer for member in self.members.all()]
        if len(peers) > MAX_NAMED:  # each peer names others, so a newcomer hears of nearly all
            peers = sorted(peers, key=lambda peer: score(f"{self.me} {peer}", 0))[:MAX_NAMED]
        return Hello(
            wire_version=WIRE_VERSION, run_id=self.run_id, manifest_hash=self.manifest_hash,
            name=self.name, trains=self.trains, holds=self.may_hold, device=self.device,
            peers=peers, addresses=self.address_book.all([self.me, *peers]), status=self.status(),
            sequences=self.data, claims=[self.claim_of(lease) for lease in self.leases.held_by(self.me)],
            votes=self.votes(),
        )  # fmt: skip

    def others_at(self) -> list[str]:
        """One address of each other peer that is there."""
        named = self.address_book.all(member.peer for member in self.members.all())
        return [addresses[0] for addresses in named.values()]

    def votes(self) -> list[Vote]:
        """Whom this peer believes to hold which fragment, if it holds any itself."""
        return [vote for fragment in self.fragments for vote in self.vote(fragment)]

    def vote(self, fragment: Fragment) -> list[Vote]:
        """Whom this peer believes to hold that fragment; nothing when it holds it itself."""
        lease = fragment.lease
        if lease is None or lease.holder == self.me or not self.holds or self.gone:
            return []
        return [Vote(fragment=lease.fragment, term=lease.term, holder=lease.holder)]

    def claim_of(self, lease: Lease) -> Claim:
        """What this peer says of a lease that it holds."""
        return Claim(
            fragment=lease.fragment, term=lease.term, version=lease.version, digest=lease.digest,
            applied_tokens=0 if lease.fragment else self.applied_tokens, skipped=lease.skipped,
            **self.accounts.data_cursor(lease.fragment),
        )  # fmt: skip

    def publication(self, fragment: Fragment, syncer: Syncer, contributors: Collection[str]) -> Published:
        """Announces the version of a fragment that this peer has just made of these contributions."""
        return Published(
            fragment=fragment.index, term=syncer.term, version=fragment.version, digest=fragment.digest,
            contributors=sorted(contributors), applied_tokens=self.applied_tokens,
            staleness=round(within_bounds(syncer.last_staleness, MAX_COUNT), 3),
            **self.accounts.data_cursor(fragment.index),
        )  # fmt: skip

    # -- what others say ----------------------------------------------------------------------------------------------

    def objection(self, hello: Hello) -> str | None:
        """Why the sender of this hello cannot be in this run, as one line for its user; None when it can."""
        if (objection := objection_to_wire(hello.wire_version)) is not None:
            return objection
        if hello.run_id != self.run_id:
            return f"run.id={hello.run_id} is not the run here, which is run.id={self.run_id}"
        if hello.manifest_hash != self.manifest_hash:
            return f"the manifest {hello.manifest_hash[:12]} differs from {self.manifest_hash[:12]} here"
        if len(hello.status.versions) != len(self.fragments):
            return f"{len(hello.status.versions)} fragments there, {len(self.fragments)} here"
        return None

    def impossible(self, message: Message) -> str | None:
        """Why no honest peer of this run says that on a control stream, in one line; None when one may.

        It judges only by what this peer knows for certain. A message may also name a term or version that cannot be
        true; its sender is not to blame for these, because a liar may have told it.
        """
        if message.place not in (Place.HELLO, Place.CONTROL):
            return f"a control stream does not carry {type(message).__name__}"
        return message.misfit(len(self.fragments))

    # -- when to train ------------------------------------------------------------------------------------------------

    @property
    def lockstep(self) -> bool:
        """Whether all peers exchange all fragments at one barrier, in which inner steps wait."""
        return self.outer.quorum is None and not self.outer.staggered and not self.outer.overlap

    def may_train(self) -> bool:
        """Whether inner steps may be taken: in step with the others, when these train or have all started."""
        if self.state != "ready":
            return False
        trainers = [member.status for member in self.members.all() if member.trains]
        return any(status.in_round for status in trainers) or all(status.state != "starting" for status in trainers)

    def under_way(self) -> bool:
        """Whether others train already; then nobody waits until `min_peers` are connected, which may never happen."""
        return any(member.status.in_round for member in self.members.all())

    def in_step(self, now: float) -> bool:
        """Whether a round that began now would be the others' too; asked after an exchange, to join anew if it is not.

        In the middle of an exchange some fragments are a version ahead of the others. A newcomer, or a peer that came
        late and caught up, must not begin to train from there. It would be out of step with everybody, in this round
        and in all that follow: too early for some fragments and too late for the rest, so that each side waits for the
        other's inner steps. It must not be between the versions from which another peer began its round and the next.
        """
        if any(self.behind(fragment.index) for fragment in self.fragments):
            return False
        if not self.lockstep or not self.trains:
            return True
        mine = self.versions
        for member in self.members.all():
            if not member.status.in_round or member.stalled(now):
                continue
            theirs = member.round_versions
            if theirs is None or not (theirs == mine or all(a > b for a, b in zip(mine, theirs, strict=True))):
                return False
        return True

    def first_position(self, now: float | None = None) -> int:
        """Inner steps of its first cycle that this peer leaves out, because the others are in the middle of theirs.

        None at a barrier if it was ready when they began: they had waited for it, however late it hears of that. The
        others have gone on since their last status. With staggered fragments, a peer that begins behind them is too
        late for every fragment, and one that begins ahead waits a little once; so this leaves out one step more.
        """
        if self.outer.quorum is not None:
            return 0
        most = self.outer.sync_every  # whatever pace a peer claims
        ahead = [
            m.status.inner_step + (0 if now is None else round(min((now - m.heard_at) * m.status.steps_per_s, most)))
            for m in self.members.all()
            if m.trains
            and m.status.in_round
            and not (self.lockstep and (m.status.versions != self.versions or m.began_at > self.ready_at))
        ]
        margin = 1 if self.outer.staggered and now is not None and ahead else 0
        return min(max(ahead, default=0) + margin, self.outer.sync_every - 1)

    def num_trainers(self) -> int:
        """Peers that train now, this one included if it trains; at least 1."""
        return max(1, self.trains + sum(member.trains and member.status.counted_in for member in self.members.all()))

    def fastest_steps_per_s(self, mine: float) -> float:
        """The pace of the fastest peer that trains, this one included.

        Nobody counts as more than `FASTEST` times as fast as the median: a peer that claims any pace must not make the
        others take hardly any steps.
        """
        paces = [mine, *(m.status.steps_per_s for m in self.members.all() if m.trains)]
        measured = [pace for pace in paces if pace > 0]
        return min(max(measured), FASTEST * median_low(measured)) if measured else 0.0

    # -- who holds what -----------------------------------------------------------------------------------------------

    def live_lease(self, fragment: int) -> Lease | None:
        """The lease of a fragment whose holder is connected, or is this peer."""
        lease = self.leases.get(fragment)
        return lease if lease is not None and (lease.holder == self.me or lease.holder in self.members) else None

    def vacant(self, fragment: Fragment) -> bool:
        """Whether the fragment has no syncer that goes on, as far as this peer sees."""
        lease = fragment.lease
        if lease is None or lease.holder == self.me:
            return lease is None
        holder = self.members.get(lease.holder)
        if holder is None or holder.status.state == "leaving":
            return True  # A peer that is done keeps its fragments while it is connected: there is no next version.
        _, other = fragment.votes.get(lease.holder, (lease.term, lease.holder))
        return other != lease.holder and other not in self.members  # it gave way to a peer that is gone

    def contributes_elsewhere(self, fragment: Fragment, peer: str) -> bool:
        """Whether a peer believes that another one, which lives, is syncer of a fragment that this peer holds."""
        _, holder = fragment.votes.get(peer, (0, self.me))
        other = self.members.get(holder)
        return holder != self.me and other is not None and not other.status.gone

    def heirs(self) -> dict[int, str]:
        """For each fragment the peer that would claim it if its syncer died, one syncer at a time."""
        depends_on = (self.members.generation, self.leases.generation, self.holds, self.gone)
        if self._heirs[0] != depends_on:
            self._heirs = (depends_on, self._find_heirs())
        return self._heirs[1]

    def able(self) -> list[str]:
        """Peers that can hold fragments; this one comes last."""
        members = [one for one in self.members.all() if one.holds and not one.status.gone]
        others = [one.peer for one in members if one.peer not in self.deposed]
        return [*others, self.me] if self.holds and not self.gone else others

    def _find_heirs(self) -> dict[int, str]:
        load = {peer: self.leases.load(peer) for peer in self.able()}
        heirs: dict[int, str] = {}
        for holder in [peer for peer, held in load.items() if held]:
            others = {peer: held for peer, held in load.items() if peer != holder}
            heirs |= assign((lease.fragment for lease in self.leases.held_by(holder)), others, others)
        return heirs

    # -- anchors, here and elsewhere ----------------------------------------------------------------------------------

    def near(self, fragment: int) -> bool:
        """Whether the anchor is the syncer's, or at most as far behind as a contribution may be."""
        known, lease = self.fragments[fragment], self.leases.get(fragment)
        if lease is None:
            return False
        return known.agrees() or 0 < lease.version - known.version <= self.outer.staleness_limit * self.num_trainers()

    def behind(self, fragment: int) -> bool:
        """Whether the fragment's syncer published a later version, or another anchor under the same one."""
        lease = self.leases.get(fragment)
        return lease is not None and lease.version >= self.fragments[fragment].version and not self.near(fragment)

    def swarm_clock(self) -> tuple[int, int]:
        """Fewest outer steps of all fragments, and applied tokens, as published; this peer's anchors may be behind."""
        newest = (f.steps if f.lease is None else max(f.steps, f.lease.steps) for f in self.fragments)
        control = self.fragments[CONTROL_FRAGMENT].lease
        return min(newest), max(self.applied_tokens, 0 if control is None else control.applied_tokens)

    def over(self) -> bool:
        """Whether a peer is done with training, so that in lockstep there is no next version."""
        return "done" in (self.state, *(member.status.state for member in self.members.all()))

    def ended_as_one(self) -> bool:
        """Whether all peers that train are done and have the same anchors."""
        trainers = [m for m in self.members.all() if m.trains and m.status.state != "leaving"]
        if any(m.status.state != "done" for m in trainers):
            return False
        return all(f.agrees() for f in self.fragments) and all(m.status.versions == self.versions for m in trainers)

    def merging(self, fragment: int) -> bool:
        """Whether a `Merge` of this fragment has been asked for and not reported as published."""
        return self.fragments[fragment].busy is Busy.MERGING
