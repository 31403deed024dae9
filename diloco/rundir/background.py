"""Checkpoints in the background: a thread writes copies while training goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco.errors import CheckpointError
from diloco.rundir.checkpoint import CheckpointStore

__all__ = ["BackgroundWriter", "copied"]

Groups = Mapping[str, Mapping[str, Tensor]]


def copied(tensors: Groups) -> dict[str, dict[str, Tensor]]:
    """Groups of tensors, as copies on the CPU that nobody else writes to."""
    with torch.no_grad():
        return {
            stem: {name: tensor.detach().to("cpu", copy=True) for name, tensor in group.items()}
            for stem, group in tensors.items()
        }


class BackgroundWriter:
    """Writes one checkpoint at a time in a thread.

    Python waits for the thread before it ends. A process that is killed leaves a temporary directory, which the next
    `CheckpointStore.save` removes.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[Path] | None = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writing is not None and not self._writing.done()

    def begin(self, step: int, tensors: Groups, state: Mapping[str, Any]) -> None:
        """Write `tensors`, which must stay as they are, and `state` as it is now. Take `result` of the one before
        first.
        """
        assert self._writing is None, "one checkpoint at a time"
        self._writing = self._threads.submit(self._store.save, step, tensors, json.loads(json.dumps(state)))

    def result(self) -> CheckpointError | None:
        """Wait until nothing is being written; returns why the last checkpoint could not be written, once."""
        writing, self._writing = self._writing, None
        error = None if writing is None else writing.exception()
        if error is not None and not isinstance(error, CheckpointError):
            raise error
        return error
