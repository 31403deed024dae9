"""Thousands of peers on a quadratic, without a model: the production protocol objects, one heap of events, one core.

Every peer minimises |x - t_i|^2 / 2 for a target t_i of its own by noisy gradient steps, in closed form. What is
synchronised when, from which base, and what is refused is decided by `Schedule`, `Exchange` and `Syncer`; their
answers travel with a fixed delay. All peers share one view of the membership, so nothing here is about gossip.

    train -> due -> send -> (delay) -> offer, poll -> close -> outer step -> (delay) -> record -> adopt -> train
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from diloco.config import Config
from diloco.errors import SwarmError
from diloco.outer.digest import anchor_digest, fragment_digest, part_digests
from diloco.outer.optimizer import delayed_nesterov_, nesterov_
from diloco.outer.rates import dylu_steps
from diloco.protocol.exchange import Exchange, Step
from diloco.protocol.fragment import Lease
from diloco.protocol.membership import Member
from diloco.protocol.messages.control import Status
from diloco.protocol.rendezvous import assign
from diloco.protocol.schedule import Due, Schedule
from diloco.protocol.states import State
from diloco.protocol.syncer import Close, Syncer
from diloco.sim import events
from diloco.sim.events import Event
from diloco.train.clock import finished

__all__ = ["Toy", "ToyPeer"]

DIMENSIONS = 16  # of a fragment
RATE = 0.05  # of an inner step, of the way to the peer's target
SPREAD, NOISE = 1.0, 0.1  # of the targets around their mean, and of an inner step
RETRY_S = 1.0


class _ToyMember(Member):
    """Nobody stalls: a peer computes, or it is gone and no member any more."""

    def stalled(self, now: float, progress_at: float = 0.0) -> bool:
        return False


@dataclass
class ToyPeer:
    """One life of a peer; `versions` are of its anchors, `loaded` of what its parameters started from."""

    index: int
    name: str
    step_s: float
    schedule: Schedule
    local: Tensor  # (F, D)
    base: Tensor  # (F, D), the anchors that the pseudo-gradients are relative to
    target: Tensor  # (F, D)
    versions: list[int]
    loaded: list[int]
    began_at: float
    applied_tokens: int = 0
    steps: int = 0
    discarded_tokens: int = 0
    blocked: set[int] = field(default_factory=set)
    flights: dict[int, tuple[Exchange, Tensor]] = field(default_factory=dict)
    arrived: dict[int, tuple[int, Tensor]] = field(default_factory=dict)  # adopted when the schedule says so
    sent_steps: list[int] = field(default_factory=list)
    segment: tuple[int, float] = (0, 0.0)  # position in the cycle, and when it was there
    ended_at: float | None = None
    leaving: bool = False

    @property
    def version(self) -> int:
        return self.loaded[0]

    @property
    def inner_step(self) -> int:
        return self.schedule.inner_step


class Toy:
    """The whole swarm. `run` returns when every peer has ended; `on_version` hears of each version of fragment 0.

    Attributes:
        now: virtual seconds. anchors: (F, D) fp32. versions: of the fragments. applied_tokens: the swarm clock.
        peers: all lives so far. log: what happened, (seconds, kind, peer).
    """

    def __init__(self, config: Config, on_version: Callable[[Toy], None] = lambda toy: None) -> None:
        self.config, self.outer, self.on_version = config, config.outer, on_version
        count, self.generator = self.outer.fragments, torch.Generator().manual_seed(config.run.seed)
        self.random = random.Random(config.run.seed)
        self.now = 0.0
        self.anchors = torch.zeros(count, DIMENSIONS)
        self.optimum = self._normal()
        self.masters, self.momenta, self.buffers = (torch.zeros(count, DIMENSIONS) for _ in range(3))
        self.versions, self.applied_tokens, self.merges = [0] * count, 0, 0
        self.peers: list[ToyPeer] = []
        self.log: list[tuple[float, str, str]] = []
        self.live: dict[str, ToyPeer] = {}
        self.members: dict[str, Member] = {}
        self.leases: list[Lease] = []
        self.syncers: list[Syncer] = []
        self._deltas: list[dict[str, Tensor]] = [{} for _ in range(count)]
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._pushed = 0
        sim = config.sim
        nbytes = 4.0 * DIMENSIONS
        self.delay_s = sim.latency_s + (0.0 if sim.bandwidth is None else nbytes / sim.bandwidth)
        self._tokens_per_step = config.inner.batch_size * config.data.sequence_length

    def run(self) -> None:
        """From the start to the end of the budget; `SwarmError` when everybody has crashed or left before."""
        sim, count = self.config.sim, self.config.local.peers
        planned = events.parse(sim.events, count)
        for index in events.starters(planned, count):
            self._join(index)
        for fragment in range(self.outer.fragments):
            self.leases.append(Lease(fragment, "", 0, 0, self._digest(fragment)))
            self.syncers.append(Syncer(fragment, 1, 0, self.outer))
        self._hold(range(self.outer.fragments))
        for event in planned:
            self._push(event.at_s, self._happen, event)
        while self._heap:
            self.now, _, action, arguments = heapq.heappop(self._heap)
            action(*arguments)
            if not self.live and any(finished(peer, self.config.budget) for peer in self.peers):
                return
        if self.live:
            raise SwarmError(f"{len(self.live)} peers wait for each other at version {self.versions[0]}")
        raise SwarmError("sim.events: every peer crashed or left; let one of them stay")

    @property
    def loss(self) -> float:
        """Mean square distance of the anchors from the optimum of all peers together."""
        return float((self.anchors - self.optimum).square().mean())

    @property
    def steps(self) -> int:
        """Inner steps of all peers."""
        return sum(peer.steps for peer in self.peers)

    def digest(self) -> str:
        """Digest of all anchors (hex)."""
        return anchor_digest([self._digest(fragment) for fragment in range(self.outer.fragments)])

    def _digest(self, fragment: int) -> str:
        return fragment_digest(part_digests(self.anchors[fragment]))

    def _normal(self) -> Tensor:
        return torch.randn(self.outer.fragments, DIMENSIONS, generator=self.generator)

    def _push(self, at: float, action: Callable[..., None], *arguments: Any) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (at, self._pushed, action, arguments))

    # -- who is there -------------------------------------------------------------------------------------------------

    def _happen(self, event: Event) -> None:
        name = f"p{event.peer}"
        if event.kind == "join":
            self._join(event.peer)
        elif name not in self.live:
            return  # it has finished already
        elif event.kind == "leave":
            self.live[name].leaving = True
        else:
            self._end(self.live[name], "crash")

    def _join(self, index: int) -> None:
        if self.outer.quorum is None and not self.outer.staggered and len(set(self.versions)) > 1:
            self._push(self.now + RETRY_S, self._join, index)  # as `Peer.in_step`: not in the middle of an exchange
            return
        steps_s, outer = self.config.sim.step_s, self.outer
        schedule = Schedule(outer.fragments, outer.sync_every, outer.staggered, outer.overlap)
        peer = ToyPeer(
            index=index,
            name=f"p{index}",
            step_s=steps_s[index % len(steps_s)],
            schedule=schedule,
            local=self.anchors.clone(),
            base=self.anchors.clone(),
            target=self.optimum + SPREAD * self._normal(),
            versions=list(self.versions),
            loaded=list(self.versions),
            began_at=self.now,
            applied_tokens=self.applied_tokens,
            sent_steps=[0] * outer.fragments,
        )
        schedule.begin(self._first_position())
        self.peers.append(peer)
        self.live[peer.name] = peer
        self.members[peer.name] = _ToyMember(peer.name, peer.name, True, True, self._status(peer), self.now, self.now)
        self.log.append((self.now, "join", peer.name))
        self._train(peer)

    def _first_position(self) -> int:
        """As `Peer.first_position`, from where the others are now."""
        if self.outer.quorum is not None:
            return 0
        others = [peer for peer in self.live.values() if self.outer.staggered or peer.versions == self.versions]
        return min(max(map(self._position, others), default=0), self.outer.sync_every - 1)

    def _position(self, peer: ToyPeer) -> int:
        """Inner steps of its cycle that a peer has taken by now."""
        position, since = peer.segment
        taken = int((self.now - since) / peer.step_s) if peer.step_s > 0 and not peer.blocked else 0
        return (position + taken) % self.outer.sync_every

    def _end(self, peer: ToyPeer, kind: str) -> None:
        peer.ended_at = self.now
        del self.live[peer.name], self.members[peer.name]
        self.log.append((self.now, kind, peer.name))
        held = [lease.fragment for lease in self.leases if lease.holder == peer.name]
        if kind == "crash":
            for fragment in held:  # the outer state dies with its syncer; the anchors survive
                self.masters[fragment] = self.anchors[fragment]
                self.momenta[fragment].zero_()
                self.buffers[fragment].zero_()
        if self.live:
            self._hold(held)
            for fragment in range(self.outer.fragments):
                self._poll(fragment, certain=True)

    def _hold(self, fragments: Any) -> None:
        """Give fragments new syncers, under new terms; what was contributed to the old ones is contributed again."""
        load = dict.fromkeys(self.live, 0)
        for lease in self.leases:
            if lease.holder in load:
                load[lease.holder] += 1
        for fragment, holder in assign(fragments, load, load).items():
            lease = self.leases[fragment]
            self.leases[fragment] = Lease(fragment, holder, lease.term + 1, lease.version, lease.digest)
            contributors = self.syncers[fragment].last_contributors
            self.syncers[fragment] = Syncer(fragment, lease.term + 1, lease.version, self.outer, contributors)
            for name in self._deltas[fragment]:
                if name in self.live and fragment in self.live[name].flights:
                    self._retry(self.live[name], fragment, lease)
            self._deltas[fragment] = {}

    def _status(self, peer: ToyPeer, state: State = "training") -> Status:
        pace = 1.0 / peer.step_s if peer.step_s > 0 else 0.0
        return Status(state=state, versions=list(peer.versions), inner_step=peer.inner_step, steps_per_s=pace)

    # -- a peer -------------------------------------------------------------------------------------------------------

    def _train(self, peer: ToyPeer) -> None:
        """Inner steps up to the next that sends or receives."""
        if finished(peer, self.config.budget):
            self._end(peer, "done")
            return
        if peer.leaving:
            self._end(peer, "leave")
            return
        steps, due, peer.segment = 0, Due((), ()), (peer.inner_step, self.now)
        while not (due.send or due.receive):
            if peer.inner_step == 0 and self.outer.dylu:
                fastest = 1.0 / min(one.step_s for one in self.live.values())
                peer.schedule.next_cycle(dylu_steps(1.0 / peer.step_s, fastest, self.outer.sync_every))
            due = peer.schedule.advance()
            steps += 1
        self._push(self.now + steps * peer.step_s, self._due, peer, due, steps)

    def _due(self, peer: ToyPeer, due: Due, steps: int) -> None:
        if peer.ended_at is not None:
            return
        keep = (1.0 - RATE) ** steps
        noise = torch.randn(peer.local.shape, generator=self.generator) * (NOISE * RATE * steps**0.5)
        peer.local = peer.target + keep * (peer.local - peer.target) + noise
        peer.steps += steps
        peer.sent_steps = [sent + steps for sent in peer.sent_steps]
        for fragment in due.send:
            self._send(peer, fragment)
        peer.segment = (peer.inner_step, self.now)
        peer.blocked = {fragment for fragment in due.receive if fragment in peer.flights}
        for fragment in due.receive:
            self._adopt(peer, fragment)
        self.members[peer.name].hear(self._status(peer, "exchanging"), self.now)
        if not peer.blocked:
            self._train(peer)

    def _send(self, peer: ToyPeer, fragment: int) -> None:
        steps, peer.sent_steps[fragment] = peer.sent_steps[fragment], 0
        tokens, limit = steps * self._tokens_per_step, self.outer.staleness_limit
        exchange = Exchange(fragment, peer.loaded[fragment], steps, tokens, "0" * 64, limit)
        peer.flights[fragment] = (exchange, peer.base[fragment] - peer.local[fragment])
        self._push(self.now + self.delay_s, self._contribute, peer, fragment)

    def _retry(self, peer: ToyPeer, fragment: int, lease: Lease) -> None:
        peer.flights[fragment][0].broke(lease)
        self._push(self.now + RETRY_S + self.delay_s, self._contribute, peer, fragment)

    def _adopt(self, peer: ToyPeer, fragment: int) -> None:
        """The local parameters move to the anchor, as far as `outer.mixing` says."""
        if fragment not in peer.arrived:
            return
        version, anchor = peer.arrived.pop(fragment)
        peer.base[fragment] = anchor
        peer.local[fragment] = anchor.lerp(peer.local[fragment], self.outer.mixing)
        peer.loaded[fragment] = version

    def _record(self, fragment: int, version: int, anchor: Tensor, contributors: tuple[str, ...], clock: int) -> None:
        """A new version reaches those who contributed to it (or came too late for theirs)."""
        for name in contributors:
            peer = self.live.get(name)
            if peer is None or fragment not in peer.flights:
                continue
            exchange, _ = peer.flights.pop(fragment)
            if not exchange.discarded:
                exchange.recorded(contributors, name)
            peer.versions[fragment] = version
            assert (
                exchange.next_step(self.leases[fragment], max(version, self.versions[fragment]), self.now) is Step.DONE
            )
            if fragment == 0:
                peer.applied_tokens = clock
                peer.discarded_tokens += exchange.tokens if exchange.discarded else 0
            peer.arrived[fragment] = (version, anchor)
            if fragment in peer.blocked:
                peer.blocked.discard(fragment)
                self._adopt(peer, fragment)
                self.members[name].hear(self._status(peer), self.now)
                if not peer.blocked:
                    self._train(peer)

    # -- the syncers --------------------------------------------------------------------------------------------------

    def _contribute(self, peer: ToyPeer, fragment: int) -> None:
        """A contribution arrives at the syncer, or is lost on the way."""
        if peer.ended_at is not None or fragment not in peer.flights:
            return
        (exchange, delta), lease, syncer = peer.flights[fragment], self.leases[fragment], self.syncers[fragment]
        if self.config.sim.loss and self.random.random() < self.config.sim.loss:
            self._retry(peer, fragment, lease)
            return
        verdict = syncer.offer(peer.name, exchange.header(lease))
        if not verdict.accepted:
            exchange.refused(verdict, lease)
            exchange.discarded = True
            state = (fragment, self.versions[fragment], self.anchors[fragment].clone(), (peer.name,))
            self._push(self.now + self.delay_s, self._record, *state, self.applied_tokens)
            return
        self._deltas[fragment][peer.name] = delta
        syncer.folded(peer.name)
        syncer.arrived(peer.name)
        self._poll(fragment)

    def _poll(self, fragment: int, certain: bool = False) -> None:
        """Ask the syncer whether to close, unless it cannot: a poll looks at every member."""
        syncer, here = self.syncers[fragment], len(self._deltas[fragment])
        known = len(syncer.last_contributors & self.live.keys()) if self.outer.staggered else 0
        if not certain and here < min(self.outer.quorum or known or len(self.live), len(self.live)):
            return
        close = syncer.poll(self.members, self.now)
        if close is not None:
            self._merge(fragment, close)
        elif syncer.grace_until is not None and syncer.grace_until > self.now:
            self._push(syncer.grace_until, self._poll, fragment, True)

    def _merge(self, fragment: int, close: Close) -> None:
        syncer, outer, names = self.syncers[fragment], self.outer, close.contributors
        deltas = self._deltas[fragment]
        weights = torch.tensor([syncer.weight(name) for name in names])
        discounts = torch.tensor([syncer.discount(name) for name in names])
        stacked = torch.stack([deltas.pop(name) for name in names])  # (contributors, D)
        delta = (weights * discounts) @ stacked / weights.sum()
        master, momentum = self.masters[fragment], self.momenta[fragment]
        if outer.optimizer == "nesterov":
            nesterov_(master, momentum, delta, outer.lr, outer.momentum)
        else:
            delayed_nesterov_(
                master, momentum, self.buffers[fragment], delta, lr=outer.lr, beta=outer.momentum,
                pushes=float(discounts.sum()), delay=close.delay, flush=close.flush, c=outer.delay_c,
            )  # fmt: skip
        self.anchors[fragment] = master
        self.versions[fragment] = version = close.base_version + 1
        self.merges += 1
        syncer.advance(version)
        lease = self.leases[fragment]
        self.leases[fragment] = Lease(fragment, lease.holder, lease.term, version, lease.digest)
        if fragment == 0:
            self.applied_tokens += close.tokens
            self.on_version(self)
        record = (fragment, version, master.clone(), names, self.applied_tokens)
        self._push(self.now + self.delay_s, self._record, *record)
