"""Ids that another program has made: `.bin` (numbers of `data.dtype` in a row, as nanoGPT writes
them, or behind the header of llm.c), `.npy`, and lists of ids in a column of Parquet.

A list in Parquet is a document, held out by its hash; of the other files together the last part is
held out. One file is mapped into memory, several are copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from diloco.config import DataConfig
from diloco.data.formats import num_rows, parquet_columns
from diloco.data.packing import is_held_out
from diloco.data.sources import as_data_error, files_of
from diloco.data.tokenizers import Tokenizer, token_dtype
from diloco.data.tokens import TokenList

HEADER, MAGIC = 1024, 20240520  # bytes before the ids in files of llm.c, and the first number
LOOKED_AT = 1 << 24  # ids at a time

Ids = NDArray[Any]  # (n,) of an integer type


def tokens_in(settings: DataConfig, tokenizer: Tokenizer) -> TokenList:
    """The ids in the files of `data.path`.

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
        found: Ids = np.load(file, mmap_mode="r", allow_pickle=False).reshape(-1)
        if found.dtype.kind not in "iu":
            raise ValueError(f"it holds {found.dtype}, and no integers")
        return found
    if dtype is None:
        raise ValueError("its numbers may be of any type; set data.dtype, such as uint16")
    head = np.fromfile(file, np.int32, 1)
    start = HEADER if head.tolist() == [MAGIC] else 0
    size, rest = divmod(file.stat().st_size - start, np.dtype(dtype).itemsize)
    if rest or size < 1:
        raise ValueError(f"its size is no multiple of data.dtype={dtype}")
    return np.memmap(file, dtype, "r", start, (size,))


def _lists(handle: Any, field: str) -> Iterator[Ids]:
    for value in parquet_columns(handle, field):
        found = getattr(value, "values", None)  # of a list that is not null
        ids = np.zeros(0, np.uint8) if found is None else found.to_numpy(zero_copy_only=False)
        if ids.dtype.kind not in "iu" or (found is None and value.is_valid):
            raise ValueError(f"data.field={field} holds no lists of integers")
        if ids.size:
            yield ids


def _known(ids: Ids, tokenizer: Tokenizer) -> Ids:
    """The ids, if the tokenizer has them all; else ValueError."""
    for start in range(0, len(ids), LOOKED_AT):
        part = ids[start : start + LOOKED_AT]
        low, high = int(part.min()), int(part.max())
        if low < 0 or high >= tokenizer.vocab_size:
            raise ValueError(
                f"it has the id {low if low < 0 else high}, and data.tokenizer has"
                f" {tokenizer.vocab_size}; give the one that made them, and the right data.dtype"
            )
    return ids
