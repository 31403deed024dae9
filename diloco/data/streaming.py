"""Data too large for this machine: a streaming dataset of the Hugging Face hub, tokenised as it arrives.

1. The files of the dataset are visited in a seeded order, a new one in each epoch.
2. With at least as many files as shards, shard s of S visits every S-th file, starting at s. With fewer files, every
   shard reads all files and takes every S-th document.
3. Held-out documents are left out; the others are tokenised, packed and yielded in the order of the stream.

Documents are not shuffled inside a file: the shuffle buffer of `datasets` loses its content at a resume, and our resume
is exact. The state is the position in the current file (`IterableDataset.state_dict`) and the tokens that wait in the
packer.

The sequences of a stream have no numbers, so no work units of it are leased: which text a number stands for is known
only after everything before it was read and tokenised, and a whole file is too large for a unit. For the same reason
each rank of an island reads and tokenises the peer's whole batch, and keeps its own rows.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diloco.config import DataConfig
from diloco.data.numbered import Leases
from diloco.data.packing import Packer, is_held_out, permuted
from diloco.data.sources import open_pinned, open_stream, reading, text_of
from diloco.data.tokenizers import Tokenizer
from diloco.errors import CheckpointError, DataError
from diloco.hub import check_reachable

__all__ = ["HubDataset", "HubStream"]

logger = logging.getLogger(__name__)

_DOCUMENTS_AT_ONCE = 256  # per call of the tokenizer, at most


class HubDataset:
    """A streaming dataset of the hub, or without `data.revision` a local directory with the same layout.

    `datasets` retries a connection that breaks while streaming. When it gives up, a DataError ends the run, which can
    be resumed from its checkpoint.
    """

    digest = ""  # its sequences have no numbers

    def __init__(self, settings: DataConfig, tokenizer: Tokenizer, seed: int) -> None:
        assert settings.name is not None
        self.tokenizer = tokenizer
        self.sequence_length = settings.sequence_length
        self.settings = settings
        self.seed = seed
        pinned = settings.revision is not None
        if pinned or not Path(settings.name).exists():
            check_reachable("data.name", "dataset", settings.name, settings.revision)
        with _reading_hub(settings):
            # An IterableDataset; its "shards" are files.
            self.rows = (
                open_pinned(settings)
                if pinned
                else open_stream(settings.name, name=settings.subset, split=settings.split)
            )
            first = next(iter(self.rows), None)
        if first is None:
            raise DataError(f"data.split: {settings.split} of {settings.name} is empty; choose another split")
        text_of(first, settings.field)
        self.rows = self.rows.select_columns([settings.field])
        files = self.rows.num_shards
        self.description = (
            f"hub {settings.name}: {files:,} files, streamed in sequences of {self.sequence_length} tokens"
        )

    def batches(
        self, batch_size: int, *, shard: int = 0, shards: int | None = 1, rows: tuple[int, int] = (0, 1)
    ) -> HubStream:
        return HubStream(self, batch_size, shard, shards, rows)

    def leased(self, batch_size: int, leases: Leases, *, shard: int = 0, rows: tuple[int, int] = (0, 1)) -> HubStream:
        return self.batches(batch_size, shard=shard, shards=None, rows=rows)

    def holdout(self, sequences: int) -> Tensor:
        # Reads 1 / data.holdout times the text that it returns, once per run.
        packer = Packer(self.sequence_length, self.tokenizer)
        with _reading_hub(self.settings):
            for row in self.rows if self.settings.holdout else ():
                document = text_of(row, self.settings.field)
                if document and is_held_out(document, self.settings.holdout):
                    packer.add(self.tokenizer.encode([document])[0])
                    if len(packer) >= sequences:
                        break
        if self.settings.holdout and not len(packer):
            raise DataError(
                f"data.holdout: {self.settings.holdout} of the documents of {self.settings.name} leaves no held-out "
                f"sequence of {self.sequence_length} tokens; raise it, or set it to 0 (no held-out loss)"
            )
        return torch.from_numpy(packer.take(min(sequences, len(packer))).astype(np.int64))


class HubStream:
    """One shard's endless batches of a streaming dataset.

    The plan of a batch is its number since the start. A position is kept with every batch that was made, because that
    of the batch that was handed out last is the stream's (see `prefetch`).
    """

    def __init__(
        self, dataset: HubDataset, batch_size: int, shard: int, shards: int | None, rows: tuple[int, int] = (0, 1)
    ) -> None:
        assert batch_size > 0 and shard >= 0 and (shards is None or shard < shards), (batch_size, shard, shards)
        self._rows = dataset.rows
        self._settings = settings = dataset.settings
        self._tokenizer = dataset.tokenizer
        self._batch_size = batch_size
        self._rank, self._size = rows
        self._packer = Packer(settings.sequence_length, self._tokenizer)
        self._files: int = self._rows.num_shards
        self._shard, self._shards = shard, shards
        self._order = f"{dataset.seed}" if shards is not None else f"{dataset.seed}/{shard}"
        by_file = shards is not None and self._files >= shards
        self._first, self._stride = (shard, shards) if by_file and shards is not None else (0, 1)
        # With too few files every shard takes each `_document_stride`-th document; 1: it takes whole files.
        self._document_stride = 1 if by_file or shards is None else shards
        if shards is None and self._files == 1:
            logger.warning("data.name: %s is one file, so all peers read it in the same order", settings.name)
        self._epoch = 0
        self._visit = 0  # files read in this epoch
        self._document = 0  # rows read of the current file
        self._documents_in_epoch = 0
        self._file: Any = None
        self._iterator: Iterator[dict[str, Any]] | None = None
        self._bytes_per_token = 1.0  # of the last documents
        self._begin()

    def _begin(self) -> None:
        self._planned = self._made = 0
        self._positions = {0: self._position()}  # by batch: where the stream is after it

    def __iter__(self) -> HubStream:
        return self

    def __next__(self) -> Tensor:
        return self.make(self.plan())

    def plan(self) -> int:
        """The number of the next batch."""
        self._positions.pop(self._planned - 1, None)
        self._planned += 1
        return self._planned

    def ahead(self, batches: int) -> list[int]:
        """The numbers of those after it."""
        return list(range(self._planned + 1, self._planned + 1 + batches))

    def make(self, plan: int) -> Tensor:
        """The next batch: (B / size, T) int64. They are made in order, each once."""
        assert plan == self._made + 1, (plan, self._made)
        while (rows := self._batch_size - len(self._packer)) > 0:
            # About as many as are missing: the tokenizer is faster with several, and nobody is to wait for more.
            wanted = rows * self._settings.sequence_length * self._bytes_per_token
            documents, num_bytes = [self._next_document()], 0
            while (num_bytes := num_bytes + len(documents[-1])) < wanted and len(documents) < _DOCUMENTS_AT_ONCE:
                documents.append(self._next_document())
            encoded = self._tokenizer.encode(documents)
            self._bytes_per_token = num_bytes / max(1, sum(map(len, encoded)))
            for one in encoded:
                self._packer.add(one)
        batch = self._packer.take(self._batch_size)[self._rank :: self._size]
        self._made = plan
        self._positions[plan] = self._position()
        return torch.from_numpy(batch.astype(np.int64))

    def state(self) -> dict[str, Any]:
        position = self._positions[self._planned]
        return {**position, "waiting": position["waiting"].tolist()}

    def _position(self) -> dict[str, Any]:
        return {
            "kind": "hub", "epoch": self._epoch, "visit": self._visit, "document": self._document,
            "documents_in_epoch": self._documents_in_epoch,
            "stride": self._stride, "shard": self._shard, "shards": self._shards,
            "file": None if self._file is None else copy.deepcopy(self._file.state_dict()),
            "waiting": self._packer.waiting(),
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        try:
            self._epoch = int(state["epoch"])
            self._visit = int(state["visit"]) * int(state["stride"]) // self._stride
            self._documents_in_epoch = int(state["documents_in_epoch"])
            file, waiting, document = state["file"], list(state["waiting"]), int(state["document"])
            same_shard = (state["shard"], state["shards"]) == (self._shard, self._shards)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                "data: the checkpoint holds no position for this data.source; use the source it was made with"
            ) from error
        self._file = self._iterator = None
        self._document = 0
        self._packer = Packer(self._settings.sequence_length, self._tokenizer)
        if not same_shard:
            logger.warning("data.shards changed since the checkpoint: reading the current file from its beginning")
        else:
            self._packer.restore(waiting)
            self._document = document
            if file is not None:
                self._open(file)
        self._begin()

    def _next_document(self) -> bytes:
        """The next training document of this shard."""
        while True:
            with _reading_hub(self._settings):
                if self._iterator is None:
                    self._open(None)
                assert self._iterator is not None
                row = next(self._iterator, None)
            if row is None:
                self._next_file()
                continue
            number, self._document = self._document, self._document + 1
            if number % self._document_stride != self._shard % self._document_stride:
                continue
            document = text_of(row, self._settings.field)
            if document and not is_held_out(document, self._settings.holdout):
                self._documents_in_epoch += 1
                return document

    def _open(self, position: dict[str, Any] | None) -> None:
        """Opens the file of the current visit, at its beginning or at a position from `IterableDataset.state_dict`."""
        place = np.array([(self._first + self._stride * self._visit) % self._files])
        number = int(permuted(place, self._files, f"{self._order}/{self._epoch}")[0])
        self._file = self._rows.shard(num_shards=self._files, index=number)
        if position is not None:
            self._file.load_state_dict(copy.deepcopy(position))
        self._iterator = iter(self._file)

    def _next_file(self) -> None:
        self._file = self._iterator = None
        self._document = 0
        self._visit += 1
        if self._first + self._stride * self._visit < self._files:
            return
        if not self._documents_in_epoch:
            raise DataError(
                f"data.name: {self._settings.name} has no training document for shard {self._shard} of {self._shards}; "
                f"use fewer peers or more data"
            )
        self._epoch, self._visit, self._documents_in_epoch = self._epoch + 1, 0, 0


def _reading_hub(settings: DataConfig) -> AbstractContextManager[None]:
    return reading(f"data.name: {settings.name}", "check data.name, data.subset, data.split and the network")
