"""One peer's run, top to bottom: configuration, ranks, data, model, optimizer, swarm, loop,
summary."""

from __future__ import annotations

import faulthandler
import gc
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
from diloco.attach.parameters import full_tensor, values_digest
from diloco.attach.ranks import RankGroup
from diloco.attach.swarm import Swarm
from diloco.config import Config, flatten
from diloco.rundir.files import exclusive, prepare_run_directory, write_atomic
from diloco.rundir.metrics import RunLog, WandbLog
from diloco.rundir.plot import plot_losses
from diloco.rundir.push import Pusher
from diloco.rundir.reporting import (
    Finished,
    Listener,
    Notice,
    Ready,
    Report,
    Stage,
    swarm_figures,
)
from diloco.rundir.summary import (
    PhaseTimer,
    Summary,
    merge_peer_summaries,
    write_contributions,
    write_summary,
)
from diloco.signals import OF_COMMANDS, watch
from diloco.swarm.wire.identity import identity_number
from diloco.train import start_files
from diloco.train.checkpoint import (
    AddressFile,
    RunCheckpoints,
    Sync,
    checkpoints_name,
    identity_path,
)
from diloco.train.data_parallel import DataParallel
from diloco.train.gradients import MemoryShort, autocast, precision_of, prepare_, to_device
from diloco.train.loop import Trainer
from diloco.train.machine import fit_to_memory
from diloco.train.optimizer import inner_optimizer
from diloco.train.reporter import Reporter, token_share

Tell = Callable[[Report], None]

ARRIVAL_EVERY_S = 0.2


def run(config: Config, listen: Listener) -> Summary:
    """Train as one peer until the budget is used up, or until Ctrl+C.

    Where memory runs out between two passes, it begins again from a checkpoint with half as many
    rows at a time. Raises `DilocoError`, one line for the user, if anything else ends the run
    early; the last checkpoint is good then.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable()  # where each thread was, if a library aborts this process
    ranks = RankGroup.from_environment(config.train.device, config.train.parallel)
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    try:
        with ranks.report_lost_rank(), ExitStack() as stack:
            _check_ranks(config, ranks)
            if not ranks.is_rank0:
                return _run(config, ranks, lambda message: None)
            name = _name(config)
            prepare_run_directory(config.run.dir)
            own = config.run.dir / "checkpoints" / checkpoints_name(config)
            stack.enter_context(exclusive(own))
            tell: Tell = lambda message: listen(message.told_by(name, time.time()))  # noqa: E731
            while True:
                try:
                    return _run(config, ranks, tell)
                except MemoryShort as short:
                    train = config.train.model_copy(update={"micro_batch": short.micro_batch})
                    config = config.model_copy(update={"train": train})
                gc.collect()  # model and optimizer, with the error that held them
                devices.empty_cache(ranks.device)
    finally:
        ranks.close()


def _run(config: Config, ranks: RankGroup, tell: Tell) -> Summary:
    began_at = time.monotonic()
    config = fit_to_memory(config, ranks)
    # other ranks read the run directory only after rank 0 has claimed it
    ranks.broadcast_floats([0])
    checkpoints = RunCheckpoints(config)
    ranks.check_newest(checkpoints.saved_version, f"run.dir={config.run.dir}")
    config = checkpoints.config

    dataset = _data(config, tell)
    holdout, tokenizer = dataset.holdout(config.eval.sequences), dataset.tokenizer
    model, chosen = _model(config, ranks, tokenizer)
    wrapped = ranks.wrap(model)
    optimizer = inner_optimizer(model, config.inner)

    with ExitStack() as stack:
        wandb = WandbLog(config, _name(config)) if ranks.is_rank0 else None
        log = RunLog(config.run.dir, _name(config), wandb, say=lambda text: tell(Notice(text=text)))
        stack.enter_context(log)
        if ranks.is_rank0:
            log.event("computes", device=ranks.device_name, **chosen)
            if checkpoints.saved_version >= 0:
                log.event("resume", version=checkpoints.saved_version, skipped=checkpoints.skipped)
        phases = PhaseTimer(checkpoints.seconds, settle=partial(devices.synchronize, ranks.device))
        sync: Sync
        if config.outer.method == "data_parallel":
            sync = DataParallel(model, optimizer, ranks, config.outer.sync_every, phases)
        else:
            file = stack.enter_context(closing(AddressFile(config)))
            swarm = _swarm(config, dataset, log, tell, file)
            saved = checkpoints.swarm() if ranks.is_rank0 else None
            sync = swarm.attach(model, optimizer, ranks=ranks, saved=saved, phases=phases)
        stream = stack.enter_context(closing(_stream(config, dataset, ranks, sync)))
        checkpoints.restore(sync, model, optimizer, stream)

        share = token_share(model, config.data.sequence_length, ranks.device)
        report = Reporter(config, ranks, sync, phases, log, tell, checkpoints.traffic, share)
        parts = (model, wrapped, optimizer, stream, holdout, sync, checkpoints, report, tokenizer)
        trainer = Trainer(config, ranks, *parts)
        if wandb is not None:
            wandb.figures = lambda: {} if sync.node is None else swarm_figures(sync.node.observe())
        if ranks.is_rank0 and config.run.lead:
            _prepare_files(trainer)
        report.state("waiting")
        stack.callback(_leave_on_signals(sync, ranks))
        _take_part(trainer)
        return _finish(trainer, began_at)


def _name(config: Config) -> str:
    return config.run.name or "peer"


def _check_ranks(config: Config, ranks: RankGroup) -> None:
    """Raise `ConfigError` for ranks with different settings, or that cannot share a batch."""
    # which `diloco local` gives each process in data parallel
    own = ("run.", "data.shard", "train.device")
    settings = flatten(config.model_dump(mode="json"))
    alike = {key: value for key, value in settings if not key.startswith(own)}
    # `auto` may be another precision on another device, and a loss is scaled on all ranks or none
    ranks.check_same({**alike, "train.precision": precision_of(config, ranks.device)})
    batch_size = config.inner.batch_size
    if config.outer.method == "diloco" and batch_size % ranks.size:
        ranks.refuse(
            f"inner.batch_size={batch_size} cannot be shared evenly by {ranks.size} processes;"
            f" use a multiple of {ranks.size}"
        )


def _data(config: Config, tell: Tell) -> data.Dataset:
    def progress(done: int, total: int) -> None:
        tell(Stage(stage="data", received=done, wanted=total))

    progress(0, 0)
    return data.load(config.data, config.run.seed, progress)


def _model(
    config: Config, ranks: RankGroup, tokenizer: data.Tokenizer
) -> tuple[nn.Module, dict[str, object]]:
    """Return the model on this rank's device, and how it computes, for the log."""
    settings, seed, length = config.model, config.run.seed, config.data.sequence_length
    model = models.build(settings, seed, tokenizer=tokenizer, sequence_length=length, narrow=True)
    if ranks.is_rank0:
        start_files.keep(config, model)
    model = to_device(model, config, ranks.device)
    if config.data.has_conversations:
        with autocast(config, ranks.device):
            models.check_segments(model)
    return model, prepare_(model, config, ranks.device)


