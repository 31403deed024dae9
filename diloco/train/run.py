"""One peer's run from configuration to summary: what is built, in which order, and what is left behind."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from diloco import data
from diloco import model as models
from diloco.config import Config, flatten
from diloco.errors import CheckpointError, UnsavedError, on_signals
from diloco.rundir.files import exclusive, prepare_run_directory, write_atomic
from diloco.rundir.metrics import RunLog, WandbLog
from diloco.rundir.plot import plot_losses
from diloco.rundir.reporting import Finished, Listener, Message, Ready, Stage, swarm_figures, to_wire
from diloco.rundir.summary import (
    Evaluation,
    PeerSummary,
    PhaseTimer,
    Summary,
    Tokens,
    merge_peer_summaries,
    write_contributions,
    write_summary,
)
from diloco.swarm.wire.libp2p import identity_number
from diloco.train import devices, origin
from diloco.train.api import Attachment, Swarm
from diloco.train.baseline import DataParallel
from diloco.train.evaluate import loss_of
from diloco.train.inner import inner_optimizer
from diloco.train.island import Island
from diloco.train.loop import Trainer
from diloco.train.memory import fitted
from diloco.train.planning import Exchange, Link, predict
from diloco.train.precision import precision_of, prepare_
from diloco.train.rows import whole
from diloco.train.session import Session, Sync, checkpoints_name, identity_path

__all__ = ["run", "summary_of"]

ARRIVAL_EVERY_S = 0.2
ARRIVING_BYTES = 12  # per parameter: the anchor, and the two moments of a donor


def run(config: Config, listen: Listener) -> Summary:
    """Train as one peer until the budget is used up, or until Ctrl+C.

    Leaves in the run directory: config.yaml, manifest.json, metrics, events, checkpoints, and from the peer that leads
    contributions.csv, model/, loss.png and summary.json. Raises `DilocoError`, one line for the user, if anything else
    ends the run early; the last checkpoint is good then.
    """
    island = Island.from_environment(config.train.device, config.train.parallel)
    try:
        with island.following():
            own = ("run.", "data.shard", "train.device")  # which `diloco local` gives each process in data parallel
            settings = flatten(config.model_dump(mode="json"))
            alike = {key: value for key, value in settings if not key.startswith(own)}
            # `auto` may be another precision on another device, and a loss is scaled on all ranks or on none.
            island.check_same({**alike, "train.precision": precision_of(config, island.device)})
            if config.outer.method == "diloco":
                island.check_batch_size(config.inner.batch_size)
            if not island.leads:
                return _run(config, island, lambda message: None)
            prepare_run_directory(config.run.dir)
            with exclusive(config.run.dir / "checkpoints" / checkpoints_name(config)):
                return _run(config, island, listen)
    finally:
        island.close()


def _run(config: Config, island: Island, listen: Listener) -> Summary:
    began_at = time.monotonic()
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    name = config.run.name or "peer"

    def tell(message: Message) -> None:
        listen(to_wire(replace(message, peer=name, time=time.time())))

    config = fitted(config, island)
    island.agree([0])  # other ranks read the run directory only after rank 0 has claimed it
    session = _session(config, island)
    tell(Stage(stage="data"))
    dataset = data.load(
        config.data, config.run.seed, lambda done, total: tell(Stage(stage="data", received=done, wanted=total))
    )
    holdout = dataset.holdout(config.eval.sequences)
    tokenizer = dataset.tokenizer
    build = partial(
        models.build, config.model, config.run.seed, vocab_size=tokenizer.vocab_size,
        sequence_length=config.data.sequence_length,
    )  # fmt: skip
    model = build()
    if island.leads:
        origin.keep(config, model)
    model = model.to(island.device)
    chosen = prepare_(model, config, island.device)
    wrapped = island.wrap(model)
    optimizer = inner_optimizer(model, config.inner)
    shard = _shard(config, island)
    wandb = WandbLog(config, name) if island.leads else None
    with RunLog(config.run.dir, name, wandb) as log:
        if island.leads:
            log.event("computes", device=island.device_name, **chosen)
        if session.saved_version >= 0 and island.leads:
            log.event("resume", version=session.saved_version, skipped=session.skipped)
        phases = PhaseTimer(session.seconds, settle=partial(devices.synchronize, island.device))
        sync = _sync(config, island, model, optimizer, session, phases, log, tell)
        if config.outer.spot_check and island.sharded:
            log.event("spot_checks_left_out", why="train.parallel=fsdp: no process has the whole model; ddp checks")
        elif config.outer.spot_check and isinstance(sync, Attachment):
            # A peer with a shard of its own may number its sequences differently than the others do.
            sync.check_contributions(loss_of(model, dataset, holdout, numbered=config.data.shard is None))
        stream = _stream(config, dataset, shard, island, sync)
        if wandb is not None:
            wandb.figures = lambda: {} if sync.view is None else swarm_figures(sync.view.observe())
        session.restore(sync, model, optimizer, stream)
        trainer = Trainer(config, island, model, wrapped, optimizer, stream, holdout, sync, session, phases, log, tell)
        if island.leads and config.run.lead:  # nothing is left that could be wrong with the settings
            if not config.run.report:  # a supervisor writes its own, which names all of its peers
                write_atomic(config.run.dir / "config.yaml", config.to_yaml())
            write_atomic(config.run.dir / "manifest.json", config.manifest().to_json(indent=2) + "\n")
        tell(trainer.status("waiting"))
        with _signals(sync, island), closing(stream):
            with ExitStack() as stack:
                with _arriving(sync, model, tell):
                    stack.enter_context(sync)
                if sync.version == 0 and not island.sharded:
                    origin.check_start(config, model)
                with island.following():  # before the swarm is left, which takes longer than torchrun waits
                    trainer.train()
                if island.leads:
                    tell(trainer.status("leaving"))
                if sync.version > 0:
                    trainer.save()
            return _finish(trainer, build, tokenizer, began_at)


def _session(config: Config, island: Island) -> Session:
    """What the run directory holds; `CheckpointError` when that is not the same for all ranks."""
    session = Session(config)
    (newest,) = island.agree([session.saved_version])
    if session.saved_version != newest:
        raise CheckpointError(
            f"run.dir={config.run.dir} holds outer step {newest:.0f} for rank 0 and {session.saved_version} for rank "
            f"{island.rank}; put it where all ranks see the same files"
        )
    return session


def _sync(
    config: Config,
    island: Island,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    session: Session,
    phases: PhaseTimer,
    log: RunLog,
    tell: Callable[[Message], None],
) -> Sync:
    """What keeps the model in step with others: the swarm, or gradients averaged in every step."""
    outer, name = config.outer, config.run.name or "peer"
    if outer.method == "data_parallel":
        return DataParallel(model, optimizer, island, outer.sync_every, phases)

    def ready(address: str) -> None:
        node = swarm.attachment.node if swarm.attachment is not None else None
        assert node is not None
        first, addresses, command = not config.swarm.initial_peers, tuple(node.addresses), config.joining_command
        tell(Ready(address=address, addresses=addresses, first=first, command=command, advice=node.advice))
        if first:
            write_atomic(config.run.dir / "address", address + "\n")

    swarm = Swarm.of(config, config.manifest(), identity_path(config, name), name, log.swarm_event, ready)
    return swarm.attach(model, optimizer, island=island, saved=session.outer() if island.leads else None, phases=phases)


@contextmanager
def _arriving(sync: Sync, model: nn.Module, tell: Callable[[Message], None]) -> Iterator[None]:
    """Says how much has come from the swarm, while its state is fetched."""
    arrived = threading.Event()
    wanted = ARRIVING_BYTES * sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)

    def watch() -> None:
        while not arrived.wait(ARRIVAL_EVERY_S):
            if sync.view is not None:
                tell(Stage(stage="state", received=sync.view.node.traffic.bytes_received, wanted=wanted))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        arrived.set()
        watcher.join()


@contextmanager
def _signals(sync: Sync, island: Island) -> Iterator[None]:
    """Ctrl+C, SIGTERM or SIGUSR1: leave cleanly, and rank 0 says so. Ctrl+C twice: end at once (as does the daemon).

    The notice of a scheduler may come several times, as SIGUSR1 and SIGTERM, from it and from torchrun.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def stop(number: int, frame: object) -> None:
        received.append(number)
        if received.count(signal.SIGINT) > 1:
            os._exit(UnsavedError.exit_code)
        if len(received) == 1 and island.leads and not island.broken:
            sys.stderr.write("diloco: leaving the swarm; Ctrl+C once more ends at once\n")
        sync.interrupt()

    with on_signals(stop):
        yield


