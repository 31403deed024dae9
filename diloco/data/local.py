"""Data of this machine: tokenised once, packed into sequences that have numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from diloco.config import DataConfig
from diloco.data.numbered import LeasedStream, Leases, NumberedStream, Rows
from diloco.data.packing import Packer, is_held_out, permuted
from diloco.data.tokenizers import Tokenizer
from diloco.errors import DataError

__all__ = ["LocalDataset"]

# Documents per call of the tokenizer: enough to occupy its threads, few enough to be held in memory twice.
_DOCUMENTS_AT_ONCE = 256


class LocalDataset:
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
        training, self.held_out = (packer.take(len(packer)) for packer in packers)  # (N, T) and (n, T)
        self.training = Rows(training, blake3(training.view(np.uint8).data).hexdigest()[:16])
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

    def batches(
        self, batch_size: int, *, shard: int = 0, shards: int | None = 1, rows: tuple[int, int] = (0, 1)
    ) -> NumberedStream:
        return NumberedStream(self.training, batch_size, self._seed, shard, shards, rows)

    def leased(
        self, batch_size: int, leases: Leases, *, shard: int = 0, rows: tuple[int, int] = (0, 1)
    ) -> LeasedStream:
        return LeasedStream(self.training, batch_size, self._seed, shard, leases, rows)

    def sequences(self, numbers: Sequence[int]) -> Tensor:
        found = self.training.read(np.asarray(numbers, dtype=np.int64), f"{self._seed}")
        return torch.from_numpy(found.astype(np.int64))

    def holdout(self, sequences: int) -> Tensor:
        # In file order they would come from one or two documents. The order does not depend on the seed.
        count = min(sequences, len(self.held_out))
        chosen = permuted(np.arange(count), len(self.held_out), "holdout")
        return torch.from_numpy(self.held_out[chosen].astype(np.int64))
