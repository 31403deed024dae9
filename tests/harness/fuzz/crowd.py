"""Swarms of production peers with tiny models, over a simulated network; the fuzz drives them.

    Crowd -> the life of a peer (a thread in lockstep) -> Attachment -> Node -> SimTransport ->
    Network

A peer does what the loop in the README does. All that acts is production code; time, network and
faults are simulated.
"""

from __future__ import annotations

import asyncio
import copy
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from diloco.admission import Admission, RunKey, Token, issue
from diloco.admission.keys import new_key
from diloco.attach.swarm import Attachment, Swarm
from diloco.config import OuterConfig
from diloco.errors import SwarmError
from diloco.outer.digest import digest_of
from diloco.outer.fragments import partition
from diloco.outer.payloads import Codec
from diloco.outer.replica import Replica
from diloco.protocol import Role
from diloco.sim.link import PeerLink
from diloco.sim.lockstep import Lockstep
from diloco.sim.network import Network
from diloco.sim.peers import SimRuntime
from diloco.sim.virtual_time import DeadlockError, VirtualLoop
from diloco.swarm.node.node import Connect, Node
from diloco.swarm.node.options import NodeOptions
from diloco.swarm.node.saved import Saved
from diloco.swarm.wire.gate import Gate
from diloco.swarm.wire.streams import BULK
from diloco.swarm.wire.transport import Handler, Transport
from tests.harness.fuzz.faults import Scenario
from tests.harness.fuzz.lives import Life, LifeCheckpoint, PeerSpec, Violation
from tests.harness.fuzz.store import SimStore, StoreSpec

# of the outer steps, where a schedule says no others
RATES = {"lr": 0.7, "momentum": 0.9, "momentum_warmup": 0}
TOKENS_PER_STEP = 8
SEQUENCES_PER_STEP = 2
MAX_SEEDS = 3
REJOIN_S = 3.0  # before a peer that could not join tries again, as its owner would
CHECKPOINTS = 4  # that are kept
JOINS = 20  # tries after which a peer that cannot join is wrong