def _swarm(
    config: Config, dataset: data.Dataset, log: RunLog, tell: Tell, file: AddressFile
) -> Swarm:
    def ready(address: str) -> None:
        assert swarm.attachment is not None and swarm.attachment.node is not None
        node, first = swarm.attachment.node, not swarm.network.initial_peers
        addresses, command = tuple(node.addresses), config.joining_command
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
            file.write(address)

    name = _name(config)
    swarm = Swarm.of(
        config,
        config.manifest(),
        # a single shard is data of this peer's own
        sequences="" if config.data.shards == 1 else dataset.digest,
        identity=identity_path(config, name),
        name=name,
        on_event=log.swarm_event,
        on_ready=ready,
    )
    return swarm


def _stream(config: Config, dataset: data.Dataset, ranks: RankGroup, sync: Sync) -> data.Prefetched:
    """Return the batches: of leased units if peers share one list of data, or of a shard of it."""
    size, rows = config.inner.batch_size, (ranks.rank, ranks.size)
    shard, shards = config.data.shard, config.data.shards
    if isinstance(sync, DataParallel):
        stream = dataset.batches(size, shard=ranks.rank, shards=ranks.size)
    elif shard is not None and shards is not None:
        stream = dataset.batches(size, shard=shard, shards=shards, rows=rows)
    else:
        leases = sync.lease_units(dataset.units(size * config.outer.sync_every), data.AHEAD)
        # Where none is leased, each identity has an order of its own over all the data.
        path = identity_path(config, _name(config))
        [own] = ranks.broadcast_floats([identity_number(path) if ranks.is_rank0 else 0])
        stream = dataset.batches(size, shard=int(own), rows=rows, leases=leases)
    return data.Prefetched(stream, ranks.device)


