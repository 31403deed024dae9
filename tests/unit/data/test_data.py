"""Data: sources, hold-out, packing, order, resume, and the texts of what goes wrong."""

import io
import json
import shutil
from collections import Counter
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diloco import data
from diloco.config import DataConfig
from diloco.data.numbered import NumberedStream, SequenceArray, permuted
from diloco.data.packing import Packer, document_hash, documents_of, is_held_out, pieces
from diloco.data.tokenizers import ByteTokenizer
from diloco.errors import CheckpointError, DataError
from tests.support.data import config, documents, numbered, rows_of, written
from tests.support.errors import error_text


def tuples(array: SequenceArray) -> list[tuple[int, ...]]:
    return [tuple(row) for row in array.rows.tolist()]


def through_json(state: dict[str, Any]) -> Any:
    return json.loads(json.dumps(state))


@pytest.mark.parametrize(("size", "key"), [(1, ""), (2, "a"), (255, "é"), (2999, "0/1")])
def test_the_permutation_hits_every_number_once(size: int, key: str) -> None:
    assert sorted(permuted(np.arange(size), size, key).tolist()) == list(range(size))


def test_the_permutation_starts_anywhere_and_parts_neighbours() -> None:
    whole = permuted(np.arange(1000), 1000, "0/0")
    assert np.array_equal(permuted(np.arange(400, 410), 1000, "0/0"), whole[400:410])
    assert (whole != permuted(np.arange(1000), 1000, "0/1")).mean() > 0.9, "it depends on its key"
    # Checkpoints and the disjointness of shards rely on it: a change of these numbers is a change
    # of the wire version.
    assert whole[:8].tolist() == [271, 162, 158, 535, 520, 113, 420, 69]
    steps = np.abs(np.diff(permuted(np.arange(10_000), 10_000, "a")))
    # the mean distance of two random places
    assert steps.mean() == pytest.approx(10_000 / 3, rel=0.05)
    assert (steps == 1).sum() < 10


def test_the_hold_out_takes_its_part_and_grows_with_it() -> None:
    texts = [f"document {number}".encode() for number in range(5000)]
    small = {text for text in texts if is_held_out(text, 0.02)}
    large = {text for text in texts if is_held_out(text, 0.1)}
    assert 0.015 < len(small) / 5000 < 0.025
    assert 0.09 < len(large) / 5000 < 0.11
    assert small < large
    assert [n for n in range(40) if is_held_out(b"%d" % n, 0.1)] == [18, 29], "forever"
    assert [n for n in range(60) if is_held_out(b"%d\n" % n, 0.1, "text")] == [30, 36, 43]


@given(
    texts=st.lists(st.binary(max_size=40), max_size=20),
    length=st.integers(2, 9),
    taken=st.lists(st.integers(0, 3), max_size=30),
)
def test_packing_loses_and_repeats_no_token(
    texts: list[bytes], length: int, taken: list[int]
) -> None:
    packer, tokenizer, out = Packer(length, ByteTokenizer()), ByteTokenizer(), []
    for number, tokens in enumerate(tokenizer.encode(texts)):
        packer.add(tokens)
        rows = min(len(packer), taken[number] if number < len(taken) else 0)
        out += packer.take(rows).flatten().tolist()
    out += packer.take(len(packer)).flatten().tolist()
    assert len(packer.waiting()) < length
    assert bytes(out + packer.waiting().tolist()) == b"".join(text + b"\0" for text in texts)


words = st.text(st.sampled_from("ab \té日"), max_size=30)


