"""Endless lists of sequences with numbers 0, 1, 2, ..., and the batches that a peer takes of one.

A permutation that all peers share puts the sequences of an epoch in order, and epochs follow each
other. Shard s of S takes s, s + S, s + 2S, ... Shards never share a sequence within an epoch, and
the state of a stream is the number of sequences that it has taken. Any sequence can be read at any
time, so a rank reads its own rows only.

A mixture is a list made of blocks of `MIXTURE_BLOCK` sequences. In every block each source has its
part, to one sequence, in a random order (if sources took turns, a shard could read one source
only), and continues where it stopped in the block before. So a number alone says which source a
sequence is from and how many of that source come before it. Each source begins its next epoch when
it is used up, at its own pace.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor

from diloco.config import MIXTURE_BLOCK
from diloco.errors import CheckpointError

Numbers = NDArray[np.int64]
Ranges = Sequence[tuple[int, int]]
"""Ranges (start, stop) of sequences of the run's list."""
Plan = tuple[str, tuple[range, ...]]
"""What a batch is made of: the order in which its sequences have numbers, and these."""

_FEISTEL_ROUNDS = 6

logger = logging.getLogger(__name__)


class SequenceSource(Protocol):
    """Endless sequences 0, 1, 2, ..., in one permutation for each name of an order."""

    digest: str  # names the content; a checkpoint holds it

    def read(self, numbers: Numbers, order: str) -> NDArray[Any]:
        """Return the sequences numbered (N,) in an order: (N, T), of any integer type."""


class Leases(Protocol):
    """Work units that the swarm leases to this peer. Called by the training loop's thread only."""

    def take(self, number: int) -> Ranges | None:
        """Take the next `number` sequences, which are trained on from now on; None while fewer are
        leased."""

    def ahead(self, number: int) -> Ranges:
        """Return up to `number` sequences that `take` would return next; takes none."""


class SequenceArray:
    """An array of sequences, (N, T), perhaps mapped into memory, as an endless list; with `marks`
    each is read as `marked` makes it, for a mixture with conversations."""

    def __init__(self, rows: NDArray[Any], digest: str, marks: bool = False) -> None:
        self.rows, self._marks = rows, marks
        self.digest = f"{digest}-{len(rows)}x{rows.shape[-1]}"

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, numbers: Numbers, order: str) -> NDArray[Any]:
        epochs, positions = np.divmod(numbers, len(self.rows))
        chosen = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            chosen[here] = permuted(positions[here], len(self.rows), f"{order}/{epoch}")
        sequences: NDArray[Any] = np.asarray(self.rows[chosen])
        return marked(sequences) if self._marks else sequences


def marked(rows: NDArray[Any]) -> NDArray[Any]:
    """Bring rows of plain text, (N, T), into the form (N, 2, T) of `conversations.pack_samples`:
    one segment, all learned."""
    if rows.ndim == 3:
        return rows
    marks = np.full(rows.shape, 3, np.int32)
    marks[:, 0] = 2
    return np.stack([rows.astype(np.int32), marks], 1)


class Mixture:
    """Sources with weights, as one `SequenceSource`; all have sequences of the same length."""

    def __init__(
        self, names: Sequence[str], sources: Sequence[SequenceSource], weights: Sequence[float]
    ) -> None:
        self.names, self.sources, self.counts = names, sources, sequences_per_block(weights)
        content = zip(names, self.counts, sources, strict=True)
        text = " ".join(f"{name}/{count}/{source.digest}" for name, count, source in content)
        self.digest = blake3(text.encode()).hexdigest()[:16]

    def read(self, numbers: Numbers, order: str) -> NDArray[Any]:
        sources, ranks = mixture_positions(numbers, order, self.counts)
        named = enumerate(zip(self.names, self.sources, strict=True))
        rows = np.concatenate(
            [data.read(ranks[sources == index], f"{order}/{name}") for index, (name, data) in named]
        )
        sequences = np.empty_like(rows)
        sequences[np.argsort(sources, kind="stable")] = rows
        return sequences