class Crowd:
    """Peers by name, and what befalls them.

    Args:
        loop: where virtual time passes.
        seed: of gradients, losses and everything else that is drawn.
        outer: settings of the outer step, as `Swarm` takes them.
        elements: of each fragment of the model.
        units: whether sequences are leased to the peers.
        loss: probability that a bulk stream breaks.
        closed: whether only invited peers take part; every peer has an invitation.
        uninvited: peers without one, which contribute: the run is public.
        store: through which all exchange, instead of streams.
    """

    def __init__(
        self,
        loop: VirtualLoop,
        seed: int,
        outer: Mapping[str, Any],
        *,
        elements: int = 20,
        units: bool = False,
        heartbeat_s: float = 2.0,
        loss: float = 0.0,
        inner_state: str = "donor",
        closed: bool = False,
        uninvited: Collection[str] = (),
        store: StoreSpec | None = None,
    ) -> None:
        self.loop, self.seed, self.outer = loop, seed, {**RATES, **outer}
        self.network = Network(loop, seed, loss, {BULK})
        self.store = None if store is None else SimStore(loop, store, seed)
        self.with_streams: Collection[str] = ()  # in spite of a store
        self.with_both: Collection[str] = ()  # of these
        self.lives: dict[str, Life] = {}  # the newest of each peer
        self.started: list[Life] = []
        self.ended: list[Life] = []
        self.failures: list[str] = []  # of lives
        self.story: list[str] = []
        self.goal = 10**9  # outer steps after which training ends
        self.rests = False  # nobody makes inner steps, and all stay
        # whether any peers could not reach each other for a while, or began without each other
        self.torn = False
        self.on_life: Callable[[Life], object] = lambda life: None  # its node is there
        self.on_note: Callable[[Life, str, dict[str, Any]], None] = lambda *event: None
        self.on_end: Callable[[Life], None] = lambda life: None
        self.tell: Callable[[str], None] = lambda line: None
        self._elements, self._units = elements, units
        self._heartbeat_s, self._inner_state = heartbeat_s, inner_state
        self._key = RunKey(new_key()) if closed or uninvited else None
        self._uninvited = uninvited
        self._tokens: dict[str, Token] = {}
        self._numbers = 0
        self._joins: Counter[str] = Counter()  # tries that failed
        loop.set_exception_handler(self._uncaught)

    @classmethod
    def of(cls, loop: VirtualLoop, plan: Scenario) -> Self:
        """A swarm that is set as a scenario says."""
        return cls(
            loop,
            plan.seed,
            dict(plan.outer),
            units=plan.units,
            heartbeat_s=plan.heartbeat_s,
            loss=plan.loss,
            inner_state="cold" if plan.cold else "donor",
            closed=plan.closed,
            store=plan.store,
        )

    # -- what happens ------------------------------------------------------------------------------

    def start(
        self, member: PeerSpec, min_peers: int = 1, checkpoint: LifeCheckpoint | None = None
    ) -> Life:
        """A process of this peer starts, and joins through the peers that are there."""
        self._numbers += 1
        others = [life for life in self.living() if life.name != member.name]
        known = [life.name for life in others if life.ready]
        # they live, or may come back from their checkpoints
        elsewhere = self.lives.keys() - {member.name}
        self.torn = self.torn or bool(elsewhere and not known and min_peers == 1)
        before = self.lives.get(member.name)
        fresh = not before or (before.fresh and (before.sync is None or before.sync.tokens == 0))
        saved = [checkpoint] if checkpoint is not None else []
        flips = before.flips if before is not None and saved else 0
        seeds = known[:MAX_SEEDS]
        life = Life(member, self._numbers, seeds, min_peers, saved, flips=flips, fresh=fresh)
        self.lives[member.name] = life
        self.started.append(life)
        rate, offset_s = member.clock
        if (rate, offset_s) != (1.0, 0.0):
            self.loop.set_clock(life.owner, rate, offset_s)
        with self.loop.owned_by(life.owner):
            life.task = self.loop.create_task(self._live(life), name=life.owner)
        life.task.add_done_callback(lambda _: self._over(life))
        return life

    def crash(self, name: str) -> None:
        """SIGKILL: everything of the peer is gone at once."""
        life = self.lives[name]
        life.ended = life.ended or "killed"
        self.network.crash(name)
        self.loop.kill(life.owner)

    def leave(self, name: str) -> None:
        """Ctrl+C: the peer hands its fragments over and goes."""
        life = self.lives[name]
        life.leaving = True
        if life.sync is not None:
            life.sync.interrupt()
        elif life.node is not None:
            life.node.context.tasks.notify()

    def violation_of(self, story: Coroutine[Any, Any, None]) -> str | None:
        """Play a story; what is violated in it."""
        try:
            self.loop.run_until_complete(story)
        except (Violation, DeadlockError) as error:
            return str(error)
        return None

    def living(self) -> list[Life]:
        """Lives that go on, by name."""
        return [life for _, life in sorted(self.lives.items()) if not life.ended]

    def members(self) -> list[Life]:
        """Lives whose node is in the swarm and stays there."""
        return [life for life in self.living() if life.ready and not life.leaving]

    def all_ready(self) -> bool:
        return all(life.ready for life in self.living())

    def note(self, name: str, text: str) -> None:
        """One line of the story."""
        self.story.append(f"{self.loop.seconds:9.3f} {name:5} {text}")
        self.tell(self.story[-1])

    async def until(
        self, condition: Callable[[], object], patience_s: float, what: str, every_s: float = 0.25
    ) -> None:
        """Wait until something is so; `Violation` when that is in vain, or a life has failed."""
        deadline = self.loop.seconds + patience_s
        while not condition():
            if self.failures:
                raise Violation("; ".join(self.failures))
            if self.loop.seconds > deadline:
                states = {life.owner: life.state for life in self.living()}
                raise Violation(f"waited {patience_s:g} s until {what}, in vain: {states}")
            await asyncio.sleep(every_s)

    # -- what is learned ---------------------------------------------------------------------------

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The inner optimizer of every peer."""
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)

    def gradient(self, life: Life, w: Tensor, r: random.Random) -> Tensor:
        """The gradient of one inner step: noise, which teaches nothing and moves everything."""
        return torch.tensor([r.gauss(0.0, 1.0) for _ in range(w.numel())])

    # -- a life ------------------------------------------------------------------------------------

    async def _live(self, life: Life) -> None:
        if life.member.trains:
            lockstep: Lockstep[None] = Lockstep(lambda: self._train(life, lockstep), life.owner)
            await lockstep.run()
        else:
            await self._host(life)

    def _over(self, life: Life) -> None:
        assert life.task is not None
        error = None if life.task.cancelled() else life.task.exception()
        self.ended.append(life)
        if life.ended:
            return
        if isinstance(error, SwarmError) and not life.began and self._joins[life.name] < JOINS:
            life.ended = f"could not join: {error}"
            self._joins[life.name] += 1
            self.loop.at(self.loop.seconds + REJOIN_S, self._again, life)
        elif error is not None:
            life.ended = f"failed: {error!r}"
            self.failures.append(f"{life.name} {life.ended}")
        else:
            life.ended = "left" if life.leaving else "done"
        self.note(life.name, life.ended)
        if error is not None:
            self.network.crash(life.name)
        self.on_end(life)

    def _again(self, life: Life) -> None:
        if self.lives[life.name] is life:
            self.start(life.member, checkpoint=next(iter(life.checkpoints), None))

    def _train(self, life: Life, lockstep: Lockstep[None]) -> None:
        """In the peer's thread: the loop of the README, with random gradients."""
        r = random.Random(f"{self.seed} {life.owner}")
        model = nn.ParameterDict({"w": nn.Parameter(self._parameters())})
        optimizer = self.optimizer(model)
        begins_at = next(iter(life.checkpoints), None)
        saved = None if begins_at is None else begins_at.saved
        runtime = SimRuntime(self.loop, lockstep, self._connect(life), self.seed, self._gate(life))
        runtime.node_type = self._node_type(life)
        life.sync = sync = self._swarm(life, runtime).attach(model, optimizer, saved=saved)
        if begins_at is not None:
            sync.steps, sync.tokens, sync.discarded_tokens = begins_at.counters
            optimizer.load_state_dict(dict(begins_at.inner))
        ahead = SEQUENCES_PER_STEP * self.outer["sync_every"]
        leases = sync.lease_units(ahead) if self._units else None
        if life.leaving:
            return
        with sync:
            with sync.checkpointing() as live:
                life.checkpoints = life.checkpoints or [self._checkpoint(sync, live, optimizer)]
            while not sync.interrupted and sync.version < self.goal:
                if self.rests or life.hangs:
                    life.at_rest = self.rests
                    lockstep.call(asyncio.sleep(1.0))
                    continue
                lockstep.call(asyncio.sleep(life.member.step_s * r.uniform(0.9, 1.1)))
                if leases is not None:
                    leases.take(SEQUENCES_PER_STEP)
                w = model["w"]
                w.grad = self.gradient(life, w, r)
                sync.count(TOKENS_PER_STEP)
                optimizer.step()
                life.began = True
                if sync.exchanged and not sync.interrupted:
                    written = self._boundary(life, sync, optimizer, lockstep)
                    life.checkpoints = [*life.checkpoints[1 - CHECKPOINTS :], written]

    def _boundary(
        self, life: Life, sync: Attachment, optimizer: Any, lockstep: Lockstep[None]
    ) -> LifeCheckpoint:
        """What a trainer does at an outer step: it evaluates, and writes a checkpoint."""
        flips = life.flips
        with sync.checkpointing() as live:
            if life.member.boundary_s:
                begun = [digest_of(anchor) for anchor in live.anchors]
                lockstep.call(asyncio.sleep(life.member.boundary_s))
            written = self._checkpoint(sync, live, optimizer)
        unhurt = life.member.boundary_s and life.flips == flips
        if unhurt and begun != [digest_of(anchor) for anchor in written.saved.anchors]:
            self.failures.append(f"the checkpoint of {life.name} moved while it was written")
        return written

    def _checkpoint(self, sync: Attachment, live: Saved, optimizer: Any) -> LifeCheckpoint:
        # in memory of its own: that of a running node moves on
        anchors, outer, residuals = copy.deepcopy((live.anchors, live.outer, live.residuals))
        saved = replace(live, anchors=anchors, outer=outer, residuals=residuals)
        counters = (sync.steps, sync.tokens, sync.discarded_tokens)
        return LifeCheckpoint(saved, counters, copy.deepcopy(optimizer.state_dict()))

    async def _host(self, life: Life) -> None:
        """A peer that holds fragments, as `diloco host` does."""
        parameters = {"w": self._parameters()}
        outer = OuterConfig.parse({"method": "diloco", **self.outer})
        fragments = partition({"w": parameters["w"].numel()}, outer.fragments, outer.pattern)
        replica = Replica(parameters, fragments, outer)
        replica.rng = random.Random(f"{self.seed} {life.owner}")
        swarm = self._swarm(life)
        options = swarm.options(parameters, trains=False)
        options = replace(options, gate=self._gate(life), wall=1e9 + self.loop.time())
        connect, on_event = self._connect(life), partial(self._on_event, life)
        node = await self._node_type(life).open(options, replica, on_event, connect)
        try:
            life.ready = True
            await node.context.tasks.until(lambda: life.leaving)
            await node.leave(finished=False)
        finally:
            await node.close()

    def _gate(self, life: Life) -> Gate:
        """The peer's own admission; in all its lives it shows the same invitation."""
        if self._key is None:
            return Gate()
        if life.name in self._uninvited:
            return Gate(Admission(None, public=True, run=(self._key.public, "run")))
        role: Role = "worker" if life.member.trains else "host"
        if life.name not in self._tokens:
            self._tokens[life.name] = issue(self._key, "run", role, int(time.time()) + 86400)
        return Gate(Admission(self._tokens[life.name], public=bool(self._uninvited)))

    def _parameters(self) -> Tensor:
        return torch.arange(float(self._elements * self.outer.get("fragments", 1))) / 10

    def _node_type(self, life: Life) -> type[Node]:
        class Watched(Node):
            async def _join(self) -> None:
                if life.member.lie != 1.0:
                    self.replica.up = lying(self.replica.up, life.member.lie)
                life.node = self
                crowd.on_life(life)
                await super()._join()

        crowd = self
        return Watched

    def link(self, life: Life) -> PeerLink:
        """The link of a peer to the network."""
        return PeerLink(latency_s=life.member.latency_s)

    def _connect(self, life: Life) -> Connect:
        async def connect(options: NodeOptions) -> Transport:
            link = self.link(life)
            streams = self.store is None or life.name in self.with_streams
            seeds = [seed for seed in life.seeds if seed in self.with_streams or not self.store]
            transport = self.network.join(life.name, seeds if streams else [], link, options.gate)
            if life.name not in self.with_streams or life.name in self.with_both:
                transport.store = self.store
            if not streams and self.store is not None:
                transport.addresses, transport.handle = [self.store.url], deaf  # type: ignore
                transport.announced = nobody  # type: ignore[method-assign]
            options.gate.instance = f"{life.number:016x}"
            transport.reachable = life.member.reachable
            return transport

        return connect

    def _on_event(self, life: Life, kind: str, fields: dict[str, object]) -> None:
        if not life.ended:
            self.note(life.name, f"{kind} {fields}")
            self.on_note(life, kind, fields)

    def _swarm(self, life: Life, runtime: SimRuntime | None = None) -> Swarm:
        def on_ready(address: str) -> None:
            life.ready = True

        return Swarm(
            run_id="run",
            name=life.name,
            identity=Path(life.name),
            min_peers=life.min_peers,
            heartbeat_s=self._heartbeat_s,
            inner_state=self._inner_state,
            on_event=partial(self._on_event, life),
            on_ready=on_ready,
            runtime=runtime,
            quiet=True,
            **self.outer,
        )

    def _uncaught(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """An exception that nobody took."""
        error = context.get("exception")
        if not isinstance(error, asyncio.CancelledError):
            self.failures.append(f"nobody took {error!r} ({context.get('message')})")


async def deaf(protocol: str, handler: Handler) -> None:
    """The streams that others open to a peer that exchanges through a store only."""


async def nobody() -> dict[str, list[str]]:
    """The addresses of peers that exchange through a store only."""
    return {}


def lying(honest: Codec, factor: float) -> Codec:
    """A codec that encodes values times a factor, and reads what others send as they sent it."""
    liar = copy.copy(honest)
    liar.encode = lambda x, out: honest.encode(x * factor, out)  # type: ignore[method-assign]
    return liar
