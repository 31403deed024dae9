"""A node's presence in the swarm: connected, heard, answering, and carrying out what the protocol core asks for.

Everything happens in one event loop, where the protocol core is driven: nothing in it needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from diloco.errors import DilocoError, PayloadError, SwarmError
from diloco.outer.replica import Replica
from diloco.protocol.actions import Action, Broadcast, CatchUp, Disconnect, Hold, Merge, Note, Release, Wake
from diloco.protocol.fragment import CONTROL_FRAGMENT
from diloco.protocol.ledger import union
from diloco.protocol.messages import Message
from diloco.protocol.messages.base import MAX_UNIT_RANGES
from diloco.protocol.messages.bulk import MAX_UNITS_WANTED
from diloco.protocol.messages.control import Hello, Revocations
from diloco.protocol.peer import Peer
from diloco.protocol.snapshot import Snapshot as Observed
from diloco.protocol.states import State
from diloco.swarm.conversations.answer import BulkServer
from diloco.swarm.conversations.bulk import BULK, BulkClient, FetchedRecord, request_manifest
from diloco.swarm.conversations.inner_state import Snapshot
from diloco.swarm.conversations.probe import ProbeServer
from diloco.swarm.conversations.units import Reserve
from diloco.swarm.conversations.watch import Recorder
from diloco.swarm.node.mesh import RECORD_LIFE_S, RECORD_PERIOD_S, ControlMesh
from diloco.swarm.node.options import NodeOptions
from diloco.swarm.node.rounds import Rounds
from diloco.swarm.node.saved import Saved
from diloco.swarm.node.spot import SpotChecks
from diloco.swarm.wire.deadline import within
from diloco.swarm.wire.dht_records import LEASES, REVOKED, leases_in, pack_revoked, revoked_in
from diloco.swarm.wire.streams import BROKEN, Stream, Traffic
from diloco.swarm.wire.transport import Reader, Transport, Writer

__all__ = ["Connect", "OnEvent", "Presence"]

logger = logging.getLogger(__name__)

ACQUAINTANCE_S = 20.0
CLOSE_S = 5.0
STALE_VERSIONS = 4  # a momentum as old as that is fetched anew: it costs three times the fragment in fp32


OnEvent = Callable[[str, dict[str, object]], None]
Connect = Callable[[NodeOptions], Awaitable[Transport]]


class Presence:
    """The base of `Node`: coroutines of one event loop, over whatever transport `connect` opens.

    On failure: peers that vanish are dealt with by the protocol and become events; a swarm that cannot be reached or
    that refuses this peer raises `SwarmError` from `start`; a task of the node that fails re-raises in whoever waits.
    """

    protocol: Peer

    def __init__(self, options: NodeOptions, replica: Replica, on_event: OnEvent, connect: Connect) -> None:
        self.replica = replica
        self.manifest_text = options.run.manifest_text
        self.records: dict[int, FetchedRecord] = {}
        self.reserve = Reserve()
        self.recorder = Recorder()
        self.traffic = Traffic(upload_limit=options.network.upload_limit)
        self.addresses: list[str] = []
        self.advice = ""  # what would let others connect to this peer, where they cannot
        self.inner_state: Snapshot = options.inner_state
        self.checks = SpotChecks(replica, options.seed, options.loss)
        self.gate = options.gate
        self.gate.on_refused = lambda peer, why: self.note("refused", peer=peer, why=why)
        self.gate.on_revoked = self._revoked
        self._options = options
        self._on_event = on_event
        self._connect = connect
        self._transport: Transport | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._interrupted = False
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._refusal: str | None = None
        self._standing_by: set[int] = set()  # being fetched
        self._asking = False  # for units

    async def start(self) -> None:
        """Listen, connect and learn where the swarm is; `SwarmError` when it cannot be reached or refuses this peer."""
        options, saved = self._options, self._options.saved
        if saved is not None:
            saved.load_(self.replica)
            self._options = replace(options, saved=None)  # it may be as large as the model, and mapped from a file
        transport = self._transport = await self._connect(options)
        self.addresses = transport.addresses
        self.protocol = Peer(
            me=transport.me,
            name=options.name,
            run_id=options.run.id,
            manifest_hash=options.run.manifest_hash,
            digests=self.replica.digests(),
            versions=None if saved is None else list(saved.versions),
            applied_tokens=0 if saved is None else saved.applied_tokens,
            trains=options.trains,
            holds=transport.reachable,
            min_peers=options.network.min_peers,
            newcomer=bool(transport.seeds),
            outer=self.replica.settings,
            tokens_per_step=options.run.tokens_per_step,
            device=options.device,
            payload_bytes=[self.replica.payload_numel(index) for index in range(len(self.replica.fragments))],
        )
        self.protocol.address_book.hear(
            transport.me, {transport.me: transport.addresses if transport.reachable else []}
        )
        transport.where = self.protocol.address_book.of
        self.advice = transport.advice
        if not transport.reachable:
            self.note("unreachable", advice=transport.advice or "swarm.reachable=no")
        if self.replica.settings.spot_check and self.checks.loss is None:
            self.note("unchecked", why="outer.spot_check: no data is here, so what this peer merges is not checked")
        self._client = BulkClient(transport, self.protocol, self.replica, self.traffic)
        self._server = BulkServer(self, ProbeServer(transport, self.protocol, self.now))
        self.rounds = Rounds(self, self._client)
        if saved is not None:
            self._restore(saved)
        await self._learn_terms()
        await transport.handle(BULK, self._serve)
        self._mesh = ControlMesh(transport, self)
        answered = await self._mesh.start()
        if self._refusal is not None:
            raise SwarmError(self._refusal)
        if transport.seeds and not answered:
            raise SwarmError(
                f"swarm.initial_peers={list(options.network.initial_peers)} answer, but no diloco peer of "
                f"run.id={options.run.id} is there"
            )
        self.spawn(transport.failed())
        self.spawn(self._heartbeat())
        if transport.seeds:
            self.spawn(self._get_acquainted())

    def _restore(self, saved: Saved) -> None:
        """What a checkpoint kept beside tensors and versions, which the node began with."""
        for fragment, term in enumerate(saved.terms):
            self.protocol.leases.see_term(fragment, term)
        self.protocol.accounts.restore_shares(saved.shares)
        self.protocol.accounts.restore_data_cursor((saved.units[0], union(saved.units[1])))
        self.rounds.restore(saved.applied)

    async def close(self) -> None:
        """End every stream and the transport. Can be called after a failed `start`."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)
        self.notify()
        if hasattr(self, "_mesh"):
            await self._mesh.close()
        if self._transport is not None:
            await self._transport.close()

    async def _get_acquainted(self) -> None:
        """A newcomer hears every peer that it can reach before it believes anything about who holds what."""

        def heard_all() -> bool:
            return self._mesh.settled() and len(self.protocol.members) > 0

        await self._until_or(heard_all, ACQUAINTANCE_S, "hellos of the swarm")
        self.do(self.protocol.discovered(self.now()))

    # -- what the mesh tells ------------------------------------------------------------------------------------------

    def greeted(self, peer: str, hello: Hello) -> None:
        self.do(self.protocol.connected(peer, hello, self.now()))

    def heard(self, peer: str, message: Message) -> None:
        if isinstance(message, Revocations):
            self.gate.hear(message)
            return
        self.do(self.protocol.heard(peer, message, self.now()))
        if peer in self.protocol.members:
            self.recorder.heard(self.protocol, peer, message, self.now())

    def offended(self, peer: str, why: str) -> None:
        self.do(self.protocol.offence(peer, why, self.now()))

    def lost(self, peer: str, why: str) -> None:
        self.do(self.protocol.lost(peer, self.now(), why))

    async def refused(self, peer: str, reason: str) -> None:
        assert self._transport is not None
        self.note("refused_us", peer=peer, why=reason)
        if peer not in self._transport.seeds and not self.gate.believes(peer):
            return
        if "manifest" in reason:
            try:
                differing = self._options.run.differences(await request_manifest(self._transport, peer))
                reason = f"the run there has other settings: {'; '.join(differing[:5])}; use the same"
            except (*BROKEN, DilocoError) as error:
                logger.debug("the manifest of %s could not be compared: %r", peer, error)
        self._refusal = f"the swarm refused this peer: {reason}"
        self.notify()

    def record(self) -> list[str]:
        return [self.protocol.name, *self.gate.evidence()]

    def named(self, records: Mapping[str, object]) -> None:
        self.recorder.named(self.protocol, records, self.now())
        for peer, record in records.items():
            self.gate.witness(peer, record)

    def objection(self, peer: str, hello: Hello) -> str | None:
        reason = self.gate.objection(peer, hello)
        if reason is not None:
            self.gate.refused(peer, reason)
        return reason

    # -- what it does by itself ---------------------------------------------------------------------------------------

    async def _heartbeat(self) -> None:
        last_record_at = -RECORD_PERIOD_S
        while True:
            traffic = (self.traffic.bytes_sent, self.traffic.bytes_received)
            self.do(self.protocol.heartbeat(self.now(), traffic))
            self._stand_by()
            self._ask_for_units()
            if self.now() - last_record_at >= RECORD_PERIOD_S:
                last_record_at = self.now()
                if self.protocol.leases.held_by(self.protocol.me):
                    self.spawn(self._store_leases())
                self.spawn(self._compare_revocations())
            self._put_out()
            await asyncio.sleep(self._options.network.heartbeat_s)

    def do(self, actions: list[Action]) -> None:
        """Carry out what the protocol asks for; long work becomes a task that reports back to the protocol."""
        for action in actions:
            match action:
                case Broadcast():
                    self._mesh.broadcast(action.message)
                    self.recorder.heard(self.protocol, self.protocol.me, action.message, self.now())
                case Disconnect():
                    self._mesh.disconnect(action.peer)
                case Note():
                    self.note(action.kind, **action.fields)
                case Hold():
                    self._take_over(action)
                    self.spawn(self._store_leases())
                case Release():
                    self.replica.release(action.fragment)
                    self.records.pop(action.fragment, None)
                case Merge():
                    self.spawn(self.rounds.merge(action.close))
                case Wake():
                    asyncio.get_running_loop().call_at(action.at, self._wake)
                case CatchUp():
                    self.spawn(self.rounds.catch_up(action.fragment, action.donors, action.outer))
        self._forget_records()
        self.notify()

    def _take_over(self, action: Hold) -> None:
        """A fragment that had another syncer goes on with the momentum that is known here, or with none."""
        fragment = action.fragment
        if action.term > 1:
            version, standby = self.protocol.versions[fragment], self.replica.standby.get(fragment)
            momentum = "kept" if fragment in self.replica.outer else "restarted"
            if standby is not None:
                momentum = "kept" if standby.version == version else "stale"
            self.note("takeover", fragment=fragment, term=action.term, version=version, momentum=momentum)
        self.replica.hold(fragment)

    def _stand_by(self) -> None:
        """Follow the outer state of the fragments that would come to this peer."""
        if not self.replica.can_stand_by:
            return
        wanted = self.protocol.backs_up()
        for fragment in self.replica.standby.keys() - wanted:
            self.replica.stand_down(fragment)
        versions = self.protocol.versions
        behind = {f for f, standby in self.replica.standby.items() if versions[f] - standby.version >= STALE_VERSIONS}
        for fragment in wanted - (self.replica.standby.keys() - behind) - self._standing_by:
            self._standing_by.add(fragment)
            self.spawn(self._begin_standby(fragment))

    async def _begin_standby(self, fragment: int) -> None:
        try:
            await self.rounds.stand_by(fragment)
        finally:
            self._standing_by.discard(fragment)

    def _ask_for_units(self) -> None:
        """When they run short, one request at a time; one that fails is made again at the next heartbeat."""
        if self.reserve.missing and not self._asking and not self._closed:
            self._asking = True
            self.spawn(self._fetch_units())

    async def _fetch_units(self) -> None:
        lease, me = self.protocol.leases.get(CONTROL_FRAGMENT), self.protocol.me
        wanted, has = min(self.reserve.missing, MAX_UNITS_WANTED), self.reserve.all[:MAX_UNIT_RANGES]
        try:
            if lease is None:
                return
            if lease.holder == me:
                granted = self.protocol.accounts.lease_units(me, wanted, has) or []
            else:
                granted = await self._client.request_units(lease.holder, wanted, has)
            self.reserve.add(granted)
            self.do(self.protocol.has_units(self.reserve.all, self.now()))
        except (*BROKEN, PayloadError) as error:
            logger.debug("no units were leased to this peer: %r", error)
        finally:
            self._asking = False
            self.notify()

    def _forget_records(self) -> None:
        """An update that every connected peer has adopted serves nobody any more; who comes later gets the state."""
        members = self.protocol.members.all()
        for fragment, record in list(self.records.items()):
            adopted = all(member.status.versions[fragment] >= record.header.version for member in members)
            if adopted and self._server.serving == 0:
                del self.records[fragment]

    async def enter(self, state: State) -> None:
        """Tell the swarm what this peer is doing."""
        self.do(self.protocol.enter(state, self.now()))

    def note(self, kind: str, **fields: object) -> None:
        """Hand one event to whoever keeps the log, and keep it for whoever watches."""
        self.recorder.note(kind, fields, self.now())
        self._on_event(kind, fields)

    async def observe(self) -> Observed:
        """What this peer knows of the swarm."""
        return self.recorder.snapshot(self.protocol, self.manifest_text, self.now())

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition that can change with any event.

        Raises `ConnectionError` when the node is closed meanwhile, and whatever made a task of the node fail.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            if condition():
                return
            if self._closed:
                raise ConnectionError("this node is closed")
            await self._changed.wait()

    async def _until_or(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        try:
            await within(timeout_s, self.until(condition))
        except asyncio.TimeoutError:
            culprits = [m.name for m in self.protocol.members.all()]
            self.note("gave_up_waiting", what=what, timeout_s=round(timeout_s, 1), peers=culprits)

    async def pause(self, timeout_s: float) -> None:
        """Wait for the next event, or for a while."""
        try:
            await within(timeout_s, self._changed.wait())
        except asyncio.TimeoutError:
            return

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _wake(self) -> None:
        if not self._closed:
            self.do(self.protocol.tick(self.now()))

    async def _serve(self, peer: str, reader: Reader, writer: Writer) -> None:
        await self._server.serve(Stream(peer, reader, writer, self.traffic))
        self._forget_records()
        self.notify()

    async def _store_leases(self) -> None:
        held = [[lease.fragment, lease.term] for lease in self.protocol.leases.held_by(self.protocol.me)]
        await self._store(LEASES, held)

    async def _store(self, kind: str, value: object) -> None:
        assert self._transport is not None
        try:
            key = f"{self.protocol.run_id}/{kind}"
            await self._transport.store(key, self.protocol.me, value, RECORD_LIFE_S)
        except BROKEN as error:
            logger.debug("the DHT did not take %s: %r", kind, error)

    async def _learn_terms(self) -> None:
        """Read the terms in the DHT, so that this peer's claims are above all that were made before."""
        assert self._transport is not None
        for record in (await self._transport.get(f"{self.protocol.run_id}/{LEASES}")).values():
            for fragment, term in leases_in(record):
                if fragment < len(self.protocol.versions):
                    self.protocol.leases.see_term(fragment, term)

    # -- admission ----------------------------------------------------------------------------------------------------

    def _revoked(self, revoked: Revocations) -> None:
        """A newer list: tell everybody, those on it too, before they are put out."""
        if hasattr(self, "_mesh"):
            self.note("revoked", number=revoked.number, token_ids=revoked.token_ids, peer_ids=revoked.peer_ids)
            self._mesh.broadcast(revoked)
            self.spawn(self._store(REVOKED, pack_revoked(revoked)))
            self._put_out()

    def _put_out(self) -> None:
        """Drop whoever may be in no longer; this peer too, if it is one of them."""
        for peer, reason in self.gate.expel().items():
            self._mesh.disconnect(peer)
            self.do(self.protocol.lost(peer, self.now(), reason))
        lapsed = self.gate.lapsed()
        if lapsed is not None and self._failure is None:
            self._failure = SwarmError(f"the swarm refused this peer: {lapsed}")
            self.notify()

    async def _compare_revocations(self) -> None:
        """The newest list in the DHT and the one here; for who was away when it was spread."""
        assert self._transport is not None
        if self.gate.admission is None:
            return
        try:
            records = await self._transport.get(f"{self.protocol.run_id}/{REVOKED}")
        except BROKEN as error:
            logger.debug("the DHT did not answer: %r", error)
            return
        for record in records.values():
            revoked = revoked_in(record)
            if revoked is not None:
                self.gate.hear(revoked)
        if self.gate.revocations is not None:
            await self._store(REVOKED, pack_revoked(self.gate.revocations))

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            logger.debug("a task of the swarm node failed", exc_info=self._failure)
            self.notify()
