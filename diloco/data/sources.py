"""Lists the files of a source and reads their rows: UTF-8 text, in an order that depends on the
data alone."""

from __future__ import annotations

import contextlib
import logging
import os
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import ClassVar

from diloco.config import DataConfig
from diloco.config.registry import DATA_SOURCES
from diloco.data.formats import SUFFIXES, OddRows, format_of, is_hidden, log_left_out, read_rows
from diloco.errors import DataError, DilocoError
from diloco.text import counted

# generated tables, constants of one machine, tests, and packages that are not part of the library
_STDLIB_SKIPPED = set("__pycache__ dist-packages encodings idlelib lib2to3 pydoc_data".split())
_STDLIB_SKIPPED |= {"site-packages", "test", "tests"}
# files that datasets on the hub have beside their data
_ABOUT_DATA = set(
    "config.json dataset_dict.json dataset_info.json dataset_infos.json state.json".split()
)
# The first pieces of a file, 64 MiB, decide if it is text; a later fault is an error.
_LOOKED_AT = 1 << 14

ROW_SOURCES = ("json", "parquet")  # rows with fields, in files of any format that has these
# suffixes of files that a folder in `data.path` stands for
_KINDS = {**SUFFIXES, "tokens": (".bin", ".npy", ".parquet")}

logger = logging.getLogger(__name__)


class DataSource(ABC):
    """A source of the user's own, which `diloco.register` adds to `data.source`."""

    name: ClassVar[str]

    @abstractmethod
    def documents(self, settings: DataConfig) -> Iterator[str]:
        """Yield documents in an order that depends on the data alone; `data.path` is free."""


def rows_of(settings: DataConfig, files: Sequence[Path]) -> Iterator[bytes]:
    """Yield the rows of a local source that are not empty; `files` comes from `files_of`.

    Raises DataError while iterating, if a file is unreadable or not text, or has no such field.
    """
    if settings.source == "stdlib":
        yield from _stdlib()
        return
    if settings.source in DATA_SOURCES.found:
        with as_data_error(f"data.source={settings.source}", "mend it"):
            documents = DATA_SOURCES[settings.source].documents(settings)
            yield from (text.encode() for text in documents if text)
        return
    kind, empty, odd = settings.source, 0, OddRows("mend that row, or leave it out")
    remedy = f"make it readable as {kind}, or leave it out"
    for file in files:
        with as_data_error(f"data.path: {file}", remedy), file.open("rb") as handle:
            format = kind_of(file, kind)
            for text in read_rows(handle, str(file), format, settings.field, odd=odd):
                empty += not text
                if text:
                    yield text
    odd.close()
    if empty := empty - odd.count:
        where = ", ".join(settings.path or ())
        line = "%d of %d rows of %s have no %r, and are left out"
        logger.warning(line, empty, odd.rows, where, settings.field)


def files_of(settings: DataConfig) -> list[Path]:
    """List the files of a local source in order. Raises DataError if one is missing.

    A directory in `data.path` stands for all files below it that the source can read and that are
    not hidden. A line of the log says how many others there are.
    """
    files, odd = list[Path](), list[Path]()
    if settings.source in DATA_SOURCES.found:
        return files
    for given in settings.path or ():
        with as_data_error(f"data.path: {given}", "make it readable"):
            path = Path(os.path.expanduser(given))
            if not path.exists():
                raise DataError(f"data.path: {given} does not exist; give a file or a directory")
            if not path.is_dir() and not path.is_file():
                raise DataError(
                    f"data.path: {given} is no file that stays; give a file or a directory"
                )
            if path.is_file():
                files.append(path)
                continue
            inside = files_below(path)
            fitting = [file for file in inside if _fits(file, settings.source)]
            if not fitting and settings.source in ROW_SOURCES:
                others = [file for file in inside if _fits(file, kind_of(file, "json"))]
                fitting = others if len({format_of(file.name) for file in others}) == 1 else []
            if not fitting:
                is_text = settings.source == "text"
                kinds = "UTF-8" if is_text else ", ".join(_KINDS[settings.source])
                beside = f", but {counted(len(inside), 'other')} such as {inside[0]}"
                raise DataError(
                    f"data.path: {given} has no {kinds} files in it{beside if inside else ''}; give"
                    " a file or a directory with some"
                )
            files += fitting
            odd += sorted({*inside} - {*fitting})
    log_left_out(odd, settings.source)
    return files


def kind_of(file: Path, source: str) -> str:
    """Return the format of a file: its suffix says it for rows with fields."""
    named = format_of(file.name) if source in ROW_SOURCES else None
    return source if named in (None, "text") else str(named)


def files_below(folder: Path) -> list[Path]:
    """List the files below a folder that are not hidden, in order; a folder that several links lead
    to counts once."""

    def refuse(error: OSError) -> None:
        raise error

    files, seen = list[Path](), set[str]()
    root = os.path.realpath(folder)
    for directory, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(directory)
        if real in seen or (seen and os.path.islink(directory) and real.startswith(f"{root}/")):
            folders.clear()  # its files are listed under the folder's real path
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not is_hidden([name]))
        files += [Path(directory, name) for name in names if not is_hidden([name])]
    return sorted(files)


def _fits(file: Path, source: str) -> bool:
    """Return True if a source can read a file below a folder: by its suffix, or for `data=text` by
    its content."""
    if not file.is_file():  # a broken link, a socket
        return False
    if source == "tokens":
        return file.suffix.lower() in _KINDS[source]
    if source != "text":
        return format_of(file.name) == source and file.name not in _ABOUT_DATA
    remedy = "make it readable, or leave it out"
    with as_data_error(f"data.path: {file}", remedy), file.open("rb") as handle:
        try:
            return all(True for _ in islice(read_rows(handle, str(file), "text", ""), _LOOKED_AT))
        except Exception as error:  # each kind of compression has its own
            if isinstance(error, OSError) and error.errno is not None:
                raise
            return False


@contextlib.contextmanager
def as_data_error(subject: str, remedy: str) -> Iterator[None]:
    """Turn an exception of a reader inside the block into a DataError `what: exception; remedy`."""
    try:
        yield
    except (DilocoError, ImportError):  # an ImportError is a broken installation, not bad data
        raise
    # OSError; pyarrow, fsspec and datasets each have their own exception tree
    except Exception as error:
        text = " ".join(str(error).split())
        if isinstance(error, OSError) and error.strerror:
            text, path = error.strerror, str(error.filename or "")
            if path not in subject:  # a cache, a folder for copies
                subject = f"{subject.partition(':')[0]}: {path}"
                remedy = "make that path usable, the data are not at fault"
        elif isinstance(error, MemoryError):
            text, remedy = "this machine is out of memory", "free some"
        raise DataError(
            f"{subject}: {text[:300].rstrip('.') or type(error).__name__}; {remedy}"
        ) from error


def _stdlib() -> Iterator[bytes]:
    """Yield files of this interpreter's library; other Python versions have slightly other text."""
    remedy = "use data=text with files that you can read"
    for directory, children, files in os.walk(sysconfig.get_path("stdlib")):
        kept = (c for c in children if not c.startswith("config-"))
        children[:] = sorted(c for c in kept if c not in _STDLIB_SKIPPED)
        for name in sorted(files):
            # _sysconfigdata holds the paths and compiler flags of one installation.
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                with as_data_error(f"data.source=stdlib: {directory}/{name}", remedy):
                    text = Path(directory, name).read_bytes()
                if text:
                    yield text
