"""`diloco simulate`: a whole run in virtual time, from configuration to summary.

The peers of `local.peers` start, the first one before the others, as with `diloco local`. Each
trains in a thread in lockstep with the virtual clock, and `sim.events` happen at their times. The
run ends when nobody trains any more; its directory is a real run's, with virtual seconds in it.
"""

from __future__ import annotations

import asyncio
import copy
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from diloco import data
from diloco import model as models
from diloco.attach.ranks import RankGroup
from diloco.attach.swarm import Attachment, Swarm
from diloco.config import Config
from diloco.errors import ConfigError, SwarmError
from diloco.rundir.files import exclusive, prepare_run_directory, write_atomic
from diloco.rundir.metrics import RunLog
from diloco.rundir.plot import plot_losses
from diloco.rundir.reporting import Listener, Notice, PeerStatus, Report
from diloco.rundir.summary import (
    PhaseTimer,
    Summary,
    merge_peer_summaries,
    write_contributions,
    write_summary,
)
from diloco.sim import events
from diloco.sim.events import SimEvent
from diloco.sim.link import PeerLink
from diloco.sim.lockstep import Lockstep
from diloco.sim.network import Network
from diloco.sim.peers import PacedStream, SimRuntime, SimTrainer
from diloco.sim.virtual_time import VirtualLoop, virtual_time
from diloco.swarm.node.options import NodeOptions
from diloco.swarm.wire.streams import BULK
from diloco.swarm.wire.transport import Transport
from diloco.train.checkpoint import RunCheckpoints
from diloco.train.gradients import autocast, to_device
from diloco.train.optimizer import inner_optimizer
from diloco.train.reporter import Reporter

LOGS = ("metrics.jsonl", "events.jsonl", "summary.json", "contributions.csv", "loss.png")
PATIENCE_S = 3600.0  # virtual; a run without a step for so long, and some transfers, hangs


@dataclass(frozen=True)
class Simulated:
    """Summary and length of a run; its `wall_s` is in real seconds, its phases in virtual ones."""

    summary: Summary
    virtual_s: float


@dataclass
class SimPeer:
    """One life of a peer: a peer that crashes and joins again gets another."""

    index: int
    name: str
    seeds: list[str]
    lockstep: Lockstep[Summary]
    task: asyncio.Task[Summary]
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    sync: Attachment | None = None
    crashed: bool = False


def simulate(config: Config, listen: Listener) -> Simulated:
    """Run the simulation in `run.dir`, whose earlier simulation is replaced.

    Raises ConfigError for settings that cannot be simulated and for the directory of a real run,
    and any DilocoError that would stop a real run.
    """
    if config.outer.method == "data_parallel":
        remedy = "use diloco local, or another outer"
        raise ConfigError(f"outer.method=data_parallel has no swarm to simulate; {remedy}")
    run_dir = config.run.dir
    if any((run_dir / "checkpoints").glob("*/step-*")):
        raise ConfigError(f"run.dir={run_dir} holds a run with checkpoints; choose another run.dir")
    prepare_run_directory(run_dir)
    with exclusive(run_dir):
        for name in LOGS:
            (run_dir / name).unlink(missing_ok=True)
        write_atomic(run_dir / "config.yaml", config.to_yaml())
        write_atomic(run_dir / "manifest.json", config.manifest().to_json(indent=2) + "\n")
        with virtual_time() as loop:
            outcome: Simulated = loop.run_until_complete(Simulation(loop, config, listen).run())
        write_summary(run_dir / "summary.json", outcome.summary)
        write_contributions(run_dir / "contributions.csv", outcome.summary.contributions)
        title = f"{config.run.id}: {config.model.name}, simulated"
        plot_losses(run_dir / "metrics.jsonl", run_dir / "loss.png", title)
    return outcome


