"""A callback for Lightning's `Trainer`."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BackboneFinetuning, ModelPruning

from diloco.attach.saved import PeerState
from diloco.attach.schedulers import ScheduledStep, Schedulers
from diloco.errors import ConfigError
from diloco.integrations.membership import Membership, SwarmCallback, peer_state
from diloco.rundir.checkpoint import copied

KEY = "diloco"  # key of this callback's state in a checkpoint of Lightning


class DilocoLightningCallback(SwarmCallback, Callback):
    """Makes a Lightning `Trainer` one peer of a swarm while it fits.

        own = DilocoLightningCallback(run_id="mine", sync_every=100)
        trainer = Trainer(max_steps=1000, callbacks=[own])

    As `DilocoCallback`. Schedulers with `interval="step"` are the swarm's; those with
    `interval="epoch"` are left alone. `training_step` may count tokens itself, by
    `callback.attachment.count`. Each checkpoint of Lightning holds the peer's part of the swarm,
    and `fit(ckpt_path=...)` goes on as the same peer, whose key is in `default_root_dir`. The
    processes of strategy `ddp` are one peer.

    Raises what `DilocoCallback` raises, and `ConfigError` for several optimizers (strategies `fsdp`
    and `deepspeed` cannot be attached).
    """

    def __init__(self, **settings: Any) -> None:
        remedy = "lower the optimizer's learning rate, or gradient_clip_val"
        # Lightning's own handlers of these signals wait for the end of a batch
        self._membership = Membership(settings, remedy, over=(signal.SIGTERM, signal.SIGUSR1))
        self._saved: PeerState | None = None
        self._scheduled: list[ScheduledStep] = []
        self._steps = math.inf
        self._fits = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if sum(isinstance(callback, DilocoLightningCallback) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise ConfigError("callbacks: a DilocoLightningCallback is there twice; name one")
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, BackboneFinetuning | ModelPruning):
                raise ConfigError(
                    f"callbacks: {type(callback).__name__} changes which parameters are trained,"
                    " and a swarm has those of the beginning; leave it out, and freeze or prune"
                    " before"
                )
        if len(trainer.optimizers) != 1:
            raise ConfigError(
                f"configure_optimizers gives {len(trainer.optimizers)} optimizers, and a peer"
                " counts the steps of one; give one with several groups of parameters"
            )
        self._scheduled = _scheduled(trainer)
        saved, self._saved = self._saved, None
        self._steps = _steps(trainer)
        self._membership.open(
            trainer.strategy.model or pl_module,
            trainer.optimizers[0],
            self._scheduled,
            Path(trainer.default_root_dir),
            trainer.world_size,
            self._steps,
            saved,
        )
        self._fits = True
        combined, fetcher = trainer.fit_loop._combined_loader, trainer.fit_loop._data_fetcher
        loaders = [] if combined is None else combined.flattened
        own = self._membership.order(loaders, trainer.current_epoch)
        has_workers = any(getattr(loader, "num_workers", 0) for loader in loaders)
        if own and has_workers and fetcher is not None:
            iter(fetcher)  # restart workers, which have prefetched in the old order

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self._membership.go_on()
        self._membership.see(batch)
        scheduled = _scheduled(trainer)
        if self.attachment is not None and scheduled != self._scheduled:
            # a callback has replaced them, as StochasticWeightAveraging does
            self._scheduled, self.attachment.schedulers = scheduled, Schedulers(scheduled)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        self._membership.count()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.log_dict(self._membership.figures(), rank_zero_only=True)
        if self._membership.is_over(self._steps):
            trainer.should_stop = True

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self._fits:
            self._membership.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._membership.go_on()

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        if self._fits:
            self._membership.pause()  # until the next batch: Lightning writes files after this hook
            if trainer.is_global_zero:
                assert self._membership.swarm is not None
                with peer_state(self._membership.swarm) as (groups, state):
                    checkpoint[KEY] = {"tensors": copied(groups), "state": json.dumps(state)}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        if KEY in checkpoint:
            tensors, state = checkpoint[KEY]["tensors"], checkpoint[KEY]["state"]
            self._saved = PeerState.restore(tensors, json.loads(state))

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._membership.finish()

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._fits = False
        self._membership.close()

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        self._fits = False
        self._membership.leave(type(exception))


def _scheduled(trainer: Trainer) -> list[ScheduledStep]:
    """List the schedules with `interval="step"`, which follow the swarm."""
    batches = trainer.accumulate_grad_batches
    return [
        ScheduledStep(config.scheduler, every=math.lcm(config.frequency, batches) // batches)
        for config in trainer.lr_scheduler_configs
        if config.interval == "step" and not config.reduce_on_plateau
    ]


def _steps(trainer: Trainer) -> float:
    """Optimizer steps that a starting Trainer will make; infinite if unknown."""
    try:
        steps = trainer.estimated_stepping_batches
    except MisconfigurationException:  # gradient accumulation that changes by epoch
        steps = trainer.max_steps
    return steps if steps >= 0 else math.inf