def sequences_per_block(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the sequences of each source in a block: integers nearest to the weights."""
    exact = np.asarray(weights, dtype=np.float64) * (MIXTURE_BLOCK / sum(weights))
    counts = np.floor(exact).astype(int)
    missing = MIXTURE_BLOCK - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    return tuple(counts.tolist())


def mixture_positions(
    numbers: Numbers, order: str, counts: tuple[int, ...]
) -> tuple[Numbers, Numbers]:
    """Return for each number, (N,), its source, and its index in that source: two (N,)."""
    blocks, positions = np.divmod(numbers, MIXTURE_BLOCK)
    sources, ranks = np.empty_like(positions), np.empty_like(positions)
    for block in np.unique(blocks):
        here = blocks == block
        of_block, rank_in_block = _pattern(f"{order}/mixture/{block}", counts)
        sources[here] = of_block[positions[here]]
        before = block * np.asarray(counts)[sources[here]]
        ranks[here] = before + rank_in_block[positions[here]]
    return sources, ranks


@functools.lru_cache(maxsize=16)
def _pattern(key: str, counts: tuple[int, ...]) -> tuple[Numbers, Numbers]:
    """Return for each position in a block its source, and its index within that source."""
    numbers = permuted(np.arange(MIXTURE_BLOCK), MIXTURE_BLOCK, key)
    sources = np.searchsorted(np.cumsum(counts), numbers, side="right")
    ranks = np.empty_like(sources)
    for index, count in enumerate(counts):
        ranks[sources == index] = np.arange(count)
    return sources, ranks


class NumberedStream:
    """Endless batches of one peer from a numbered list: its shard, or the work units that the swarm
    leases to it.

    A unit is taken when its batch is handed out. While none are leased (the peer that hands out
    units has died, for example) training does not wait: the batch comes from this peer's own order
    over all data. Leased units are not part of the state, because a peer that stops gives them
    back.

    With leases, every shard has the whole list, in an order of its own. `rows` is (rank, size): of
    the peer's batch, which has `batch_size` sequences, only rows rank, rank + size, ... are read.
    """

    def __init__(
        self,
        source: SequenceSource,
        batch_size: int,
        seed: int,
        shard: int,
        shards: int,
        rows: tuple[int, int] = (0, 1),
        leases: Leases | None = None,
    ) -> None:
        assert batch_size > 0 and shard >= 0 and (leases is not None or shard < shards)
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
        size = self._batch_size
        coming = [] if self._leases is None else self._leases.ahead(batches * size)
        plans = [self._leased(ranges) for ranges in _cut(coming, size)]
        return plans + [self._own(self._taken + n * size) for n in range(batches - len(plans))]

    def make(self, plan: Plan) -> Tensor:
        order, ranges = plan
        numbers = np.concatenate([np.asarray(part, np.int64) for part in ranges])
        own = numbers[self._rank :: self._size]
        return torch.from_numpy(self._source.read(own, order).astype(np.int64))

    def _own(self, taken: int) -> Plan:
        start = self._first + self._stride * taken
        return self._order, (range(start, start + self._stride * self._batch_size, self._stride),)

    def _leased(self, ranges: Ranges) -> Plan:
        return self._common, tuple(range(start, stop) for start, stop in ranges)

    def state(self) -> dict[str, Any]:
        position = {"taken": self._taken, "stride": self._stride}
        return {"kind": "memory", **position, "digest": self._source.digest}

    def restore(self, state: dict[str, Any]) -> None:
        try:
            taken, stride, digest = int(state["taken"]), int(state["stride"]), state["digest"]
        except (KeyError, TypeError, ValueError) as error:
            raise no_position() from error
        if digest != self._source.digest:
            warn_of_other_data()
        # If the number of shards has changed, continue after all that the shards together took.
        self._taken = taken if stride == self._stride else -(-taken * stride // self._stride)


def no_position() -> CheckpointError:
    return CheckpointError(
        "data: the checkpoint holds no position for this data.source, or one of another version of"
        " diloco; use those that it was made with, or another run.dir"
    )


def warn_of_other_data() -> None:
    logger.warning(
        "the training data changed since the checkpoint: continuing at the same position in it"
    )


def _cut(ranges: Ranges, size: int) -> Iterator[Ranges]:
    """Yield groups of `size` sequences, list after list; an incomplete group at the end is
    dropped."""
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


# -- order -----------------------------------------------------------------------------------------


def permuted(positions: Numbers, size: int, key: str) -> Numbers:
    """Map `positions`, each in [0, size), by the permutation that `key` names: same shape, int64.

    A Feistel network permutes the numbers below the next power of four. A result outside of the
    range goes through the network again until it is inside (fewer than 4 passes on average). It
    needs no memory, and is equal with every numpy version, which `numpy.random` does not promise
    (NEP 19).
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    digest = hashlib.blake2b(key.encode(), digest_size=8 * _FEISTEL_ROUNDS).digest()
    round_keys = np.frombuffer(digest, "<u8").astype(np.uint64)
    values = _network(positions.astype(np.uint64), half_bits, round_keys)
    while (outside := values >= size).any():
        values[outside] = _network(values[outside], half_bits, round_keys)
    return values.astype(np.int64)


def _network(
    values: NDArray[np.uint64], half_bits: int, round_keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    left, right = values >> shift, values & mask
    for key in round_keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    joined: NDArray[np.uint64] = (left << shift) | right
    return joined


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele et al. 2014): every output bit depends on every input
    bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
