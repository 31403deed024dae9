"""Files to texts: any columns, any name, any compression; what is left out is counted, and what is
wrong is named."""

import gzip
import io
import json
import logging
import lzma
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import Table, parquet

from diloco.data.formats import read_rows
from diloco.data.packing import LONG_ROW_BYTES, documents_of
from diloco.data.sources import as_data_error, files_of
from diloco.errors import DataError
from tests.support.data import config, documents, written
from tests.support.errors import error_text

CATEGORIES = pyarrow.dictionary(pyarrow.int8(), pyarrow.string())
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
rows_of_any_columns = st.lists(
    st.builds(
        lambda row, text: {**row, **text},
        st.dictionaries(st.text(max_size=4), anything, max_size=4),
        st.fixed_dictionaries({}, optional={"body": st.none() | st.text(max_size=20)}),
    ),
    max_size=12,
)
JSON: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "lines": lambda rows: "".join(json.dumps(row) + "\n" for row in rows),
    "no end": lambda rows: "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows),
    "blank lines": lambda rows: "\n\n".join(json.dumps(row) for row in rows) + "\n\n",
    "list": json.dumps,
    "list over several lines": lambda rows: "\n" + json.dumps(rows, indent=1),
}


def read(content: bytes, format: str, field: str = "body", start: int = 0) -> list[bytes]:
    return list(read_rows(io.BytesIO(content), "some file", format, field, start))


def compressed(content: bytes, suffix: str) -> bytes:
    def by_arrow(codec: str) -> bytes:
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, codec) as stream:
            stream.write(content)
        return sink.getvalue().to_pybytes()

    def archive() -> bytes:
        sink = io.BytesIO()
        with zipfile.ZipFile(sink, "w") as opened:
            opened.writestr("inside/rows.jsonl", content)
        return sink.getvalue()

    by_python = {"": lambda: content, ".zip": archive, ".xz": lambda: lzma.compress(content)}
    if suffix in by_python:
        return by_python[suffix]()
    return by_arrow({".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}[suffix])


@given(
    rows=rows_of_any_columns,
    form=st.sampled_from(sorted(JSON)),
    start=st.integers(0, 13),
    mark=st.booleans(),
)
@example([{"n": [1], "body": "half a pair \ud800"}, {"n": {"a": "b"}}], "lines", 0, False)
@settings(max_examples=60)
def test_only_the_asked_column_of_json_matters(
    rows: list[dict[str, Any]], form: str, start: int, mark: bool
) -> None:
    text = ("\ufeff" if mark else "") + JSON[form](rows)
    content = text.encode("utf-8", "surrogatepass")
    expected = [(row.get("body") or "").encode("utf-8", "replace") for row in rows]
    if any(rows) and not any("body" in row for row in rows):
        with pytest.raises(DataError, match=r"^data\.field: 'body' is no field of some file, whi"):
            read(content, "json")
    else:
        assert read(content, "json", start=start) == expected[start:]


COLUMNS: dict[str, list[Any]] = {"n": [1, 2, None], "a": [{"b": 1}, None, {"b": 2}]}
COLUMNS |= {"b": ["x", None, "y"], "a ": [[1], [], None], "é.b": [None] * 3}


@pytest.mark.parametrize("field", ["body", "a", "a.b", "é"])
@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), CATEGORIES])
@pytest.mark.parametrize(("group", "start"), [(1, 0), (2, 1), (3, 4)])
def test_only_the_asked_column_of_a_table_matters(
    field: str, kind: Any, group: int, start: int
) -> None:
    text = ["one", None, "é\n"]
    table = Table.from_pydict({**COLUMNS, field: pyarrow.array(text, kind)})
    sinks = {name: io.BytesIO() for name in ("parquet", "stream", "file")}
    parquet.write_table(table, sinks["parquet"], row_group_size=group)
    for name, writer in (("stream", pyarrow.ipc.new_stream), ("file", pyarrow.ipc.new_file)):
        with writer(sinks[name], table.schema) as out:
            out.write_table(table, group)
    expected = [(one or "").encode() for one in text][start:]
    for name, sink in sinks.items():
        format = "parquet" if name == "parquet" else "arrow"
        assert read(sink.getvalue(), format, field, start) == expected


