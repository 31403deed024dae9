"""Mixtures: so much of each source, by the number of a sequence alone, each at its own pace."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco import data
from diloco.config import MIXTURE_BLOCK, Config, Manifest, compose
from diloco.config.manifest import sources_of
from diloco.data.numbered import mixture_positions, sequences_per_block
from diloco.errors import ConfigError, DataError
from tests.support.data import config, rows_of, written
from tests.support.errors import error_text

weights = st.lists(st.floats(0.01, 100), min_size=1, max_size=5)


@given(weights)
def test_counts_are_the_weights_as_near_as_whole_numbers_are(weights: list[float]) -> None:
    counts = sequences_per_block(weights)
    assert sum(counts) == MIXTURE_BLOCK
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - MIXTURE_BLOCK * weight / sum(weights)) < 1 + 1e-6
    scaled = sequences_per_block([10 * weight for weight in weights])
    assert counts == scaled or len(set(weights)) < len(weights)


@given(weights=weights, blocks=st.integers(1, 3), order=st.text(max_size=4))
@settings(max_examples=20)
def test_every_block_has_its_part_of_each_source(
    weights: list[float], blocks: int, order: str
) -> None:
    """Each of which goes on where it stopped; and a number says that without those before it."""
    counts = sequences_per_block(weights)
    sources, ranks = mixture_positions(np.arange(blocks * MIXTURE_BLOCK), order, counts)
    for part in np.split(sources, blocks):
        assert tuple(np.bincount(part, minlength=len(counts))) == counts
    for index, count in enumerate(counts):
        assert np.array_equal(ranks[sources == index], np.arange(blocks * count))
    numbers = np.array([7, 10**15, len(sources) - 5])
    together = np.stack(mixture_positions(numbers, order, counts), 1)
    for at, found in enumerate(together):
        alone = np.stack(mixture_positions(numbers[[at]], order, counts), 1)
        assert np.array_equal(alone[0], found)
    assert together[2].tolist() == [sources[-5], ranks[-5]]


MIXTURE = [
    {"name": "python", "source": "stdlib", "weight": 1},
    {"name": "notes", "source": "text", "weight": 3},
    {"name": "rows", "source": "json", "weight": 1, "field": "body"},
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, ...]]:
    notes = "".join(f"note {number} of many\n" for number in range(3000))
    rows = "".join(json.dumps({"body": f"row {number} " * 9}) + "\n" for number in range(300))
    files = {"notes/a.txt": notes, "rows.jsonl": rows, "none/x.txt": ""}
    place = written(tmp_path_factory.mktemp("files"), files)
    return {"notes": (str(place / "notes"),), "rows": (str(place / "rows.jsonl"),)}


def opened(files: dict[str, tuple[str, ...]], seed: int = 0) -> Any:
    return data.load(config("mixture", mixture=MIXTURE, paths=files), seed)


def test_a_mixture_of_files_is_read_by_weight(files: dict[str, tuple[str, ...]]) -> None:
    one, again, other_seed = opened(files), opened(files), opened(files, 9)
    rows = [bytes(row) for row in rows_of(one.batches(50), 20)]
    of_notes = sum(b" of many" in row or b"note " in row for row in rows)
    of_rows = sum(b"row" in row for row in rows)
    assert 550 < of_notes < 650 and 150 < of_rows < 250
    assert one.description.startswith("mixture of 20 % stdlib: ")
    assert again.batches(1).state() == one.batches(1).state()

    found = one.holdout(200)
    assert found.shape == (200, 16) and torch.equal(found[:30], one.holdout(30))
    assert torch.equal(found, other_seed.holdout(200))
    texts = [bytes(row.tolist()) for row in found]
    assert 90 < sum(b" of many" in text or b"note " in text for text in texts) < 150
    # A source with little text held out gives what it has, once.
    everything = one.holdout(20_000)
    assert len(everything) < 20_000
    assert len(set(map(tuple, everything.tolist()))) > 0.5 * len(everything)


def test_errors_name_the_source(files: dict[str, tuple[str, ...]], tmp_path: Path) -> None:
    empty, missing = (files["notes"][0].replace("notes", name) for name in ("none", "no"))
    said = f"^data.paths.notes: {missing} does not exist; give a file or a directory$"
    for place, text in ((missing, said), (empty, r"^notes of data\.mixture \(text in ")):
        with pytest.raises(DataError, match=text):
            opened({**files, "notes": (place,)})
    (tmp_path / "rows.jsonl").write_text('{"content": "text"}')
    rows = {"name": "rows", "source": "json", "weight": 1}
    said = r"^data\.mixture, field of rows: 'text' is no field of .*content; "
    with pytest.raises(DataError, match=said):
        data.load(config("mixture", mixture=[rows], paths={"rows": [str(tmp_path)]}), 0)


A, B = "{name:a,source:stdlib,weight:1}", "{name:b,source:text,weight:3}"


def settings_of(*entries: str, **changes: str) -> Config:
    lists = f"[{','.join(entries or (A, B))}]"
    typed = {"data.source": "mixture", "data.mixture": lists, "data.paths.b": "notes/", **changes}
    return compose([f"{key}={value}" for key, value in typed.items() if value])


def test_a_mixture_belongs_to_the_run_and_its_paths_to_the_peer() -> None:
    """So a joiner takes it, and says where its own files are."""
    one, other = settings_of(), settings_of(**{"data.paths.b": "[elsewhere/,x]"})
    theirs = one.manifest()
    assert theirs == other.manifest() == Manifest.from_json(theirs.to_json())
    assert "notes" not in theirs.to_json()
    assert theirs.hash() != settings_of(A.replace("1", "2"), B).manifest().hash()
    with pytest.raises(ConfigError, match=r"b needs files; set data\.paths\.b=FILE_OR_DIRECTORY"):
        compose([]).adopt(theirs)
    assert settings_of(**{"data.paths.b": "mine/"}).adopt(theirs).data.paths == {"b": ("mine/",)}
    assert [source.kind for source in sources_of(theirs)] == ["data"]
    alone = settings_of(A, **{"data.paths.b": ""})
    assert not list(sources_of(alone.manifest()))
    back = alone.adopt(compose([]).manifest())
    assert (back.data.source, back.data.mixture) == ("stdlib", ())


@pytest.mark.parametrize(
    ("entries", "changes", "text"),
    [
        ([A.replace("1", "0")], {}, ".weight=0 is out of range; expected a list, each {name: "),
        ([A, B.replace("3", "1e5")], {}, ": the weight 1 of a is less than 1/10000 of all; raise "),
        ([], {"data.path": "x"}, "data.path=x has no effect with data.source=mixture; set data.p"),
    ],
)
def test_a_mixture_that_cannot_be_is_one_line(
    entries: list[str], changes: dict[str, str], text: str
) -> None:
    reason = error_text(ConfigError, settings_of, *entries, **changes)
    assert reason.startswith(text if text.startswith("data.") else f"data.mixture{text}")
