"""Tokenises local text once; the tokens of large text are kept in files that are mapped into
memory.

    DIRECTORY/KEY/training.bin, held_out.bin   the tokens, in the smallest integer type
                  index.json                   how many they are, and of what type
    DIRECTORY/KEY.lock                         held by the process that makes them; the others wait

The key is a digest of what the tokens depend on: the content of the files, which column and which
part of the documents counts, and the tokenizer. An entry is made beside its place and renamed. One
that is cut short is made again. Nothing is ever deleted: whoever needs the space deletes the
directory of an entry, or all of them.
"""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from diloco.config import DataConfig
from diloco.data.packing import Packer, encode_rows
from diloco.data.sources import as_data_error, files_of, rows_of
from diloco.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer, token_dtype
from diloco.errors import DataError

logger = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]
"""Called with bytes of text that are tokenised, and of all."""

VERSION = 4  # of the files
PROGRESS_S = 0.5
FILES_FROM_BYTES = 1 << 20  # of text: to read less again takes a second or less
FILES_FROM_BYTES_OF_BYTES = 64 << 20  # with the byte tokenizer, which only copies
ROWS_AT_ONCE, BYTES_AT_ONCE = 256, 1 << 20  # per task: few enough to be in memory several times
# A tokenizer's threads stand still while rows are read and packed, so several processes are faster;
# to begin one takes seconds.
PROCESSES_FROM_BYTES, MOST_PROCESSES = 32 << 20, 32
PARTS = ("training", "held_out")


class TokenList(NamedTuple):
    """The tokens of some documents, in order, each document followed by the end token."""

    training: NDArray[Any]  # (N,)
    held_out: NDArray[Any]  # (n,)
    documents: int
    num_bytes: int  # of text
    digest: str = ""  # of the training tokens, if these are all of a source


def tokens_of(settings: DataConfig, tokenizer: Tokenizer, on_progress: OnProgress) -> TokenList:
    """Tokenise a local source: in memory if it is small, or else into files of `data.cache`.

    Raises DataError: the text cannot be read or tokenised, or the tokens cannot be kept.
    """
    files, is_bytes = files_of(settings), isinstance(tokenizer, ByteTokenizer)
    dtype = np.dtype(token_dtype(tokenizer.vocab_size))
    total, processes = sum(file.stat().st_size for file in files), 1
    if not is_bytes and total >= PROCESSES_FROM_BYTES:
        has_affinity = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
        processes = min(cores, MOST_PROCESSES)
    parts = tokenised(rows_of(settings, files), settings, tokenizer, processes)
    fewest = FILES_FROM_BYTES_OF_BYTES if is_bytes else FILES_FROM_BYTES
    if settings.cache is None or total < fewest:
        streams = io.BytesIO(), io.BytesIO()
        index = _write(streams, parts)
        training, held_out = (np.frombuffer(stream.getbuffer(), dtype) for stream in streams)
        return TokenList(training, held_out, **index)

    def write(streams: Sequence[BinaryIO]) -> dict[str, Any]:
        return _write(streams, parts, lambda done: on_progress(done, max(total, done)))

    directory = _directory(settings.cache)
    try:
        return _kept(directory / _key(settings, files, tokenizer), dtype, write)
    except OSError as error:
        raise DataError(
            f"data.cache={settings.cache}: {directory} cannot hold the tokens"
            f" ({error.strerror or error}); make room there, set data.cache to another directory,"
            " or data.cache=null to keep them in memory"
        ) from error


# -- files of tokens -------------------------------------------------------------------------------


def _directory(cache: str) -> Path:
    try:
        if cache != "auto":
            return Path(cache).expanduser()
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        raise DataError(
            f"data.cache={cache}: there is no home directory; set data.cache=DIRECTORY, or null"
        ) from None
    return home / "diloco" / "tokens"


def _key(settings: DataConfig, files: Sequence[Path], tokenizer: Tokenizer) -> str:
    made_of = [VERSION, settings.source, settings.field, settings.holdout, tokenizer.digest]
    key = blake3(json.dumps(made_of).encode())
    for file in files:
        with as_data_error(f"data.path: {file}", "make it readable or leave it out"):
            content = blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest()
        key.update(json.dumps(["".join(file.suffixes), content]).encode())
    return key.hexdigest()[:32]


_Write = Callable[[Sequence[BinaryIO]], dict[str, Any]]


