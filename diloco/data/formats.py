"""Reads the texts of the rows of one file: JSON, Parquet, CSV, Arrow or plain text.

- A text is UTF-8, and b"" where a row has none (null, an empty string, no such field): the n-th is
  that of row `start` + n.
- `format` is one of SUFFIXES. The rows of plain text are pieces of the file, and it has no fields.
- Columns that nobody asked for may be of any type, of several, or in some rows only.
- `handle` is a seekable binary file. Its content says how it is compressed: gzip, bzip2, xz, zstd
  or lz4. A ZIP archive stands for the files in it.
- In memory are one row, or one batch of rows, however large the file.
- A row that cannot be used is left out and counted (`OddRows`), and b"" stands for its text.
- Another fault of the content is a ValueError, or a DataError about `data.field`. An OSError with
  an `errno` is one of the machine or of the network. `as_data_error` makes a line of each.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import logging
import lzma
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count, islice
from typing import Any, BinaryIO

from diloco.data.packing import pieces
from diloco.errors import DataError
from diloco.text import counted

logger = logging.getLogger(__name__)

SUFFIXES = {
    "arrow": (".arrow",),
    "csv": (".csv", ".tsv"),
    "json": (".json", ".jsonl", ".ndjson"),
    "parquet": (".parquet",),
    "text": (".txt",),
}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")

_LONGEST = 1 << 30  # bytes of one value of JSON
_BLOCK = 1 << 20
_ROWS_AT_ONCE = 256
# If so many first rows of JSON lack the field, its name is wrong.
_ROWS_WITHOUT = 10_000
_ODD_AT_ONCE = 100  # odd rows; from so many on it is an error at once if they are half of all

_CONTENT = re.compile(
    rb"(?P<gzip>\x1f\x8b\x08)|(?P<bz2>BZh[1-9](1AY&SY|\x17rE8P\x90))|(?P<xz>\xfd7zXZ\0)"
    rb"|(?P<zstd>\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18)|(?P<lz4>\x04\x22\x4d\x18)|(?P<zip>PK(\x03\x04|\x05\x06))"
)


class OddRows:
    """Counts rows and unusable rows. A line of the log names the first unusable one: with `live` at
    the 1st, the 10th, the 100th, ..., else in `close`.

    Raises DataError instead if they are half of all rows or more.
    """

    rows = count = 0
    _first = ""

    def __init__(self, remedy: str, live: bool = False) -> None:
        self._remedy, self._live = remedy, live

    def add(self, error: Exception, path: str) -> None:
        self.count += 1
        is_line = isinstance(error, DataError)
        self._first = self._first or (str(error) if is_line else f"{path}: {error}; {self._remedy}")
        if self.count >= _ODD_AT_ONCE and 2 * self.count >= self.rows:
            raise DataError(self._first)
        if self._live and str(self.count).strip("0") == "1":
            self._log()

    def close(self) -> None:
        if self.count and 2 * self.count >= self.rows:
            raise DataError(self._first)
        if self.count and not self._live:
            self._log()

    def _log(self) -> None:
        line = "%d of %d rows cannot be used, and are left out; the first: %s"
        logger.warning(line, self.count, self.rows, self._first)


_Row = dict[str, Any] | ValueError  # or the error of an unusable row


def read_rows(
    handle: BinaryIO, path: str, format: str, field: str, start: int = 0, odd: OddRows | None = None
) -> Iterator[bytes]:
    """Yield the texts of one file from row `start` on; `path` is its name in errors. Without `odd`
    an unusable row is an error."""
    for number, row in enumerate(records(handle, path, format, field, start), start + 1):
        if odd is not None:
            odd.rows += 1
        try:
            text = _text_of(row, field, number, path)
        except (ValueError, DataError) as error:
            if odd is None:
                raise
            odd.add(error, path)
            text = b""
        yield text


def records(
    handle: BinaryIO, path: str, format: str, field: str | None = None, start: int = 0
) -> Iterator[_Row]:
    """Yield the rows of one file from row `start` on, or the error of an unusable one; with a
    `field`, other columns may be left out."""
    head = handle.read(16)
    handle.seek(0)
    if format == "parquet" and not _CONTENT.match(head):  # Parquet is read from its end
        yield from _parquet(handle, path, field, start)
    else:
        contents = _contents(handle, path, format)
        rows = (_READERS[format](content, path, field) for content in contents)
        yield from islice(chain.from_iterable(rows), start, None)


def num_rows(handle: Any) -> int:
    """Return the number of rows in the metadata of a Parquet file."""
    return int(_parquet_file(handle).metadata.num_rows)


def format_of(name: str) -> str | None:
    """Return the format that a file's suffix names, in any case, compressed or not."""
    stem, dot, suffix = name.lower().rpartition(".")
    if dot and f".{suffix}" in COMPRESSIONS:
        suffix = stem.rpartition(".")[2]
    return next((format for format, suffixes in SUFFIXES.items() if f".{suffix}" in suffixes), None)


