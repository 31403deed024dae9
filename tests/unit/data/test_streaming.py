"""A hub stream: units of any files for any number of peers, resume, broken connections, and which
files are read."""

import gzip
import io
import json
import lzma
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyarrow import Table, parquet

from diloco import data
from diloco.data import hub_files as files
from diloco.data import streaming
from diloco.data.hub_files import Reader, find_files
from diloco.data.packing import is_held_out
from diloco.errors import CheckpointError, DataError
from tests.support.data import ROWS, T, config, hub_directory, rows_of, written
from tests.support.errors import error_text


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hub_directory(tmp_path_factory.mktemp("hub"))


@pytest.fixture(scope="module")
def streamed(hub: Path) -> Any:
    return data.load(config("hub", name=str(hub)), seed=3)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "RETRIES_S", (0.0,) * 6)
    monkeypatch.setattr(streaming, "LEASE_RETRY_S", 0.0)


def through_json(state: dict[str, Any]) -> Any:
    return json.loads(json.dumps(state))


class Dealer:
    """Leases 0, 1, 2, ... to any number of peers, each number once; refuses every `refuses`-th
    time."""

    def __init__(self, most: int = 10**9, refuses: int = 0) -> None:
        self.next, self.most, self.refuses, self.asked = 0, most, refuses, 0
        self.dealt: list[tuple[int, int]] = []

    def take(self, number: int) -> Sequence[tuple[int, int]] | None:
        self.asked += 1
        if number > self.most or (self.refuses and self.asked % self.refuses):
            return None
        self.dealt.append((self.next, self.next + number))
        self.next += number
        return self.dealt[-1:]

    def ahead(self, number: int) -> Sequence[tuple[int, int]]:
        return []


def table(path: Path, texts: Sequence[str | None], kind: str) -> None:
    rows = [{"text": text, "n": number} for number, text in enumerate(texts)]
    if kind == "parquet":
        schema = Table.from_pylist([{"text": "a", "n": 1}]).schema
        parquet.write_table(Table.from_pylist(rows, schema=schema), path, row_group_size=3)
    else:
        path.write_bytes("".join(json.dumps(row) + "\n" for row in rows).encode())


