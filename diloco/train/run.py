"""One peer's run from configuration to summary, from top to bottom: ranks, data, model, optimizer,
swarm, loop, end."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diloco import data
from diloco import model as models
from diloco.attach import devices
from diloco.attach.inner_optimizer import inner_optimizer
from diloco.attach.parameters import values_digest
from diloco.attach.ranks import RankGroup
from diloco.attach.sharded import full_tensor
from diloco.attach.signals import watch
from diloco.attach.swarm import Swarm
from diloco.config import Config, flatten
from diloco.rundir.files import exclusive, prepare_run_directory, write_atomic
from diloco.rundir.metrics import RunLog, WandbLog
from diloco.rundir.plot import plot_losses
from diloco.rundir.push import Pusher
from diloco.rundir.reporting import Finished, Listener, Ready, Report, Stage, swarm_figures
from diloco.rundir.summary import (
    PhaseTimer,
    Summary,
    merge_peer_summaries,
    write_contributions,
    write_summary,
)
from diloco.swarm.wire.identity import identity_number
from diloco.train import start_files
from diloco.train.checkpoint import (
    RunCheckpoints,
    Sync,
    checkpoints_name,
    identity_path,
    write_address,
)
from diloco.train.data_parallel import DataParallel
from diloco.train.loop import Trainer
from diloco.train.memory import fit_to_memory
from diloco.train.precision import precision_of, prepare_

Tell = Callable[[Report], None]

ARRIVAL_EVERY_S = 0.2


def run(config: Config, listen: Listener) -> Summary:
    """Train as one peer until the budget is used up, or until Ctrl+C.

    Raises `DilocoError`, one line for the user, if anything else ends the run early; the last
    checkpoint is good then.
    """
    ranks = RankGroup.from_environment(config.train.device, config.train.parallel)
    try:
        with ranks.report_lost_rank(), ExitStack() as stack:
            _check_ranks(config, ranks)
            if not ranks.is_rank0:
                return _run(config, ranks, lambda message: None)
            name = _name(config)
            prepare_run_directory(config.run.dir)
            stack.enter_context(
                exclusive(config.run.dir / "checkpoints" / checkpoints_name(config))
            )
            return _run(config, ranks, lambda message: listen(message.told_by(name, time.time())))
    finally:
        ranks.close()


def _run(config: Config, ranks: RankGroup, tell: Tell) -> Summary:
    began_at = time.monotonic()
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    config = fit_to_memory(config, ranks)
    # other ranks read the run directory only after rank 0 has claimed it
    ranks.broadcast_floats([0])
    checkpoints = RunCheckpoints(config)
    ranks.check_newest(checkpoints.saved_version, f"run.dir={config.run.dir}")
    config = checkpoints.config

    tell(Stage(stage="data"))
    dataset = data.load(
        config.data,
        config.run.seed,
        lambda done, total: tell(Stage(stage="data", received=done, wanted=total)),
    )
    holdout, tokenizer = dataset.holdout(config.eval.sequences), dataset.tokenizer

    length = config.data.sequence_length
    model = models.build(config.model, config.run.seed, tokenizer=tokenizer, sequence_length=length)
    if ranks.is_rank0:
        start_files.keep(config, model)
    model = model.to(ranks.device)
    chosen = prepare_(model, config, ranks.device)
    wrapped = ranks.wrap(model)
    optimizer = inner_optimizer(model, config.inner)

    shard = _shard(config, ranks)
    wandb = WandbLog(config, _name(config)) if ranks.is_rank0 else None
    with RunLog(config.run.dir, _name(config), wandb) as log, ExitStack() as stack:
        if ranks.is_rank0:
            log.event("computes", device=ranks.device_name, **chosen)
            if checkpoints.saved_version >= 0:
                log.event("resume", version=checkpoints.saved_version, skipped=checkpoints.skipped)
        phases = PhaseTimer(checkpoints.seconds, settle=partial(devices.synchronize, ranks.device))
        # a single shard is data of this peer's own
        sequences = "" if config.data.shards == 1 else dataset.digest
        sync = _attach(config, ranks, model, optimizer, checkpoints, phases, log, tell, sequences)
        stream = stack.enter_context(closing(_stream(config, dataset, shard, ranks, sync)))
        if wandb is not None:
            wandb.figures = lambda: {} if sync.view is None else swarm_figures(sync.view.observe())
        checkpoints.restore(sync, model, optimizer, stream)
        trainer = Trainer(
            config,
            ranks,
            model,
            wrapped,
            optimizer,
            stream,
            holdout,
            sync,
            checkpoints,
            phases,
            log,
            tell,
            tokenizer,
        )
        if ranks.is_rank0 and config.run.lead:
            _prepare_files(trainer)
        tell(trainer.status("waiting"))
        stack.callback(_watch(sync, ranks))
        _take_part(trainer)
        return _finish(trainer, began_at)


def _name(config: Config) -> str:
    return config.run.name or "peer"


def _check_ranks(config: Config, ranks: RankGroup) -> None:
    """Raise `ConfigError` for ranks that were started with different settings, or cannot share a
    batch."""
    # which `diloco local` gives each process in data parallel
    own = ("run.", "data.shard", "train.device")
    alike = {
        key: value
        for key, value in flatten(config.model_dump(mode="json"))
        if not key.startswith(own)
    }
    # `auto` may be another precision on another device, and a loss is scaled on all ranks or on
    # none.
    ranks.check_same({**alike, "train.precision": precision_of(config, ranks.device)})
    if config.outer.method == "diloco" and config.inner.batch_size % ranks.size:
        ranks.refuse(
            f"inner.batch_size={config.inner.batch_size} cannot be shared evenly by {ranks.size}"
            f" processes; use a multiple of {ranks.size}"
        )


def _shard(config: Config, ranks: RankGroup) -> int:
    if config.data.shard is not None:
        return config.data.shard
    # Nobody deals out shards here, so each identity has an order of its own over all the data.
    own = identity_number(identity_path(config, _name(config))) if ranks.is_rank0 else 0
    return int(ranks.broadcast_floats([own])[0])


def _attach(
    config: Config,
    ranks: RankGroup,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoints: RunCheckpoints,
    phases: PhaseTimer,
    log: RunLog,
    tell: Tell,
    sequences: str,
) -> Sync:
    """What keeps the model in step with others: the swarm, or gradients averaged in every step."""
    if config.outer.method == "data_parallel":
        return DataParallel(model, optimizer, ranks, config.outer.sync_every, phases)

    def ready(address: str) -> None:
        node = swarm.attachment.node if swarm.attachment is not None else None
        assert node is not None
        first, addresses, command = (
            not swarm.network.initial_peers,
            tuple(node.addresses),
            config.joining_command,
        )
        tell(
            Ready(
                address=address,
                addresses=addresses,
                first=first,
                command=command,
                advice=node.advice,
            )
        )
        if config.run.lead:
            write_address(config, address)

    name = _name(config)
    swarm = Swarm.of(
        config, config.manifest(), identity_path(config, name), name, log.swarm_event, ready
    )
    swarm.sequences = sequences
    return swarm.attach(
        model,
        optimizer,
        ranks=ranks,
        saved=checkpoints.swarm() if ranks.is_rank0 else None,
        phases=phases,
    )


def _stream(
    config: Config, dataset: data.Dataset, shard: int, ranks: RankGroup, sync: Sync
) -> data.Prefetched:
    """Leased units, where peers share one list of them and nobody has cut it into shards."""
    batch_size, settings = config.inner.batch_size, config.data
    if isinstance(sync, DataParallel):
        stream = dataset.batches(batch_size, shard=ranks.rank, shards=ranks.size)
    elif settings.shards is not None:
        stream = dataset.batches(
            batch_size, shard=shard, shards=settings.shards, rows=ranks.batch_slice
        )
    else:
        leases = sync.lease_units(dataset.units(batch_size * config.outer.sync_every), data.AHEAD)
        stream = dataset.batches(batch_size, shard=shard, rows=ranks.batch_slice, leases=leases)
    return data.Prefetched(stream, ranks.device)


def _prepare_files(trainer: Trainer) -> None:
    """Of the peer that leads: where its models go, and, as nothing else can be wrong with them, its
    settings."""
    config = trainer.config
    if config.checkpoint.push is not None:
        trainer.pusher = Pusher(
            config.checkpoint.push, values_digest, partial(_write, config, trainer.tokenizer)
        )
    if not config.run.report:  # a supervisor writes its own, which names all of its peers
        write_atomic(config.run.dir / "config.yaml", config.to_yaml())
    write_atomic(config.run.dir / "manifest.json", config.manifest().to_json(indent=2) + "\n")


def _watch(sync: Sync, ranks: RankGroup) -> Callable[[], None]:
    """Ctrl+C, SIGTERM and their like: leave cleanly, and rank 0 says so once."""
    told = threading.Event()

    def stop(number: int) -> bool:
        if not told.is_set() and ranks.is_rank0 and not ranks.broken:
            sys.stderr.write("diloco: leaving the swarm; Ctrl+C once more ends at once\n")
        told.set()
        sync.interrupt()
        return False

    return watch(stop, over=(signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))


def _take_part(trainer: Trainer) -> None:
    """Joins the swarm, trains, saves and leaves."""
    ranks, sync = trainer.ranks, trainer.sync
    with ExitStack() as stack:
        with _arriving(sync, trainer.tell):
            stack.enter_context(sync)
        if sync.version == 0 and not ranks.sharded:
            start_files.check_start(trainer.config, trainer.model)
        # before the swarm is left, which takes longer than torchrun waits
        with ranks.report_lost_rank():
            trainer.train()
        if ranks.is_rank0:
            trainer.tell(trainer.status("leaving"))
        if sync.version > 0:
            trainer.save()


@contextmanager
def _arriving(sync: Sync, tell: Tell) -> Iterator[None]:
    """Says how much has come from the swarm, while its state is fetched."""
    arrived = threading.Event()

    def report() -> None:
        while not arrived.wait(ARRIVAL_EVERY_S):
            if sync.view is not None:
                tell(Stage(stage="state", received=sync.view.node.traffic.bytes_received))

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        arrived.set()
        reporter.join()


def _finish(trainer: Trainer, began_at: float) -> Summary:
    """After the swarm, all ranks: evaluate the final anchor. Rank 0 writes the model, the picture
    and the summary."""
    config, sync, tell, is_rank0 = (
        trainer.config,
        trainer.sync,
        trainer.tell,
        trainer.ranks.is_rank0,
    )
    if trainer.lead:
        if is_rank0:
            tell(trainer.status("evaluating"))
        # In the middle of a round the parameters are no anchor, and before the first there is
        # nothing to show.
        if (sync.inner_step == 0 or not sync.interrupted) and sync.version > 0:
            trainer.evaluate()
            trainer.push(final=True)
            state = {
                name: full_tensor(value.detach())
                for name, value in trainer.model.state_dict().items()
            }
            if is_rank0:
                _write(config, trainer.tokenizer, state, config.run.dir / "model")
    digest = sync.anchor_digest() if is_rank0 or isinstance(sync, DataParallel) else ""
    if not is_rank0:  # rank 0 speaks for the peer
        return Summary()
    mine = trainer.summary(time.monotonic() - began_at, digest)
    tell(Finished(summary=mine))
    summary = merge_peer_summaries(
        [mine],
        run_id=mine.run_id,
        manifest_hash=mine.manifest_hash,
        mode=mine.mode,
        wall_s=mine.wall_s,
        exit=mine.exit,
    )
    if config.run.lead and not config.run.report:
        title = f"{config.run.id}: {config.model.name}"
        plot_losses(config.run.dir / "metrics.jsonl", config.run.dir / "loss.png", title)
        write_summary(config.run.dir / "summary.json", summary)
        if summary.contributions:
            write_contributions(config.run.dir / "contributions.csv", summary.contributions)
    if trainer.pusher is not None:
        trainer.pusher.wait()
    tell(trainer.status("left" if sync.interrupted else "done"))
    return summary


def _write(config: Config, tokenizer: Any, state: dict[str, Tensor], place: Path) -> None:
    """Write a model with these parameters and buffers, as `diloco export` does. No random number is
    drawn."""
    with torch.device("meta"):
        model: Any = models.outline(config.model)
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    models.save(model, place, tokenizer)
