"""The base of the callbacks for all trainers: a peer that joins when training begins, and leaves
when it ends.

1. Training begins: the optimizer is attached; the peer's key lies in the trainer's directory.
2. While the trainer evaluates or saves, the peer takes no inner steps, and the others are told so.
3. Training ends: the last updates are adopted, the peer leaves, and the model is the swarm's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from shutil import copytree
from typing import Any

import torch
from torch import Tensor, nn

from diloco.attach.data_shard import ActivePeers, ReadPosition, shard
from diloco.attach.ranks import RankGroup
from diloco.attach.saved import Groups, PeerState
from diloco.attach.swarm import Attachment, Swarm
from diloco.errors import CheckpointError, ConfigError, JoinError
from diloco.integrations.batches import order_by_, remedy, tokens_of
from diloco.rundir.checkpoint import CheckpointStore
from diloco.rundir.files import exclusive

KEY = "output directory"
# the Trainer does not upload folders with an underscore, and this one holds the peer's key
FOLDER = "_diloco"
# By run: the next training of a run in this process is the same peer, in any directory.
_directories: dict[str, Path] = {}


class SwarmCallback:
    """Public methods of the callbacks that are not hooks of their trainers."""

    _membership: Membership

    @property
    def attachment(self) -> Attachment | None:
        """The model in step with the swarm; None before training begins."""
        return self._membership.attachment

    def shard(self, dataset: Any, *, index: int | None = None, of: int | None = None) -> Any:
        """This peer's share of a dataset without a length, or a part of any: `Swarm.shard`."""
        return self._membership.shard(dataset, index, of)