def is_hidden(parts: Sequence[str]) -> bool:
    """Return True for a file, below a folder or in an archive, that is not meant for readers."""
    return any(part.startswith(".") or part == "__MACOSX" for part in parts)


def log_left_out(files: Sequence[object], kind: str) -> None:
    """Say in the log which files are left out."""
    if files:
        count = counted(len(files), "file")
        logger.warning("%s left out, which cannot be read as %s, such as %s", count, kind, files[0])


def _contents(handle: Any, path: str, format: str) -> Iterator[io.BufferedReader]:
    """Yield a file decompressed and without byte order mark, or each file of an archive."""
    match = _CONTENT.match(handle.read(16))
    handle.seek(0)
    kind = match.lastgroup if match else None
    # not a document of an office program
    if kind == "zip" and (format != "text" or path.lower().endswith(".zip")):
        with zipfile.ZipFile(handle) as archive:
            for member in _members(archive, path, format):
                with archive.open(member) as opened:
                    yield from _contents(opened, f"{path}/{member}", format)
        return
    raw = lzma.LZMAFile(handle) if kind == "xz" else handle
    if kind in ("bz2", "gzip", "lz4", "zstd"):
        import pyarrow as module

        raw = module.CompressedInputStream(handle, kind)
    with io.BufferedReader(raw, _BLOCK) as content:
        if content.peek(3).startswith(codecs.BOM_UTF8):
            content.read(3)
        yield content


def _members(archive: zipfile.ZipFile, path: str, format: str) -> list[str]:
    names = (name for name in archive.namelist() if not name.endswith("/"))
    files = [name for name in names if not is_hidden(name.split("/"))]
    fitting = [name for name in files if format in ("text", format_of(name))]
    log_left_out([f"{path}/{name}" for name in files if name not in fitting], format)
    return fitting


def _text_of(row: _Row, field: str, number: int, path: str) -> bytes:
    if isinstance(row, ValueError):
        raise row
    value = row.get(field)
    if isinstance(value, bytes):
        try:
            value.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"row {number} is no UTF-8 text ({error})") from error
        return value
    if not isinstance(value, str | None):
        names = [name for name, other in row.items() if isinstance(other, str)]
        raise _holds_no_text(f"row {number} of {path}", field, type(value).__name__, names)
    # half of a surrogate pair is possible in JSON
    return (value or "").encode("utf-8", errors="replace")


def _text(content: io.BufferedReader, path: str, field: str | None) -> Iterator[_Row]:
    for number, piece in enumerate(pieces(content)):
        try:
            if "\0" in piece.decode("utf-8") and number == 0:  # it is UTF-16
                raise ValueError
        except ValueError:
            raise ValueError("it is not UTF-8 text") from None
        yield {str(field): piece}


def _json(content: io.BufferedReader, path: str, field: str | None) -> Iterator[_Row]:
    # names in the rows so far, until one has the field
    fields: set[str] | None = None if field is None else set()
    for number, row in enumerate(_json_rows(content, field is None), 1):
        if isinstance(row, str):  # a list of strings
            row = {"text": row}
        if not isinstance(row, dict | ValueError):
            row = ValueError(f"row {number} is no object")
        if fields is not None and isinstance(row, dict):
            fields = None if field in row else fields | row.keys()
            if fields and number == _ROWS_WITHOUT:
                break
        yield row
    if fields:
        raise NoFieldError(path, str(field), fields)


