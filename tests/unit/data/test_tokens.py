"""Files of tokens: the same tokens as in memory, made once, made again when they are broken, never
half there."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from diloco import data
from diloco.config import DataConfig
from diloco.data import tokens
from diloco.data.tokenizers import ByteTokenizer, HubTokenizer
from diloco.errors import DataError
from tests.support.data import T, config, rows_of, written
from tests.support.errors import error_text
from tests.support.peers import together


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """Text of some 40 documents."""
    parts = {
        f"{part}.txt": "".join(f"w{part} w{n} " for n in range(30 + part)) for part in range(40)
    }
    return written(tmp_path / "book", dict(parts))


@pytest.fixture(autouse=True)
def everything_has_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "FILES_FROM_BYTES", 0)
    monkeypatch.setattr(tokens, "FILES_FROM_BYTES_OF_BYTES", 0)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Which entries were made."""
    entries, make = list[Path](), tokens._make
    monkeypatch.setattr(
        tokens, "_make", lambda entry, *rest: entries.append(entry) or make(entry, *rest)
    )
    return entries


def cached(tmp_path: Path, *paths: Path, **values: Any) -> DataConfig:
    return config("text", *paths, cache=str(tmp_path / "cache"), **values)


def same(one: Any, other: Any) -> bool:
    rows = bool(np.array_equal(one.training.rows, other.training.rows))
    held_out = bool(np.array_equal(one.held_out[0], other.held_out[0]))
    return (
        rows
        and held_out
        and (one.description, one.training.digest) == (other.description, other.training.digest)
    )


@pytest.mark.parametrize("tokenizer", ["bytes", "words"])
def test_files_hold_what_memory_would(
    tokenizer: str, word_tokenizer: str, book: Path, tmp_path: Path
) -> None:
    name = "bytes" if tokenizer == "bytes" else word_tokenizer
    kept = data.load(cached(tmp_path, book, tokenizer=name), 0)
    plain = data.load(config("text", book, cache=None, tokenizer=name), 0)
    assert same(kept, plain)
    assert isinstance(kept.training.rows, np.memmap), "RAM does not hold them"  # type: ignore[attr-defined]
    assert rows_of(kept.batches(5), 7) == rows_of(plain.batches(5), 7)
    assert torch.equal(kept.holdout(9), plain.holdout(9))


def test_tokens_are_made_once_for_any_sequence_length_and_place(
    book: Path, tmp_path: Path, made: list[Path]
) -> None:
    first = data.load(cached(tmp_path, book), 0)
    assert same(first, data.load(cached(tmp_path, book), 0))
    longer = data.load(cached(tmp_path, book, sequence_length=2 * T), 1)
    assert len(longer.training.rows) == len(first.training.rows) // 2  # type: ignore[attr-defined]
    data.load(cached(tmp_path, book.rename(tmp_path / "moved")), 0)
    assert len(made) == 1


def test_the_key_has_what_tokens_depend_on(
    book: Path, tmp_path: Path, made: list[Path], word_tokenizer: str
) -> None:
    files = sorted(book.iterdir())

    def load(files: list[Path], **values: Any) -> None:
        kept, plain = (
            config("text", *files, cache=cache, **values)
            for cache in (str(tmp_path / "cache"), None)
        )
        assert same(data.load(kept, 0), data.load(plain, 0))

    load(files)
    load(files, holdout=0.3)
    load(files, tokenizer=word_tokenizer)
    load(files[::-1])
    files[3].write_text(files[3].read_text().replace("w3", "w4"))
    load(files)
    assert len(set(made)) == 5


DAMAGE: tuple[Callable[[Path], object], ...] = (
    lambda entry: os.truncate(file := entry / "training.bin", file.stat().st_size - 1),
    lambda entry: (file := entry / "training.bin").write_bytes(file.read_bytes() + b"x"),
    lambda entry: (entry / "index.json").write_text('{"training": 3'),
    lambda entry: (entry / "held_out.bin").unlink(),
    lambda entry: (file := entry / "index.json").write_text(
        file.read_text().replace("uint8", "uint16")
    ),
    lambda entry: [file.unlink() for file in entry.iterdir()],
)


def test_a_broken_entry_is_made_again(book: Path, tmp_path: Path, made: list[Path]) -> None:
    whole = data.load(config("text", book, cache=None), 0)
    data.load(cached(tmp_path, book), 0)
    [entry] = made
    for damage in DAMAGE:
        made.clear()
        damage(entry)
        assert same(data.load(cached(tmp_path, book), 0), whole)
        assert made == [entry]
    left = entry.rename(entry.with_name(f".{entry.name}.tmp"))  # as a killed process leaves it
    data.load(cached(tmp_path, book), 0)
    assert not left.exists() and entry.is_dir()


def test_several_that_want_the_same_tokens_make_them_once(
    book: Path, tmp_path: Path, made: list[Path]
) -> None:
    one, *others = together(*[lambda: data.load(cached(tmp_path, book), 0)] * 4)
    assert all(same(one, other) for other in others)
    assert len(made) == 1


def test_a_full_disk_is_one_line_and_leaves_nothing(book: Path, tmp_path: Path) -> None:
    cache, full = tmp_path / "cache", OSError(errno.ENOSPC, "No space left on device")
    with patch.object(tokens.os, "fsync", side_effect=full):
        text = error_text(DataError, data.load, cached(tmp_path, book), 0)
    assert (
        text
        == f"data.cache={cache}: {cache} cannot hold the tokens (No space left on device); make"
        " room there, set data.cache to another directory, or data.cache=null to keep them in"
        " memory"
    )
    assert [file.suffix for file in cache.iterdir()] == [".lock"]
    cache.rename(tmp_path / "moved")
    cache.write_text("a file")
    with pytest.raises(
        DataError, match=r"^data\.cache=.*/cache: .*/cache cannot hold the tokens \(.*\); make room"
    ):
        data.load(cached(tmp_path, book), 0)


def test_the_place_is_that_of_caches(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    data.load(config("text", book), 0)
    assert list((tmp_path / "xdg" / "diloco" / "tokens").glob("*/index.json"))
    monkeypatch.delenv("XDG_CACHE_HOME")
    data.load(config("text", book), 0)
    assert list((tmp_path / "home" / ".cache" / "diloco" / "tokens").glob("*/index.json"))


def test_little_text_has_no_files(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    data.load(cached(tmp_path, book), 0)
    assert not (tmp_path / "cache").exists()


def test_a_tokenizer_has_the_same_digest_wherever_it_lies(
    word_tokenizer: str, tmp_path: Path
) -> None:
    one = HubTokenizer(word_tokenizer)
    one.save(tmp_path)
    assert one.digest == HubTokenizer(str(tmp_path)).digest != ByteTokenizer().digest
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"]["another"] = len(content["model"]["vocab"])
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert HubTokenizer(str(tmp_path)).digest != one.digest
