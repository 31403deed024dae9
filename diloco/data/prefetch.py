"""Makes batches before their turn, in a thread beside the training loop.

A stream decides in two steps. Its `plan` runs in the training thread when a batch is handed out: it
moves the position and takes leased units. `make` reads and tokenises what a plan says, in any
thread. The worker makes the plans that the stream foresees. A wrong forecast (units came back from
a peer that died) costs the time to make that batch, and nothing else.

A thread is enough: numpy, tokenizers, pyarrow and the network let other threads run meanwhile.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Hashable
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch import Tensor

Made = Future[Tensor | None]

AHEAD = 8  # batches
# A worker that does not end in this time, as it waits for the network, is left behind.
END_S = 1.0


class BatchStream(Protocol):
    """Endless batches of one peer, resumable at every batch."""

    def __next__(self) -> Tensor:
        """Return the next batch: (B, T) int64 on the CPU. Raises what reading the data raises."""

    def state(self) -> dict[str, Any]:
        """Return the position after the last batch that was handed out, as a JSON object."""

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after that batch, before the first `next`; exactly if data and shards are equal.

        Raises CheckpointError: `state` is not a position of this kind of stream.
        """


class Planned(BatchStream, Protocol):
    """A stream whose batches can be made by another thread."""

    def plan(self) -> Hashable:
        """Return the plan of the next batch, and move the position behind it."""

    def ahead(self, batches: int) -> list[Any]:
        """Forecast the plans of the next batches."""

    def make(self, plan: Any) -> Tensor | None:
        """Make the batch of a plan: (B, T) int64; None if it, and each later one, cannot be yet.

        The worker calls it in the order of the plans.
        """


class Prefetched:
    """A stream with up to `depth` batches made ahead; for a CUDA device they lie in pinned memory.

    An exception of the worker is raised, as itself, by the `next` whose batch it was. Use it with
    `contextlib.closing`: `close` ends the worker, and drops what it has made.
    """

    def __init__(
        self, stream: Planned, device: torch.device | None = None, depth: int = AHEAD
    ) -> None:
        assert depth > 0, depth
        self._stream = stream
        self._device = device if device is not None and device.type == "cuda" else None
        self._depth = depth
        self._foreseen: dict[Hashable, Made] = {}  # by plan, in their order
        self._jobs = queue.SimpleQueue[tuple[Hashable, Made] | None]()
        self._worker: threading.Thread | None = None

    def __next__(self) -> Tensor:
        plan = self._stream.plan()
        batch = self._foreseen.pop(plan, None) or self._order(plan)
        coming = self._stream.ahead(self._depth)
        for wrong in self._foreseen.keys() - set(coming):
            self._foreseen.pop(wrong).cancel()
        for following in coming:
            if following not in self._foreseen:
                self._foreseen[following] = self._order(following)
        if (made := batch.result()) is None:
            self._drop()
            made = self._stream.make(plan)
            assert made is not None, "it is planned now"
        return made

    def state(self) -> dict[str, Any]:
        return self._stream.state()

    def restore(self, state: dict[str, Any]) -> None:
        assert self._worker is None, "batches were made already"
        self._stream.restore(state)

    def close(self) -> None:
        """End the worker. Can be called twice."""
        self._drop()
        worker, self._worker = self._worker, None
        if worker is not None:
            self._jobs.put(None)
            worker.join(END_S)

    def _drop(self) -> None:
        for batch in self._foreseen.values():
            batch.cancel()
        self._foreseen.clear()

    def _order(self, plan: Hashable) -> Made:
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="diloco-data", daemon=True)
            self._worker.start()
        batch = Made()
        self._jobs.put((plan, batch))
        return batch

    def _work(self) -> None:
        # else pinned memory would belong to the first device of the machine
        if self._device is not None:
            torch.cuda.set_device(self._device)
        while (job := self._jobs.get()) is not None:
            plan, batch = job
            if not batch.set_running_or_notify_cancel():
                continue
            try:
                made = self._stream.make(plan)
                if made is not None and self._device is not None:
                    made = made.pin_memory()
                batch.set_result(made)
            except BaseException as error:  # the training thread raises it
                batch.set_exception(error)
            del job, batch
