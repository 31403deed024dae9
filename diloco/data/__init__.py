"""From text to batches of packed token sequences.

1. A source yields documents, UTF-8 bytes in a fixed order (`sources`): the standard library, files, or a hub stream.
2. The hash of a document decides whether it is training text or held out, the same on every peer (`packing`).
3. A tokenizer turns it into integers, followed by its end token (`tokenizers`).
4. The tokens are concatenated and cut into sequences of T = `data.sequence_length`; none is lost, none repeated but for
   the tail that is shorter than T. A sequence may so hold the end of one document and the start of the next, and
   attention is not masked between them, as usual in pretraining.
5. A stream deals out batches (B, T) in a seeded order, this peer's part only, for ever (`memory`, `streaming`). Its
   `state()` is small JSON; `restore()` continues with the very next sequence.

A sequence counts as T tokens everywhere, although its first token is read and not predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from diloco.config import DataConfig
from diloco.data.memory import MemoryDataset, Take
from diloco.data.sources import documents
from diloco.data.streaming import HubDataset
from diloco.data.tokenizers import Tokenizer, load_tokenizer

__all__ = ["Dataset", "Stream", "Take", "Tokenizer", "load", "load_tokenizer"]


class Stream(Protocol):
    """Endless batches of one peer, resumable at every batch."""

    def __iter__(self) -> Stream: ...

    def __next__(self) -> Tensor:
        """The next batch: (B, T) int64 on the CPU."""
        ...

    def state(self) -> dict[str, Any]:
        """The position after the last batch, as JSON."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continues after the batch that `state` was taken at, exactly if data and shards are the same.

        Raises:
            CheckpointError: `state` is no position of this kind of stream.
        """
        ...


class Dataset(Protocol):
    """Text of one source, tokenised and split."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def sequence_length(self) -> int: ...
    @property
    def description(self) -> str:
        """One line for the log: the source and how much there is of it."""
        ...

    def batches(self, batch_size: int, *, shard: int = 0, shards: int | None = 1) -> Stream:
        """Training batches of shard `shard` of `shards`; the shards of one seed are disjoint and cover the data.

        With `shards=None`, when nobody knows how many peers there are, every `shard` number has an order of its own
        over all the data, and peers may meet the same sequence at different times.
        """
        ...

    def leased(self, batch_size: int, take: Take, *, shard: int = 0) -> Stream:
        """Training batches of the ranges that `take` gives, from the list that all peers of the run have in common.

        A source without numbered sequences (a hub stream) goes on as `batches` with `shards=None`.
        """
        ...

    def sequences(self, numbers: Sequence[int]) -> Tensor | None:
        """Training sequences by their numbers in the list that all peers of the run have in common: (N, T) int64.

        None from a source without numbered sequences (a hub stream).
        """
        ...

    def holdout(self, sequences: int) -> Tensor:
        """The first `sequences` held-out sequences (or all, if there are fewer): (N, T) int64, equal on every peer.

        Raises:
            DataError: the held-out documents fill not even one sequence.
        """
        ...


def load(settings: DataConfig, seed: int) -> Dataset:
    """Opens the data of a run: reads and tokenises local text, or connects to the hub.

    Raises:
        DataError: missing, unreadable or empty data, no such field, tokenizer or hub dataset.
    """
    tokenizer = load_tokenizer(settings.tokenizer)
    if settings.source == "hub":
        return HubDataset(settings, tokenizer, seed)
    return MemoryDataset(settings, tokenizer, seed, documents(settings))