def test_a_table_without_such_text_says_what_it_has() -> None:
    sink = io.BytesIO()
    parquet.write_table(Table.from_pylist([{"id": 1, "content": "text"}]), sink)
    none = "'body' is no field of some file, which has content, id; take one, or leave the file out"
    for field, message in {
        "body": none,
        "id": "'id' holds int64, not text, in some file; fields with text: content",
    }.items():
        text = error_text(DataError, read, sink.getvalue(), "parquet", field)
        assert text == f"data.field: {message}"


def test_csv_is_read_by_its_header() -> None:
    content = b'\xef\xbb\xbfid,body\r\n1,"one, or\nmore"\r\n2,\r\n3,7\r\n4\r\n'
    assert read(content, "csv") == [b"one, or\nmore", b"", b"7", b""]
    tabs = list(read_rows(io.BytesIO(b"id\tbody\n1\tone\n"), "a.TSV", "csv", "body"))
    assert tabs == [b"one"]


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip"])
def test_any_compression_is_read_whatever_its_name(suffix: str, tmp_path: Path) -> None:
    rows = (json.dumps({"text": f"row {number}"}) + "\n" for number in range(300))
    packed, parts = compressed("".join(rows).encode(), suffix), suffix not in ("", ".zip")
    if parts:  # as parallel compressors write
        packed += compressed(b'{"text": "of a second part"}', suffix)
    written(tmp_path, {f"shard.jsonl{suffix.upper()}": packed})
    found = list(documents(config("json", tmp_path)))
    assert found[:300] == [b"row %d" % number for number in range(300)]
    assert found[300:] == ([b"of a second part"] if parts else [])
    assert read(packed, "json", "text", start=290) == found[290:]


NAMES = [*"a::b a* a[12] a?{x,y} file: ~ zip: a=b \u00e9\u202e \\ $HOME".split(), " "]


@pytest.mark.parametrize("source", ["json", "parquet", "text"])
def test_a_name_is_a_name(source: str, tmp_path: Path) -> None:
    suffix = {"json": ".jsonl", "parquet": ".parquet", "text": ""}[source]
    for number, name in enumerate(NAMES):
        sink = io.BytesIO()
        parquet.write_table(Table.from_pylist([{"text": name_text(number)}]), sink)
        line, text = json.dumps({"text": name_text(number)}).encode(), name_text(number).encode()
        content = {"json": line, "parquet": sink.getvalue(), "text": text}[source]
        for place in (f"{name}{suffix}", f"_{name}/x{suffix}"):
            written(tmp_path, {place: content})
            assert list(documents(config(source, tmp_path / place))) == [text]
        assert list(documents(config(source, tmp_path / f"_{name}"))) == [text]
    written(tmp_path, {os.fsdecode(b"\xff\xfe") + suffix: content})
    expected = {name_text(number).encode() for number in range(len(NAMES))}
    assert {*documents(config(source, tmp_path))} == expected


def name_text(number: int) -> str:
    return f"what file {number} says"