def _json_rows(content: Any, numbers: bool) -> Iterator[object]:
    """Yield the rows of JSON lines, or the error of a bad one; else those of one JSON document."""
    # Numbers that are not used may have more digits than Python converts.
    parse_int = None if numbers else lambda digits: 0
    decoder, number, line = json.JSONDecoder(strict=False, parse_int=parse_int), 0, b""

    def decoded(value: bytes, name: str) -> object:
        try:
            return decoder.decode(value.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            kind = "UTF-8" if isinstance(error, UnicodeDecodeError) else "valid JSON"
            raise ValueError(f"{name} is no {kind} ({error})") from error

    if not content.peek(_BLOCK).lstrip().startswith(b"["):
        for line in iter(lambda: content.readline(_LONGEST), b""):
            if line.isspace():
                continue
            number += 1
            try:
                row = decoded(line, f"row {number}")
            except ValueError as error:
                length = len(line.decode(errors="replace").rstrip())
                if number == 1 and getattr(error.__cause__, "pos", -1) >= length:
                    break  # the value goes on in the next line
                row = error
            yield row
        else:
            return
    whole = line + content.read(_LONGEST)
    if len(whole) >= _LONGEST:
        raise ValueError("it is one value of more than 1 GB; make it JSON lines")
    rows = decoded(whole, "it")
    yield from rows if isinstance(rows, list) else [rows]


def _csv(content: io.BufferedReader, path: str, field: str | None) -> Iterator[_Row]:
    tabs = path.lower().removesuffix(".zip").rpartition("/")[2].partition(".tsv")[1]
    csv.field_size_limit(_LONGEST)
    with io.TextIOWrapper(content, "utf-8", "surrogateescape", newline="") as lines:
        rows = csv.DictReader(lines, delimiter="\t" if tabs else ",")
        if field is not None and rows.fieldnames and field not in rows.fieldnames:
            raise NoFieldError(path, field, rows.fieldnames)
        for number in count(1):
            row: _Row | None
            try:
                row = next(rows, None)
                for value in (row or {}).values():
                    str(value).encode()
            except (csv.Error, UnicodeEncodeError) as error:
                row = ValueError(f"row {number} is no CSV of UTF-8 ({error})")
            if row is None:
                return
            yield row


def _arrow(content: io.BufferedReader, path: str, field: str | None) -> Iterator[_Row]:
    import pyarrow as module

    is_file = content.peek(6).startswith(b"ARROW1")
    reader = (module.ipc.open_file if is_file else module.ipc.open_stream)(content)
    batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
    yield from _table_rows(batches, reader.schema, path, field)


def _parquet_file(handle: Any) -> Any:
    from pyarrow import parquet

    # without these a whole row group is in memory
    return parquet.ParquetFile(handle, buffer_size=8 * _BLOCK, pre_buffer=False)


def parquet_columns(handle: Any, field: str) -> Iterator[Any]:
    """Yield the values (pyarrow scalars) of a column of Parquet; DataError if it is missing."""
    file = _parquet_file(handle)
    if field not in file.schema_arrow.names:
        raise NoFieldError(str(handle.name), field, file.schema_arrow.names)
    for batch in file.iter_batches(_ROWS_AT_ONCE, columns=[field]):
        yield from batch.column(0)


def _parquet(handle: Any, path: str, field: str | None, start: int = 0) -> Iterator[_Row]:
    file = _parquet_file(handle)
    groups = list(range(file.num_row_groups))
    while groups and start >= (rows := file.metadata.row_group(groups[0]).num_rows):
        start -= rows
        del groups[0]
    batches = file.iter_batches(_ROWS_AT_ONCE, groups, None if field is None else [field])
    yield from islice(_table_rows(batches, file.schema_arrow, path, field), start, None)


def _table_rows(batches: Any, schema: Any, path: str, field: str | None) -> Iterator[_Row]:
    import pyarrow as module

    def is_text(kind: Any) -> bool:
        kind = kind.value_type if module.types.is_dictionary(kind) else kind
        return str(kind).removeprefix("large_").removesuffix("_view") in ("string", "binary")

    if field is None:
        for batch in batches:
            yield from map(_without_null, batch.to_pylist())
        return
    if field not in schema.names:
        raise NoFieldError(path, field, schema.names)
    kind = schema.types[schema.names.index(field)]
    if not is_text(kind) and not module.types.is_null(kind):
        names = [column.name for column in schema if is_text(column.type)]
        raise _holds_no_text(path, field, str(kind), names)
    for batch in batches:
        column = batch.column(batch.schema.names.index(field))
        if module.types.is_dictionary(kind):
            column = column.dictionary_decode()
        for value in column.cast(module.large_binary()).to_pylist():
            yield {field: value}


def _without_null(value: Any) -> Any:
    """Drop keys that are null: Arrow gives all objects of a column the same keys."""
    if isinstance(value, dict):
        return {key: _without_null(inner) for key, inner in value.items() if inner is not None}
    return [*map(_without_null, value)] if isinstance(value, list) else value


class NoFieldError(DataError):
    """A file has no such column."""

    def __init__(self, path: str, field: str, fields: Iterable[str]) -> None:
        has = ", ".join(sorted(fields)[:20]) or "none"
        text = f"{field!r} is no field of {path}, which has {has}"
        super().__init__(f"data.field: {text}; take one, or leave the file out")


def _holds_no_text(where: str, field: str, kind: str, names: list[str]) -> DataError:
    fields = ", ".join(sorted(names)[:20]) or "none"
    return DataError(
        f"data.field: {field!r} holds {kind}, not text, in {where}; fields with text: {fields}"
    )


_READERS: dict[str, Callable[[io.BufferedReader, str, str | None], Iterator[_Row]]] = dict(
    arrow=_arrow, csv=_csv, json=_json, parquet=_parquet, text=_text
)
