"""`data=tokens`: ids that another program has made, in files of all kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from diloco import data
from diloco.config import compose
from diloco.errors import ConfigError, DataError

IDS = np.random.default_rng(0).integers(0, 256, 4000)
LIST = [IDS[start : start + 100].tolist() for start in range(0, 4000, 100)]


def write(path: Path) -> Path:
    match path.suffix:
        case ".npy":
            np.save(path, IDS.astype(np.int64))
        case ".parquet":
            parquet.write_table(pa.table({"input_ids": [*LIST, None, []]}), path)
        case _:
            head = np.zeros(256, np.int32)
            head[:3] = 20240520, 1, len(IDS)
            start = head.tobytes() if path.stem == "llmc" else b""
            path.write_bytes(start + IDS.astype(np.uint16).tobytes())
    return path


def load(path: Path, *more: str) -> Any:
    start = ["experiment=smoke", "data=tokens", f"data.path={path}", "data.sequence_length=10"]
    return data.load(compose([*start, "data.dtype=uint16", "data.holdout=0.1", *more]).data, 0)


@pytest.mark.parametrize("name", ["ids.bin", "llmc.bin", "ids.npy"])
def test_the_last_part_of_ids_in_a_row_is_held_out(name: str, tmp_path: Path) -> None:
    found = load(write(tmp_path / name))
    assert found.training.rows.tolist() == IDS[:3600].reshape(-1, 10).tolist()
    assert found.held_out[0].tolist() == IDS[3600:].reshape(-1, 10).tolist()
    twice = load(tmp_path, "data.holdout=0")  # a folder
    assert len(twice.training) == 400
    assert next(found.batches(4)).shape == (4, 10)


def test_each_list_of_parquet_is_a_document(tmp_path: Path) -> None:
    found = load(write(tmp_path / "ids.parquet"))
    rows = [*found.training.rows.tolist(), *found.held_out[0].tolist()]
    assert sorted(rows) == sorted(IDS.reshape(-1, 10).tolist())
    assert 0 < len(found.held_out[0]) < 200


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("ids.bin", "data.dtype=null", "ids.bin: its numbers may be of any type; set data.dtype"),
        ("ids.bin", "data.dtype=uint32", "it has the id 1[0-9]+, and data.tokenizer has 256; give"),
        ("floats.npy", "", "floats.npy: it holds float64, and no integers; give ids as"),
        (
            "ids.parquet",
            "data.field=text",
            "data.field: 'text' is no field of .*ids.parquet, which",
        ),
        ("odd.bin", "", "odd.bin: its size is no multiple of data.dtype=uint16"),
        (
            "large.parquet",
            "",
            "large.parquet: row 2: it has the id 999, and data.tokenizer has 256",
        ),
    ],
)
def test_what_holds_no_ids_is_named(name: str, more: str, said: str, tmp_path: Path) -> None:
    write(tmp_path / "ids.bin"), write(tmp_path / "ids.parquet")
    np.save(tmp_path / "floats.npy", np.zeros(9))
    (tmp_path / "odd.bin").write_bytes(b"odd")
    parquet.write_table(pa.table({"input_ids": [[1], [999]]}), tmp_path / "large.parquet")
    with pytest.raises(DataError, match=said):
        load(tmp_path / name, *([more] if more else []))


@pytest.mark.parametrize("kind", ["llmc", "litdata"])
def test_a_header_is_no_ids(kind: str, tmp_path: Path) -> None:
    ids, dtype = IDS.astype(np.uint32 if kind == "llmc" else np.uint16), "uint32"
    head = np.zeros(256, np.int32)
    head[:3] = 20240801, 7, len(IDS)
    if kind == "litdata":  # how many texts, and where each begins
        dtype, head = "uint16", np.array([2, 16, 16 + 3000, 16 + ids.nbytes], np.int32)
    (tmp_path / "ids.bin").write_bytes(head.tobytes() + ids.tobytes())
    found = load(tmp_path / "ids.bin", f"data.dtype={dtype}", "data.holdout=0")
    assert found.training.rows.flatten().tolist() == IDS.tolist()
    if kind == "llmc":
        with pytest.raises(DataError, match="header says that the ids are uint32"):
            load(tmp_path / "ids.bin")


def test_a_mixture_takes_no_ids() -> None:
    with pytest.raises(ConfigError, match="cannot be a part of a mixture"):
        compose(["data=mixture", "data.mixture=[{name: a, source: tokens, weight: 1}]"])