def _prepare_files(trainer: Trainer) -> None:
    """Prepare the push of models and write the checked settings; the leading peer only."""
    config = trainer.config
    if config.checkpoint.push is not None:
        write = partial(_write, config, trainer.tokenizer)
        trainer.pusher = Pusher(config.checkpoint.push, values_digest, write)
    if not config.run.report:  # a supervisor writes its own, which names all of its peers
        write_atomic(config.run.dir / "config.yaml", config.to_yaml())
    write_atomic(config.run.dir / "manifest.json", config.manifest().to_json(indent=2) + "\n")


def _leave_on_signals(sync: Sync, ranks: RankGroup) -> Callable[[], None]:
    """Leave cleanly on Ctrl+C, SIGTERM and their like; rank 0 says so once."""
    announced = threading.Event()

    def stop(number: int) -> None:
        if not announced.is_set() and ranks.is_rank0 and not ranks.broken:
            sys.stderr.write("diloco: leaving the swarm; Ctrl+C once more ends at once\n")
        announced.set()
        sync.interrupt()

    return watch(stop, over=OF_COMMANDS)


def _take_part(trainer: Trainer) -> None:
    """Join the swarm, train, save and leave."""
    ranks, sync, report = trainer.ranks, trainer.sync, trainer.report
    with ExitStack() as stack:
        with _reporting_arrival(sync, report.tell):
            stack.enter_context(sync)
        if sync.version == 0 and not ranks.sharded:
            start_files.check_start(trainer.config, trainer.model)
        # before the swarm is left, which takes longer than torchrun waits
        with ranks.report_lost_rank():
            try:
                trainer.train()
            except torch.OutOfMemoryError:
                inner, length = trainer.config.inner, trainer.config.data.sequence_length
                short = trainer.gradients.halve(inner.batch_size, length)
                if sync.version > 0:
                    trainer.save()
                raise short from None
        report.state("leaving")
        if sync.version > 0:
            trainer.save()


@contextmanager
def _reporting_arrival(sync: Sync, tell: Tell) -> Iterator[None]:
    """Report how many bytes have come from the swarm, while its state is fetched."""
    arrived = threading.Event()

    def report() -> None:
        while not arrived.wait(ARRIVAL_EVERY_S):
            if sync.node is not None:
                tell(Stage(stage="state", received=sync.node.traffic[1]))

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        arrived.set()
        reporter.join()


def _finish(trainer: Trainer, began_at: float) -> Summary:
    """After the swarm, all ranks: evaluate the final anchor; rank 0 writes model, plot and
    summary."""
    config, sync, report = trainer.config, trainer.sync, trainer.report
    is_rank0 = trainer.ranks.is_rank0
    if trainer.lead:
        report.state("evaluating")
        # In the middle of a round the parameters are no anchor, nor before the first.
        if sync.version > 0 and (sync.inner_step == 0 or not sync.interrupted):
            trainer.evaluate()
            trainer.push(final=True)
            written = models.saved_state(trainer.model).items()
            state = {name: full_tensor(value) for name, value in written}
            if is_rank0:
                _write(config, trainer.tokenizer, state, config.run.dir / "model")
    digest = sync.anchor_digest() if is_rank0 or isinstance(sync, DataParallel) else ""
    if not is_rank0:  # rank 0 speaks for the peer
        return Summary()
    mine = report.summary(time.monotonic() - began_at, digest)
    report.tell(Finished(summary=mine))
    same = ("run_id", "manifest_hash", "mode", "wall_s", "exit")
    summary = merge_peer_summaries([mine], **{name: getattr(mine, name) for name in same})
    if config.run.lead and not config.run.report:
        title = f"{config.run.id}: {config.model.name}"
        plot_losses(config.run.dir / "metrics.jsonl", config.run.dir / "loss.png", title)
        write_summary(config.run.dir / "summary.json", summary)
        if summary.contributions:
            write_contributions(config.run.dir / "contributions.csv", summary.contributions)
    if trainer.pusher is not None:
        trainer.pusher.wait()
    report.state("left" if sync.interrupted else "done")
    return summary


def _write(config: Config, tokenizer: Any, state: dict[str, Tensor], directory: Path) -> None:
    """Write a model with these parameters and buffers, as `diloco export` does."""
    with torch.device("meta"):  # which draws no random number
        model: Any = models.outline(config.model)
    model.load_state_dict(state, assign=True, strict=not models.has_adapter(model))
    model.tie_weights()
    models.save(model, directory, tokenizer)