def test_what_is_left_out_of_a_folder_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    png = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
    late = b"plain text\n" * 10_000 + "café".encode("latin-1")
    files: dict[str, str | bytes] = {"a.txt": "good", "b.md": "good", ".hidden": png}
    files |= {"picture.png": png, "late.txt": late, "cut.gz": gzip.compress(b"text " * 99)[:-9]}
    files |= {f"{code}.txt": "a note".encode(code) for code in ("utf-16", "utf-16le")}
    written(tmp_path, files)
    (tmp_path / "nowhere").symlink_to("gone")
    assert list(documents(config("text", tmp_path))) == [b"good", b"good"]
    text = f"6 files left out, which cannot be read as text, such as {tmp_path}/cut.gz"
    assert [record.getMessage() for record in caplog.records] == [text]
    for name in files.keys() - {"a.txt", "b.md", ".hidden", "cut.gz"}:
        settings = config("text", tmp_path / name)
        text = error_text(DataError, lambda settings=settings: list(documents(settings)))
        assert f"/{name}: it is not UTF-8 text; make it readable as text, or leave it out" in text
    caplog.clear()
    rows = '{"text": "a"}\n{"text": null}\n{}\n'
    written(tmp_path, {"rows.jsonl": rows, "a.jsonl.br": "?", "dataset_info.json": "{}"})
    assert list(documents(config("json", tmp_path))) == [b"a"]
    assert [record.getMessage().partition(", such")[0] for record in caplog.records] == [
        "10 files left out, which cannot be read as json",
        f"2 of 3 rows of {tmp_path} have no 'text', and are left out",
    ]
    assert not any(record.levelno > logging.WARNING for record in caplog.records)


def test_folders_that_are_links_are_read_once(tmp_path: Path) -> None:
    written(tmp_path, {"data/a.txt": "a", "data/real/c.txt": "c", "elsewhere/b.txt": "b"})
    links = {"0": "real", "link": "../elsewhere", "loop": ".", "also": "../elsewhere"}
    for link, target in links.items():
        (tmp_path / "data" / link).symlink_to(target)
    found = [tmp_path / "data" / name for name in ("a.txt", "also/b.txt", "real/c.txt")]
    assert files_of(config("text", tmp_path / "data")) == found
    (tmp_path / "given").symlink_to("data/real")
    assert list(documents(config("text", tmp_path / "given"))) == [b"c"]


GOOD = '{"body": "good"}\n'
CUT = "is no valid JSON (Unterminated string starting at: line 1 column 10"
NAME = "it is no valid JSON (Expecting property name enclosed in double quotes: line 2 column 4"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD * 2 + '{"body": "cut', f"row 3 {CUT}"),
        ('{"body": "cut\n' + GOOD, f"row 1 {CUT}"),
        (GOOD + "42\n", "row 2 is no object"),
        (GOOD.encode() + b'{"body": "caf\xe9"}\n' + GOOD.encode(), "row 2 is no UTF-8 ("),
        (f"[{GOOD}, {GOOD}", "it is no valid JSON (Expecting ',' delimiter: line 3 column 1"),
        (f"[{GOOD}, {{]", NAME),
        ("[1]", "row 1 is no object"),
        (GOOD + "[" * 100_000, "row 2 is no valid JSON"),
        (GOOD + '{"body": 7, "a": "b"}', "'body' holds int, not text, in row 2 of some file; fie"),
        (gzip.compress(GOOD.encode() * 9)[:-9], "Truncated compressed stream"),
        (compressed(GOOD.encode() * 9, ".xz")[:-9], "Compressed file ended before"),
    ],
    # a gzip file has its time, and workers compare ids
    ids=lambda value: value[:20] if value.isascii() else "bytes",
)
def test_what_is_wrong_with_json_has_its_row(content: str | bytes, message: str) -> None:
    def load() -> None:
        with as_data_error("data.path: some file", "leave it out"):
            read(content.encode() if isinstance(content, str) else content, "json")

    assert message in error_text(DataError, load)


