"""Checkpoints of a training loop of one's own, in the format of those that `diloco train` writes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diloco.attach.attachment import Attachment
from diloco.attach.peer_state import PeerState
from diloco.attach.ranks import RankGroup
from diloco.attach.schedulers import Schedulers
from diloco.attach.sharded import full_tensor, load_rows_
from diloco.attach.state_io import flatten_own, restore_own
from diloco.errors import CheckpointError
from diloco.rundir.checkpoint import CheckpointStore
from diloco.rundir.files import exclusive
from diloco.swarm.node.options import RunSpec

__all__ = ["Checkpoints"]

KEY = "checkpoints directory"
KEEP = 2


class Checkpoints:
    """The checkpoints of one peer in a directory; the newest two stay.

    Each has the model (`model.safetensors`, as `state_dict()` names it), the optimizer, the random generators, what the
    loop adds, and the peer's part of the swarm. It appears as a whole or not at all, and nothing in it needs pickle.
    One that is damaged is skipped for the one before it.

    Raises `ConfigError` if another process uses the directory.
    """

    def __init__(self, directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: RankGroup) -> None:
        self.directory = directory
        self._model, self._optimizer, self._ranks = model, optimizer, ranks
        self._store = CheckpointStore(directory, KEEP, KEY)
        self._lock = ExitStack()
        if ranks.is_rank0:
            self._lock.enter_context(exclusive(directory, KEY))

    def close(self) -> None:
        """Let other processes use the directory."""
        self._lock.close()

    def load(self, schedules: Schedulers) -> tuple[PeerState, dict[str, Any]] | None:
        """All ranks: restore model, optimizer and generators from the newest checkpoint; None if there is none.

        Returns the peer's state and what the loop added. Raises `CheckpointError` when no checkpoint can be used, or
        when the newest is that of another model or optimizer, or is not the same for all ranks.
        """
        found = self._store.load_latest()
        self._ranks.check_newest(-1 if found is None else found.step, f"checkpoints={self.directory}")
        if found is None:
            return None
        state, tensors = found.state, found.tensors
        self._load_model_(tensors["model"])
        restore_own(self._optimizer, tensors, state, KEY)
        schedules.start_again_()
        return PeerState.restore(tensors, state["peer"]), state["loop"]

    def _load_model_(self, saved: Mapping[str, Tensor]) -> None:
        own = self._tensors()
        wrong = [name for name in own.keys() | saved.keys() if _shape(own, name) != _shape(saved, name)]
        if wrong:
            name = min(wrong)
            raise CheckpointError(
                f"checkpoints={self.directory} holds another model ({name} is {_shape(saved, name)} there, and "
                f"{_shape(own, name)} here); build the model that it was written for, or choose another directory"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                load_rows_(tensor, saved[name])

    def _tensors(self) -> dict[str, Tensor]:
        return {name: one for name, one in self._model.state_dict().items() if isinstance(one, Tensor)}

    def save(self, sync: Attachment, run: RunSpec | None, loop: Mapping[str, Any]) -> Path | None:
        """All ranks: have rank 0, which has a `run`, write a checkpoint; returns where, on rank 0.

        Raises `CheckpointError` when it cannot be written, and `TypeError` when JSON cannot hold what the loop adds.
        """
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
