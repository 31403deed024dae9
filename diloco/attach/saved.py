"""What of a peer survives its process: in the checkpoints of a loop of one's own, and beside those
of libraries."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diloco.attach.attachment import Attachment
from diloco.attach.ranks import RankGroup
from diloco.attach.schedulers import Schedulers
from diloco.attach.sharded import full_tensor, load_rows_
from diloco.attach.state_io import (
    Groups,
    Tensors,
    flatten_own,
    flatten_swarm,
    restore_own,
    restore_swarm,
)
from diloco.errors import CheckpointError, PayloadError
from diloco.rundir.checkpoint import CheckpointStore
from diloco.rundir.files import exclusive
from diloco.swarm.node.options import RunSpec
from diloco.swarm.node.saved import Saved

KEY = "checkpoints directory"
KEEP = 2


@dataclass(frozen=True)
class PeerState:
    """What a peer needs to go on as itself, besides its model and its optimizer.

    `run` is the manifest, `counters` are inner steps, tokens and discarded tokens, `schedules`
    those at step 0.
    """

    run: str
    saved: Saved
    counters: tuple[int, int, int]
    schedules: list[Any]

    @classmethod
    def of(cls, sync: Attachment, run: RunSpec, saved: Saved) -> PeerState:
        """That of an attached peer. Unsent tokens count as discarded, because who resumes goes on
        from the anchors."""
        counters = sync.steps, sync.tokens, sync.discarded_tokens + sync.unsent_tokens
        return cls(run.manifest_text, saved, counters, sync.schedulers.state())

    def flatten(self) -> tuple[Groups, dict[str, Any]]:
        """Groups of tensors, which are not copies, and JSON."""
        tensors, state = flatten_swarm(self.saved)
        return tensors, {
            **state,
            "run": self.run,
            "counters": self.counters,
            "schedules": self.schedules,
        }

    @classmethod
    def restore(cls, tensors: Mapping[str, Tensors], state: Mapping[str, Any]) -> PeerState:
        """The inverse of `flatten`."""
        steps, tokens, discarded = state["counters"]
        return cls(
            state["run"],
            restore_swarm(tensors, state),
            (steps, tokens, discarded),
            state["schedules"],
        )

    def check_same_run(self, run: RunSpec, where: str) -> None:
        """Raise `CheckpointError` for the state of another run; `where` is where it comes from."""
        try:
            differing = run.differences(self.run)
        except PayloadError:
            raise CheckpointError(f"{where} holds no manifest; choose another checkpoint") from None
        if differing:
            raise CheckpointError(
                f"{where} holds a run with other settings ({'; '.join(differing[:4])}); use the"
                " same settings, or another checkpoint"
            )

    def apply(self, sync: Attachment) -> None:
        """Give the accounts to a peer that is attached and not entered yet."""
        sync.steps, sync.tokens, sync.discarded_tokens = self.counters
        sync.schedulers.restore(self.schedules)


class LoopCheckpoints:
    """The checkpoints of one peer in a directory, in the format of those that `diloco train`
    writes; two stay.

    One appears as a whole or not at all, nothing in it needs pickle, and one that is damaged is
    skipped for the one before. Raises `ConfigError` if another process uses the directory.
    """

    def __init__(
        self, directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: RankGroup
    ) -> None:
        self.directory = directory
        self._model, self._optimizer, self._ranks = model, optimizer, ranks
        self._store = CheckpointStore(directory, KEEP, KEY)
        self._lock = ExitStack()
        if ranks.is_rank0:
            self._lock.enter_context(exclusive(directory, KEY))

    def close(self) -> None:
        """Let other processes use the directory."""
        self._lock.close()

    def load(self, schedulers: Schedulers) -> tuple[PeerState, dict[str, Any]] | None:
        """All ranks: restore model, optimizer and generators from the newest checkpoint; None if
        there is none.

        Raises `CheckpointError` when none can be used, or the newest is of another model or not the
        same for all ranks.
        """
        found = self._store.load_latest()
        self._ranks.check_newest(
            -1 if found is None else found.step, f"checkpoints={self.directory}"
        )
        if found is None:
            return None
        state, tensors = found.state, found.tensors
        self._load_model_(tensors["model"])
        restore_own(self._optimizer, tensors, state, KEY)
        schedulers.start_again_()
        return PeerState.restore(tensors, state["peer"]), state["loop"]

    @torch.no_grad()
    def _load_model_(self, saved: Mapping[str, Tensor]) -> None:
        own = self._tensors()
        wrong = [
            name for name in own.keys() | saved.keys() if _shape(own, name) != _shape(saved, name)
        ]
        if wrong:
            name = min(wrong)
            raise CheckpointError(
                f"checkpoints={self.directory} holds another model ({name} is {_shape(saved, name)}"
                f" there, and {_shape(own, name)} here); build the model that it was written for,"
                " or choose another directory"
            )
        for name, tensor in own.items():
            load_rows_(tensor, saved[name])

    def _tensors(self) -> dict[str, Tensor]:
        return {
            name: one for name, one in self._model.state_dict().items() if isinstance(one, Tensor)
        }

    def save(self, sync: Attachment, run: RunSpec | None, loop: Mapping[str, Any]) -> Path | None:
        """All ranks: rank 0 writes a checkpoint. Raises `CheckpointError`, and `TypeError` for what
        is no JSON."""
        model = {name: full_tensor(tensor.detach()) for name, tensor in self._tensors().items()}
        own, own_json = flatten_own(self._optimizer)
        if run is None:
            return None
        with sync.checkpointing() as saved:
            tensors, peer = PeerState.of(sync, run, saved).flatten()
            state = {**own_json, "peer": peer, "loop": dict(loop)}
            return self._store.save(sync.version, {**tensors, **own, "model": model}, state)


def _shape(tensors: Mapping[str, Tensor], name: str) -> str:
    return str(list(tensors[name].shape)) if name in tensors else "missing"
