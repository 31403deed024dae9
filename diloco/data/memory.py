"""Data that fits in memory: tokenised once, packed into one array, yielded in a seeded order.

A permutation that all peers share numbers the training sequences of an epoch, and epochs follow each other: the run has
one endless list of sequences 0, 1, 2, ... Shard s of S takes s, s + S, s + 2S, ... Shards never share a sequence within
an epoch, and the state of a stream is the number of sequences that it has taken.
"""

from __future__ import annotations

import functools
import itertools
import logging
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diloco.config import DataConfig
from diloco.data.packing import Packer, is_held_out, permuted
from diloco.data.tokenizers import Tokenizer
from diloco.errors import CheckpointError, DataError

__all__ = ["LeasedStream", "MemoryDataset", "MemoryStream", "TakeUnits"]

TakeUnits = Callable[[int], Sequence[tuple[int, int]] | None]
"""Takes n sequences of the run's list: ranges (start, stop) of n in all, or None while none are leased to this peer."""

logger = logging.getLogger(__name__)

# Documents per call of the tokenizer: enough to occupy its threads, few enough to be held in memory twice.
_DOCUMENTS_AT_ONCE = 256


class MemoryDataset:
    """All sequences of a source in one array of the smallest integer type; with the byte tokenizer 1 byte per token."""

    def __init__(self, settings: DataConfig, tokenizer: Tokenizer, seed: int, documents: Iterable[bytes]) -> None:
        self.tokenizer = tokenizer
        self.sequence_length = settings.sequence_length
        self._seed = seed
        packers = [Packer(self.sequence_length, tokenizer), Packer(self.sequence_length, tokenizer)]
        num_documents = num_bytes = 0
        iterator = iter(documents)
        while group := list(itertools.islice(iterator, _DOCUMENTS_AT_ONCE)):
            num_documents += len(group)
            num_bytes += sum(map(len, group))
            for document, tokens in zip(group, tokenizer.encode(group), strict=True):
                packers[is_held_out(document, settings.holdout)].add(tokens)
        where = settings.source if settings.path is None else f"{settings.source} in {', '.join(settings.path)}"
        self.training, self.held_out = (packer.take(len(packer)) for packer in packers)  # (N, T) and (n, T)
        self.description = (
            f"{where}: {num_documents:,} documents, {num_bytes / 1e6:.1f} MB, {len(self.training):,} training and "
            f"{len(self.held_out):,} held-out sequences of {self.sequence_length} tokens"
        )
        if not num_documents:
            raise DataError(f"data.source={where} has no text; give files that are not empty")
        if not len(self.training):
            raise DataError(
                f"data.sequence_length: {self.sequence_length} tokens are more than all training text of "
                f"data.source={where} ({num_bytes:,} bytes); lower it or add text"
            )
        if not len(self.held_out):
            raise DataError(
                f"data.holdout: {settings.holdout} of {num_documents} documents leaves no held-out sequence of "
                f"{self.sequence_length} tokens; raise it or add text to data.source={where}"
            )

    def batches(self, batch_size: int, *, shard: int = 0, shards: int | None = 1) -> MemoryStream:
        return MemoryStream(self.training, batch_size, self._seed, shard, shards)

    def leased(self, batch_size: int, take: TakeUnits, *, shard: int = 0) -> LeasedStream:
        return LeasedStream(self.training, batch_size, self._seed, shard, take)

    def sequences(self, numbers: Sequence[int]) -> Tensor:
        return _sequences(self.training, np.asarray(numbers, dtype=np.int64), f"{self._seed}")

    def holdout(self, sequences: int) -> Tensor:
        # In file order they would come from one or two documents. The order does not depend on the seed.
        count = min(sequences, len(self.held_out))
        chosen = permuted(np.arange(count), len(self.held_out), "holdout")
        return torch.from_numpy(self.held_out[chosen].astype(np.int64))


def _sequences(rows: NDArray[Any], numbers: NDArray[np.int64], order: str) -> Tensor:
    """Sequences of the endless list by number: (B,) int64 to (B, T) int64."""
    epochs, positions = np.divmod(numbers, len(rows))
    chosen = np.empty_like(positions)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        chosen[here] = permuted(positions[here], len(rows), f"{order}/{epoch}")
    return torch.from_numpy(rows[chosen].astype(np.int64))


class MemoryStream:
    """One shard's endless batches of an in-memory dataset."""

    def __init__(self, rows: NDArray[Any], batch_size: int, seed: int, shard: int, shards: int | None) -> None:
        assert batch_size > 0 and shard >= 0 and (shards is None or shard < shards), (batch_size, shard, shards)
        self._rows = rows  # (N, T)
        self._batch_size = batch_size
        # If the number of shards is unknown, every peer has the whole list, in its own order.
        self._order = f"{seed}" if shards is not None else f"{seed}/{shard}"
        self._first, self._stride = (shard, shards) if shards is not None else (0, 1)
        self._taken = 0

    def __iter__(self) -> MemoryStream:
        return self

    def __next__(self) -> Tensor:
        taken = self._taken + np.arange(self._batch_size, dtype=np.int64)
        self._taken += self._batch_size
        return _sequences(self._rows, self._first + self._stride * taken, self._order)  # (B, T)

    def state(self) -> dict[str, Any]:
        return {"kind": "memory", "taken": self._taken, "stride": self._stride, "digest": self._digest}

    def restore(self, state: dict[str, Any]) -> None:
        try:
            taken, stride, digest = int(state["taken"]), int(state["stride"]), state["digest"]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                "data: the checkpoint holds no position for this data.source; use the source it was made with"
            ) from error
        if digest != self._digest:
            logger.warning("the training data changed since the checkpoint: continuing at the same position in it")
        # If the number of shards has changed, continue after everything that all shards together have taken.
        self._taken = taken if stride == self._stride else -(-taken * stride // self._stride)

    @functools.cached_property
    def _digest(self) -> str:
        return f"{zlib.crc32(self._rows.data):08x}-{len(self._rows)}x{self._rows.shape[1]}"


class LeasedStream(MemoryStream):
    """Batches of the work units that the swarm leases to this peer.

    While `take` returns None (the peer that hands out units has died, for example) training does not wait: the batch
    comes from this peer's own order over all data. Leased units are not part of the state, because a peer that stops
    gives them back.
    """

    def __init__(self, rows: NDArray[Any], batch_size: int, seed: int, shard: int, take: TakeUnits) -> None:
        super().__init__(rows, batch_size, seed, shard, None)
        self._common_order, self._take = f"{seed}", take

    def __next__(self) -> Tensor:
        units = self._take(self._batch_size)
        if units is None:
            return super().__next__()
        numbers = np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in units])
        return _sequences(self._rows, numbers, self._common_order)
