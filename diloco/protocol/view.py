"""What one peer knows of the swarm, and what follows from it. Sans-IO; nothing here changes anything."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from diloco.config import WIRE_VERSION, OuterConfig
from diloco.protocol.address_book import AddressBook
from diloco.protocol.leases import Lease, LeaseTable
from diloco.protocol.ledger import Units
from diloco.protocol.membership import Membership
from diloco.protocol.messages import Message, objection_to_wire
from diloco.protocol.messages.base import MAX_UNIT_RANGES, Place
from diloco.protocol.messages.control import Claim, Figures, Hello, Status
from diloco.protocol.rendezvous import assign
from diloco.protocol.states import State
from diloco.protocol.syncer import SYNC

__all__ = ["WIRE_VERSION", "View"]


class View:
    """State and conclusions of a peer; `Peer` takes in events and changes it.

    Args:
        me: this peer's id.
        name: display name.
        run_id, manifest_hash: what a peer on the other side must have too.
        digests: digest of each fragment's anchor; its length is the number of fragments.
        versions: anchor version of each fragment (all 0 in a new run).
        applied_tokens: swarm clock at these versions.
        trains, holds: whether this peer contributes, and whether it can be a syncer.
        min_peers: connected peers, this one included, before anything is claimed.
        newcomer: this peer joins others, and claims nothing before `discovered` says that it has heard all of them;
            else it would take every fragment for vacant.
        outer: when versions close, and how far behind a contribution may be.
        tokens_per_step: of an inner step of any peer, as the manifest has it; None where nobody says.
        device: what it trains on, for whoever watches.
        payload_bytes: length of a contribution to each fragment, for the record of who contributed how much.
    """

    def __init__(
        self,
        me: str,
        name: str,
        run_id: str,
        manifest_hash: str,
        digests: list[str],
        versions: list[int] | None = None,
        applied_tokens: int = 0,
        trains: bool = True,
        holds: bool = True,
        min_peers: int = 1,
        newcomer: bool = False,
        outer: OuterConfig = SYNC,
        tokens_per_step: int | None = None,
        device: str = "",
        payload_bytes: Sequence[int] = (),
    ) -> None:
        self.me = me
        self.name = name
        self.run_id = run_id
        self.manifest_hash = manifest_hash
        self.digests = list(digests)
        self.versions = list(versions or [0] * len(digests))
        self.applied_tokens = applied_tokens
        self.swarm_tokens = applied_tokens  # swarm clock at the newest version that was heard of
        self.trains = trains
        self.holds = holds
        self.min_peers = min_peers
        self.newcomer = newcomer
        self.outer = outer
        self.tokens_per_step = tokens_per_step
        self.device = device
        self.payload_bytes = tuple(payload_bytes)
        self.members = Membership()
        self.address_book = AddressBook()
        self.leases = LeaseTable()
        self.state: State = "starting"
        self.units: Units = []  # leased to this peer; its owner keeps them up to date
        self.traffic = (0, 0)  # bytes sent and received; its owner keeps them up to date
        self._progress = (0, 0, 0.0, 0)
        self._measured: tuple[float, int, list[float], int] = (0.0, 0, [], 0)
        self._begin()

    def _begin(self) -> None:
        """Further state of a subclass."""

    def data_cursor(self, fragment: int, contributors: Collection[str] | None = None) -> dict[str, Any]:
        """Fields of a message about this peer's version of a fragment, or about the next one, which these contributors
        make: what of the data is handed out, and what of it is not in the model. Only the control fragment has any.
        """
        return {}

    # -- what this peer says ------------------------------------------------------------------------------------------

    def status(self, figures: bool = False) -> Status:
        """This peer's status as the others shall see it, at a heartbeat with figures for whoever watches."""
        inner_step, target_steps, steps_per_s, tokens = self._progress
        return Status(
            state=self.state,
            versions=list(self.versions),
            inner_step=inner_step,
            target_steps=target_steps,
            steps_per_s=steps_per_s,
            tokens=tokens,
            units=[list(unit) for unit in self.units[:MAX_UNIT_RANGES]],
            figures=self._figures() if figures else None,
        )

    def _figures(self) -> Figures:
        loss, rounds, seconds, discarded = self._measured
        sent, received = self.traffic
        return Figures(
            discarded=discarded, loss=loss, bytes_sent=sent, bytes_received=received, rounds=rounds, seconds=seconds
        )

    def hello(self) -> Hello:
        """First message to a newly connected peer."""
        return Hello(
            wire_version=WIRE_VERSION,
            run_id=self.run_id,
            manifest_hash=self.manifest_hash,
            name=self.name,
            trains=self.trains,
            holds=self.holds,
            device=self.device,
            peers=[member.peer for member in self.members.all()],
            addresses=self.address_book.all([self.me, *(member.peer for member in self.members.all())]),
            status=self.status(),
            claims=[self.claim_of(lease) for lease in self.leases.held_by(self.me)],
        )

    def claim_of(self, lease: Lease) -> Claim:
        """What this peer says of a lease that it holds."""
        return Claim(
            fragment=lease.fragment,
            term=lease.term,
            version=lease.version,
            digest=lease.digest,
            applied_tokens=0 if lease.fragment else self.applied_tokens,
            **self.data_cursor(lease.fragment),
        )

    def objection(self, hello: Hello) -> str | None:
        """Why the sender of this hello cannot be in this run, as one line for its user; None when it can."""
        if (objection := objection_to_wire(hello.wire_version)) is not None:
            return objection
        if hello.run_id != self.run_id:
            return f"run.id={hello.run_id} is not the run here, which is run.id={self.run_id}"
        if hello.manifest_hash != self.manifest_hash:
            return f"the manifest {hello.manifest_hash[:12]} differs from {self.manifest_hash[:12]} here"
        if len(hello.status.versions) != len(self.versions):
            return f"{len(hello.status.versions)} fragments there, {len(self.versions)} here"
        return None

    def impossible(self, message: Message) -> str | None:
        """Why no honest peer of this run says that on a control stream, in one line; None when one may.

        It judges only by what this peer knows for certain. A message may also name a term or version that cannot be
        true; its sender is not to blame for these, because a liar may have told it.
        """
        if message.place not in (Place.HELLO, Place.CONTROL):
            return f"a control stream does not carry {type(message).__name__}"
        return message.misfit(len(self.versions))

    # -- when to train ------------------------------------------------------------------------------------------------

    @property
    def lockstep(self) -> bool:
        """Whether all peers exchange all fragments at one barrier, in which inner steps wait."""
        return self.outer.quorum is None and not self.outer.staggered and not self.outer.overlap

    def may_train(self) -> bool:
        """Whether inner steps may be taken: in step with the others, who train or have all started."""
        states = {member.status.state for member in self.members.all() if member.trains}
        return self.state == "ready" and ("starting" not in states or bool(states & {"training", "exchanging"}))

    def under_way(self) -> bool:
        """Whether others train already: then `min_peers` may never be there at once, and nobody waits for them."""
        return any(member.status.state in ("training", "exchanging") for member in self.members.all())

    def in_step(self, now: float) -> bool:
        """Whether a round that began now would be the others' too; ask after an exchange, and join anew if it is not.

        In the middle of an exchange some fragments are a version ahead of the others. Who began to train from there (a
        newcomer, or a peer that came late and caught up) would be out of step with everybody, in this round and in all
        that follow: too early for some fragments and too late for the rest, so that each side waits for the other's
        inner steps. So this peer must not be between the versions from which another one began its round and the next.
        """
        if any(map(self.behind, range(len(self.versions)))):
            return False
        if not self.lockstep:
            return True
        for member in self.members.all():
            if not self.trains or member.status.state not in ("training", "exchanging") or member.stalled(now):
                continue
            theirs = member.round_versions
            if theirs is None or not (
                theirs == self.versions or all(a > b for a, b in zip(self.versions, theirs, strict=True))
            ):
                return False
        return True

    def first_position(self, now: float | None = None) -> int:
        """Inner steps of its first cycle that this peer leaves out, because the others are in the middle of theirs.

        They have gone on since they said where they are. With staggered fragments, who begins behind them is too late
        for every one, and who begins ahead waits a little once, so a step is left out for good measure.
        """
        if self.outer.quorum is not None:
            return 0
        ahead = [
            m.status.inner_step + (0 if now is None else round((now - m.heard_at) * m.status.steps_per_s))
            for m in self.members.all()
            if m.trains
            and m.status.state in ("training", "exchanging")
            and (not self.lockstep or m.status.versions == self.versions)
        ]
        margin = 1 if self.outer.staggered and now is not None and ahead else 0
        return min(max(ahead, default=0) + margin, self.outer.sync_every - 1)

    def num_trainers(self) -> int:
        """Peers that train now, this one included."""
        states = [member.status.state for member in self.members.all() if member.trains]
        return 1 + sum(state not in ("starting", "leaving", "done") for state in states)

    def fastest_steps_per_s(self, mine: float) -> float:
        """The pace of the fastest peer that trains."""
        return max([mine, *(m.status.steps_per_s for m in self.members.all() if m.trains)])

    def backs_up(self) -> set[int]:
        """Fragments that this peer would claim if their syncers died, one syncer at a time."""
        return {fragment for fragment, heir in self.heirs().items() if heir == self.me}

    def heirs(self) -> dict[int, str]:
        """For each fragment the peer that would claim it if its syncer died, one syncer at a time."""
        able = [m.peer for m in self.members.all() if m.holds and m.status.state not in ("leaving", "done")]
        if self.holds and self.state not in ("leaving", "done"):
            able.append(self.me)
        load = {peer: len(self.leases.held_by(peer)) for peer in able}
        heirs: dict[int, str] = {}
        for holder in able:
            others = {peer: held for peer, held in load.items() if peer != holder}
            heirs |= assign((lease.fragment for lease in self.leases.held_by(holder)), others, others)
        return heirs

    # -- anchors, here and elsewhere ----------------------------------------------------------------------------------

    def agrees(self, fragment: int) -> bool:
        """Whether the anchor of a fragment is the one that its syncer published last."""
        lease = self.leases.get(fragment)
        return lease is not None and lease.version == self.versions[fragment] and lease.digest == self.digests[fragment]

    def near(self, fragment: int) -> bool:
        """Whether the anchor is the syncer's, or as little behind as a contribution may be."""
        lease = self.leases.get(fragment)
        if lease is None:
            return False
        return self.agrees(fragment) or 0 < lease.version - self.versions[fragment] <= self.outer.staleness_limit

    def behind(self, fragment: int) -> bool:
        """Whether the fragment's syncer published a later version, or another anchor under the same one."""
        lease = self.leases.get(fragment)
        if lease is None or lease.version < self.versions[fragment]:
            return False
        return not self.near(fragment)

    def swarm_clock(self) -> tuple[int, int]:
        """Lowest version of all fragments, and applied tokens, as published; this peer's anchors may be behind."""
        leases = map(self.leases.get, range(len(self.versions)))
        newest = (
            mine if lease is None else max(mine, lease.version)
            for lease, mine in zip(leases, self.versions, strict=True)
        )
        return min(newest), max(self.applied_tokens, self.swarm_tokens)

    def ended_as_one(self) -> bool:
        """Whether all peers that train are done, and (where they do not end in lockstep) all have the same anchors."""
        trainers = [m for m in self.members.all() if m.trains and m.status.state != "leaving"]
        if any(m.status.state != "done" for m in trainers):
            return False
        if self.lockstep:
            return True
        return all(map(self.agrees, range(len(self.versions)))) and all(
            m.status.versions == self.versions for m in trainers
        )