def _kept(entry: Path, dtype: np.dtype[Any], write: _Write) -> TokenList:
    """Map an entry; if it is missing, one of the processes that want it makes it."""
    if (tokens := _read(entry, dtype)) is not None:
        return tokens
    entry.parent.mkdir(parents=True, exist_ok=True)
    with entry.with_suffix(".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("another process tokenises the same files; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            logger.debug("%s has no locks", entry.parent)
        if (tokens := _read(entry, dtype)) is None:
            _make(entry, dtype, write)
            tokens = _read(entry, dtype)
    assert tokens is not None, f"{entry} was made and cannot be read"
    return tokens


def _read(entry: Path, dtype: np.dtype[Any]) -> TokenList | None:
    """Map an entry; None if it is missing, incomplete, or of another type."""
    try:
        index = json.loads((entry / "index.json").read_bytes())
        if index.pop("dtype") != dtype.name:
            return None
        training, held_out = (_map(entry / f"{part}.bin", dtype, index.pop(part)) for part in PARTS)
        return TokenList(training, held_out, **index)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _map(path: Path, dtype: np.dtype[Any], tokens: int) -> NDArray[Any]:
    if path.stat().st_size != tokens * dtype.itemsize:
        raise ValueError(f"{path} is not whole")
    return np.memmap(path, dtype, "r", shape=(tokens,)) if tokens else np.zeros(0, dtype)


def _make(entry: Path, dtype: np.dtype[Any], write: _Write) -> None:
    temporary = entry.with_name(f".{entry.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # what a process that was killed has left behind
    temporary.mkdir()
    try:
        paths = [temporary / f"{part}.bin" for part in PARTS]
        with paths[0].open("xb") as training, paths[1].open("xb") as held_out:
            index = write((training, held_out))
            sizes = (stream.tell() // dtype.itemsize for stream in (training, held_out))
            index |= dict(zip(PARTS, sizes, strict=True))
            with (temporary / "index.json").open("xb") as file:
                file.write(json.dumps({**index, "dtype": dtype.name}).encode())
                for stream in (training, held_out, file):
                    stream.flush()
                    os.fsync(stream.fileno())
        shutil.rmtree(entry, ignore_errors=True)  # it may be there and not whole
        temporary.rename(entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(
    streams: Sequence[BinaryIO],
    parts: Iterable[TokenList],
    on_bytes: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Write training and held-out tokens; returns the other fields of their `TokenList`."""
    digest, told_at = blake3(), 0.0
    documents = num_bytes = 0
    for part in parts:
        digest.update(part.training.view(np.uint8).data)
        streams[0].write(part.training.data)
        streams[1].write(part.held_out.data)
        documents, num_bytes = documents + part.documents, num_bytes + part.num_bytes
        if time.monotonic() - told_at >= PROGRESS_S:
            told_at = time.monotonic()
            on_bytes(num_bytes)
    return {"documents": documents, "num_bytes": num_bytes, "digest": digest.hexdigest()}


# -- rows to tokens --------------------------------------------------------------------------------


def tokenised(
    rows: Iterable[bytes], settings: DataConfig, tokenizer: Tokenizer, processes: int = 1
) -> Iterator[TokenList]:
    """Yield the tokens of rows, group by group, in order. DataError if a process dies."""
    groups = _groups(rows)
    if processes == 1:
        yield from (_tokens_of(group, settings, tokenizer) for group in groups)
        return
    pool = ProcessPoolExecutor(processes, get_context("spawn"), _begin, settings.tokenizer_place)
    coming: deque[Future[TokenList]] = deque()
    try:
        for group in groups:
            coming.append(pool.submit(_tokens_of, group, settings))
            if len(coming) > 2 * processes:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "data.path: a process that tokenises was killed, perhaps for want of memory; free some,"
            " and start again"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _groups(rows: Iterable[bytes]) -> Iterator[list[bytes]]:
    group: list[bytes] = []
    size = 0
    for row in rows:
        group.append(row)
        size += len(row)
        if len(group) == ROWS_AT_ONCE or size >= BYTES_AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group


_own: Tokenizer | None = None  # of a worker process


def _begin(name: str, revision: str | None) -> None:
    global _own
    # Ctrl+C is for the process that waits for this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _own = load_tokenizer(name, revision)


def _tokens_of(
    rows: Sequence[bytes], settings: DataConfig, tokenizer: Tokenizer | None = None
) -> TokenList:
    tokenizer = tokenizer or _own
    assert tokenizer is not None
    training, held_out = Packer(1, tokenizer), Packer(1, tokenizer)
    documents = [document for row in encode_rows(rows, settings, tokenizer) for document in row]
    for document in documents:
        (held_out if document.held_out else training).add(document.tokens)
    arrays = [packer.take(len(packer)).reshape(-1) for packer in (training, held_out)]
    return TokenList(arrays[0], arrays[1], len(documents), sum(map(len, rows)))