class Simulation:
    """The peers of one run, and the objects that they share because they are equal for all."""

    def __init__(self, loop: VirtualLoop, config: Config, listen: Listener) -> None:
        sim, peers = config.sim, config.local.peers
        self.events = events.parse_events(sim.events, peers)
        self.num_shards = max([peers, *(event.peer + 1 for event in self.events)])
        if len(sim.step_s) not in (1, self.num_shards):
            given = f"{len(sim.step_s)} values for {self.num_shards} peers"
            raise ConfigError(f"sim.step_s has {given}; give one per peer, or one")
        if config.train.threads is not None:
            torch.set_num_threads(config.train.threads)
        self.began_at = time.monotonic()
        self.loop, self.config, self.listen = loop, config, listen
        self.network = Network(loop, config.run.seed, sim.loss, {BULK})
        self.link = PeerLink(sim.bandwidth, sim.bandwidth, sim.latency_s)
        self.ranks = RankGroup.from_environment(config.train.device)
        self.dataset = data.load(config.data, config.run.seed)
        self.holdout = self.dataset.holdout(config.eval.sequences)
        length = config.data.sequence_length
        tokenizer, seed = self.dataset.tokenizer, config.run.seed
        model = models.build(
            config.model, seed, tokenizer=tokenizer, sequence_length=length, narrow=True
        )
        self.model = to_device(model, config, self.ranks.device)
        if config.data.has_conversations:
            with autocast(config, self.ranks.device):
                models.check_segments(self.model)
        self.evaluated: dict[str | None, float | None] = {}
        self.peers: dict[int, SimPeer] = {}
        self.summaries: list[Summary] = []

    async def run(self) -> Simulated:
        await self._run()
        if not self.summaries:
            raise SwarmError("sim.events: every peer crashed or left; let one of them stay")
        summary = merge_peer_summaries(
            sorted(self.summaries, key=lambda summary: summary.peers[0].name or ""),
            run_id=self.config.run.id,
            manifest_hash=self.config.manifest().hash(),
            mode=self.config.outer.method,
            wall_s=time.monotonic() - self.began_at,
            virtual_s=self.loop.time(),
        )
        return Simulated(summary, self.loop.time())

    async def _run(self) -> None:
        timeline = self.loop.create_task(self._timeline())
        watch = self.loop.create_task(self._watch())
        # the run is over with its last peer
        while self.peers or not (timeline.done() or self.summaries):
            running = {peer.task for peer in self.peers.values()}
            others: set[asyncio.Task[Any]] = {watch} if timeline.done() else {watch, timeline}
            done, _ = await asyncio.wait(running | others, return_when=asyncio.FIRST_COMPLETED)
            for peer in [peer for peer in self.peers.values() if peer.task in done]:
                if not peer.crashed:
                    self.summaries.append(peer.task.result())
                del self.peers[peer.index]
            for task in done - running:
                task.result()

    # -- what happens ------------------------------------------------------------------------------

    async def _timeline(self) -> None:
        """Start the peers, then carry out the configured events, each at its time."""
        starters = events.starters(self.events, self.config.local.peers)
        for index in starters:
            self._join(index, len(starters))
            if index == starters[0] and not await self._is_ready(self.peers[index]):
                return
        for event in self.events:
            await asyncio.sleep(max(0.0, event.at_s - self.loop.time()))
            self._happen(event)

    async def _is_ready(self, peer: SimPeer) -> bool:
        """Wait until others can join this peer; False if it ended before (`_run` raises why)."""
        ready = self.loop.create_task(peer.ready.wait())
        await asyncio.wait({ready, peer.task}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        return peer.ready.is_set()

    def _happen(self, event: SimEvent) -> None:
        peer = self.peers.get(event.peer)
        if event.kind == "join":
            self._join(event.peer, 1)
        elif peer is None:
            return  # it has finished already
        elif event.kind == "leave" and peer.sync is not None:
            peer.sync.interrupt()
        else:
            peer.crashed = True
            self.network.crash(peer.name)
            self.loop.kill(peer.name)
            self._tell(peer, PeerStatus(state="killed"))

    def _join(self, index: int, min_peers: int) -> None:
        living = (peer for peer in self.peers.values() if not peer.crashed)
        seeds, name = [peer.name for peer in living if peer.ready.is_set()], f"p{index}"
        lockstep: Lockstep[Summary] = Lockstep(lambda: self._live(peer, min_peers), name)
        with self.loop.owned_by(name):
            task = self.loop.create_task(lockstep.run(), name=name)
        # Several peers may fail alike, and only the first one's exception is raised.
        task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        peer = self.peers[index] = SimPeer(index, name, seeds, lockstep, task)

    async def _watch(self) -> None:
        """Stop a swarm that hangs; its heartbeats would go on for ever."""
        sim = self.config.sim
        transfer_s = 4 * models.num_trained(self.model) / (sim.bandwidth or float("inf"))
        patience_s = PATIENCE_S + 1000 * max(sim.step_s) + 100 * transfer_s
        before: object = None
        while True:
            begun = [(p.index, p.sync) for p in self.peers.values() if p.sync is not None]
            now = [(index, sync.steps, sync.version) for index, sync in begun]
            if now == before:
                still = f"nothing has moved for {patience_s:.0f} virtual seconds"
                raise SwarmError(f"{still}: {now} (peer, step, version)")
            before = now
            await asyncio.sleep(patience_s)

    # -- one peer, in its thread -------------------------------------------------------------------

    def _live(self, peer: SimPeer, min_peers: int) -> Summary:
        """Train as `diloco train` does, without checkpoints."""
        config = _config_of(self.config, peer.name, min_peers)
        tell = partial(self._tell, peer)
        say = lambda text: tell(Notice(text=text))  # noqa: E731
        with RunLog(config.run.dir, peer.name, clock=self.loop.time, say=say) as log:
            phases = PhaseTimer(clock=self.loop.time)
            model = _copied(self.model)
            optimizer = inner_optimizer(model, config.inner)
            index, size, sim = peer.index, config.inner.batch_size, config.sim
            batches = self.dataset.batches(size, shard=index, shards=self.num_shards)
            step_s = sim.step_s[index % len(sim.step_s)]
            seed = f"{config.run.seed}/{peer.name}"
            paced = PacedStream(batches, step_s, sim.jitter, seed, peer.lockstep)
            swarm = self._swarm(peer, config, log)
            peer.sync = sync = swarm.attach(model, optimizer, ranks=self.ranks, phases=phases)
            report = Reporter(config, self.ranks, sync, phases, log, tell)
            trainer = SimTrainer(
                config,
                self.ranks,
                model,
                model,
                optimizer,
                paced,
                self.holdout,
                sync,
                RunCheckpoints(config),
                report,
                self.dataset.tokenizer,
                evaluated=self.evaluated,
            )
            with sync:
                trainer.train()
            if sync.version > 0 and not sync.interrupted:
                trainer.evaluate()
            report.state("left" if sync.interrupted else "done")
            return report.summary(self.loop.time())

    def _swarm(self, peer: SimPeer, config: Config, log: RunLog) -> Swarm:
        def on_event(kind: str, fields: dict[str, object]) -> None:
            if not peer.crashed:
                log.swarm_event(kind, fields)

        async def connect(options: NodeOptions) -> Transport:
            return self.network.join(peer.name, peer.seeds, self.link)

        runtime = SimRuntime(self.loop, peer.lockstep, connect, config.run.seed)
        identity = config.run.dir / "identities" / peer.name  # a file that is named and never made
        return Swarm.of(
            config,
            config.manifest(),
            identity=identity,
            name=peer.name,
            on_event=on_event,
            on_ready=lambda _: peer.ready.set(),
            runtime=runtime,
        )

    def _tell(self, peer: SimPeer, report: Report) -> None:
        self.listen(report.told_by(peer.name, self.loop.time()))


def _config_of(config: Config, name: str, min_peers: int) -> Config:
    changes: dict[str, dict[str, object]] = {
        "run": {"name": name, "lead": True},
        "swarm": {"initial_peers": (), "min_peers": min_peers},
        "checkpoint": {"every": 0},
        "train": {"step_delay_s": 0.0},
    }
    parts = {of: getattr(config, of).model_copy(update=changes[of]) for of in changes}
    return config.model_copy(update=parts)


def _copied(model: nn.Module) -> nn.Module:
    """Copy a model. Tensors that a forward pass left in layers (RecurrentGemma) become leaves."""
    left = (value for layer in model.modules() for value in vars(layer).values())
    memo = {id(tensor): tensor.detach().clone() for tensor in left if isinstance(tensor, Tensor)}
    return copy.deepcopy(model, memo)
