"""Data with a number for every sequence: the run has one endless list of sequences 0, 1, 2, ... in
a seeded order.

A permutation that all peers share puts the sequences of an epoch in order, and epochs follow each
other. Shard s of S takes s, s + S, s + 2S, ... Shards never share a sequence within an epoch, and
the state of a stream is the number of sequences that it has taken. Any sequence can be read at any
time, so a rank reads its own rows only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diloco.data.packing import permuted
from diloco.errors import CheckpointError

Ranges = Sequence[tuple[int, int]]
"""Ranges (start, stop) of sequences of the run's list."""

Plan = tuple[str, tuple[range, ...]]
"""What a batch is made of: the order in which its sequences have numbers, and these."""

logger = logging.getLogger(__name__)


class EndlessList(Protocol):
    """Sequences 0, 1, 2, ... without an end, in as many orders as there are names for one."""

    digest: str  # names the content; a checkpoint holds it

    def read(self, numbers: NDArray[np.int64], order: str) -> NDArray[Any]:
        """The sequences with these numbers, (N,), in the order of that name: (N, T), in any integer
        type."""


class Leases(Protocol):
    """Work units that the swarm leases to this peer. Called by the training loop's thread only."""

    def take(self, number: int) -> Ranges | None:
        """The next `number` sequences, which count as trained on from now on; None while so many
        are not leased."""

    def ahead(self, number: int) -> Ranges:
        """Up to `number` sequences that would be taken after the last ones, as it looks now;
        nothing is taken."""


class Rows:
    """The endless list of an array of sequences, (N, T), in memory or in a file that is mapped into
    it."""

    def __init__(self, rows: NDArray[Any], digest: str) -> None:
        self.rows = rows
        self.digest = f"{digest}-{len(rows)}x{rows.shape[1]}"

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, numbers: NDArray[np.int64], order: str) -> NDArray[Any]:
        epochs, positions = np.divmod(numbers, len(self.rows))
        chosen = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            chosen[here] = permuted(positions[here], len(self.rows), f"{order}/{epoch}")
        found: NDArray[Any] = np.asarray(self.rows[chosen])
        return found


def no_position() -> CheckpointError:
    return CheckpointError(
        "data: the checkpoint holds no position for this data.source, or one of another version of"
        " diloco; use those that it was made with, or another run.dir"
    )


class NumberedStream:
    """One peer's endless batches of a numbered list: its shard, or the work units that the swarm
    leases to it.

    A unit is taken when its batch is handed out. While none are leased (the peer that hands out
    units has died, for example) training does not wait: the batch comes from this peer's own order
    over all data. Leased units are not part of the state, because a peer that stops gives them
    back.

    With leases, every shard has the whole list, in an order of its own. `rows` is (rank, size): of
    the peer's batch, which has `batch_size` sequences, only the rows rank, rank + size, ... are
    read.
    """

    def __init__(
        self,
        source: EndlessList,
        batch_size: int,
        seed: int,
        shard: int,
        shards: int,
        rows: tuple[int, int] = (0, 1),
        leases: Leases | None = None,
    ) -> None:
        assert batch_size > 0 and shard >= 0 and (leases is not None or shard < shards), (
            batch_size,
            shard,
            shards,
        )
        self._source, self._batch_size, self._leases = source, batch_size, leases
        self._common = self._order = f"{seed}"
        self._first, self._stride = shard, shards
        if leases is not None:
            self._order, self._first, self._stride = f"{seed}/{shard}", 0, 1
        self._rank, self._size = rows
        self._taken = 0

    def __next__(self) -> Tensor:
        return self.make(self.plan())

    def plan(self) -> Plan:
        if self._leases is not None and (ranges := self._leases.take(self._batch_size)) is not None:
            return self._leased(ranges)
        plan = self._own(self._taken)
        self._taken += self._batch_size
        return plan

    def ahead(self, batches: int) -> list[Plan]:
        coming = [] if self._leases is None else self._leases.ahead(batches * self._batch_size)
        plans = [self._leased(ranges) for ranges in _cut(coming, self._batch_size)]
        return plans + [
            self._own(self._taken + more * self._batch_size) for more in range(batches - len(plans))
        ]

    def make(self, plan: Plan) -> Tensor:
        order, ranges = plan
        numbers = np.concatenate([np.asarray(one, np.int64) for one in ranges])[
            self._rank :: self._size
        ]
        return torch.from_numpy(self._source.read(numbers, order).astype(np.int64))

    def _own(self, taken: int) -> Plan:
        start = self._first + self._stride * taken
        return self._order, (range(start, start + self._stride * self._batch_size, self._stride),)

    def _leased(self, ranges: Ranges) -> Plan:
        return self._common, tuple(range(start, stop) for start, stop in ranges)

    def state(self) -> dict[str, Any]:
        return {
            "kind": "memory",
            "taken": self._taken,
            "stride": self._stride,
            "digest": self._source.digest,
        }

    def restore(self, state: dict[str, Any]) -> None:
        try:
            taken, stride, digest = int(state["taken"]), int(state["stride"]), state["digest"]
        except (KeyError, TypeError, ValueError) as error:
            raise no_position() from error
        if digest != self._source.digest:
            logger.warning(
                "the training data changed since the checkpoint: continuing at the same position"
                " in it"
            )
        # If the number of shards has changed, continue after everything that all shards together
        # have taken.
        self._taken = taken if stride == self._stride else -(-taken * stride // self._stride)


def _cut(ranges: Ranges, size: int) -> Iterator[Ranges]:
    """Yields ranges of `size` sequences in all, one such list after the other, as far as they are
    full."""
    part: list[tuple[int, int]] = []
    missing = size
    for start, stop in ranges:
        while start < stop:
            end = min(stop, start + missing)
            part.append((start, end))
            missing -= end - start
            start = end
            if not missing:
                yield part
                part, missing = [], size
