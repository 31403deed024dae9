"""The files of a dataset of the Hugging Face hub, or of a local directory, and their rows."""

from __future__ import annotations

import functools
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import islice, repeat
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from diloco.config import DataConfig
from diloco.config.explain import show
from diloco.data.formats import (
    SUFFIXES,
    NoFieldError,
    OddRows,
    format_of,
    log_left_out,
    num_rows,
    read_rows,
)
from diloco.data.numbered import permuted
from diloco.data.packing import Packer, encode_rows
from diloco.data.sources import as_data_error, files_below
from diloco.data.tokenizers import Tokenizer
from diloco.errors import DataError, DilocoError
from diloco.hub import check_reachable, commit_of, opened
from diloco.text import one_line

logger = logging.getLogger(__name__)

T = TypeVar("T")

HUB_REMEDY = "check it, data.subset, data.split and the network"
MANY_FILES = 64
RETRIES_S = (1, 2, 5, 10, 20, 40)  # waits before a file is opened again whose connection broke
# For a longer jump in a Parquet file, opening it again is cheaper than decoding the rows between.
JUMP_ROWS = 10_000


class HubFiles:
    """A split of a dataset of the hub, or of a local directory with the same layout.

    With fewer than `MANY_FILES` files every peer reads all of them in an epoch: N peers fetch N
    times the data, and a newcomer passes over what was read before it came. (Of Parquet, only the
    row groups that it needs.) With more files each peer fetches its own. Then a peer that leaves
    for good takes the rest of a file with it until the next epoch, and more peers than files read
    files of the epochs to come.
    """

    def __init__(self, settings: DataConfig, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer, self.settings, self.seed = tokenizer, settings, seed
        self.sequence_length = settings.sequence_length
        with self.reading():
            self.format, self.files, self.open = find_files(settings)
        self.by_file = len(self.files) >= MANY_FILES
        # The names of files on the hub hold the commit; a folder may be at another place on each
        # machine.
        names = self.files
        if self.open is open:
            names = [f"{os.path.basename(file)} {os.path.getsize(file)}" for file in names]
        digest = blake3("\n".join(names).encode()).hexdigest()[:16]
        # 0: the number of sequences is unknown
        self.digest = f"{digest}-0x{self.sequence_length}"
        # Once there was text, a file that is damaged or lacks the column does not end the run.
        self._has_text, self._odd = False, OddRows("mend that row, or choose other data", live=True)
        some = list(islice(filter(None, self._all_rows()), 100))
        self._odd.close()
        if not some:
            raise DataError(
                f"data.split: {settings.split} of {settings.name} is empty; choose another split"
            )
        parts = [text[:4096] for text in some]
        tokens = sum(map(len, tokenizer.encode(parts))) / sum(map(len, parts)) * sum(map(len, some))
        self._tokens_per_row = max(1.0, tokens / len(some))
        self.description = (
            f"hub {settings.name}: {len(self.files):,} files, streamed in sequences of"
            f" {self.sequence_length} tokens"
        )

    def units(self, sequences: int) -> int:
        rows = math.ceil(sequences * self.sequence_length / self._tokens_per_row)
        return 1 if self.by_file else rows

    def holdout(self, sequences: int) -> Tensor:
        # Reads 1 / data.holdout times the text that it returns, once per run.
        packer = Packer(self.sequence_length, self.tokenizer)
        for row in self._all_rows() if self.settings.holdout else ():
            [documents] = encode_rows([row], self.settings, self.tokenizer, held_out=True)
            for document in documents:
                packer.add(document.tokens)
            if len(packer) >= sequences:
                break
        if self.settings.holdout and not len(packer):
            raise DataError(
                f"data.holdout: {self.settings.holdout} of the documents of {self.settings.name}"
                f" leaves no held-out sequence of {self.sequence_length} tokens; start the run with"
                " data.holdout=0 (no held-out loss), or a larger one"
            )
        return torch.from_numpy(packer.take(min(sequences, len(packer))).astype(np.int64))

    def reading(self, file: int | None = None) -> AbstractContextManager[None]:
        name = self.settings.name if file is None else self.files[file]
        return as_data_error(f"data.name: {name}", HUB_REMEDY)

    def rows_of(self, file: int, handle: Any, start: int) -> Iterator[bytes | None]:
        """Yield the rows of a file from row `start` on, and None at its end."""
        path, row = self.files[file], start
        try:
            for text in read_rows(handle, path, self.format, self.settings.field, start, self._odd):
                self._has_text |= text != b""
                yield text
                row += 1
        except (NoFieldError, ValueError, OSError) as error:
            of_machine = isinstance(error, OSError) and (error.errno or self.open is not open)
            if not self._has_text or of_machine:
                raise
            line = "%s: from row %d on its rows are left out: %s"
            logger.warning(line, path, row + 1, one_line(error))
            if self.format == "parquet":  # other peers read its length from the file
                yield from repeat(b"", num_rows(handle) - row)
        yield None

    def _all_rows(self) -> Iterator[bytes]:
        reader = Reader(self)
        for file in range(len(self.files)):
            yield from reader.rows(file)


class Reader:
    """Reads units; going forward is cheap.

    Attributes:
        lengths: rows of the files that were read to their end, or that say it themselves, by index.
    """

    def __init__(self, dataset: HubFiles) -> None:
        self.lengths: dict[int, int] = {}
        self._dataset = dataset
        self._place, self._row = (-1, -1), 0  # file that is open, and the epoch; its next row
        self._rows: Iterator[bytes | None] = iter(())

    def unit(self, number: int, start: int = 0) -> Iterator[bytes]:
        """Yield the rows of a unit, from row `start` of it on."""
        if self._dataset.by_file:
            files = len(self._dataset.files)
            order = _order(files, f"{self._dataset.seed}/{number // files}")
            yield from self.rows(order[number % files], 0, start)
            return
        while start == 0:
            row = next(self.rows(*self._find(number)), None)
            if row is not None:  # else the file has ended, and its length is known now
                yield row
                return

    def rows(self, file: int, epoch: int = 0, start: int = 0) -> Iterator[bytes]:
        """Yield the rows of a file, from row `start` on."""
        jumps = self._dataset.format == "parquet" and start > self._row + JUMP_ROWS
        if (file, epoch) != self._place or start < self._row or jumps:
            self._place, self._row = (file, epoch), start if file in self.lengths else 0
            read = functools.partial(self._dataset.rows_of, file)
            self._rows = self._patiently(file, read, self._row)
        for row in self._rows:
            if row is None:
                self.lengths[file] = self._row
                return
            self._row += 1
            if self._row > start:
                yield row

    def _find(self, number: int) -> tuple[int, int, int]:
        """Return file, epoch and row of a unit; the row may be behind the end of the file."""
        dataset, files = self._dataset, len(self._dataset.files)
        epoch, row = 0, number
        if len(self.lengths) == files:
            epoch, row = divmod(number, sum(self.lengths.values()))
        for file in _order(files, f"{dataset.seed}/{epoch}"):
            if file not in self.lengths and dataset.format == "parquet":
                counts = self._patiently(file, lambda handle, row: iter([num_rows(handle)]))
                self.lengths[file] = next(counts)
            if file not in self.lengths or row < self.lengths[file]:
                return file, epoch, row
            row -= self.lengths[file]
        return self._find(number)  # all lengths are known now

    def _patiently(
        self, file: int, read: Callable[[Any, int], Iterator[T]], row: int = 0
    ) -> Iterator[T]:
        """Yield what `read` reads of a file from `row` on; where a connection breaks, reopen it."""
        dataset, waits = self._dataset, iter(RETRIES_S)
        with dataset.reading(file):
            while True:
                try:
                    with dataset.open(dataset.files[file], "rb") as handle:
                        for item in read(handle, row):
                            row, waits = row + 1, iter(RETRIES_S)
                            yield item
                        return
                except Exception as error:  # each library has its own
                    is_fault = isinstance(error, DilocoError | ImportError | ValueError)
                    is_local = dataset.open is open
                    if is_fault or is_local or (wait_s := next(waits, None)) is None:
                        raise
                    logger.warning("data.name: %s; trying again in %d s", one_line(error), wait_s)
                time.sleep(wait_s)


@functools.lru_cache(maxsize=4)
def _order(files: int, key: str) -> list[int]:
    return [int(file) for file in permuted(np.arange(files), files, key)]


def find_files(settings: DataConfig) -> tuple[str, list[str], Callable[[str, str], Any]]:
    """Return format and files of a split of a dataset, and the function that opens them.

    The publisher of a dataset may name any file as its data: one of this machine, or of another
    server. Only files of the dataset itself are read. Raises DataError if it names others, or there
    is no such split. Use it in `as_data_error`.
    """
    import datasets as module  # type: ignore[import-untyped, unused-ignore]  # late, because it takes a second

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    module.logging.set_verbosity(module.logging.CRITICAL)
    module.disable_progress_bars()
    name, revision, links = settings.name or "", settings.revision, dict[str, Path]()
    folder = Path(os.path.expanduser(name))
    with TemporaryDirectory(prefix="diloco-") as scratch:
        if revision is None and folder.is_file():
            raise DataError(
                f"data.name: {name} is a file; give its folder, or use data=json data.path=FILE"
            )
        if revision is None and folder.is_dir():
            where = os.path.join(os.path.realpath(scratch), "data")
            start, links = f"{where}/", _links(folder, Path(where))
        else:
            check_reachable("data.name", "dataset", name, revision)
            revision = revision or commit_of("dataset", name)
            where, start = f"hf://datasets/{name}", f"hf://datasets/{name}@{revision}/"
        try:
            options = {"name": settings.subset, "revision": revision, "cache_dir": scratch}
            builder = module.load_dataset_builder(where, **options)
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise ValueError(str(error).replace(where, name)) from error
    kind = type(builder).__module__.rpartition(".")[2]
    if kind not in SUFFIXES:
        raise DataError(
            f"data.name: {name} is of the format {kind}; expected one of {', '.join(SUFFIXES)}"
        )
    named = (builder.config.data_files or {}).items()
    splits = {str(split): [str(file) for file in files] for split, files in named}
    files = [file for split in splits.values() for file in split]
    strange = [f for f in files if not f.startswith(start) or "::" in f or "/../" in f]
    if strange or not files:
        reason = f"reads {show(strange[0])}" if strange else "names no files"
        raise DataError(
            f"data.name: {name} {reason}, and not files of its own; choose another dataset"
        )
    if settings.split not in splits:
        raise DataError(
            f"data.split: {name} has no {settings.split}; its splits are {', '.join(splits)}"
        )
    others = (file for file in links.values() if format_of(file.name) != kind)
    log_left_out([file for file in others if file.suffix not in (".md", ".zip")], kind)
    chosen = splits[settings.split]
    return (kind, [str(links[file]) for file in chosen], open) if links else (kind, chosen, opened)


def _links(folder: Path, scratch: Path) -> dict[str, Path]:
    """Link to the files of a folder, under names without characters of `datasets` patterns."""
    links = {}
    for number, file in enumerate(files_below(folder)):
        link = scratch / re.sub(r"[][*?:]+", f"_{number}_", str(file.relative_to(folder)))
        stem, _, suffix = link.name.partition(".")
        if format_of(file.name) and suffix != suffix.lower():
            link = link.with_name(f"{stem}-{number}.{suffix.lower()}")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file.absolute())
        links[str(link)] = file
    return links
