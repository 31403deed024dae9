"""The anchors of a bare node: it serves contributions, merges them, and fetches and adopts what others merged.

Each method is one side of a conversation, as in `swarm.serve` and `swarm.anchors`, step by step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence

from diloco.protocol.actions import Action
from diloco.protocol.exchange import Exchange
from diloco.protocol.messages.bulk import Contribution, Record, StateHeader
from diloco.protocol.peer import CONTROL_FRAGMENT, Peer
from diloco.protocol.shares import Shares
from diloco.protocol.syncer import Close, Syncer
from diloco.sim.arena import CHUNKS, Answer, Arena, State, Stream
from diloco.sim.lineage import Contributed, Made, digest_of, repeated
from diloco.sim.world import Clock, Conversation, Violation

__all__ = ["Holder"]

STREAM_TIMEOUT_S = 30.0  # of a read that somebody has to answer at once


class Holder:
    """What a node has, and what it does for the fragments it holds.

    Attributes:
        anchors: what the anchors really are; the protocol's digests say what it believes.
        momentum: versions that went into the outer state of the fragments held.
        folded: chunks in the sum of the fragments held.
        records: the newest update of fragments held. moving: fragments whose anchor is being read or written.
        exchanges: all that this node began.
    """

    peer: Peer
    world: Arena
    name: str
    clock: Clock

    def began(self) -> None:
        """Set up what is here before anything happens."""
        self.anchors = list(self.peer.digests)
        self.records: dict[int, Record] = {}
        self.momentum: dict[int, tuple[int, ...]] = {}
        self.folded: dict[int, list[tuple[Contributed, int]]] = {}
        self.moving: set[int] = set()
        self.exchanges: list[Exchange] = []

    def now(self) -> float:
        """What this node's clock shows."""
        return self.clock.read(self.world.now)

    def do(self, actions: list[Action]) -> None:
        """Carry out what the protocol asks for."""
        self.world.do(self, actions)

    def carry_out(self, action: Action) -> None:
        """What the protocol asks of its owner, except for what is the world's."""
        raise NotImplementedError

    # -- as a syncer --------------------------------------------------------------------------------------------------

    def serve(self, stream: Stream, header: Contribution) -> Conversation:
        """Answer a contribution; what is sent back waits in the stream."""
        peer, fragment, sender = self.peer, header.fragment, stream.client.name
        verdict, record = peer.offer(sender, header), self.records.get(fragment)
        late = record is not None and record.version == header.base_version + 1 <= verdict.version
        self.world.note(self.name, f"offer of {sender} {header.fragment}:{header.base_version} {verdict}")
        if not verdict.accepted:
            verdict = verdict.model_copy(update={"record_follows": late})
            stream.answer = Answer(verdict, record if late else None)
            return
        syncer, base_version = peer.syncers[fragment], peer.versions[fragment]
        contribution = Contributed(sender, header.base_version)
        for chunk in range(verdict.first_chunk, CHUNKS):
            if not (yield from stream.chunk()):
                return
            if not syncer.folds_whole and not self._fold(syncer, sender, contribution, chunk):
                return stream.close()
        if syncer.folds_whole and verdict.first_chunk < CHUNKS:
            yield lambda: fragment not in self.moving
            base_version = peer.versions[fragment]
            if not self._fold_whole(syncer, sender, contribution):
                return stream.close()
        self.do(peer.arrived(sender, fragment, self.now()))
        yield lambda: peer.versions[fragment] > base_version or peer.syncers.get(fragment) is not syncer
        record = self.records.get(fragment)
        if record is not None and record.version == header.base_version + 1:
            stream.answer = Answer(verdict, record)
        elif syncer.folds_whole and peer.syncers.get(fragment) is syncer:
            yield lambda: fragment not in self.moving
            stream.answer = Answer(verdict, self._state(fragment, outer=False))
        else:
            stream.close()

    def _fold_whole(self, syncer: Syncer, sender: str, contribution: Contributed) -> bool:
        return all(self._fold(syncer, sender, contribution, chunk) for chunk in range(CHUNKS))

    def _fold(self, syncer: Syncer, sender: str, contribution: Contributed, chunk: int) -> bool:
        if self.peer.syncers.get(syncer.fragment) is not syncer or not syncer.wants(
            sender, chunk, contribution.base_version
        ):
            return False
        self.folded[syncer.fragment].append((contribution, chunk))
        syncer.folded(sender)
        return True

    def merge(self, close: Close) -> Conversation:
        """Make the next version of a fragment; every contributor must be in it once, and whole."""
        peer, fragment = self.peer, close.fragment
        syncer = peer.syncers[fragment]
        yield lambda: fragment not in self.moving
        if peer.syncers.get(fragment) is not syncer or syncer.version != close.base_version:
            return
        self.moving.add(fragment)
        chunks, self.folded[fragment] = tuple(self.folded[fragment]), []
        self._check_whole(close, chunks, syncer.folds_whole)
        before, momentum, version = self.anchors[fragment], self.momentum[fragment], close.base_version + 1
        digest_before, clock = peer.digests[fragment], peer.applied_tokens
        word = peer.data_cursor(fragment, close.contributors)
        yield 0.02 + self.world.latency()
        # A peer that restarted amid a round makes the same contribution with fewer tokens: other values, in a real one.
        digest = self.anchors[fragment] = digest_of(before, chunks, momentum, sorted(close.contributors.items()))
        self.moving.discard(fragment)
        clock += close.tokens if fragment == CONTROL_FRAGMENT else 0
        self.world.lineage.add(
            digest, Made(before, fragment, version, self.name, syncer.term, chunks, tuple(close.contributors.items()))
        )
        lost = peer.syncers.get(fragment) is not syncer
        record = Record(
            fragment=fragment, term=syncer.term, version=version, digest_before=digest_before, digest=digest,
            contributors=dict(close.contributors), applied_tokens=clock,
            **(word if lost else peer.data_cursor(fragment, close.contributors)),
        )  # fmt: skip
        if lost:  # a version of the side that lost, which others adopt or replace
            self._moved(fragment, record, None)
            return
        self.records[fragment] = record
        self.momentum[fragment] = (*momentum, version)
        self.world.records.append(record)
        self.do(peer.published(fragment, digest, close.contributors, self.now()))

    def _check_whole(self, close: Close, chunks: Sequence[tuple[Contributed, int]], staged: bool) -> None:
        count = Counter((whose.peer, chunk) for whose, chunk in chunks)
        whole = {(peer, chunk) for peer in close.contributors for chunk in range(CHUNKS)}
        if (
            not (count.keys() == whole if staged else count.keys() >= whole)
            or repeated(chunks)
            or set(count.values()) - {1}
        ):
            raise Violation(f"{self.name} closes {close} over {chunks}")

    # -- from others --------------------------------------------------------------------------------------------------

    def catch_up(self, fragment: int, donors: Sequence[str], outer: bool) -> Conversation:
        """Fetch a fragment from the first donor that has what fits here: the missing record, or the state."""
        for donor in (self.world.nodes[name] for name in donors):
            for have in (self.peer.versions[fragment], -1):
                fetched = yield from self._fetch(donor, fragment, have, outer)
                if fetched is None:
                    break
                if (yield from self._adopt(fragment, fetched)):
                    return
        self.peer.catch_up_failed(fragment)

    def _fetch(
        self, donor: Holder, fragment: int, have: int, outer: bool
    ) -> Generator[float | Callable[[], bool], None, Record | State | None]:
        world, stream = self.world, Stream(self.world, self, donor)
        patient_until = world.now + STREAM_TIMEOUT_S

        def given_up() -> bool:
            return stream.broken() or world.now >= patient_until

        yield from stream.pass_over(self, donor, given_up)
        yield lambda: given_up() or not (donor.peer.merging(fragment) or fragment in donor.moving)
        if given_up():
            return None
        record = donor.records.get(fragment)
        missing = record is not None and record.version == have + 1 and not outer
        fetched = record if missing else donor._state(fragment, outer)
        if outer:
            donor.peer.handed_over(fragment)
        yield from stream.pass_over(donor, self, given_up)
        return None if given_up() else fetched

    def _state(self, fragment: int, outer: bool) -> State:
        peer = self.peer
        momentum = self.momentum.get(fragment) if outer and peer.state == "leaving" else None
        header = StateHeader(
            fragment=fragment, version=peer.versions[fragment], digest=peer.digests[fragment],
            applied_tokens=peer.applied_tokens, outer=outer, **peer.data_cursor(fragment),
        )  # fmt: skip
        return State(
            header.version, header.digest, self.anchors[fragment], header.applied_tokens, dict(peer.shares(fragment)),
            momentum, header,
        )  # fmt: skip

    def _adopt(self, fragment: int, update: Record | State) -> Generator[float | Callable[[], bool], None, bool]:
        """Move the anchor; False when the update does not fit what is here."""
        yield lambda: fragment not in self.moving
        peer, momentum = self.peer, None
        if peer.merging(fragment):
            return False
        if isinstance(update, Record):
            if (peer.versions[fragment], peer.digests[fragment]) != (update.version - 1, update.digest_before):
                return False
            follows = self.anchors[fragment] == update.digest_before
            self.anchors[fragment] = update.digest if follows else digest_of(self.anchors[fragment], update.digest)
        else:
            if update.anchor != update.digest or update.version < peer.versions[fragment] + (fragment in peer.syncers):
                return False
            self.anchors[fragment], momentum = update.digest, update.momentum
        self.moving.add(fragment)
        yield 0.01
        self.moving.discard(fragment)
        self._moved(fragment, update, momentum)
        if self.anchors[fragment] != update.digest:
            lease = peer.leases.get(fragment)
            if lease is not None and lease.holder != self.name:
                yield from self.catch_up(fragment, (lease.holder,), outer=False)
        return True

    def _moved(self, fragment: int, update: Record | State, momentum: tuple[int, ...] | None) -> None:
        if momentum is not None:
            self.momentum[fragment] = momentum
        if fragment in self.peer.syncers:
            self.folded[fragment] = []
            if isinstance(update, Record):
                self.momentum[fragment] = (*self.momentum[fragment], update.version)
        elif momentum is None:
            self.momentum.pop(fragment, None)
        digest = self.anchors[fragment]
        contributors, shares = (update.contributors, None) if isinstance(update, Record) else (None, update.shares)
        now, tokens = self.now(), update.applied_tokens
        self.peer.hear_data_cursor(update if isinstance(update, Record) else update.header)
        self.do(self.peer.adopted(fragment, update.version, digest, tokens, now, contributors, shares))
        self._recount(fragment, {} if shares is None else shares)

    def _recount(self, fragment: int, shares: Shares) -> None:
        """What one half of a split left out is in the model after all, when the other half won (see `Anchors`)."""
        newest = shares[self.name].last_version - 1 if self.name in shares else -1
        for exchange in self.exchanges:
            if exchange.fragment == fragment and newest == exchange.base_version:
                exchange.discarded = False