def _finish(trainer: Trainer, build: Callable[[], nn.Module], tokenizer: Any, began_at: float) -> Summary:
    """After the swarm, all ranks: evaluate the final anchor. Rank 0 writes the model, the picture and the summary."""
    config, sync, tell, leads = trainer.config, trainer.sync, trainer.tell, trainer.island.leads
    if trainer.lead:
        if leads:
            tell(trainer.status("evaluating"))
        # In the middle of a round the parameters are no anchor, and before the first there is nothing to show.
        if (sync.inner_step == 0 or not sync.interrupted) and sync.version > 0:
            trainer.evaluate()
            final = _whole(trainer.model, build, leads) if trainer.island.sharded else trainer.model
            if leads:
                models.save(final, config.run.dir / "model", tokenizer)
    digest = sync.anchor_digest() if leads or isinstance(sync, DataParallel) else ""
    if not leads:  # rank 0 speaks for the island
        return Summary()
    mine = summary_of(trainer, time.monotonic() - began_at, digest=digest)
    tell(Finished(summary=mine))
    summary = merge_peer_summaries(
        [mine], run_id=mine.run_id, manifest_hash=mine.manifest_hash, mode=mine.mode, wall_s=mine.wall_s, exit=mine.exit
    )
    if config.run.lead and not config.run.report:
        title = f"{config.run.id}: {config.model.name}"
        plot_losses(config.run.dir / "metrics.jsonl", config.run.dir / "loss.png", title)
        write_summary(config.run.dir / "summary.json", summary)
        if summary.contributions:
            write_contributions(config.run.dir / "contributions.csv", summary.contributions)
    tell(trainer.status("left" if sync.interrupted else "done"))
    return summary


