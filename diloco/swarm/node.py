"""The swarm node: protocol core, tensors and hivemind's streams together, in one thread beside the training loop.

The training loop calls `start`, `begin`, `exchange`, `leave` and `close`; each blocks its caller only. Everything else
happens in the node's event loop, where the protocol core is driven: nothing in it needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P
from hivemind.utils.timed_storage import get_dht_time

from diloco.errors import DilocoError, SwarmError
from diloco.outer.replica import Replica
from diloco.protocol.actions import Action, Broadcast, CatchUp, Disconnect, Hold, Merge, Note, Release
from diloco.protocol.messages import Message, State
from diloco.protocol.peer import Peer
from diloco.swarm.bulk import BULK, BulkClient, FetchedRecord, request_manifest
from diloco.swarm.control import RECORD_LIFE_S, RECORD_PERIOD_S, UNREACHABLE, ControlMesh
from diloco.swarm.daemon import open_daemon, peer_id_of, read_addresses, watch
from diloco.swarm.memory import give_back
from diloco.swarm.rounds import Exchanged, Rounds
from diloco.swarm.serve import BulkServer
from diloco.swarm.streams import Stream, Traffic

__all__ = ["Exchanged", "Node", "NodeOptions"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
RETRY_S = 1.0  # before the same syncer is tried again after its stream broke
LEAVE_FLOOR_S = 10.0
ACQUAINTANCE_S = 20.0
CLOSE_S = 5.0
ADDRESS_WAIT_S = 120.0


@dataclass(frozen=True)
class NodeOptions:
    """Peer-local settings of a node, and the run it belongs to."""

    run_id: str
    manifest_hash: str
    manifest_text: str
    name: str
    initial_peers: Sequence[str]
    listen: Sequence[str]
    announce: Sequence[str]
    identity_path: Path
    min_peers: int = 1
    heartbeat_s: float = 1.0
    trains: bool = True
    versions: Sequence[int] | None = None
    terms: Sequence[int] | None = None
    applied_tokens: int = 0
    explain: Callable[[str], list[str]] = field(
        default=lambda text: []
    )  # manifest text of another peer -> differing keys


class Node:
    """One peer's presence in the swarm.

    On failure: peers that vanish are dealt with by the protocol and become events; a swarm that cannot be reached or
    that refuses this peer raises `SwarmError` from `start`; a bug in the node's thread is re-raised in the caller.
    """

    protocol: Peer

    def __init__(
        self, options: NodeOptions, replica: Replica, on_event: Callable[[str, dict[str, object]], None]
    ) -> None:
        self.replica = replica
        self.manifest_text = options.manifest_text
        self.records: dict[int, FetchedRecord] = {}
        self.traffic = Traffic()
        self.addresses: list[str] = []
        self._options = options
        self._on_event = on_event
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="swarm", daemon=True)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._interrupted = False
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._refusal: str | None = None
        self._p2p: P2P | None = None
        self._dht: DHTNode | None = None

    # -- called by the training loop ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen, connect and learn where the swarm is; `SwarmError` when it cannot be reached or refuses this peer."""
        self._thread.start()
        self._call(self._start())

    def begin(self, sync_every: int, interrupted: Callable[[], bool]) -> int:
        """Wait until this peer agrees with the swarm, then enter `training`.

        Returns the inner steps of the first round; 0 when `interrupted` said so first. The local parameters are the
        anchors' afterwards.
        """
        while not interrupted():
            steps = self._call(self._begin(sync_every, patience_s=0.2))
            if steps:
                return steps
        return 0

    def exchange(self, steps: int, tokens: int, sync_every: int) -> Exchanged | None:
        """Contribute the inner steps since the last exchange, adopt the updates, and load them into the parameters.

        A peer that came too late for its round first gets in step with the others again. Returns None when `interrupt`
        ended it.
        """
        give_back()  # where gradients were, there is room now
        outcome = self._call(self._exchange(steps, tokens, sync_every))
        give_back()
        return outcome

    def interrupt(self) -> None:
        """End the waiting of `exchange`; may be called from a signal handler, before and after `start` too."""
        self._loop.call_soon_threadsafe(self._interrupt)

    @property
    def num_peers(self) -> int:
        """Connected peers, this one included."""
        return 1 + (len(self.protocol.members) if hasattr(self, "protocol") else 0)

    def enter(self, state: State) -> None:
        """Tell the swarm what this peer is doing."""
        self._call(self._enter(state))

    def progress(self, inner_step: int, target_steps: int, steps_per_s: float, tokens: int) -> None:
        """Figures for the next heartbeat; does not block."""
        self._loop.call_soon_threadsafe(self.protocol.progress, inner_step, target_steps, steps_per_s, tokens)

    def leave(self, finished: bool) -> None:
        """Say goodbye: hand fragments over, or, at the end of the run, let everybody have the last update first."""
        self._call(self._leave(finished))

    def close(self) -> None:
        """End every stream, the daemon and the thread. Can be called twice, and after a failed `start`."""
        if not self._thread.is_alive():
            return
        try:
            self._call(self._close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=LEAVE_FLOOR_S)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    # -- start and end ------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        options = self._options
        seeds = await read_addresses(options.initial_peers, ADDRESS_WAIT_S)
        self._p2p, self._dht = await open_daemon(seeds, options.listen, options.announce, options.identity_path)
        self.protocol = Peer(
            me=self._p2p.peer_id.to_base58(),
            name=options.name,
            run_id=options.run_id,
            manifest_hash=options.manifest_hash,
            digests=self.replica.digests(),
            versions=None if options.versions is None else list(options.versions),
            applied_tokens=options.applied_tokens,
            trains=options.trains,
            min_peers=options.min_peers,
            newcomer=bool(seeds),
        )
        self.addresses = [str(address) for address in await self._p2p.get_visible_maddrs()]
        self._client = BulkClient(self._p2p, self.protocol, self.replica, self.traffic)
        self._server = BulkServer(self)
        self._rounds = Rounds(self, self._client)
        await self._learn_terms()
        await self._p2p.add_binary_stream_handler(BULK, self._serve)
        self._mesh = ControlMesh(
            self._p2p,
            self._dht,
            self.protocol,
            self.traffic,
            on_hello=lambda peer, hello: self.do(self.protocol.connected(peer, hello, self.now())),
            on_message=self._heard,
            on_lost=lambda peer, why: self.do(self.protocol.lost(peer, self.now(), why)),
            on_refused=self._refused,
            on_call_ended=self.notify,
        )
        answered = await self._mesh.start([peer_id_of(seed) for seed in seeds])
        if self._refusal is not None:
            raise SwarmError(self._refusal)
        if seeds and not answered:
            raise SwarmError(
                f"swarm.initial_peers={seeds} answer, but no diloco peer of run.id={options.run_id} is there"
            )
        self.spawn(watch(self._p2p))
        self.spawn(self._heartbeat())
        if seeds:
            self.spawn(self._get_acquainted())

    async def _get_acquainted(self) -> None:
        """A newcomer hears every peer that it can reach before it believes anything about who holds what."""

        def heard_all() -> bool:
            return self._mesh.settled() and len(self.protocol.members) > 0

        await self._until_or(heard_all, ACQUAINTANCE_S, "hellos of the swarm")
        self.do(self.protocol.acquainted(self.now()))

    async def _refused(self, peer: str, reason: str) -> None:
        assert self._p2p is not None
        self.note("refused_us", peer=peer, why=reason)
        if "manifest" in reason:
            try:
                differing = self._options.explain(await request_manifest(self._p2p, peer))
                reason = f"the run there has other settings: {'; '.join(differing[:5])}; use the same"
            except (*UNREACHABLE, DilocoError) as error:
                logger.debug("the manifest of %s could not be compared: %r", peer, error)
        self._refusal = f"the swarm refused this peer: {reason}"
        self.notify()

    async def _leave(self, finished: bool) -> None:
        await self._enter("done" if finished else "leaving")
        if finished:

            def others_done() -> bool:
                states = [m.status.state for m in self.protocol.members.all() if m.trains]
                return all(state in ("leaving", "done") for state in states)

            await self._until_or(
                others_done, LEAVE_FLOOR_S + 3 * self._rounds.longest_exchange_s, "the others to finish"
            )
        else:

            def handed_over() -> bool:
                others = [m for m in self.protocol.members.all() if m.holds]
                able = any(m.status.state not in ("leaving", "done") for m in others)
                return not able or not self.protocol.leases.held_by(self.protocol.me)

            await self._until_or(
                handed_over, LEAVE_FLOOR_S + 3 * self._rounds.longest_exchange_s, "fragments to be taken over"
            )
        await self._until_or(lambda: self._server.serving == 0, LEAVE_FLOOR_S, "peers to read the last update")

    async def _close(self) -> None:
        self._closed = True
        await self._end(list(self._tasks))
        self.notify()
        if hasattr(self, "_mesh"):
            await self._mesh.close()
        for part in (self._dht, self._p2p):
            if part is not None:
                await self._end([self._loop.create_task(part.shutdown())], cancel=False)
        remains = asyncio.all_tasks() - {asyncio.current_task()}  # hivemind's own, which it leaves pending
        await self._end(list(remains))
        await self._loop.shutdown_default_executor()

    async def _end(self, tasks: list[asyncio.Task[Any]], cancel: bool = True) -> None:
        """End tasks, but not at any price: what waits for a daemon that died does not even take a cancellation."""
        for task in tasks if cancel else ():
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)

    async def _enter(self, state: State) -> None:
        self.do(self.protocol.enter(state, self.now()))

    async def _begin(self, sync_every: int, patience_s: float) -> int:
        if self._refusal is not None:
            raise SwarmError(self._refusal)
        if not self.protocol.may_train():
            try:
                await asyncio.wait_for(self.until(self.protocol.may_train), patience_s)
            except asyncio.TimeoutError:
                return 0
        steps = self.protocol.first_steps(sync_every)
        await self._enter("training")
        await self._rounds.load()
        return steps

    def _interrupt(self) -> None:
        self._interrupted = True
        self.notify()

    async def _exchange(self, steps: int, tokens: int, sync_every: int) -> Exchanged | None:
        exchange = self._loop.create_task(self._exchange_and_load(steps, tokens, sync_every))
        exchange.add_done_callback(lambda _: self.notify())
        await self.until(lambda: exchange.done() or self._interrupted)
        if not exchange.done():
            exchange.cancel()
            await asyncio.wait({exchange})
        return None if exchange.cancelled() else exchange.result()

    async def _exchange_and_load(self, steps: int, tokens: int, sync_every: int) -> Exchanged:
        outcome = await self._rounds.exchange(steps, tokens)
        if not self.protocol.in_step(self.now()):
            self.note("out_of_step", version=outcome.version)
            begun_at = self.now()
            await self._enter("starting")
            await self.until(self.protocol.may_train)
            outcome = replace(outcome, next_steps=self.protocol.first_steps(sync_every))
            outcome.seconds.wait += self.now() - begun_at
        begun_at = self.now()
        await self._rounds.load()
        outcome.seconds.outer += self.now() - begun_at
        return outcome

    async def _heartbeat(self) -> None:
        last_record_at = -RECORD_PERIOD_S
        while True:
            self._mesh.broadcast(self.protocol.status())
            self.do(self.protocol.tick(self.now()))
            if self.now() - last_record_at >= RECORD_PERIOD_S:
                last_record_at = self.now()
                for lease in self.protocol.leases.held_by(self.protocol.me):
                    self.spawn(self._store_lease(lease.fragment, lease.term))
            await asyncio.sleep(self._options.heartbeat_s)

    # -- the protocol's actions ---------------------------------------------------------------------------------------

    def do(self, actions: list[Action]) -> None:
        """Carry out what the protocol asks for; long work becomes a task that reports back to the protocol."""
        for action in actions:
            match action:
                case Broadcast():
                    self._mesh.broadcast(action.message)
                case Disconnect():
                    self._mesh.disconnect(action.peer)
                case Note():
                    self.note(action.kind, **action.fields)
                case Hold():
                    self.replica.hold(action.fragment)
                    self.spawn(self._store_lease(action.fragment, action.term))
                case Release():
                    self.replica.release(action.fragment)
                    self.records.pop(action.fragment, None)
                case Merge():
                    self.spawn(self._rounds.merge(action.close))
                case CatchUp():
                    self.spawn(self._rounds.catch_up(action.fragment, action.donors, action.outer))
        self._forget_records()
        self.notify()

    def _forget_records(self) -> None:
        """An update that every connected peer has adopted serves nobody any more; who comes later gets the state."""
        members = self.protocol.members.all()
        for fragment, record in list(self.records.items()):
            adopted = all(member.status.versions[fragment] >= record.header.version for member in members)
            if adopted and self._server.serving == 0:
                del self.records[fragment]

    # -- small things -------------------------------------------------------------------------------------------------

    def note(self, kind: str, **fields: object) -> None:
        """Hand one event to whoever keeps the log."""
        self._on_event(kind, fields)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition that can change with any event.

        Raises `ConnectionError` when the node is closed meanwhile, and whatever made a task of the node fail.
        """
        while not condition():
            if self._failure is not None:
                raise self._failure
            if self._closed:
                raise ConnectionError("this node is closed")
            await self._changed.wait()

    async def _until_or(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        try:
            await asyncio.wait_for(self.until(condition), timeout_s)
        except asyncio.TimeoutError:
            culprits = [m.name for m in self.protocol.members.all()]
            self.note("gave_up_waiting", what=what, timeout_s=round(timeout_s, 1), peers=culprits)

    async def pause(self, timeout_s: float) -> None:
        """Wait for the next event, or for a while."""
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except asyncio.TimeoutError:
            return

    def notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _heard(self, peer: str, message: Message) -> None:
        self.do(self.protocol.heard(peer, message, self.now()))

    async def _serve(self, info: Any, reader: Any, writer: Any) -> None:
        await self._server.serve(Stream(info.peer_id.to_base58(), reader, writer, self.traffic))
        self._forget_records()
        self.notify()

    async def _store_lease(self, fragment: int, term: int) -> None:
        assert self._dht is not None
        value, life = [self.protocol.me, term], get_dht_time() + RECORD_LIFE_S
        try:
            await self._dht.store(f"{self.protocol.run_id}/leases", value, life, subkey=str(fragment))
        except UNREACHABLE as error:
            logger.debug("the DHT did not take the lease of fragment %d: %r", fragment, error)

    async def _learn_terms(self) -> None:
        """Terms from the checkpoint and the DHT, so that a claim of ours is above any that was made."""
        assert self._dht is not None
        for fragment, term in enumerate(self._options.terms or ()):
            self.protocol.leases.see_term(fragment, term)
        found = await self._dht.get(f"{self.protocol.run_id}/leases", latest=True)
        records = found.value if found is not None and isinstance(found.value, dict) else {}
        for fragment in range(len(self.protocol.versions)):
            record = records.get(str(fragment))
            if record is not None and isinstance(record.value, list | tuple) and len(record.value) == 2:
                term = record.value[1]
                if isinstance(term, int) and 0 < term < 2**62:
                    self.protocol.leases.see_term(fragment, term)

    def now(self) -> float:
        return self._loop.time()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failure = task.exception()
            logger.debug("a task of the swarm node failed", exc_info=self._failure)
            self.notify()