class Membership:
    """A peer that takes part while a trainer trains; `ConfigError` for invalid settings.

    `over` are signals for which the trainer sets handlers itself, and `remedy` is the trainer's
    advice when training diverges.
    """

    def __init__(self, settings: dict[str, Any], remedy: str, over: Sequence[int] = ()) -> None:
        if "run_id" not in settings:
            raise ConfigError("run_id is missing; peers of one run have the same")
        self._settings, self._remedy, self._over = settings, remedy, over
        Swarm(**self._settings)  # raises now, not only once the data is prepared
        self.attachment: Attachment | None = None
        self.swarm: Swarm | None = None
        self._active: ActivePeers | None = None
        self._tokens: list[Tensor | int] = []  # by micro-batch of the coming step
        self._pause = ExitStack()

    def open(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedulers: Iterable[Any],
        directory: Path,
        processes: int,
        steps: float,
        saved: PeerState | None = None,
    ) -> Attachment:
        """Join, as the peer whose key is in `directory` unless the settings name another.

        The trainer averages gradients over so many `processes`. Raises `JoinError` if the swarm has
        made all `steps`.
        """
        self.leave()
        self._tokens.clear()
        rank, there = RankGroup.rank_and_size()
        if processes != there:
            raise ConfigError(
                f"{there} processes were started together, and the trainer averages gradients over"
                f" {processes}; on CPUs tell it so (use_cpu=True in TrainingArguments)"
            )
        folder, run = directory / FOLDER, self._settings["run_id"]
        swarm = self.swarm = Swarm(**{"identity": folder / "identity.key", **self._settings})
        has_key = "identity" not in self._settings and rank == 0
        if has_key and (before := _directories.get(run)) and not (folder / "identity.key").exists():
            with suppress(OSError):  # without the old key it is a new peer
                copytree(before, folder, dirs_exist_ok=True)
        if has_key:
            _directories[run] = folder
        lock = exclusive(folder, KEY) if has_key else nullcontext()
        swarm.in_trainer(lock, self._active, steps, remedy=self._remedy, signals=self._over)
        try:
            attached = swarm.attach(model, optimizer, schedulers=schedulers, saved=saved)
            self.attachment = attached.open()
        except BaseException:
            self.leave()
            raise
        self.end_if_told()
        if self.is_over(steps) and not self.attachment.interrupted:
            self.leave()
            raise JoinError(
                f"max_steps={steps}, and the swarm has made so many inner steps; train longer, or"
                " take another run_id"
            )
        return self.attachment

    def shard(self, dataset: Any, index: int | None, of: int | None) -> Any:
        """As `Swarm.shard` before a swarm exists: a share of a stream, or a part of any dataset."""
        active = self._active = self._active or ActivePeers()
        if index is None and of is None and hasattr(dataset, "__len__"):
            raise ConfigError(
                f"shard({type(dataset).__name__}): it has a length, so the callback gives each peer"
                " its own order; pass it to the trainer as it is"
            )
        return shard(dataset, lambda _: 0, lambda: active, index, of, ReadPosition(None))

    def order(self, loaders: Sequence[Any], epoch: int) -> bool:
        """Give unread loaders an order of this peer; return True if at least one shuffles."""
        assert self.swarm is not None
        seed = self.swarm.seed
        without = [loader for loader in loaders if not order_by_(loader, seed, epoch)]
        if self._active is None:
            for loader in without:
                self.swarm.say(remedy(loader))
        if own := len(without) < len(loaders):
            self.swarm.say(f"this peer reads its data in an order of its own (seed {seed})")
        return own

    def figures(self) -> dict[str, float]:
        """As `Swarm.figures`; empty without a swarm."""
        return {} if self.swarm is None else self.swarm.figures()

    def see(self, batch: Any) -> None:
        """Count the tokens of a micro-batch of the coming step."""
        if self.attachment is not None:
            self._tokens.append(tokens_of(batch))

    def count(self) -> None:
        """All ranks, before each optimizer step: report its tokens, unless the program did."""
        tokens, self._tokens = self._tokens, []
        if self.attachment is None or self.attachment.counted_tokens:
            return
        if not tokens:
            raise ConfigError(
                "callbacks: this trainer calls no training_step, so nobody can count its tokens;"
                " use diloco.Swarm"
            )
        [total] = self.attachment.ranks.sum(sum(map(int, tokens)))
        self.attachment.count(int(total))

    def is_over(self, steps: float) -> bool:
        """Return True once the swarm has made so many inner steps, or a signal ends the peer."""
        if self.swarm is None or self.attachment is None:
            return False
        return self.attachment.interrupted or self.swarm.steps >= steps

    def pause(self) -> None:
        """Take no inner steps until `go_on`; the other peers wait for a while."""
        if self.attachment is not None:
            self._pause.close()
            self._pause.enter_context(self.attachment.anchored())

    def go_on(self) -> None:
        """End the pause."""
        self._pause.close()

    def finish(self) -> None:
        """Adopt the last updates, for the model to be saved. No inner step may follow."""
        if self.attachment is not None:
            self.go_on()
            self.attachment.finish()

    def close(self) -> None:
        """Leave the swarm. The model becomes its last anchor, unless it was written to."""
        self.go_on()
        if self.swarm is not None:
            self.swarm.close()
        self.end_if_told()

    def leave(self, error: type[BaseException] = RuntimeError) -> None:
        """Leave the swarm, if the peer takes part, because training failed or starts again."""
        self._pause.pop_all()
        with suppress(Exception):
            if self.swarm is not None:
                self.swarm.__exit__(error, None, None)

    @property
    def ended_by(self) -> int:
        """The signal that ends the program, the same on all ranks; 0 without one."""
        return 0 if self.attachment is None else self.attachment.ended_by

    def end_if_told(self) -> None:
        """Leave and end the program after a signal."""
        if self.ended_by:
            self.leave()
            raise SystemExit(128 + self.ended_by)


@contextmanager
def peer_state(swarm: Swarm) -> Iterator[tuple[Groups, dict[str, Any]]]:
    """Rank 0: yield the input of `PeerState.restore`; its tensors do not change in the block."""
    assert swarm.run is not None and swarm.attachment is not None
    with swarm.attachment.checkpointing() as saved:
        tensors, state = PeerState.of(swarm.attachment, swarm.run, saved).flatten()
        yield tensors, {**state, "seed": swarm.seed}


def save_beside(checkpoint: Path, swarm: Swarm) -> None:
    """Rank 0: write a peer's state into another library's checkpoint. Raises `CheckpointError`."""
    with peer_state(swarm) as (groups, state):
        assert swarm.attachment is not None
        CheckpointStore(checkpoint / FOLDER, 1, KEY).save(swarm.attachment.version, groups, state)


def load_beside(checkpoint: Path) -> PeerState | None:
    """Load what `save_beside` wrote; None without it. Raises `CheckpointError` if unusable."""
    latest = CheckpointStore(checkpoint / FOLDER, 1, KEY).load_latest()
    if latest is None:
        return None
    try:
        return PeerState.restore(latest.tensors, latest.state)
    except KeyError as error:
        raise CheckpointError(
            f"{checkpoint / FOLDER} lacks {error}; choose another checkpoint"
        ) from None
