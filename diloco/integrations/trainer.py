"""A callback for the Hugging Face `Trainer`, and for those of TRL, which are Trainers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from diloco.attach.saved import PeerState
from diloco.errors import CheckpointError, ConfigError
from diloco.integrations.batches import check_has_batches
from diloco.integrations.membership import Membership, SwarmCallback, load_beside, save_beside

logger = logging.getLogger(__name__)

FOLLOWS_A_METRIC = ("reduce_lr_on_plateau", "greedy")


class DilocoCallback(SwarmCallback, TrainerCallback):
    """Makes a `Trainer` one peer of a swarm while it trains.

        own = DilocoCallback(run_id="mine", sync_every=100)
        trainer = Trainer(model, args, train_dataset=data, callbacks=[own])

    Every `sync_every`-th step of the optimizer ends in an exchange with the swarm; a step that fp16
    skips is none. The learning rate and the end are the swarm's: who joins at its 300th inner step
    goes on from there to `max_steps`. While the Trainer evaluates or saves, the other peers wait.
    When training ends, the model is the swarm's last anchor (that of `load_best_model_at_end`
    stays). A contribution's weight is its tokens without padding, or its samples where a batch has
    no tokens. What the Trainer logs has the figures of the swarm.

    Each checkpoint of the Trainer gets the peer's part of the swarm beside it, and
    `resume_from_checkpoint` goes on as the same peer.

    Args:
        resume_from: the checkpoint that `trainer.train` goes on from, where it is not in
            `args.output_dir`.
        **settings: as those of `Swarm`; `run_id` and `sync_every` are required.

    Raises `ConfigError` for settings that cannot be; and when training begins, for a model or an
    optimizer that cannot be attached (FSDP1, DeepSpeed). `JoinError`, a `SwarmError`, says that
    nobody is at the address, or that the swarm has made `max_steps` already. If training fails, the
    peer leaves.
    """

    def __init__(self, *, resume_from: str | Path | None = None, **settings: Any) -> None:
        self._membership = Membership(settings, "lower learning_rate, or max_grad_norm")
        self._resume_from = resume_from
        self._trainers: WeakSet[Trainer] = WeakSet()  # Trainers whose methods are wrapped

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Put the swarm's figures into the logs before the Trainer's own callbacks send these."""
        known = self._find_trainer().callback_handler.callbacks
        if not any(isinstance(callback, _Figures) for callback in known):
            # the insertion shifts this callback, so the Trainer calls it once more
            known.insert(0, _Figures(self._membership))

    def _find_trainer(self) -> Trainer:
        """Find the calling Trainer, and wrap its methods to count tokens and to leave on errors."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not isinstance(frame.f_locals.get("self"), Trainer):
            frame = frame.f_back
        if frame is None:
            raise ConfigError(
                "DilocoCallback: no transformers.Trainer calls it; in other loops, use diloco.Swarm"
            )
        trainer: Trainer = frame.f_locals["self"]
        if trainer not in self._trainers:
            self._trainers.add(trainer)
            trainer.training_step = self._counting(trainer.training_step)  # type: ignore[method-assign]
            trainer._inner_training_loop = self._leaving(trainer._inner_training_loop)  # type: ignore[method-assign]
        return trainer

    def _counting(self, training_step: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(training_step)
        def step(model: nn.Module, inputs: Any, *rest: Any, **named: Any) -> Tensor:
            self._membership.see(inputs)
            return training_step(model, inputs, *rest, **named)

        return step

    def _leaving(self, loop: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(loop)
        def run(*arguments: Any, **named: Any) -> Any:
            try:
                return loop(*arguments, **named)
            except BaseException as error:
                self._membership.leave(type(error))
                raise

        return run

    def on_train_begin(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:
        known = self._find_trainer().callback_handler.callbacks
        if sum(isinstance(callback, DilocoCallback) for callback in known) > 1:
            raise ConfigError("callbacks: a DilocoCallback is there twice; name one")
        check_has_batches(trainer["train_dataloader"])
        sync = self._membership.open(
            trainer["model"],
            trainer["optimizer"],
            [] if args.lr_scheduler_type in FOLLOWS_A_METRIC else [trainer["lr_scheduler"]],
            Path(args.output_dir or "."),
            args.world_size,
            state.max_steps,
            self._saved(args, state),
        )
        every = sync.outer.sync_every
        if rest := state.max_steps % every:
            text = f"max_steps={state.max_steps} is no multiple of sync_every={every}: the last"
            logger.warning("%s %d inner steps reach nobody", text, rest)
        self._membership.order([trainer["train_dataloader"]], int(state.epoch or 0))
        if args.eval_on_start:
            self._membership.pause()

    def _saved(self, args: Any, state: Any) -> PeerState | None:
        """Load the peer's part of the checkpoint from which the Trainer resumes."""
        if not state.global_step:
            return None
        given = (self._resume_from, args.resume_from_checkpoint, _checkpoint(args, state))
        checkpoint = next(Path(path) for path in given if path and path != "True")
        saved = load_beside(checkpoint)
        if saved is None:
            logger.warning(
                "%s holds nothing of a swarm: this peer joins as a new one; if it is another"
                " checkpoint, name it with DilocoCallback(resume_from=...)",
                checkpoint,
            )
        return saved

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._membership.go_on()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._membership.count()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._membership.is_over(state.max_steps):
            control.should_training_stop = True
        if control.should_training_stop:
            self._membership.finish()
        self._end_if_told(args, state, control)
        self._wait_while_busy(control)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._end_if_told(args, state, control)

    def _end_if_told(self, args: Any, state: Any, control: Any) -> None:
        """After a signal, stop with a checkpoint; `on_train_end` then ends the process."""
        if self._membership.ended_by:
            control.should_training_stop, control.should_evaluate = True, False
            control.should_save = args.save_strategy != "no" and state.global_step > 0

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._membership.end_if_told()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._wait_while_busy(control)

    def _wait_while_busy(self, control: Any) -> None:
        if control.should_evaluate or control.should_save:
            self._membership.pause()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if self.attachment is not None and logs and "loss" in logs:
            self.attachment.report(float(logs["loss"]))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        checkpoint, swarm = _checkpoint(args, state), self._membership.swarm
        is_whole = state.is_world_process_zero and not args.save_only_model
        if swarm is not None and is_whole and checkpoint.is_dir():
            try:
                save_beside(checkpoint, swarm)
            except CheckpointError as error:  # the swarm has the model; the next one may succeed
                logger.warning("%s", error)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._membership.close()


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"


class _Figures(TrainerCallback):
    """Adds the figures of the swarm to the Trainer's training logs."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs is not None and "loss" in logs:
            figures = self._membership.figures()
            logs.update(figures)
            state.log_history[-1].update(figures)
