"""Streams a dataset of the Hugging Face hub: rows are read and tokenised as they are needed.

1. The run has one endless list of *units* 0, 1, 2, ... The files of the dataset are in a seeded
   order, a new one in each epoch, and a unit is a row of them, in this order. From `MANY_FILES`
   files on, a unit is a whole file.
2. Units are dealt out, so that no two peers have the same: the swarm leases them (`Leases`), or
   shard s of S has s, s + S, s + 2S, ...
3. A peer reads forward, passing over what others have. Documents that are not held out are
   tokenised, packed and yielded in this order.

Rows are not shuffled inside a file. Each rank reads and tokenises the peer's whole batch and keeps
its own rows: which text a sequence is made of is known only after all before it was read.

The state is the units that were taken and not read to their end, and the tokens that wait in the
packer.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diloco.data.hub_files import HubFiles, Reader
from diloco.data.numbered import Leases, no_position, warn_of_other_data
from diloco.data.packing import Document, Packer, encode_rows
from diloco.data.prefetch import AHEAD
from diloco.errors import DataError
from diloco.ranges import difference, union

logger = logging.getLogger(__name__)

# before a peer that has no units goes on without a lease, ...
LEASE_TRIES, LEASE_RETRY_S = 100, 0.1
UNLEASED_ROWS = 64  # ... so many at a time
ROWS_AT_ONCE, BYTES_PER_TOKEN = 256, 4  # per call of the tokenizer, at most; about so many


class HubDataset(HubFiles):
    """A split of a dataset of the hub, with the methods of `LocalDataset`."""

    def batches(
        self,
        size: int,
        shard: int = 0,
        shards: int = 1,
        rows: tuple[int, int] = (0, 1),
        leases: Leases | None = None,
    ) -> HubStream:
        return HubStream(self, size, leases or ShardUnits(shard, shards), rows)


class ShardUnits:
    """The units of shard s of S, with the `take` of `Leases`."""

    def __init__(self, shard: int, shards: int) -> None:
        assert 0 <= shard < shards, (shard, shards)
        self.shard, self.shards, self.next = shard, shards, shard

    def take(self, number: int) -> Sequence[tuple[int, int, int]]:
        start, self.next = self.next, self.next + self.shards * number
        return [(start, self.next, self.shards)]

    def skip_to(self, unit: int) -> None:
        """Continue with this shard's first unit that is not before `unit`."""
        self.next = unit + (self.shard - unit) % self.shards


