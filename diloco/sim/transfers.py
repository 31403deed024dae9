"""What a bare node asks of others: that they merge its contributions, and work units; over streams that break.

Each method of `Transfers` is one conversation, as those of `swarm.rounds` are, step by step:

    exchange -> contribute -> (header) -> serve -> merge -> (record or state) -> adopt

From `serve` on it is the other side's, a `Holder`.
"""

from __future__ import annotations

from collections.abc import Sequence

from diloco.protocol.actions import Broadcast
from diloco.protocol.exchange import Exchange, Step
from diloco.protocol.leases import Lease
from diloco.protocol.messages.bulk import Record
from diloco.protocol.peer import CONTROL_FRAGMENT
from diloco.sim.arena import CHUNKS, Stream
from diloco.sim.holder import Holder
from diloco.sim.lineage import Contributed
from diloco.sim.world import Conversation
from diloco.swarm.conversations.units import LeasedData as Reserve

__all__ = ["Transfers"]

RETRY_S = 1.0


class Transfers(Holder):
    """The moving half of a node: how what it learned gets into the anchors, its own included.

    Attributes:
        reserve: work units, if the node was told to train on any.
        loaded: versions that the local parameters started from. flying: exchanges under way.
    """

    def began(self) -> None:
        """Set up what is here before anything happens."""
        super().began()
        self.loaded = list(self.peer.versions)
        self.version = 0
        self.steps = 0
        self.sent = [0] * len(self.peer.versions)
        self.flying: dict[int, Exchange] = {}
        self.reserve = Reserve()
        self._asking = False

    def load(self, fragments: Sequence[int]) -> None:
        """The local parameters of these fragments become the anchors."""
        for fragment in fragments:
            self.loaded[fragment] = self.peer.versions[fragment]

    def arrived(self, fragments: Sequence[int]) -> bool:
        """Whether the exchanges of these fragments are over."""
        return not any(fragment in self.flying for fragment in fragments)

    # -- work units ---------------------------------------------------------------------------------------------------

    def ask_for_units(self) -> None:
        """When they run short, one request at a time."""
        if self.reserve.missing and not self._asking:
            self._asking = True
            self.world.spawn(self, self._fetch_units())

    def _fetch_units(self) -> Conversation:
        lease, wanted, has = self._live_lease(CONTROL_FRAGMENT), self.reserve.missing, self.reserve.all
        if lease is not None:
            server = self.world.nodes[lease.holder]
            stream = Stream(self.world, self, server)
            yield from stream.pass_over(self, server, stream.broken)
            granted = None if stream.broken() else server.peer.lease_units(self.name, wanted, has)
            yield from stream.pass_over(server, self, stream.broken)
            if granted and not stream.broken():
                self.reserve.add(granted)
                self.peer.units = self.reserve.all
                self.do([Broadcast(self.peer.status())])
        self._asking = False

    # -- contributor --------------------------------------------------------------------------------------------------

    def exchange(self, exchange: Exchange) -> Conversation:
        """From the pseudo-gradient to the adopted update, whoever is syncer."""
        fragment, retry_at = exchange.fragment, 0.0
        while True:
            lease = self._live_lease(fragment)
            merged = self.peer.merged(fragment).get(self.name, -1)
            match exchange.next_step(lease, self.peer.versions[fragment], self.now(), retry_at, merged):
                case Step.DONE:
                    self.flying.pop(fragment, None)
                    self.reserve.drop(exchange.units)
                    self.peer.units = self.reserve.all
                    return
                case Step.WAIT:
                    yield 0.2
                case Step.CATCH_UP:
                    donors = self.peer.members.donors(fragment, exchange.base_version + 1)
                    yield from self.catch_up(fragment, donors, outer=False)
                    yield 0.2
                case Step.CONTRIBUTE:
                    assert lease is not None
                    retry_at = self.now() + RETRY_S
                    if lease.holder == self.name:
                        yield from self._contribute_own(exchange, lease)
                    else:
                        yield from self._contribute(exchange, lease)

    def _live_lease(self, fragment: int) -> Lease | None:
        lease = self.peer.leases.get(fragment)
        return lease if lease and (lease.holder == self.name or lease.holder in self.peer.members) else None

    def _contribute_own(self, exchange: Exchange, lease: Lease) -> Conversation:
        peer, fragment = self.peer, exchange.fragment
        syncer, header = peer.syncers[fragment], exchange.header(lease)
        verdict, base_version = peer.offer(self.name, header), peer.versions[fragment]
        if not verdict.accepted:
            exchange.refused(verdict, lease)
            yield 0.2
            return
        contribution, folded = Contributed(self.name, header.base_version), verdict.first_chunk == CHUNKS
        if not folded and syncer.folds_whole:
            yield lambda: fragment not in self.moving
            base_version = peer.versions[fragment]
            folded = self._fold_whole(syncer, self.name, contribution)
            if not folded:
                yield 0.0
                return
        elif not folded:
            for chunk in range(verdict.first_chunk, CHUNKS):
                folded = self._fold(syncer, self.name, contribution, chunk)
                if not folded:
                    break
                yield 0.0
        if folded:
            self.do(peer.arrived(self.name, fragment, self.now()))
        yield lambda: peer.versions[fragment] > base_version or peer.syncers.get(fragment) is not syncer
        if syncer.version == base_version + 1:
            exchange.recorded(syncer.last_contributors, self.name)

    def _contribute(self, exchange: Exchange, lease: Lease) -> Conversation:
        """One stream to the syncer, until its answer is here or the lease is another one."""
        fragment, world = exchange.fragment, self.world
        server, header = world.nodes[lease.holder], exchange.header(lease)
        stream = Stream(world, self, server)

        def moot() -> bool:
            now = self._live_lease(fragment)
            return stream.broken() or now is None or (now.holder, now.term) != (lease.holder, lease.term)

        yield from stream.pass_over(self, server, moot)
        if not moot():
            world.spawn(server, server.serve(stream, header))
            if world.random.random() < world.repeat_rate:
                world.spawn(server, server.serve(Stream(world, self, server), header))
            yield lambda: stream.answer is not None or moot()
            yield from stream.pass_over(server, self, moot)
        answer = None if moot() else stream.answer
        stream.close()
        if answer is None or answer.verdict is None:
            return exchange.broke(lease)
        if not answer.verdict.accepted:
            exchange.refused(answer.verdict, lease)
        if isinstance(answer.update, Record):
            exchange.recorded(answer.update.contributors, self.name)
        elif answer.update is not None:
            exchange.merged()
        if answer.update is not None and not (yield from self._adopt(fragment, answer.update)):
            exchange.broke(lease)
