"""Reads documents. Every source yields UTF-8 bytes, never empty, in an order that depends on the data alone.

`stdlib` needs no download and no file: it reads the Python files of the running interpreter's standard library. Peers
with the same Python read the same text. With different versions their texts differ slightly, but no peer trains on a
document that another holds out, because the hash of the document decides.
"""

from __future__ import annotations

import contextlib
import os
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from diloco.config import DataConfig
from diloco.config.explain import show
from diloco.errors import DataError, DilocoError

__all__ = ["documents", "files_of", "open_pinned", "open_stream", "reading", "text_of"]

# Generated tables and machine-specific constants, tests, and packages that are not part of the library.
_STDLIB_SKIPPED = frozenset(
    {"__pycache__", "dist-packages", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "test", "tests"}
)
# A text file is cut at line ends about this far apart: holding out whole documents needs more than one document.
_TEXT_DOCUMENT_BYTES = 4096

_FORMATS = ("arrow", "csv", "json", "parquet", "text")  # of a dataset of the hub that is read at a commit
_SUFFIXES = {"json": (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", ".json.zst"), "parquet": (".parquet",)}


def documents(settings: DataConfig) -> Iterator[bytes]:
    """The documents of a local source (`stdlib`, `text`, `json`, `parquet`).

    Raises DataError while iterating, if a file is missing, unreadable or not text, or has no such field.
    """
    if settings.source == "stdlib":
        return _stdlib()
    if settings.source == "text":
        return _text(files_of(settings))
    return _table(settings)


def files_of(settings: DataConfig) -> list[Path]:
    """The files of a local source in their order. Raises DataError if one is missing.

    A directory in `data.path` stands for all files below it with a suffix of the source that are not hidden.
    """
    suffixes = _SUFFIXES.get(settings.source, ())
    found: list[Path] = []
    for given in settings.path or ():
        path = Path(given).expanduser()
        if path.is_file():
            found.append(path)
        elif path.is_dir():
            inside = sorted(
                file
                for file in path.rglob("*")
                if file.is_file()
                and not any(part.startswith(".") for part in file.relative_to(path).parts)
                and file.name.endswith(suffixes or "")
            )
            if not inside:
                kinds = f"{', '.join(suffixes)} " if suffixes else ""
                raise DataError(f"data.path: {given} has no {kinds}files in it; give a file or a directory with some")
            found += inside
        else:
            raise DataError(f"data.path: {given} does not exist; give a file or a directory")
    return found


def open_stream(builder: str, **options: Any) -> Any:
    """`datasets.load_dataset(builder, ..., streaming=True)`, silent: an `IterableDataset`. Use inside `reading`."""
    import datasets as module  # type: ignore[import-untyped, unused-ignore]  # late, because it takes a second

    module.logging.set_verbosity(module.logging.CRITICAL)
    module.disable_progress_bars()
    return module.load_dataset(builder, streaming=True, **options)


def open_pinned(settings: DataConfig) -> Any:
    """A dataset of the hub at the commit `data.revision`: an `IterableDataset`. Use inside `reading`.

    The description of a dataset, which its publisher writes, names its data files and may name any file: one of this
    machine, or of another server. Only files of the dataset itself are read, and only formats that hold plain text.
    Raises DataError if it names others.
    """
    import datasets as module

    module.logging.set_verbosity(module.logging.CRITICAL)
    module.disable_progress_bars()
    name, revision = settings.name, settings.revision
    builder = module.load_dataset_builder(f"hf://datasets/{name}", name=settings.subset, revision=revision)
    kind = type(builder).__module__.rpartition(".")[2]
    if kind not in _FORMATS:
        raise DataError(f"data.name: {name} is of the format {kind}; expected one of {', '.join(_FORMATS)}")
    start = f"hf://datasets/{name}@{revision}/"
    files = [str(file) for files in (builder.config.data_files or {}).values() for file in files]
    strange = [file for file in files if not file.startswith(start) or "::" in file or "/../" in file]
    if strange or not files:
        said = f"reads {show(strange[0])}" if strange else "names no files"
        raise DataError(f"data.name: {name} {said}, and not files of its own; choose another dataset")
    return builder.as_streaming_dataset(split=settings.split)


def text_of(row: Mapping[str, Any], field: str) -> bytes:
    """The text of one row as UTF-8; empty for a null. Raises DataError if there is no such field with text."""
    if field not in row:
        raise DataError(f"data.field: {field!r} is no field of the data; its fields are {', '.join(sorted(row))}")
    value = row[field]
    if value is not None and not isinstance(value, str):
        texts = [name for name in sorted(row) if isinstance(row[name], str)]
        kind = type(value).__name__
        raise DataError(f"data.field: {field!r} holds {kind}, not text; fields with text: {', '.join(texts) or 'none'}")
    return (value or "").encode("utf-8", errors="replace")


@contextlib.contextmanager
def reading(what: str, remedy: str) -> Iterator[None]:
    """Turns any exception of a reader inside the block into a DataError with the text `what: exception; remedy`."""
    try:
        yield
    except (DilocoError, ImportError):  # an ImportError is a broken installation, not bad data
        raise
    except Exception as error:  # OSError; pyarrow, fsspec and datasets each have their own exception tree
        text = (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())
        raise DataError(f"{what}: {text[:300].rstrip('.')}; {remedy}") from error


def _stdlib() -> Iterator[bytes]:
    root = Path(sysconfig.get_path("stdlib"))
    for directory, children, files in os.walk(root):
        children[:] = sorted(c for c in children if c not in _STDLIB_SKIPPED and not c.startswith("config-"))
        for name in sorted(files):
            # _sysconfigdata holds the paths and compiler flags of one installation.
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                with reading(f"data.source=stdlib: {directory}/{name}", "use data=text with files that you can read"):
                    text = Path(directory, name).read_bytes()
                if text:
                    yield text


def _text(files: list[Path]) -> Iterator[bytes]:
    for file in files:
        with reading(f"data.path: {file}", "make it readable or leave it out"), file.open("rb") as handle:
            for document in _pieces(handle):
                try:
                    document.decode("utf-8")
                except UnicodeDecodeError:
                    raise DataError(f"data.path: {file} is not UTF-8 text; convert it or leave it out") from None
                yield document


def _pieces(handle: BinaryIO) -> Iterator[bytes]:
    """The file in pieces of about `_TEXT_DOCUMENT_BYTES`, cut after a line, or else a word, or else a character."""
    rest = b""
    while len(block := handle.read(_TEXT_DOCUMENT_BYTES)) == _TEXT_DOCUMENT_BYTES:
        block = rest + block
        cut = (block.rfind(b"\n") + 1) or (block.rfind(b" ") + 1) or _last_character(block)
        rest = block[cut:]
        yield block[:cut]
    if rest or block:
        yield rest + block


def _last_character(block: bytes) -> int:
    """Index at which the last UTF-8 character, possibly incomplete, begins; the length if the bytes are not UTF-8."""
    for start in range(len(block) - 1, len(block) - 5, -1):
        if block[start] & 0xC0 != 0x80:
            return start
    return len(block)


def _table(settings: DataConfig) -> Iterator[bytes]:
    files = [str(file) for file in files_of(settings)]
    what = f"data.path: {', '.join(settings.path or ())} cannot be read as {settings.source}"
    with reading(what, "repair the file, or set data.source to its format"):
        for row in open_stream(settings.source, data_files=files, split="train"):
            if text := text_of(row, settings.field):
                yield text
