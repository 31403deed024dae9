"""Data of this machine: one source or a mixture, tokenised once, packed into numbered sequences.

Ids that another program has made are read as they are: `.bin` (numbers of `data.dtype` in a row, as
nanoGPT and Megatron write them, or behind the header of llm.c or litdata), `.npy`, and lists of ids
in a column of Parquet. A list in Parquet is a document, held out by its hash; of the other files
together the last part is held out. One file is mapped into memory, several are copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray
from torch import Tensor

from diloco.config import MIXTURE_BLOCK, DataConfig
from diloco.data.conversations import conversations_of
from diloco.data.formats import num_rows, parquet_columns
from diloco.data.numbered import (
    Leases,
    Mixture,
    NumberedStream,
    SequenceArray,
    marked,
    mixture_positions,
    permuted,
    sequences_per_block,
)
from diloco.data.packing import is_held_out
from diloco.data.sources import as_data_error, files_of
from diloco.data.tokenizers import Tokenizer, token_dtype
from diloco.data.tokens import OnProgress, TokenList, tokens_of
from diloco.errors import DataError

# The header of llm.c's files: its bytes, and the type of the ids by its first number
HEADER, MAGIC = 1024, {20240520: "uint16", 20240801: "uint32"}
LOOKED_AT = 1 << 24  # ids at a time

Ids = NDArray[Any]  # (n,) of an integer type


class LocalDataset:
    """Numbered sequences of local sources.

    Attributes:
        description: one line for the log, with the sources and their sizes.
        training: the endless list of training sequences.
        held_out: of each source, its sequences for evaluation: (n, T), of any integer type.
        digest: names the training sequences, as DIGEST-NxT; equal where their numbers stand for the
            same text.
    """

    def __init__(
        self, settings: DataConfig, tokenizer: Tokenizer, seed: int, on_progress: OnProgress
    ) -> None:
        self.tokenizer = tokenizer
        self.sequence_length = settings.sequence_length
        self._seed = seed
        self.training: SequenceArray | Mixture
        if not settings.mixture:
            source = _sequences(settings, None, tokenizer, on_progress, marks=False)
            self.training, held_out, self.description = source
            self.held_out, self._counts = [held_out], sequences_per_block([1.0])
            total = len(self.training)
        else:
            mixture, marks = settings.mixture, settings.has_conversations
            names, weights = zip(*((part.name, part.weight) for part in mixture), strict=True)
            sources = []
            for part in mixture:
                own: dict[str, Any] = {
                    "source": part.source,
                    "field": part.field,
                    "format": part.format,
                    "path": settings.paths.get(part.name),
                    "mixture": (),
                    "paths": {},
                }
                alone = settings.model_copy(update=own)
                sources.append(_sequences(alone, part.name, tokenizer, on_progress, marks))
            rows, self.held_out, descriptions = map(list, zip(*sources, strict=True))
            self.training = Mixture(names, rows, weights)
            self._counts, total = self.training.counts, sum(map(len, rows))
            shares = zip(self._counts, descriptions, strict=True)
            parts = (f"{count / 100:g} % {description}" for count, description in shares)
            self.description = f"mixture of {'; '.join(parts)}"
        self.digest = f"{self.training.digest[:16]}-{total}x{self.sequence_length}"

    def batches(
        self,
        size: int,
        shard: int = 0,
        shards: int = 1,
        rows: tuple[int, int] = (0, 1),
        leases: Leases | None = None,
    ) -> NumberedStream:
        """Return the training batches of shard `shard` of `shards`: the shards of one seed are
        disjoint and cover the data. With `leases`, the batches have the sequences that the swarm
        leases.

        `rows` is (rank, size) of a process: its batches are the rows rank, rank + size, ... of the
        peer's, (B / size, T), and its state is the peer's.
        """
        return NumberedStream(self.training, size, self._seed, shard, shards, rows, leases)

    def units(self, sequences: int) -> int:
        """Return the leased units that hold about so many sequences: a unit is a sequence."""
        return sequences

    def holdout(self, sequences: int) -> Tensor:
        """Return the first `sequences` held-out ones, or all: (N, T) int64, equal on every peer."""
        # In file order they would be of one or two documents. The order does not depend on the
        # seed.
        sequences = min(sequences, MIXTURE_BLOCK * max(map(len, self.held_out)))
        held: list[NDArray[Any]] = []
        order = mixture_positions(np.arange(sequences), "holdout", self._counts)
        for source, rank in zip(*order, strict=True):
            rows = self.held_out[source]
            if rank < len(rows):
                held.append(rows[permuted(np.array([rank]), len(rows), "holdout")])
        shape = self.held_out[0].shape[1:]
        return torch.from_numpy(np.array(held, np.int64).reshape(-1, *shape))


def _sequences(
    settings: DataConfig,
    name: str | None,
    tokenizer: Tokenizer,
    on_progress: OnProgress,
    marks: bool,
) -> tuple[SequenceArray, NDArray[Any], str]:
    """Return training and held-out sequences, (N, T) each, of a source, and a description; `name`
    is its name in a mixture, `marks` says that the mixture has conversations."""
    length = settings.sequence_length
    tokens = _tokens(settings, name, tokenizer, on_progress)
    training, held_out = (
        part if part.ndim == 3 else part[: len(part) // length * length].reshape(-1, length)
        for part in (tokens.training, tokens.held_out)
    )
    paths = "" if settings.path is None else f" in {', '.join(settings.path)}"
    where = f"{settings.source}{paths}"
    source = f"data.source={where}" if name is None else f"{name} of data.mixture ({where})"
    if not tokens.documents:
        raise DataError(f"{source} has no text; give files that are not empty")
    if not len(training) or (settings.holdout and not len(held_out)):
        missing, other = ("held-out", "larger") if len(training) else ("training", "smaller")
        total = tokens.training.size + tokens.held_out.size
        shorter = f"data.sequence_length={total} " if total < length else ""
        raise DataError(
            f"data.holdout: {settings.holdout} of {tokens.documents} documents leaves no {missing}"
            f" sequence of {length} tokens; start the run with {shorter}data.holdout=0 (no held-out"
            f" loss) or a {other} one, or add text to {source}"
        )
    description = (
        f"{where}: {tokens.documents:,} documents, {tokens.num_bytes / 1e6:.1f} MB,"
        f" {len(training):,} training and {len(held_out):,} held-out sequences of {length} tokens"
    )
    sequences = SequenceArray(training, tokens.digest[:16], marks)
    return sequences, marked(held_out) if marks else held_out, description


def _tokens(
    settings: DataConfig, name: str | None, tokenizer: Tokenizer, on_progress: OnProgress
) -> TokenList:
    """Tokenise a source. Errors name `data.path` and `data.field`, or their keys in a mixture."""
    try:
        if settings.source == "tokens":
            return tokens_in(settings, tokenizer)
        if settings.format == "auto":
            return conversations_of(settings, tokenizer)
        return tokens_of(settings, tokenizer, on_progress)
    except DataError as error:
        key, _, rest = str(error).partition(":")
        in_mixture = {
            "data.path": f"data.paths.{name}",
            "data.field": f"data.mixture, field of {name}",
        }
        if name is None or key not in in_mixture:
            raise
        raise DataError(f"{in_mixture[key]}:{rest}") from error


# -- ids -------------------------------------------------------------------------------------------


def tokens_in(settings: DataConfig, tokenizer: Tokenizer) -> TokenList:
    """Read the ids in the files of `data.path`.

    Raises DataError, which names the file: it cannot be read, holds no integers, or has an id that
    the tokenizer has not.
    """
    documents, num_bytes = 0, 0
    sides: tuple[list[Ids], list[Ids]] = [], []
    raw = list[Ids]()
    for file in files_of(settings):
        with as_data_error(f"data.path: {file}", "give ids as .bin, .npy or Parquet"):
            num_bytes += file.stat().st_size
            if file.suffix.lower() != ".parquet":
                raw.append(_known(_mapped(file, settings.dtype), tokenizer))
                documents += 1
                continue
            with file.open("rb") as handle:
                documents += num_rows(handle)
                for number, ids in enumerate(_lists(handle, settings.field), 1):
                    try:
                        side = is_held_out(_known(ids, tokenizer).tobytes(), settings.holdout)
                    except ValueError as error:
                        raise ValueError(f"row {number}: {error}") from error
                    sides[side].append(ids.astype(token_dtype(tokenizer.vocab_size)))
    if raw:
        whole = raw[0] if len(raw) == 1 else np.concatenate(raw)
        kept = len(whole) - int(len(whole) * settings.holdout)
        sides[0].append(whole[:kept])
        sides[1].append(whole[kept:])
    training, held_out = (_joined(side) for side in sides)
    digest = blake3(np.ascontiguousarray(training).view(np.uint8).data).hexdigest()
    return TokenList(training, held_out, documents, num_bytes, digest)


def _joined(parts: list[Ids]) -> Ids:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint8)


def _mapped(file: Path, dtype: str | None) -> Ids:
    if file.suffix.lower() == ".npy":
        ids: Ids = np.load(file, mmap_mode="r", allow_pickle=False).reshape(-1)
        if ids.dtype.kind not in "iu":
            raise ValueError(f"it holds {ids.dtype}, and no integers")
        return ids
    if dtype is None:
        raise ValueError("its numbers may be of any type; set data.dtype, such as uint16")
    total, head = file.stat().st_size, np.fromfile(file, np.uint32, HEADER // 4).tolist()
    start, written = 0, MAGIC.get(head[0] if head else 0)
    if written is not None:
        start = HEADER
        if np.dtype(written).itemsize != np.dtype(dtype).itemsize:
            raise ValueError(f"its header says that the ids are {written}; set data.dtype to it")
    elif head and 0 < head[0] < total // 4 - 1:  # litdata: how many texts, and where each begins
        offsets = np.fromfile(file, np.uint32, head[0] + 2)[1:].astype(np.int64)
        if offsets[[0, -1]].tolist() == [4 * (head[0] + 2), total] and (np.diff(offsets) > 0).all():
            start = int(offsets[0])
    size, rest = divmod(total - start, np.dtype(dtype).itemsize)
    if rest or size < 1:
        raise ValueError(f"its size is no multiple of data.dtype={dtype}")
    return np.memmap(file, dtype, "r", start, (size,))


def _lists(handle: Any, field: str) -> Iterator[Ids]:
    for value in parquet_columns(handle, field):
        values = getattr(value, "values", None)  # of a list that is not null
        ids = np.zeros(0, np.uint8) if values is None else values.to_numpy(zero_copy_only=False)
        if ids.dtype.kind not in "iu" or (values is None and value.is_valid):
            raise ValueError(f"data.field={field} holds no lists of integers")
        if ids.size:
            yield ids


def _known(ids: Ids, tokenizer: Tokenizer) -> Ids:
    """Return the ids if the tokenizer has them all; else raise ValueError."""
    for start in range(0, len(ids), LOOKED_AT):
        part = ids[start : start + LOOKED_AT]
        low, high = int(part.min()), int(part.max())
        if low < 0 or high >= tokenizer.vocab_size:
            raise ValueError(
                f"it has the id {low if low < 0 else high}, and data.tokenizer has"
                f" {tokenizer.vocab_size}; give the one that made them, and the right data.dtype"
            )
    return ids
