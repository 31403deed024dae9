"""Small files of text, their configuration and their tokens."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco.config import DataConfig
from diloco.data import sources
from diloco.data.numbered import SequenceArray
from diloco.data.packing import documents_of
from tests.support import models

T = 16
TEXTS = [[f"file {file} row {row} {'x' * (row % 7)}" for row in range(30)] for file in range(4)]
ROWS = {text.encode() for texts in TEXTS for text in texts}


def config(source: str, *paths: Path | str, **values: Any) -> DataConfig:
    path = tuple(str(path) for path in paths) or None
    return DataConfig(
        **{"source": source, "path": path, "sequence_length": T, "holdout": 0.2, **values}
    )


def written(directory: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return directory


def chats(place: Path) -> Path:
    """400 conversations of a turn each."""
    rows = [{"prompt": f"{n} + {n} = ", "completion": f"{2 * n}"} for n in range(400)]
    place.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return place


def hub_directory(place: Path) -> Path:
    """A dataset directory as on the hub, named corpus: 4 files of 30 rows, in a split named
    train."""
    files: dict[str, str | bytes] = {}
    for file, texts in enumerate(TEXTS):
        rows = [json.dumps({"text": text, "url": "u", "likes": len(text)}) for text in texts]
        files[f"data/train-{file}.jsonl"] = "".join(f"{row}\n" for row in rows)
    return written(place / "corpus", files)


def documents(settings: DataConfig) -> Iterator[bytes]:
    """All documents of a local source."""
    rows = sources.rows_of(settings, sources.files_of(settings))
    return (document for row in rows for document in documents_of(row, settings.source))


def rows_of(stream: Any, batches: int) -> list[tuple[int, ...]]:
    return [tuple(row) for _ in range(batches) for row in next(stream).tolist()]


def numbered(rows: int) -> SequenceArray:
    """So many sequences that each start with twice their own number."""
    return SequenceArray(np.arange(rows * 2, dtype=np.int32).reshape(rows, 2), "numbers")


@pytest.fixture(scope="module")
def word_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a tokenizer that knows w0 to w399."""
    words = models.word_tokenizer(" ".join(f"w{n}" for n in range(400)), eos_token="</s>")
    words.save_pretrained(directory := tmp_path_factory.mktemp("tokenizer"))
    return str(directory)
