"""The texts, or the ids, that are trained on are those that the writer's own reader gives: as a
multiset, since the order is the product's. Plain text counts as a whole.

Each row is read from a folder (`data.path`), and one layout from `data=hub` with a local folder.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
import os
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from pyarrow import dataset, feather, parquet

from diloco import data
from diloco.config import DataConfig
from diloco.data import sources
from diloco.data.hub_files import HubFiles
from diloco.data.tokenizers import ByteTokenizer
from diloco.errors import DilocoError
from scripts.families import WORKS, Member, refused

SOURCES = ("datasets", "pyarrow", "numpy", "litdata", "mosaicml-streaming", "webdataset")

datasets.disable_progress_bars()
SAID = 'caf\u00e9, \u4e2d, "quoted",\n a second line'
TEXTS = [f"text {n}: {SAID} {'x' * (n % 9)}" for n in range(60)]
ROWS = [{"id": n, "text": text, "likes": n / 3} for n, text in enumerate(TEXTS)]
IDS = np.random.default_rng(0).integers(1, 250, 4000)
TABLE = pa.Table.from_pylist(ROWS)


def each_row() -> Iterator[dict[str, Any]]:
    yield from ROWS


def compressed(suffix: str, content: bytes) -> bytes:
    if suffix in (".zst", ".lz4"):
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, {".zst": "zstd", ".lz4": "lz4"}[suffix]) as stream:
            stream.write(content)
        return sink.getvalue().to_pybytes()
    by_name = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    return by_name[suffix](content)


def json_lines(rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def csv_bytes(rows: Any, delimiter: str = ",") -> bytes:
    place = Path("rows.tmp")
    with place.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(ROWS[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    content = place.read_bytes()
    place.unlink()
    return content


def arrow_bytes(rows: Any, new: Any) -> bytes:
    sink, table = pa.BufferOutputStream(), pa.Table.from_pylist(list(rows))
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return sink.getvalue().to_pybytes()


def parquet_bytes(rows: Any, compression: str = "snappy") -> bytes:
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.Table.from_pylist(list(rows)), sink, compression=compression)
    return sink.getvalue().to_pybytes()


def feather_bytes(rows: Any) -> bytes:
    sink = pa.BufferOutputStream()
    feather.write_feather(pa.Table.from_pylist(list(rows)), sink, compression="uncompressed")
    return sink.getvalue().to_pybytes()


WRITERS: dict[str, tuple[str, str, Callable[[Any], bytes]]] = {
    "text": ("text", ".txt", lambda rows: "".join(row["text"] + "\n" for row in rows).encode()),
    "JSON lines": ("json", ".jsonl", json_lines),
    "JSON list": ("json", ".json", lambda rows: json.dumps(list(rows), indent=1).encode()),
    "CSV": ("json", ".csv", csv_bytes),
    "TSV": ("json", ".tsv", lambda rows: csv_bytes(rows, "\t")),
    "Parquet": ("parquet", ".parquet", parquet_bytes),
    "Parquet, zstd": ("parquet", ".parquet", lambda rows: parquet_bytes(rows, "zstd")),
    "Parquet, none": ("parquet", ".parquet", lambda rows: parquet_bytes(rows, "none")),
    "Arrow stream": ("json", ".arrow", lambda rows: arrow_bytes(rows, pa.ipc.new_stream)),
    "Arrow file": ("parquet", ".arrow", lambda rows: arrow_bytes(rows, pa.ipc.new_file)),
    "Feather": ("json", ".arrow", feather_bytes),
}
PACKED = ("text", "JSON lines", "JSON list", "CSV", "TSV")
LAYOUTS = ("plain", "nested", "hive", "hub")
FOLDERS = {
    "datasets' save_to_disk": lambda: datasets.Dataset.from_list(ROWS).save_to_disk("out/saved"),
    "datasets' save_to_disk, shards": lambda: datasets.Dataset.from_list(ROWS).save_to_disk(
        "out/saved", num_shards=3
    ),
    "datasets' cache of Arrow": lambda: datasets.Dataset.from_generator(each_row, cache_dir="out"),
    "Parquet dataset by pyarrow": lambda: dataset.write_dataset(
        TABLE, "out", format="parquet", partitioning=["id"], partitioning_flavor="hive"
    ),
    "binary text column": lambda: parquet.write_table(
        pa.table({"text": [text.encode() for text in TEXTS]}), "out/rows.parquet"
    ),
    "dictionary text column": lambda: parquet.write_table(
        pa.table({"text": pa.array(TEXTS).dictionary_encode()}), "out/rows.parquet"
    ),
    "large text column": lambda: parquet.write_table(
        pa.table({"text": pa.array(TEXTS, pa.large_string())}), "out/rows.parquet"
    ),
    "view text column": lambda: feather.write_feather(
        pa.table({"text": pa.array(TEXTS).cast(pa.string_view())}), "out/rows.arrow"
    ),
}


def header(magic: int, version: int) -> bytes:
    """What llm.c writes before the ids."""
    return np.array([magic, version, len(IDS), *[0] * 253], np.int32).tobytes()


HEADERS = {
    "nanoGPT": ("uint16", b""),
    "Megatron": ("uint16", b""),
    "llm.c, 20240520": ("uint16", header(20240520, 1)),
    "llm.c, 20240801": ("uint32", header(20240801, 7)),
    "ids, int64": ("int64", b""),
}
QUICK = {
    "datasets' save_to_disk",
    "binary text column",
    "llm.c, 20240801",
    "litdata's tokens",
    "Arrow stream: hub",
}


def members() -> Iterator[Member]:
    for writer in WRITERS:
        for layout in LAYOUTS:
            name = f"{writer}: {layout}"
            yield Member(name, writer, name in QUICK)
        for suffix in (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip") if writer in PACKED else ():
            yield Member(f"{writer}: {suffix}", writer)
    yield from (Member(name, "folders", name in QUICK) for name in FOLDERS)
    for name in (*HEADERS, "NumPy", "lists in Parquet"):
        yield Member(name, "ids", name in QUICK)
    yield Member("litdata's tokens", "ids", True, needs="litdata")
    yield Member("litdata's texts", "streaming formats", needs="litdata")
    yield Member("MDS", "streaming formats", needs="torchvision")
    yield Member("WebDataset", "streaming formats", needs="webdataset")


def play(name: str) -> str:
    Path("out").mkdir()
    writer, _, layout = name.partition(": ")
    try:
        if writer in WRITERS:
            return lay_out(writer, layout)
        if name in FOLDERS:
            FOLDERS[name]()
            source = "parquet" if "Parquet" in name or "column" in name else "json"
            return compare(texts(source))
        if name in HEADERS or name in ("NumPy", "lists in Parquet", "litdata's tokens"):
            return ids(name)
        return streaming_format(name)
    except DilocoError as error:
        return refused(error)


def lay_out(writer: str, layout: str) -> str:
    source, suffix, write = WRITERS[writer]
    parts = {"": ROWS}
    if layout != "plain" and not layout.startswith("."):
        place = {"nested": "a/b{}/", "hive": "lang=e{}/", "hub": "data/train-{}-"}[layout]
        parts = {place.format(n): ROWS[20 * n : 20 * n + 20] for n in range(3)}
    for place, rows in parts.items():
        content = write(rows)
        file = Path("out") / f"{place}rows{suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        if layout == ".zip":
            with zipfile.ZipFile(f"{file}.zip", "w") as archive:
                archive.writestr(file.name, content)
        elif layout.startswith("."):
            Path(f"{file}{layout}").write_bytes(compressed(layout, content))
        else:
            file.write_bytes(content)
    found = streamed() if layout == "hub" else texts(source)
    if source == "text":
        whole = Counter(b"".join(found))
        expected = Counter("".join(text + "\n" for text in TEXTS).encode())
        assert whole == expected, "other bytes"
        return WORKS
    return compare(found)


def texts(source: str) -> list[bytes]:
    settings = DataConfig.parse({"source": source, "path": ("out",), "cache": None})
    return [*sources.rows_of(settings, sources.files_of(settings))]


def streamed() -> list[bytes]:
    settings = DataConfig.parse({"source": "hub", "name": os.path.abspath("out")})
    files = HubFiles(settings, ByteTokenizer(), 0)
    return [row for file in range(len(files.files)) for row in rows_of(files, file)]


def rows_of(files: HubFiles, file: int) -> Iterator[bytes]:
    with files.open(files.files[file], "rb") as handle:
        yield from (row for row in files.rows_of(file, handle, 0) if row)


def compare(found: list[bytes]) -> str:
    missing = Counter(text.encode() for text in TEXTS) - Counter(found)
    assert not missing and len(found) == len(TEXTS), f"{len(found)} rows; missing {missing}"
    return WORKS


def ids(name: str) -> str:
    dtype = "uint16"
    if name == "NumPy":
        np.save("out/ids.npy", IDS)
    elif name == "lists in Parquet":
        lists = [part.tolist() for part in np.split(IDS, 40)]
        parquet.write_table(pa.table({"text": lists}), "out/ids.parquet")
    elif name == "litdata's tokens":
        import litdata

        litdata.optimize(
            fn=tensors,
            inputs=[0, 1, 2, 3],
            output_dir="out",
            chunk_bytes="1MB",
            item_loader=litdata.TokensLoader(),
            num_workers=1,
        )
    else:
        dtype, head = HEADERS[name]
        Path("out/ids.bin").write_bytes(head + IDS.astype(dtype).tobytes())
    settings = {"source": "tokens", "path": ("out",), "dtype": dtype, "sequence_length": 10}
    found = data.load(DataConfig.parse({**settings, "holdout": 0, "tokenizer": "bytes"}), 0)
    rows = found.training.rows  # type: ignore[union-attr]
    assert Counter(map(tuple, rows.tolist())) == Counter(map(tuple, IDS.reshape(-1, 10).tolist()))
    return WORKS


def tensors(part: int) -> Any:
    import torch

    return torch.from_numpy(IDS[1000 * part : 1000 * part + 1000].astype(np.uint16))


def texts_of(part: int) -> Any:
    return {"text": TEXTS[part]}


def streaming_format(name: str) -> str:
    """Samples in files that only their own library reads."""
    if name == "MDS":
        from streaming import MDSWriter

        with MDSWriter(out="out", columns={"text": "str"}) as writer:
            for text in TEXTS:
                writer.write({"text": text})
    elif name == "WebDataset":
        import webdataset

        with webdataset.TarWriter("out/shard-000.tar") as sink:
            for row in ROWS:
                sink.write({"__key__": f"{row['id']:04}", "json": row})
    else:
        import litdata

        litdata.optimize(
            fn=texts_of, inputs=[*range(60)], output_dir="out", chunk_bytes="1MB", num_workers=1
        )
    return compare(texts("json"))