def _whole(model: nn.Module, build: Callable[[], nn.Module], leads: bool) -> nn.Module:
    """All ranks: a sharded model as a plain one, on rank 0; the others get what they have."""
    state = {name: whole(value.detach()) for name, value in model.state_dict().items()}
    if not leads:
        return model
    plain = build()
    plain.load_state_dict(state)
    return plain


def summary_of(trainer: Trainer, wall_s: float, bandwidth: float | None = None, digest: str | None = None) -> Summary:
    """One peer's summary; `bandwidth` is that of its link in bytes per second, where it is known, and `digest` that of
    its anchor.
    """
    config, sync, view = trainer.config, trainer.sync, trainer.sync.view
    sent, received = trainer.traffic()
    mine = PeerSummary(
        peer_id=view.node.protocol.me if view else f"rank{trainer.island.rank}",
        name=config.run.name or "peer",
        steps=sync.steps,
        tokens=sync.tokens,
        anchor_digest=sync.anchor_digest() if digest is None else digest,
        bytes_sent=sent,
        bytes_received=received,
        seconds=trainer.phases.seconds(),
    )
    return Summary(
        run_id=config.run.id,
        manifest_hash=config.manifest().hash(),
        mode=config.outer.method,
        wall_s=wall_s,
        outer_steps=sync.version,
        tokens=Tokens(sync.tokens, sync.applied_tokens, sync.discarded_tokens),
        eval=Evaluation(trainer.eval_loss),
        peers=[mine],
        heals=view.node.protocol.heals if view else 0,
        takeovers=view.node.protocol.takeovers if view else 0,
        contributions=view.contributions() if view else (),
        predicted=_predicted(trainer, bandwidth or config.swarm.upload_limit),
    )


def _predicted(trainer: Trainer, bandwidth: float | None) -> dict[str, float | None] | None:
    """What `diloco plan` says of this run, given its measured inner step and the limit of its link."""
    sync, compute_s = trainer.sync, trainer.phases.seconds().compute
    if not sync.steps or not compute_s:
        return None
    numel = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    bits_per_s = math.inf if bandwidth is None else 8 * bandwidth
    exchange = Exchange.of(trainer.config.outer, numel, max(trainer.most_peers, 1))
    found = predict(exchange, Link(bits_per_s), compute_s / sync.steps)
    return {
        "utilization": found.utilization,
        "bytes_sent": round(found.bytes_sent * sync.steps / exchange.sync_every),
        "step_s": compute_s / sync.steps,
        "bits_per_s": None if bandwidth is None else bits_per_s,
    }


def _shard(config: Config, island: Island) -> int:
    if config.data.shard is not None:
        return config.data.shard
    # Nobody deals out shards here, so each identity has an order of its own over all the data.
    own = identity_number(identity_path(config, config.run.name or "peer")) if island.leads else 0
    return int(island.agree([own])[0])


def _stream(config: Config, dataset: data.Dataset, shard: int, island: Island, sync: Sync) -> data.Prefetched:
    """Leased units, where several peers share one list of sequences and nobody has cut it into shards.

    A hub stream has no numbered sequences. Each rank of an island reads its own rows of the peer's batch.
    """
    batch_size, settings = config.inner.batch_size, config.data
    if isinstance(sync, DataParallel):
        stream = dataset.batches(batch_size, shard=island.rank, shards=island.size)
    elif settings.shard is not None or settings.source == "hub":
        stream = dataset.batches(batch_size, shard=shard, shards=settings.shards, rows=island.rows)
    else:
        leases = sync.lease_units(batch_size * config.outer.sync_every, data.AHEAD)
        stream = dataset.leased(batch_size, leases, shard=shard, rows=island.rows)
    return data.Prefetched(stream, island.device)