@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(any),
    deal=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=40, max_size=40),
    kind=st.sampled_from(["json", "parquet"]),
)
@example(lengths=[0, 0, 40], deal=[(0, 5), (1, 9)] * 20, kind="parquet")
@settings(max_examples=8, deadline=None)
def test_peers_read_each_row_of_an_epoch_once(
    lengths: list[int], deal: list[tuple[int, int]], kind: str
) -> None:
    with TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "JUMP_ROWS", 2)
        suffix = "parquet" if kind == "parquet" else "jsonl"
        for file, length in enumerate(lengths):
            table(Path(place, f"{file}.{suffix}"), [f"{file}/{row}" for row in range(length)], kind)
        opened: Any = data.load(config("hub", name=place), seed=5)
        readers, number, read = [Reader(opened) for _ in range(4)], 0, list[bytes]()
        for peer, size in deal:
            for unit in range(number, number + size):
                read += readers[peer].unit(unit)
            number += size
        rows = [f"{file}/{row}" for file, length in enumerate(lengths) for row in range(length)]
        everything = Counter(row.encode() for row in rows)
        for epoch in range(number // sum(lengths)):
            assert Counter(read[epoch * sum(lengths) : (epoch + 1) * sum(lengths)]) == everything


def read_by(stream: Any, batches: int) -> list[bytes]:
    """The whole documents in the next batches."""
    return b"".join(bytes(row) for row in rows_of(stream, batches)).split(b"\0")[1:-1]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Any:
    place = tmp_path_factory.mktemp("large")
    for file in range(2):
        table(place / f"{file}.jsonl", [f"file {file} row {row}" for row in range(1500)], "json")
    opened = data.load(config("hub", name=str(place)), seed=3)
    opened.holdout(3)
    return opened


@pytest.mark.parametrize(("peers", "many_files"), [(3, 64), (7, 64), (2, 2)])
def test_peers_of_one_swarm_train_on_different_documents(
    large: Any, peers: int, many_files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come one after the other; with as many files, each has a file."""
    monkeypatch.setattr(large, "by_file", len(large.files) >= many_files)
    dealer, seen = Dealer(), list[list[bytes]]()
    streams = [large.batches(2, leases=dealer) for _ in range(peers)]
    for number, stream in enumerate(streams):
        seen.append(sum((read_by(one, 4) for one in streams[: number + 1]), read_by(stream, 20)))
    assert len(seen[-1]) > 20
    assert max(Counter(document for documents in seen for document in documents).values()) == 1
    assert not any(is_held_out(document, 0.2) for documents in seen for document in documents)


@pytest.mark.parametrize("shards", [1, 7])
def test_shards_are_disjoint_and_cover_all(streamed: Any, shards: int) -> None:
    seen = Counter[bytes]()
    for shard in range(shards):
        [taken] = streaming.ShardUnits(shard, shards).take(len(range(shard, len(ROWS), shards)))
        seen.update(text for unit in range(*taken) for text in Reader(streamed).unit(unit))
    assert seen == Counter(ROWS)
    stream = streamed.batches(1, shard=shards - 1, shards=shards)
    assert {*read_by(stream, 60)} <= {text for text in ROWS if not is_held_out(text, 0.2)}


@pytest.mark.parametrize(("shards", "many_files"), [(2, 64), (1, 4)])
def test_a_resumed_stream_equals_an_uninterrupted_one(
    hub: Path, streamed: Any, shards: int, many_files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MANY_FILES", many_files)
    opened = data.load(config("hub", name=str(hub)), seed=3)
    stream, states, whole = opened.batches(2, shard=0, shards=shards), {}, []
    for batch in range(150):
        if batch in (0, 13, 70):
            states[batch] = through_json(stream.state())
        whole += rows_of(stream, 1)
    resumed = data.load(config("hub", name=str(hub)), seed=3).batches(2, shard=0, shards=shards)
    rows_of(resumed, 2)
    for batch in (0, 70, 13, 13):
        resumed.restore(states[batch])
        assert rows_of(resumed, 70) == whole[2 * batch : 2 * batch + 140]


@pytest.mark.parametrize("many_files", [64, 2])
@pytest.mark.parametrize("merged", [True, False])
def test_a_peer_that_resumes_goes_on_with_what_is_in_the_model(
    large: Any, merged: bool, many_files: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not went back to the swarm, and may be another peer's."""
    monkeypatch.setattr(large, "by_file", len(large.files) >= many_files)
    dealer = Dealer()
    stream = large.batches(2, leases=dealer)
    before = read_by(stream, 30)
    state = through_json(stream.state())
    known = [[0, dealer.next if merged else dealer.next - 1]]
    resumed = large.batches(2, leases=(other := Dealer()))
    other.next = dealer.next
    resumed.restore({**state, "merged": known})
    if merged:
        assert rows_of(resumed, 30) == rows_of(stream, 30)
    else:
        assert not {*before, *read_by(stream, 5)} & {*read_by(resumed, 30)}


def test_other_shards_go_on_about_there(large: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Rows differ in length, so shards are not equally far."""
    three = [large.batches(1, shard=shard, shards=3) for shard in range(3)]
    before = [document for stream in three for document in read_by(stream, 30)]
    after = []
    for shard in range(2):
        stream = large.batches(1, shard=shard, shards=2)
        stream.restore(through_json(three[2].state()))
        after += read_by(stream, 30)
    assert "data.shards changed since the checkpoint" in caplog.text
    assert len({*before, *after}) > 0.9 * len([*before, *after])


@pytest.mark.parametrize("state", [{}, {"kind": "memory", "taken": 3, "stride": 1, "digest": ""}])
def test_a_position_of_another_kind_is_refused(state: Any, streamed: Any) -> None:
    text = error_text(CheckpointError, streamed.batches(1).restore, state)
    assert text.startswith("data: the checkpoint holds no position for this data.source, or one")


def test_without_leases_training_goes_on(large: Any, caplog: pytest.LogCaptureFixture) -> None:
    dealer = Dealer()
    stream = large.batches(2, leases=dealer)
    before = read_by(stream, 5)
    dealer.most = 0
    assert len({*before, *read_by(stream, 30)}) > len(before) + 10
    assert "the swarm leases no data to this peer" in caplog.text


class Flaky(io.FileIO):
    """A file whose connection breaks at some reads of all that are made of such files."""

    breaks_in: list[int]

    def readinto(self, buffer: Any) -> int:
        if Flaky.breaks_in:
            Flaky.breaks_in[0] -= 1
            if not Flaky.breaks_in[0]:
                del Flaky.breaks_in[0]
                raise ConnectionResetError("reset by peer")
        return super().readinto(memoryview(buffer)[:1024])


@pytest.mark.parametrize("kind", ["json", "parquet", "gzip"])
def test_a_connection_that_breaks_is_made_again(kind: str, tmp_path: Path) -> None:
    texts = [f"row {row} {'x' * 99}" for row in range(300)]
    table(tmp_path / ("a.parquet" if kind == "parquet" else "a.jsonl"), texts, kind)
    if kind == "gzip":
        plain = tmp_path / "a.jsonl"
        (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes(), 0))
        plain.unlink()
    opened: Any = data.load(config("hub", name=str(tmp_path)), seed=3)
    opened.open = lambda path, mode: io.BufferedReader(Flaky(path), 1024)
    reader, Flaky.breaks_in = Reader(opened), [2, 1, 1, 4, 30]
    assert [text.decode() for unit in range(300) for text in reader.unit(unit)] == texts
    assert not Flaky.breaks_in


def test_a_connection_that_stays_broken_is_one_line(tmp_path: Path) -> None:
    table(tmp_path / "a.jsonl", ["some text"] * 9, "json")
    opened: Any = data.load(config("hub", name=str(tmp_path)), seed=3)
    opened.open = Mock(side_effect=ConnectionError("no route to host"))
    remedy = "check it, data.subset, data.split and the network"
    text = error_text(DataError, next, opened.batches(1))
    assert text == f"data.name: {tmp_path}/a.jsonl: no route to host; {remedy}"
    assert opened.open.call_count == 7


@pytest.mark.parametrize("fault", ["rows", "file"])
def test_a_stream_passes_what_cannot_be_read(
    fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = "".join(json.dumps({"text": text.decode()}) + "\n" for text in sorted(ROWS)).encode()
    late = b'{"text": NaN}\n{"text": "the download ended he'
    files: dict[str, str | bytes] = {"train-0.jsonl": rows + late * (fault == "rows")}
    if fault == "file":
        files["train-1.jsonl.gz"] = gzip.compress(rows)[:-9]
    written(tmp_path, files)
    stream = data.load(config("hub", name=str(tmp_path), holdout=0), seed=3).batches(4)
    seen = b"".join(bytes(row) for row in rows_of(stream, 100))
    assert {*seen.split(b"\0")} >= ROWS
    said, name = "rows cannot be used, and are left out; the first", "row 121 of"
    if fault == "file":
        said, name = (
            "its rows are left out: Truncated compressed",
            "train-1.jsonl.gz: from row 1 on",
        )
    assert said in caplog.text and name in caplog.text
    again = data.load(config("hub", name=str(tmp_path), holdout=0), seed=3).batches(4)
    again.restore(through_json(stream.state()))
    assert rows_of(again, 9) == rows_of(stream, 9), "the same command goes on"


def test_a_fault_of_a_stream_stays_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = data.load(config("hub", name=str(hub_directory(tmp_path))), seed=3).batches(4)
    monkeypatch.setattr(streaming, "encode_rows", Mock(side_effect=DataError("row 7 of it")))
    for _ in range(2):  # the thread that reads ahead meets it first
        with pytest.raises(DataError, match="row 7 of it"):
            next(stream)


def test_a_stream_of_held_out_documents_only_says_so(tmp_path: Path) -> None:
    written(tmp_path, {"train.jsonl": '{"text": "18"}\n{"text": "29"}\n'})
    opened: Any = data.load(config("hub", name=str(tmp_path), holdout=0.1), seed=0)
    text = r"data\.name: all documents of .* that this peer reads are held out; "
    with pytest.raises(DataError, match=text):
        next(opened.batches(1))
    assert not len(data.load(config("hub", name=str(tmp_path), holdout=0.0), seed=0).holdout(3))
    one = data.load(config("hub", name=str(tmp_path), holdout=1e-9), seed=0)
    assert next(one.batches(1, shard=4, shards=5)).shape == (1, T)  # it is read again and again
    text = r"data\.holdout: 1e-09 of the documents of .* leaves no held-out sequence"
    with pytest.raises(DataError, match=text):
        one.holdout(3)


# -- which files are read --------------------------------------------------------------------------


def texts_in(opened: Any) -> set[str]:
    return {text.decode() for text in opened._all_rows()}


def test_every_name_in_a_local_directory_is_a_name(tmp_path: Path) -> None:
    files = {f"{name}.jsonl": json.dumps({"text": name}) for name in ("a*", "a::b", "{x}%#?")}
    written(tmp_path / "my [2024] data", dict(files))
    written(tmp_path / "a1", {"a1.jsonl": json.dumps({"text": "other"})})
    opened = data.load(config("hub", name=str(tmp_path / "my [2024] data")), seed=0)
    assert texts_in(opened) == {"a*", "a::b", "{x}%#?"}


def test_suffixes_in_a_local_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    row = json.dumps({"text": "a"}).encode()
    files: dict[str, str | bytes] = {"a.jsonl": row, "A.JSONL": row}
    files |= {"b.jsonl.gz": gzip.compress(row), "c.jsonl.xz": lzma.compress(row)}
    others = {"README.md": "about", "picture.png": "", "rows.csv": "text,n\na,1\n"}
    written(tmp_path, {**files, **others})
    opened: Any = data.load(config("hub", name=str(tmp_path)), seed=0)
    assert list(opened._all_rows()) == [b"a"] * 4
    assert "2 files left out, which cannot be read as json, such as " in caplog.text


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_columns_that_differ_do_not_end_a_stream(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file, field in enumerate(("text", "body", "text")):
        ids = [*range(5)], ["x"] * 5, [[1]] * 5
        rows = [{field: f"{file} {row}", "id": ids[file][row]} for row in range(5)]
        place = tmp_path / f"{file}.{'parquet' if kind == 'parquet' else 'jsonl'}"
        place.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if kind == "parquet":
            parquet.write_table(Table.from_pylist(rows), place, row_group_size=2)
    opened: Any = data.load(config("hub", name=str(tmp_path)), seed=0)
    whole = [text for unit in range(30) for text in Reader(opened).unit(unit)]
    found = [f"{file} {row}".encode() for file in (0, 2) for row in range(5)]
    assert sorted(filter(None, whole[:15])) == found
    reader = Reader(opened)
    assert [text for unit in range(30) for text in reader.unit(unit)] == whole
    assert "1.json" in caplog.text or "1.parquet" in caplog.text
    rows_of(opened.batches(1), 30)


def test_splits_of_a_local_directory(tmp_path: Path) -> None:
    rows = {f"data/{name}-1.jsonl": json.dumps({"text": name}) for name in ("train", "test")}
    written(tmp_path, {**rows, "README.md": "text"})
    (tmp_path / "empty").mkdir()
    assert texts_in(data.load(config("hub", name=str(tmp_path), split="test"), seed=0)) == {"test"}
    for name, split, message in (
        ("", "dev", f"data.split: {tmp_path} has no dev; its splits are train, test"),
        ("/README.md", "train", "/README.md is a file; give its folder, or use "),
        ("/empty", "train", f"/empty: Couldn't find any data file at {tmp_path}/e"),
    ):
        settings = config("hub", name=f"{tmp_path}{name}", split=split)
        assert message in error_text(DataError, data.load, settings, seed=0)


COMMIT = "a1" * 20
OWN = f"hf://datasets/org/set@{COMMIT}"


def pinned(
    monkeypatch: pytest.MonkeyPatch, *files: str, kind: str = "json", builder: Any = None
) -> Any:
    """The files of org/set at a commit, of which `datasets` makes a builder such as this."""
    import datasets

    made = type("Builder", (), {"__module__": f"datasets.packaged_modules.{kind}.{kind}"})()
    made.config = SimpleNamespace(data_files={"train": files})
    load = Mock(return_value=builder or made)
    monkeypatch.setattr(datasets, "load_dataset_builder", load)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = find_files(config("hub", name="org/set", revision=COMMIT))
    assert load.call_args.args == ("hf://datasets/org/set",)
    assert load.call_args.kwargs["revision"] == COMMIT
    return found


def test_a_dataset_at_a_commit_is_asked_of_the_hub_only(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.chdir(written(tmp_path, {"org/set/train.jsonl": "{}"}))
    kind, files, opened = pinned(monkeypatch, f"{OWN}/train.jsonl")
    assert (kind, files) == ("json", [f"{OWN}/train.jsonl"])
    assert opened is not open
    text = "is of the format webdataset; expected one of arrow, csv, json"
    with pytest.raises(DataError, match=text):
        pinned(monkeypatch, f"{OWN}/train.jsonl", kind="webdataset")
    monkeypatch.undo()
    local = datasets.load_dataset_builder(str(hub))
    with pytest.raises(DataError, match=f"reads {hub}/.*, and not files of its own"):
        pinned(monkeypatch, builder=local)


@pytest.mark.parametrize(
    "file",
    [
        "/home/alice/notes.txt",
        "https://example.org/rows.jsonl",
        "hf://datasets/org/other@main/rows.jsonl",
        f"{OWN}/../../../etc/passwd",
        f"{OWN}/a.jsonl::/etc/passwd",
    ],
)
def test_a_dataset_that_reads_files_of_others_is_refused(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"^data\.name: org/set reads .*, and not files of its own"):
        pinned(monkeypatch, f"{OWN}/train.jsonl", file)