@pytest.mark.parametrize(
    "odd",
    ['{"body": NaN}', '{"body": 7}', '{"body": ["a"]}', '{"body": "cut', '{"body": "a",}', "[1]"],
)
def test_one_odd_row_is_left_out_with_a_line(
    odd: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = written(tmp_path, {"rows.jsonl": GOOD * 9 + odd + "\n" + GOOD * 9}) / "rows.jsonl"
    assert len([*documents(config("json", file, field="body"))]) == 18
    assert "1 of 19 rows cannot be used, and are left out; the first: " in caplog.text
    assert "row 10" in caplog.text and "rows.jsonl" in caplog.text
    file.write_text(GOOD * 2 + f"{odd}\n" * 3)
    assert "row 3" in error_text(
        DataError, lambda: [*documents(config("json", file, field="body"))]
    )


def test_odd_rows_of_csv_and_of_bytes_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "rows.csv").write_bytes(b"text\ngood\ncaf\xe9\nfine\n")
    table = pyarrow.table({"text": [b"good", b"caf\xe9", b"fine", None]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    for kind in ("csv", "parquet"):
        found = [*documents(config("json", tmp_path / f"rows.{kind}"))]
        assert found == [b"good", b"fine"]
    assert caplog.text.count("rows cannot be used") == 2


def test_a_folder_of_another_format_with_fields_is_read(tmp_path: Path) -> None:
    rows = [{"text": f"row {number}"} for number in range(9)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    for source in ("json", "parquet"):
        found = [*documents(config(source, tmp_path / "saved"))]
        assert found == [row["text"].encode() for row in rows]
    written(tmp_path / "saved", {"more.csv": "text\na\n"})
    with pytest.raises(DataError, match="files in it, but 4 others"):
        [*documents(config("parquet", tmp_path / "saved"))]


def test_a_file_may_be_larger_than_memory() -> None:
    """It is read as it is needed: the first texts come before the rest is there."""

    class Endless(io.RawIOBase):
        place = 0

        def readable(self) -> bool:
            return True

        def seek(self, place: int, whence: int = 0) -> int:
            self.place = place
            return place

        def readinto(self, buffer: Any) -> int:
            assert self.place < 64 << 20, "it is read whole"
            at = self.place % len(GOOD)
            buffer[:] = (GOOD.encode() * (2 + len(buffer) // len(GOOD)))[at : at + len(buffer)]
            self.place += len(buffer)
            return len(buffer)

    found = read_rows(Endless(), "some file", "json", "body")  # type: ignore[arg-type]
    assert [next(found) for _ in range(1000)] == [b"good"] * 1000
    found.close()


def test_long_rows_are_cut_as_text_files_are(tmp_path: Path) -> None:
    book = "".join(f"line {number} of a book\n" for number in range(4000)).encode()
    written(tmp_path, {"book.txt": book, "rows.json": json.dumps([{"text": book.decode()}])})
    pieces = list(documents(config("json", tmp_path)))
    assert pieces == list(documents(config("text", tmp_path / "book.txt"))) and len(pieces) > 10
    assert list(documents_of(book[:LONG_ROW_BYTES])) == [book[:LONG_ROW_BYTES]]


def test_a_fault_of_the_machine_names_the_path_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        with as_data_error("data.path: rows.jsonl", "repair the file"):
            Path("/dev/null/cache").mkdir()

    text = error_text(DataError, fail)
    remedy = "make that path usable, the data are not at fault"
    assert text == f"data.path: /dev/null/cache: Not a directory; {remedy}"
    full = r"^data\.path: x: this machine is out of memory; free some$"
    with pytest.raises(DataError, match=full), as_data_error("data.path: x", "repair the file"):
        raise MemoryError
    for name in ("HOME", "HF_HOME", "HF_DATASETS_CACHE", "XDG_CACHE_HOME", "TMPDIR"):
        monkeypatch.setenv(name, "/dev/null/x")
    written(tmp_path, {"rows.jsonl": '{"text": "a"}'})
    assert list(documents(config("json", tmp_path))) == [b"a"]
    assert files_of(config("json", tmp_path)) == [tmp_path / "rows.jsonl"]


def test_an_object_may_be_over_several_lines() -> None:
    long = f'{{"id": {"9" * 5000}, "body": "text"}}'  # a number that Python does not convert
    several = '{"id": {\n}, "body":\n"text"}', '\n\n{"id":\n7,\n "body": "text"\n}\n'
    for content in (long, '{\n"body": "text"}', *several):
        assert read(content.encode(), "json") == [b"text"]
