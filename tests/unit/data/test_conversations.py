"""Rows of conversations: what each kind means, what is learned of it, how they are packed."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from diloco.config import DataConfig
from diloco.config.model_data import MixedSource
from diloco.data.conversations import Chat, Sample, encode_row, pack_samples, parse_row
from diloco.data.local import LocalDataset
from diloco.data.tokenizers import ByteTokenizer, HubTokenizer
from diloco.errors import DataError
from tests.support.data import T, config, written

ASKED = [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}]
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
ANEW = PLAIN.replace("<{{ m.role }}>", "{{ messages | length }}<{{ m.role }}>")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": ASKED},
        {"conversations": [{"from": "human", "value": "one?"}, {"from": "gpt", "value": "two"}]},
        {"conversations": [{"role": "User", "content": "one?"}, ASKED[1]], "text": ""},
        {"instruction": "one?", "input": "", "output": "two"},
        {"prompt": [ASKED[0]], "completion": [ASKED[1]]},
    ],
)
def test_each_kind_of_row_is_the_same_conversation(row: dict[str, Any]) -> None:
    assert parse_row(row, "text").messages == ASKED  # type: ignore[union-attr]


def test_other_rows_are_texts_or_say_what_they_lack() -> None:
    assert parse_row({"prompt": "a", "completion": "b"}, "text") == ("a", "b")
    assert parse_row({"prompt": "a", "text": "whole"}, "text") == "whole"
    wrong: dict[str, dict[str, Any]] = {
        "its columns are a, b": {"a": 1, "b": "x"},
        "message 1 of messages has no role": {"messages": [{"content": "x"}]},
        "has the role 'ghost'": {"messages": [{"role": "ghost", "content": "x"}]},
        "no list of messages": {"messages": "x"},
    }
    for said, row in wrong.items():
        with pytest.raises(ValueError, match=said):
            parse_row(row, "text")


def learned(row: dict[str, Any], tokenizer: ByteTokenizer | HubTokenizer) -> str:
    [sample] = encode_row(parse_row(row, "text"), tokenizer)
    return tokenizer.decode(sample.tokens[sample.learned].tolist())


def test_only_answers_are_learned_with_the_token_that_ends_them() -> None:
    [sample] = encode_row(Chat(ASKED * 2), ByteTokenizer())
    assert bytes(sample.tokens[sample.learned].tolist()) == b"two\n\0two\n\0"
    asked = ByteTokenizer().question("one?").encode()
    assert bytes(sample.tokens.tolist()).startswith(asked + b"two\n")
    assert learned({"prompt": "a", "completion": "bc"}, ByteTokenizer()) == "bc"
    assert learned({"text": "whole"}, ByteTokenizer()) == "whole"
    with pytest.raises(ValueError, match="nothing to learn"):
        encode_row(Chat(ASKED[:1]), ByteTokenizer())


@pytest.mark.parametrize("template", [MARKED, PLAIN])
def test_a_chat_template_says_what_the_assistant_writes(template: str, tmp_path: Path) -> None:
    ByteTokenizer().save(tmp_path)
    (tmp_path / "diloco.json").unlink()
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = HubTokenizer(str(tmp_path))
    assert learned({"messages": ASKED * 2}, tokenizer) == "two</s>two</s>"
    assert tokenizer.question("one?") == "<user>one?<assistant>"
    (tmp_path / "chat_template.jinja").write_text(ANEW)
    with pytest.raises(ValueError, match="writes messages anew"):
        encode_row(Chat(ASKED * 2), HubTokenizer(str(tmp_path)))


def test_sequences_are_full_and_samples_whole() -> None:
    def sample(number: int, size: int) -> Sample:
        return Sample(np.full(size, number, np.int32), np.arange(size) >= size - 2)

    packed = pack_samples(
        [sample(1, 3), sample(2, 6), sample(3, 5), sample(4, 9), sample(5, 2), sample(6, 10)], 8
    )
    tokens, marks = packed[:, 0], packed[:, 1]
    assert packed.shape == (3, 2, 8)
    assert tokens.tolist() == [[4] * 8, [2] * 6 + [5] * 2, [3] * 5 + [1] * 3]
    assert (marks >> 1).tolist() == [[1] * 8, [1] * 6 + [2] * 2, [1] * 5 + [2] * 3]
    assert (marks & 1).sum(1).tolist() == [1, 3, 4], "none of what was cut off, none that begins"


def chats(place: Path, number: int = 60) -> Path:
    rows = [{"prompt": f"say {n} ", "completion": f"{n}" * (1 + n % 9)} for n in range(number)]
    place.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return place


def opened(settings: DataConfig) -> LocalDataset:
    return LocalDataset(settings, ByteTokenizer(), 0, lambda done, total: None)


def test_conversations_of_a_file_are_packed_and_some_are_held_out(tmp_path: Path) -> None:
    file = chats(tmp_path / "chats.jsonl")
    settings = config("json", file, format="auto", sequence_length=64)
    dataset = opened(settings)
    held_out, stream = dataset.holdout(100), dataset.batches(4)
    batch = next(stream)
    assert batch.shape == (4, 2, 64) and held_out.shape[1:] == (2, 64) and len(held_out)
    assert "60 documents" in dataset.description and dataset.digest == opened(settings).digest
    every = dataset.training.read(np.arange(len(dataset.training)), "0")
    texts = b"".join(bytes(row[0].tolist()) for row in every)
    assert all(bytes(row[0].tolist())[:9] not in texts for row in held_out)
    state = stream.state()
    again = opened(settings).batches(4)
    again.restore(state)
    assert torch.equal(next(again), next(stream)), "a resumed run goes on at its sequence"
    numpy_rows = pyarrow.table({"prompt": ["a"] * 3, "completion": ["b"] * 3})
    parquet.write_table(numpy_rows, tmp_path / "chats.parquet")
    same = config("parquet", tmp_path / "chats.parquet", format="auto", holdout=0)
    assert opened(same).training.rows.shape == (1, 2, T)
    with zipfile.ZipFile(tmp_path / "chats.zip", "w") as archive:
        archive.write(tmp_path / "chats.parquet", "chats.parquet")
    packed = config("parquet", tmp_path / "chats.zip", format="auto", holdout=0)
    assert opened(packed).digest == opened(same).digest


def test_a_dataset_of_the_hub_is_fetched_whole_and_has_the_same_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "set").mkdir()
    file = chats(tmp_path / "set" / "train.jsonl")
    here = opened(config("json", file, format="auto", holdout=0))
    name = str(file.parent)
    folder = DataConfig(source="hub", name=name, format="auto", holdout=0, sequence_length=T)
    assert opened(folder).training.digest == here.training.digest
    found = "json", ["hf://datasets/org/chats@abc/a/train.jsonl"], lambda *_: None
    monkeypatch.setattr("diloco.data.conversations.find_files", lambda _: found)
    asked = []

    def download(*names: str, **options: str) -> str:
        asked.append((names, options))
        return str(file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    hub = DataConfig(source="hub", name="org/chats", format="auto", holdout=0, sequence_length=T)
    assert opened(hub).training.digest == here.training.digest
    names = ("org/chats", "a/train.jsonl")
    assert asked == [(names, {"repo_type": "dataset", "revision": "abc"})]


def test_a_mixture_of_conversations_and_text_has_rows_of_one_kind(tmp_path: Path) -> None:
    text = written(tmp_path, {"plain.txt": "some text of words\n" * 400})
    both = (
        MixedSource(name="chat", source="json", format="auto", weight=1),
        MixedSource(name="text", source="text", weight=1),
    )
    paths = {"chat": (str(chats(tmp_path / "c.jsonl")),), "text": (str(text / "plain.txt"),)}
    dataset = opened(config("mixture", mixture=both, paths=paths, holdout=0))
    rows = dataset.training.read(np.arange(40), "0")
    plain = [row for row in rows if row[1].tolist() == [2, *[3] * (T - 1)]]
    assert rows.shape == (40, 2, T) and 5 < len(plain) < 35


def test_odd_rows_are_left_out_with_a_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    odd = ['{"messages": []}', '{"messages": [{"role": "ghost", "content": "x"}]}', "[1]", '{"cut']
    good = [json.dumps({"messages": ASKED})] * 5
    written(tmp_path, {"c.jsonl": "\n".join([*good, *odd])})
    settings = config("json", tmp_path / "c.jsonl", format="auto", sequence_length=64, holdout=0)
    assert "5 documents" in opened(settings).description
    [line] = caplog.messages
    assert line.startswith("4 of 9 rows cannot be used, and are left out; the first: data.path: ")
    assert "c.jsonl: row 6: it has no messages" in line


def test_conversations_of_which_nothing_is_learned_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = {"prompt": "x" * 50, "completion": "y"}
    rows = [json.dumps(row) for row in (long, {"prompt": "a", "completion": "b"})]
    written(tmp_path, {"some.jsonl": "\n".join(rows), "none.jsonl": rows[0]})
    opened(config("json", tmp_path / "some.jsonl", format="auto", holdout=0))
    assert "of 1 of 2 conversations nothing is learned" in caplog.text
    with pytest.raises(DataError, match=r"data.format: of 1 of 1 conv.* data.sequence_length=16 t"):
        opened(config("json", tmp_path / "none.jsonl", format="auto", holdout=0))


@pytest.mark.parametrize(
    "row, said",
    [
        ('{"a": 1}', "c.jsonl: row 2: it has no messages, .*its columns are a; mend that row"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "row 2: it has no message of an assi"),
        ("[1]", "row 2 is no object"),
    ],
)
def test_a_bad_row_is_named_with_its_file(row: str, said: str, tmp_path: Path) -> None:
    written(tmp_path, {"c.jsonl": f'{{"text": "fine"}}\n{row}\n'})
    with pytest.raises(DataError, match=said):
        opened(config("json", tmp_path / "c.jsonl", format="auto"))


def test_conversations_are_read_from_files() -> None:
    with pytest.raises(ValueError, match="reads rows of JSON or Parquet"):
        config("stdlib", format="auto")
