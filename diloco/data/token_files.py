"""Tokens of local files: made once, kept in files that are mapped into memory, so that RAM does not hold them.

    DIRECTORY/KEY/training.bin, held_out.bin   the tokens, in the smallest integer type
                  index.json                   how many they are, and of what type
    DIRECTORY/KEY.lock                         held by the process that makes them; the others wait

The key is a digest of what the tokens depend on: the content of the files, which column and which part of the documents
counts, and the tokenizer. An entry is made beside its place and renamed. One that is cut short is made again. Nothing
is ever deleted: whoever needs the space deletes the directory of an entry, or all of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from diloco.atomic import replace_file
from diloco.config import DataConfig
from diloco.data.sources import reading
from diloco.data.tokenise import Part
from diloco.data.tokenizers import Tokenizer, token_dtype
from diloco.errors import DataError

__all__ = ["OnProgress", "TokenList", "in_memory", "mapped"]

logger = logging.getLogger(__name__)

OnProgress = Callable[[int, int], None]
"""Called with bytes of text that are tokenised, and of all."""

VERSION = 3  # of the files
PROGRESS_S = 0.5
LONG_BYTES = 100_000_000  # of text, from which on a line says that it takes a while


class TokenList(NamedTuple):
    """All tokens of a source, documents in order, each followed by the end token."""

    training: NDArray[Any]  # (N,)
    held_out: NDArray[Any]  # (n,)
    documents: int
    num_bytes: int  # of text
    digest: str  # of the training tokens


def in_memory(parts: Iterable[Part], tokenizer: Tokenizer) -> TokenList:
    """The tokens as arrays."""
    files = io.BytesIO(), io.BytesIO()
    index = _write(files, parts)
    training, held_out = (np.frombuffer(file.getbuffer(), token_dtype(tokenizer.vocab_size)) for file in files)
    return TokenList(training, held_out, index["documents"], index["num_bytes"], index["digest"])


def mapped(
    settings: DataConfig,
    files: Sequence[Path],
    tokenizer: Tokenizer,
    parts: Callable[[], Iterator[Part]],
    on_progress: OnProgress,
) -> TokenList:
    """The tokens of these files, mapped from the entry in `data.cache`, which is made from `parts()` if it is missing.

    Of several processes that want the same entry one makes it. Raises DataError if the directory cannot be written or
    the disk is full; nothing of the entry is left then.
    """
    place, dtype = _directory(settings.cache or "auto"), np.dtype(token_dtype(tokenizer.vocab_size))
    entry = place / _key(settings, files, tokenizer)
    try:
        if (found := _read(entry, dtype)) is None:
            place.mkdir(parents=True, exist_ok=True)
            with _locked(entry) as alone:
                if alone:  # what a process that was killed has left behind
                    for directory in place.glob(f".{entry.name}.tmp-*"):
                        shutil.rmtree(directory, ignore_errors=True)
                if (found := _read(entry, dtype)) is None:
                    total = sum(file.stat().st_size for file in files)
                    if total >= LONG_BYTES:
                        logger.warning("tokenising %.1f GB into %s; this is done once", total / 1e9, place)
                    _make(entry, parts(), dtype, total, on_progress)
                    found = _read(entry, dtype)
    except OSError as error:
        raise DataError(
            f"data.cache={settings.cache}: {place} cannot hold the tokens ({error.strerror or error}); make room "
            "there, set data.cache to another directory, or data.cache=null to keep them in memory"
        ) from error
    assert found is not None, f"{entry} was made and cannot be read"
    return found


def _directory(cache: str) -> Path:
    try:
        if cache != "auto":
            return Path(cache).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "diloco" / "tokens"
    except RuntimeError:
        raise DataError(f"data.cache={cache}: there is no home directory; set data.cache=DIRECTORY, or null") from None


def _key(settings: DataConfig, files: Sequence[Path], tokenizer: Tokenizer) -> str:
    made_of = [VERSION, settings.source, settings.field, settings.holdout, tokenizer.digest]
    key = blake3(json.dumps(made_of).encode())
    for file in files:
        with reading(f"data.path: {file}", "make it readable or leave it out"):
            content = blake3(max_threads=blake3.AUTO).update_mmap(file).hexdigest()
        key.update(json.dumps(["".join(file.suffixes), content]).encode())
    return key.hexdigest()[:32]


def _read(entry: Path, dtype: np.dtype[Any]) -> TokenList | None:
    """An entry, or None if it is missing, is not whole, or is of a type that may not hold every token."""
    try:
        index = json.loads((entry / "index.json").read_bytes())
        if index["dtype"] != dtype.name:
            return None
        training, held_out = (_map(entry / f"{name}.bin", dtype, index[name]) for name in ("training", "held_out"))
        return TokenList(training, held_out, index["documents"], index["num_bytes"], index["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _map(path: Path, dtype: np.dtype[Any], tokens: int) -> NDArray[Any]:
    if path.stat().st_size != tokens * dtype.itemsize:
        raise ValueError(f"{path} is not whole")
    return np.memmap(path, dtype, "r", shape=(tokens,)) if tokens else np.zeros(0, dtype)


@contextlib.contextmanager
def _locked(entry: Path) -> Iterator[bool]:
    """One process at a time is inside. False: not so, because the file system has no locks."""
    alone = True
    with entry.with_suffix(".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("another process tokenises the same files; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            alone = False
        yield alone


def _make(entry: Path, parts: Iterator[Part], dtype: np.dtype[Any], total: int, on_progress: OnProgress) -> None:
    temporary = entry.with_name(f".{entry.name}.tmp-{secrets.token_hex(8)}")
    temporary.mkdir()
    try:
        with (temporary / "training.bin").open("xb") as training, (temporary / "held_out.bin").open("xb") as held_out:
            index = _write((training, held_out), parts, lambda done: on_progress(done, max(total, done)))
            for file in (training, held_out):
                file.flush()
                os.fsync(file.fileno())
        replace_file(temporary / "index.json", json.dumps({**index, "dtype": dtype.name}).encode())
        if _read(entry, dtype) is None:  # it may be there and not whole
            shutil.rmtree(entry, ignore_errors=True)
        try:
            os.rename(temporary, entry)
        except OSError:  # without locks another process may have been faster
            if _read(entry, dtype) is None:
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(
    files: tuple[BinaryIO, BinaryIO], parts: Iterable[Part], on_bytes: Callable[[int], None] = lambda done: None
) -> dict[str, Any]:
    """Write training and held-out tokens; returns the index without the type."""
    digest, documents, num_bytes, tokens, told_at = blake3(), 0, 0, [0, 0], 0.0
    for part in parts:
        digest.update(part.training.view(np.uint8).data)
        for which, array in enumerate((part.training, part.held_out)):
            files[which].write(array.data)
            tokens[which] += len(array)
        documents += part.documents
        num_bytes += part.num_bytes
        if time.monotonic() - told_at >= PROGRESS_S:
            told_at = time.monotonic()
            on_bytes(num_bytes)
    return {
        "training": tokens[0], "held_out": tokens[1], "documents": documents, "num_bytes": num_bytes,
        "digest": digest.hexdigest(),
    }  # fmt: skip