class HubStream:
    """Endless batches of one peer from a streaming dataset; the plan of a batch is its number.

    All ranks take units at the same time, in `plan`, some batches before they are trained on. A
    peer that resumes continues with those units that are in the model, because no other peer gets
    them; the others went back.
    """

    def __init__(
        self,
        dataset: HubFiles,
        batch_size: int,
        leases: Leases | ShardUnits,
        rows: tuple[int, int] = (0, 1),
    ) -> None:
        assert batch_size > 0, batch_size
        self._dataset, self._batch_size, self._leases = dataset, batch_size, leases
        self._shard = [leases.shard, leases.shards] if isinstance(leases, ShardUnits) else None
        self._rows = rows
        self._reader = Reader(dataset)
        self._lock = threading.Lock()  # held by the thread that reads
        self._newest = 0  # the end of all taken units
        self._begin([], 0, [])

    def _begin(self, units: Iterable[range], row: int, waiting: list[int]) -> None:
        self._packer = Packer(self._dataset.sequence_length, self._dataset.tokenizer)
        self._packer.restore(waiting)
        self._taken: deque[int] = deque()  # to be read
        # not read to their end when the last batch was handed out
        self._pending: deque[range] = deque()
        self._num_taken = self._num_forgotten = self._failures = self._planned = self._made = 0
        self._add(units)
        self._encoded = self._encode(row)
        self._fault: Exception | None = None
        # A position: units read to their end, rows read of the next one, and tokens that wait in
        # the packer.
        self._read = 0, row
        self._positions = {0: (0, row, self._packer.waiting())}  # after each batch

    def __next__(self) -> Tensor:
        made = self.make(self.plan())
        assert made is not None, "its units are taken"
        return made

    def plan(self) -> int:
        """Take enough units for the next batch, and return its number."""
        done, plan, by_file = self._forget(), self._planned + 1, self._dataset.by_file
        # units in a batch
        units = math.ceil(done / self._planned) if done else self._dataset.units(self._batch_size)
        ahead = 1 if by_file else units * (AHEAD + 2)
        while self._num_taken - done < ahead and self._take(units):
            pass
        while not self._suffices(plan):
            if self._take(max(1, units >> self._failures)):
                self._failures = 0
            elif self._failures < LEASE_TRIES:
                self._failures += 1
                time.sleep(LEASE_RETRY_S)
            else:
                logger.warning(
                    "the swarm leases no data to this peer, so it reads rows that another may have"
                )
                more = 1 if by_file else UNLEASED_ROWS
                self._add([range(self._newest, self._newest + more)])
        self._positions.pop(self._planned, None)
        self._planned = plan
        return plan

    def ahead(self, batches: int) -> list[int]:
        """Return the numbers of the batches after the planned one."""
        return list(range(self._planned + 1, self._planned + 1 + batches))

    def _take(self, number: int) -> bool:
        units = self._leases.take(number)
        self._add(range(*unit) for unit in units or ())
        return units is not None

    def _add(self, units: Iterable[range]) -> None:
        for unit in units:
            self._pending.append(unit)
            self._taken.extend(unit)
            self._num_taken += len(unit)
            self._newest = max(self._newest, unit.stop)

    def _forget(self) -> int:
        """Drop from `_pending`, and count, the units read before the last batch was handed out."""
        done = self._positions[self._planned][0]
        while (more := done - self._num_forgotten) > 0:
            head = self._pending.popleft()
            if len(head) > more:
                self._pending.appendleft(head[more:])
            self._num_forgotten += min(more, len(head))
        return done

    def state(self) -> dict[str, Any]:
        self._forget()
        _, row, waiting = self._positions[self._planned]
        return {
            "kind": "rows",
            "files": self._dataset.digest,
            "lengths": sorted(self._reader.lengths.items()),
            "newest": self._newest,
            "shard": self._shard,
            "units": [[unit.start, unit.stop, unit.step] for unit in self._pending],
            "row": row,
            "waiting": waiting.tolist(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        try:
            lengths = {int(file): int(rows) for file, rows in state["lengths"]}
            units = [range(*map(int, unit)) for unit in state["units"]]
            newest, row, waiting = int(state["newest"]), int(state["row"]), state["waiting"]
            merged, shard, files = state.get("merged") or [], state["shard"], state["files"]
        except (KeyError, TypeError, ValueError) as error:
            raise no_position() from error
        self._newest, goes_on = newest, shard == self._shard
        if files == self._dataset.digest:
            self._reader.lengths = lengths
        else:
            warn_of_other_data()
        if isinstance(self._leases, ShardUnits):
            if not goes_on:
                logger.warning(
                    "data.shards changed since the checkpoint: continuing behind what was read"
                )
            self._leases.skip_to(newest)
        else:  # what is not in the model went back to the swarm, and may be another peer's now
            held = union((unit.start, unit.stop) for unit in units)
            goes_on = goes_on and bool(held) and not difference(held, union(map(tuple, merged)))
        self._begin(*((units, row, waiting) if goes_on else ([], 0, [])))

    # What follows runs in the worker, or in the training thread.

    def make(self, plan: int) -> Tensor | None:
        """Make the next batch: (B / size, T). Each is made once, in order; None while its units are
        not taken."""
        with self._lock:
            if plan != self._made + 1 or not self._fill():
                return None
            rank, size = self._rows
            batch = self._packer.take(self._batch_size)[rank::size]
            self._positions[plan] = (*self._read, self._packer.waiting())
            self._made = plan
        return torch.from_numpy(batch.astype(np.int64))

    def _suffices(self, plan: int) -> bool:
        """Return True if the batch is made, or taken units suffice for it; equal on all ranks."""
        if self._made >= plan:  # first without the lock, which a reading worker holds
            return True
        with self._lock:
            return self._made >= plan or self._fill()

    def _fill(self) -> bool:
        """Pack rows until there is a batch, and no more; False if that needs more units."""
        while len(self._packer) < self._batch_size:
            try:
                encoded = next(self._encoded)
            except Exception as error:  # it has ended the generator: raise it again
                self._fault = self._fault or error
                raise self._fault from None
            if encoded is None:
                return False
            done, row, documents = encoded
            self._read = done, row
            for document in documents:
                self._packer.add(document.tokens)
        return True

    def _encode(self, row: int) -> Iterator[tuple[int, int, list[Document]] | None]:
        """Yield the position behind each row and its training documents; None while no unit is
        taken. Reads as many rows at a time as a batch needs."""
        dataset, lengths = self._dataset, self._reader.lengths
        rows, barren = self._read_rows(row), 0
        while True:
            some, num_bytes = list[tuple[int, int, bytes]](), 0
            missing = (self._batch_size - len(self._packer)) * dataset.sequence_length
            while num_bytes < missing * BYTES_PER_TOKEN and len(some) < ROWS_AT_ONCE:
                if (position := next(rows)) is None:
                    break
                some.append(position)
                num_bytes += len(position[2])
            texts = [text for *_, text in some]
            encoded = encode_rows(texts, dataset.settings, dataset.tokenizer, held_out=False)
            for (done, number, _), documents in zip(some, encoded, strict=True):
                barren = 0 if documents else barren + 1
                if len(lengths) == len(dataset.files) and barren > sum(lengths.values()):
                    raise DataError(
                        f"data.name: all documents of {dataset.settings.name} that this peer reads"
                        " are held out; use more data, or fewer peers"
                    )
                yield done, number, documents
            if not some:
                yield None

    def _read_rows(self, row: int) -> Iterator[tuple[int, int, bytes] | None]:
        """Yield the position behind each row, and its text; None while no unit is taken."""
        for done in count():
            while not self._taken:
                yield None
            for text in self._reader.unit(self._taken.popleft(), row):
                row += 1
                yield done, row, text
            row = 0
