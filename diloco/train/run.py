"""One peer's run from configuration to summary: what is built, in which order, and what is left behind."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from diloco import data
from diloco import model as models
from diloco.config import Config, flatten
from diloco.errors import CheckpointError, SwarmError, UnsavedError, on_signals
from diloco.rundir.files import exclusive, prepare_run_directory, write_atomic
from diloco.rundir.metrics import RunLog, WandbLog
from diloco.rundir.plot import plot_losses
from diloco.rundir.presence import Presence
from diloco.rundir.reporting import (
    Finished,
    Happened,
    Listener,
    Message,
    Ready,
    Stage,
    Status,
    read_fields,
    swarm_figures,
    to_wire,
)  # fmt: skip
from diloco.rundir.summary import (
    PhaseTimer,
    Summary,
    merge_peer_summaries,
    write_contributions,
    write_summary,
)
from diloco.swarm.wire.libp2p import identity_number
from diloco.train import devices, origin
from diloco.train.api import Swarm
from diloco.train.baseline import DataParallel
from diloco.train.inner import inner_optimizer
from diloco.train.island import Island
from diloco.train.loop import Trainer
from diloco.train.memory import fitted
from diloco.train.outcome import summary_of
from diloco.train.precision import precision_of, prepare_
from diloco.train.rows import whole
from diloco.train.session import Session, Sync, checkpoints_name, identity_path
from diloco.train.standby import Standby, joins_by, unpausable

__all__ = ["run"]

logger = logging.getLogger(__name__)

Tell = Callable[[Message], None]

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
            name = config.run.name or "peer"
            if island.leads:
                prepare_run_directory(config.run.dir)
            standby = Standby(config, identity_path(config, name), island.leads, island.device.type == "cuda")
            if not island.leads:
                return _sessions(config, island, lambda message: None, standby)
            presence = Presence(
                config.run.dir, name, config.run.id, unpausable(config), config.swarm.initial_peers, config.swarm.token
            )

            def tell(message: Message) -> None:
                presence.hear(message)
                listen(to_wire(replace(message, peer=name, time=time.time())))

            with exclusive(config.run.dir / "checkpoints" / checkpoints_name(config)), presence:
                return _sessions(config, island, tell, standby)
    finally:
        island.close()


def _sessions(config: Config, island: Island, tell: Tell, standby: Standby) -> Summary:
    """All ranks: train, and pause and go on as often as `standby` says; the summary counts all sessions."""
    began_at = time.monotonic()
    summary: Summary | None = None
    while True:
        try:
            if standby.wait(island, tell):
                summary, paused = _session_of(island, tell, standby, began_at)
                if not paused:
                    return summary
                continue
        except KeyboardInterrupt:
            if summary is None:  # nothing has begun
                raise
        if summary is None:
            raise KeyboardInterrupt
        last = Status(state="left", version=summary.outer_steps)
        return _conclude(config, summary, tell, last) if island.leads else summary


def _session_of(island: Island, tell: Tell, standby: Standby, began_at: float) -> tuple[Summary, bool]:
    """One session, and whether a pause ended it.

    If this peer's port is taken by now, it takes another.
    """
    try:
        return _run(standby.coming(), island, tell, standby, began_at)
    except SwarmError as error:
        if standby.joined or island.size > 1 or not standby.forget():
            raise
        logger.warning("%s; this peer takes another port", error)
    return _run(standby.coming(), island, tell, standby, began_at)


def _run(config: Config, island: Island, tell: Tell, standby: Standby, began_at: float) -> tuple[Summary, bool]:
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    name = config.run.name or "peer"
    config = fitted(config, island)
    island.agree([0])  # other ranks read the run directory only after rank 0 has claimed it
    session = _session(config, island)
    dataset = _dataset(config, tell)
    holdout, tokenizer = dataset.holdout(config.eval.sequences), dataset.tokenizer
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
        _log_start(log, island, session, standby, chosen)
        phases = PhaseTimer(session.seconds, settle=partial(devices.synchronize, island.device))
        sync = _sync(config, island, model, optimizer, session, phases, log, tell, standby)
        stream = _stream(config, dataset, shard, island, sync)
        if wandb is not None:
            wandb.figures = lambda: {} if sync.view is None else swarm_figures(sync.view.observe())
        session.restore(sync, model, optimizer, stream)
        trainer = Trainer(config, island, model, wrapped, optimizer, stream, holdout, sync, session, phases, log, tell)
        if island.leads and config.run.lead:  # nothing is left that could be wrong with the settings
            _write_settings(config, standby)
        tell(trainer.status("waiting"))
        with _signals(sync, island) as stopped, closing(stream):
            _take_part(trainer, standby)
            standby.end_session(sync)
            [paused] = island.agree([bool(standby.why) and sync.interrupted and not stopped])
            if not paused:
                return _finish(trainer, build, tokenizer, began_at), False
            if not island.leads:
                return Summary(), True
            if config.run.lead:
                (config.run.dir / "address").unlink(missing_ok=True)  # of a node that is closed
            log.event("pause", why=standby.why, version=sync.version)
            return summary_of(trainer, time.monotonic() - began_at, digest=sync.anchor_digest()), True


def _dataset(config: Config, tell: Tell) -> data.Dataset:
    tell(Stage(stage="data"))
    return data.load(
        config.data, config.run.seed, lambda done, total: tell(Stage(stage="data", received=done, wanted=total))
    )


def _log_start(log: RunLog, island: Island, session: Session, standby: Standby, chosen: Mapping[str, Any]) -> None:
    if island.leads:
        log.event("computes", device=island.device_name, **chosen)
    if standby.paused_s:
        log.event("go_on", paused_s=round(standby.paused_s, 1))
    if session.saved_version >= 0 and island.leads:
        log.event("resume", version=session.saved_version, skipped=session.skipped)


def _write_settings(config: Config, standby: Standby) -> None:
    """A supervisor writes its own, which names all of its peers; a later session has addresses of its own."""
    if not config.run.report and standby.sessions == 1:
        write_atomic(config.run.dir / "config.yaml", config.to_yaml())
    write_atomic(config.run.dir / "manifest.json", config.manifest().to_json(indent=2) + "\n")


def _take_part(trainer: Trainer, standby: Standby) -> None:
    """Joins the swarm, trains, saves and leaves."""
    island, sync, model, tell = trainer.island, trainer.sync, trainer.model, trainer.tell
    with ExitStack() as stack:
        with standby.watching(sync):
            with _arriving(sync, model, tell):
                stack.enter_context(sync)
            if sync.version == 0 and not island.sharded:
                origin.check_start(trainer.config, model)
            with island.following():  # before the swarm is left, which takes longer than torchrun waits
                trainer.train()
        if island.leads:
            if standby.why:
                standby.remember(sync)
            tell(trainer.status("leaving"))
        if sync.version > 0:
            trainer.save()


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
    tell: Tell,
    standby: Standby,
) -> Sync:
    """What keeps the model in step with others: the swarm, or gradients averaged in every step."""
    outer, name = config.outer, config.run.name or "peer"
    if outer.method == "data_parallel":
        return DataParallel(model, optimizer, island, outer.sync_every, phases)

    def ready(address: str) -> None:
        node = swarm.attachment.node if swarm.attachment is not None else None
        assert node is not None
        first, addresses, command = not swarm.network.initial_peers, tuple(node.addresses), config.joining_command
        standby.joined = True
        tell(Ready(address=address, addresses=addresses, first=first, command=command, advice=node.advice))
        if address and config.run.lead and not joins_by(config, config.run.dir / "address"):
            write_atomic(config.run.dir / "address", address + "\n")

    def happened(kind: str, fields: dict[str, object]) -> None:
        log.swarm_event(kind, fields)
        if kind in ("leave", "lost"):
            tell(Happened(**read_fields(Happened, {**fields, "kind": kind, "peer": None, "subject": fields["peer"]})))

    swarm = Swarm.of(config, config.manifest(), identity_path(config, name), name, happened, ready)
    return swarm.attach(model, optimizer, island=island, saved=session.outer() if island.leads else None, phases=phases)


@contextmanager
def _arriving(sync: Sync, model: nn.Module, tell: Tell) -> Iterator[None]:
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
def _signals(sync: Sync, island: Island) -> Iterator[list[int]]:
    """Ctrl+C, SIGTERM or SIGUSR1: leave cleanly, and rank 0 says so. Ctrl+C twice: end at once (as does the daemon).
    Yields the signals that came.

    The notice of a scheduler may come several times, as SIGUSR1 and SIGTERM, from it and from torchrun.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def stop(number: int, frame: object) -> None:
        received.append(number)
        if received.count(signal.SIGINT) > 1:
            os._exit(UnsavedError.exit_code)
        if len(received) == 1 and island.leads and not island.broken:
            sys.stderr.write("diloco: leaving the swarm; Ctrl+C once more ends at once\n")
        sync.interrupt()

    with on_signals(stop):
        yield received


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
    return _conclude(config, mine, tell, trainer.status("left" if sync.interrupted else "done"))


def _conclude(config: Config, mine: Summary, tell: Tell, last: Status) -> Summary:
    """Rank 0: tells the summary, writes what is left of the run, and tells the last status."""
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
    tell(last)
    return summary


def _whole(model: nn.Module, build: Callable[[], nn.Module], leads: bool) -> nn.Module:
    """All ranks: a sharded model as a plain one, on rank 0; the others get what they have."""
    state = {name: whole(value.detach()) for name, value in model.state_dict().items()}
    if not leads:
        return model
    plain = build()
    plain.load_state_dict(state)
    return plain


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