@given(
    lines=st.lists(words, max_size=40),
    repeats=st.integers(1, 40),
    ends=st.sampled_from(["\r\n", "\r"]),
    tail=st.sampled_from(["", "\n", "\r\n\r\n", " \n"]),
    as_row=st.booleans(),
)
@settings(max_examples=60)
def test_copies_of_a_text_with_other_line_ends_are_cut_and_held_out_alike(
    lines: list[str], repeats: int, ends: str, tail: str, as_row: bool
) -> None:
    text = "\n".join(lines * repeats)
    plain, copy = f"{text}\n".encode(), (text.rstrip().replace("\n", ends) + tail).encode()

    def cut(text: bytes) -> list[bytes]:
        return list(documents_of(text) if as_row else pieces(io.BytesIO(text)))

    def numbers(text: bytes) -> list[int]:
        source = "json" if as_row else "text"
        return [document_hash(piece, source) for piece in cut(text) if piece.strip()]

    assert numbers(plain) == numbers(copy)
    assert b"".join(cut(copy)) == copy, "it is trained on as it is"


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 7), st.integers(0, 99))
@settings(max_examples=50)
def test_shards_are_disjoint_and_cover_every_epoch(
    rows: int, shards: int, batch: int, seed: int
) -> None:
    array, epochs = numbered(rows), 3
    needed = -(-rows * epochs // shards)
    streams = [NumberedStream(array, batch, seed, shard, shards) for shard in range(shards)]
    lists = [rows_of(stream, -(-needed // batch))[:needed] for stream in streams]
    dealt = [one[place] for place in range(needed) for one in lists]
    for epoch in range(epochs):
        assert Counter(dealt[epoch * rows : (epoch + 1) * rows]) == Counter(tuples(array))


@given(batch_size=st.integers(1, 7), number=st.integers(0, 12))
@settings(max_examples=25)
def test_leased_units_in_order_are_the_list_of_all_shards(batch_size: int, number: int) -> None:
    starts = count(0, batch_size)

    def take(number: int) -> list[tuple[int, int]]:
        start = next(starts)
        half = start + number // 2
        return [one for one in ((start, half), (half, start + number)) if one[0] < one[1]]

    leases: Any = SimpleNamespace(take=take)
    leased = NumberedStream(numbered(17), batch_size, 5, 3, 1, leases=leases)
    whole = NumberedStream(numbered(17), batch_size, 5, 0, 1)
    assert rows_of(leased, number) == rows_of(whole, number)


def test_without_units_training_goes_on_in_its_own_order() -> None:
    array, units = numbered(17), [None, [(40, 43)], None, None]

    def stream(units: list[list[tuple[int, int]] | None]) -> NumberedStream:
        left = iter(units)
        leases: Any = SimpleNamespace(take=lambda number: next(left))
        return NumberedStream(array, 3, 5, 8, 1, leases=leases)

    own, common = rows_of(stream([None] * 3), 3), rows_of(NumberedStream(array, 1, 5, 0, 1), 43)
    one, resumed = stream(units), stream(units[2:])
    assert rows_of(one, 2) == own[:3] + common[40:]
    resumed.restore(through_json(one.state()))
    assert rows_of(one, 2) == rows_of(resumed, 2) == own[3:]


def test_fewer_peers_go_on_where_all_of_them_stopped() -> None:
    array = numbered(100)
    four = [NumberedStream(array, 5, 0, shard, 4) for shard in range(4)]
    before = [row for stream in four for row in rows_of(stream, 3)]
    after = []
    for shard in range(2):
        stream = NumberedStream(array, 5, 0, shard, 2)
        stream.restore(four[shard].state())
        after += rows_of(stream, 4)
    assert sorted(before + after) == tuples(array)


def test_a_resume_on_changed_data_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """However far the stream was: it does not go through all that was taken, or this would never
    end."""
    state = NumberedStream(numbered(20), 2, 0, 0, 1).state() | {"taken": 10**15}
    for rows, told in ((20, ""), (21, "the training data changed since the checkpoint")):
        stream = NumberedStream(numbered(rows), 2, 0, 0, 1)
        stream.restore(state)
        next(stream)
        assert told in caplog.text and bool(told) == bool(caplog.records)


@pytest.mark.parametrize(
    "state", [{}, {"taken": "x", "stride": 1, "digest": ""}, {"kind": "hub", "epoch": 1}]
)
def test_a_position_of_another_source_is_refused(state: dict[str, Any]) -> None:
    text = r"data: the checkpoint holds no position for this data\.source, or "
    with pytest.raises(CheckpointError, match=text):
        NumberedStream(numbered(20), 2, 0, 0, 1).restore(state)


def test_the_standard_library_is_real_text_in_a_fixed_order() -> None:
    opened = data.load(DataConfig(source="stdlib", sequence_length=128), seed=0)
    assert len(opened.training) > 30_000  # type: ignore[attr-defined]
    assert next(opened.batches(4)).shape == (4, 128)
    texts = list(documents(config("stdlib")))
    assert texts == list(documents(config("stdlib")))
    assert Path(json.__file__).read_bytes() in texts
    assert all(b"build_time_vars" not in text[:300] for text in texts)


@given(text=st.text(alphabet="ab \né日\U0001f600", max_size=300), repeats=st.integers(1, 300))
@example(text="é日\U0001f600", repeats=2000)
@settings(max_examples=30)
def test_a_text_is_cut_between_characters(
    text: str, repeats: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cut") / "text"
    path.write_text(text * repeats, encoding="utf-8", newline="")
    texts = list(documents(config("text", path)))  # refuses a piece that is not UTF-8
    assert b"".join(texts).decode() == text * repeats
    assert all(0 < len(piece) < 3 * 4096 for piece in texts)


def test_a_transformers_tokenizer_packs_its_tokens(word_tokenizer: str, tmp_path: Path) -> None:
    written(tmp_path, {f"{number}.txt": f"w{number} w{number}" for number in range(400)})
    settings = config("text", tmp_path, tokenizer=word_tokenizer, sequence_length=3)
    opened = data.load(settings, seed=0)
    assert opened.tokenizer.vocab_size == 402
    assert opened.training.rows.dtype == np.uint16  # type: ignore[attr-defined]
    for one, second, end in next(opened.batches(50)).tolist():
        assert (one, end) == (second, opened.tokenizer.end) == (second, 1)
    assert opened.tokenizer.decode([2, 3, 1]) == "w0 w1"
    assert opened.tokenizer.num_bytes([2, 3, 1]) == 5
    opened.tokenizer.save(tmp_path / "saved")
    assert data.load_tokenizer(str(tmp_path / "saved")).encode([b"w7 w8"])[0].tolist() == [9, 10]


@given(text=st.text())
def test_bytes_survive_the_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    content = text.encode("utf-8", errors="ignore")
    tokens = tokenizer.encode([content])[0].tolist()
    assert tokenizer.decode(tokens) == content.decode().replace("\0", "")
    assert tokenizer.num_bytes(tokens) == len(tokens)
    assert tokenizer.decode([104, 0, 300, 105, 0xC3]) == "hi\ufffd"


BAD: dict[str, str | bytes] = {
    "empty/file.txt": "",
    "latin/file.txt": b"caf\xe9 " * 10,
    "some.txt": "some text that is long enough\n" * 500,
    "rows.jsonl": '{"body": "a", "id": 1}\n',
    "broken.parquet": "PAR1 no",
    "hub/train.jsonl": '{"body": "a", "id": 1}\n',
}


NO_TEXT = "of 4 documents leaves no held-out sequence of 16 tokens; start the run with data.hold"
ID = "'id' holds int, not text, in row 1 of rows.jsonl; fields with text: "


@pytest.mark.parametrize(
    ("source", "path", "values", "message"),
    [
        ("text", "nowhere", {}, "nowhere does not exist; give a file or a directory"),
        ("json", "empty", {}, "empty has no .json, .jsonl, "),
        ("text", "some.txt", {"holdout": 1e-9}, f"data.holdout: 1e-09 {NO_TEXT}"),
        ("text", "latin", {}, "no UTF-8 files in it, but 1 other such as latin/file.txt; give"),
        ("text", "latin/file.txt", {}, "file.txt: it is not UTF-8 text; make it readable as text,"),
        ("json", "rows.jsonl", {"field": "id"}, ID),
        ("parquet", "broken.parquet", {}, "broken.parquet: "),
        ("stdlib", None, {"tokenizer": "no"}, "'no' is no tokenizer that transformers"),
        ("hub", None, {}, "train.jsonl, which has body, id; take one"),
    ],
)
def test_data_that_cannot_be_used_is_an_error_of_one_line(
    source: str,
    path: str | None,
    values: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(written(tmp_path, BAD))
    paths, name = [path] if path else [], "hub" if source == "hub" else None
    settings = config(source, *paths, name=name, **values)
    assert message in error_text(DataError, data.load, settings, seed=0)


def test_a_hub_that_is_not_reachable_or_knows_no_such_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    text = r"data\.name: 'a/b/c' is no dataset that the Hugging Face hub shows you \("
    with pytest.raises(DataError, match=text):
        data.load(config("hub", name="a/b/c"), seed=0)
    no_network = Mock(side_effect=ConnectionError("Name or service not known"))
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", no_network)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", no_network)
    why = r"cannot be fetched, the Hugging Face hub is not reachable \(Name or .*\); check the net"
    with pytest.raises(DataError, match=rf"data\.name: 'allenai/c4' {why}"):
        data.load(config("hub", name="allenai/c4", subset="en"), seed=0)
    with pytest.raises(DataError, match=rf"data\.tokenizer: 'no-one/nothing' {why}"):
        data.load(config("stdlib", tokenizer="no-one/nothing"), seed=0)


COMMIT = "a1" * 20


def test_a_tokenizer_at_a_commit_is_no_path(
    word_tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cache = tmp_path / "cache"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    written(tmp_path, {"org/words/diloco.json": '{"tokenizer": "bytes"}'})
    # a directory, which `diloco train` may name
    assert data.load_tokenizer("org/words").vocab_size == 256
    text = r"data\.tokenizer: org/words at a1a1a1a1a1a1 is not in the cache"
    with pytest.raises(DataError, match=text):
        data.load_tokenizer("org/words", COMMIT)
    shutil.copytree(word_tokenizer, cache / "models--org--words" / "snapshots" / COMMIT)
    assert data.load_tokenizer("org/words", COMMIT).vocab_size == 402
