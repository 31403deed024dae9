"""Any vocabulary: ids with holes, added tokens, and the end token reach the model as they are, or
end the run first."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diloco import model as models
from diloco.config import ModelConfig
from diloco.data.packing import Packer
from diloco.data.tokenizers import ByteTokenizer, HubTokenizer
from diloco.errors import ConfigError, DataError
from tests.support.data import written
from tests.support.errors import error_text
from tests.support.models import SMALL, small_model

EDGES = [255, 256, 65_535, 65_536, 2**24 - 1]
ids = st.one_of(st.sampled_from(EDGES), st.integers(0, 1 << 17))


def tokenizer_of(
    directory: Path, letters: dict[str, int], end: int, added: dict[str, int] | None = None
) -> str:
    """A directory with a tokenizer that has a token for each of these letters."""
    added = {"</s>": end, **(added or {})}
    special = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    isolated = {"behavior": "Isolated", "invert": False}
    pipeline = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": t, "special": t == "</s>", **special} for t, i in added.items()
        ],
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, **isolated},
        "model": {"type": "WordLevel", "vocab": {**letters, **added}, "unk_token": "</s>"},
    }
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "unk_token": "</s>"}
    files = {"tokenizer.json": pipeline, "tokenizer_config.json": about}
    return str(written(directory, {name: json.dumps(text) for name, text in files.items()}))


@given(
    numbers=st.lists(ids, min_size=3, max_size=3, unique=True),
    text=st.text("ab", min_size=1, max_size=9),
)
@example(numbers=[3, 900, 2], text="ab")
@example(numbers=[1, 2, 70_000], text="ba")  # the end token counts
@settings(max_examples=12, deadline=None)
def test_every_id_of_a_vocabulary_arrives(numbers: list[int], text: str) -> None:
    letters = dict(zip("abc", numbers, strict=True))
    with TemporaryDirectory() as place:
        two = {one: letters[one] for one in "ab"}
        tokenizer = HubTokenizer(tokenizer_of(Path(place), two, letters["c"]))
    packer = Packer(2, tokenizer)
    for tokens in tokenizer.encode([text.encode(), b"", text.encode()]):
        packer.add(tokens)
    expected = [letters[one] for one in f"{text}cc{text}c"]
    assert tokenizer.vocab_size == max(numbers) + 1
    assert [*packer.take(len(packer)).flatten().tolist(), *packer.waiting().tolist()] == expected


def test_an_id_that_the_model_does_not_have_is_one_line(tmp_path: Path) -> None:
    words = tokenizer_of(tmp_path / "t", {"a": 3, "b": 5}, 2, added={"<img>": 300})
    tokenizer = HubTokenizer(words)
    about = "has no id 300, which the tokenizer gives to '<img>', one of 4 tokens; "
    small = ModelConfig(name="small", model_type="llama", config={**SMALL, "vocab_size": 256})
    text = error_text(ConfigError, models.build, small, 0, tokenizer=tokenizer)
    assert f"model.config.vocab_size: a vocabulary of 256 {about}set it to 301 or choose a" in text
    models.save(models.build(small, 0), tmp_path / "model")
    saved = ModelConfig(name="small", path=str(tmp_path / "model"))
    text = error_text(ConfigError, models.build, saved, 0, tokenizer=tokenizer)
    assert f"model.path: a vocabulary of 256 {about}choose another data.tokenizer" in text


def test_a_prompt_with_an_id_that_the_model_does_not_have_is_one_line(tmp_path: Path) -> None:
    from diloco.train.evaluate import generate

    tokenizer = HubTokenizer(tokenizer_of(tmp_path, {"a": 3, "b": 900}, 2))
    model = small_model(vocab_size=256)
    assert isinstance(generate(model, tokenizer, "aa", max_new_tokens=2, temperature=0), str)
    why = "^prompt: the tokenizer makes the id 900 of 'b', and the model's vocab"
    with pytest.raises(ConfigError, match=why):
        generate(model, tokenizer, "ab", max_new_tokens=2, temperature=0)


def test_a_text_begins_as_its_tokenizer_says(tmp_path: Path) -> None:
    from diloco.data.conversations import encode_row
    from diloco.train.evaluate import prompt_tokens

    place = Path(tokenizer_of(tmp_path, {"a": 3, "b": 5, "<s>": 7}, 6, added={"<s>": 7}))
    pipeline = json.loads((place / "tokenizer.json").read_text())
    begin, text = (
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    )
    pipeline["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [7], "tokens": ["<s>"]}},
    }
    (place / "tokenizer.json").write_text(json.dumps(pipeline))
    tokenizer = HubTokenizer(str(place))
    assert tokenizer.begin == [7] and ByteTokenizer().begin == []
    packer = Packer(1, tokenizer)
    for tokens in tokenizer.encode([b"ab", b"b"]):
        packer.add(tokens)
    assert packer.take(7).flatten().tolist() == [7, 3, 5, 6, 7, 5, 6]
    model = small_model(vocab_size=256)
    assert prompt_tokens(model, tokenizer, "ab", 1) == [7, 3, 5]
    assert prompt_tokens(model, tokenizer, "<s>ab", 1) == [7, 3, 5], "as a chat template writes it"
    [pair] = encode_row(("a", "b"), tokenizer)
    assert (pair.tokens.tolist(), pair.learned.tolist()) == ([7, 3, 5, 6], [False] * 2 + [True] * 2)
    models.save(model, tmp_path / "model", tokenizer)
    for name in ("config.json", "generation_config.json"):
        saved = json.loads((tmp_path / "model" / name).read_text())
        assert (saved["bos_token_id"], saved["eos_token_id"]) == (7, 6), name


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3_5", "gemma"])
def test_a_tokenizer_beside_any_config_is_its_own(kind: str, tmp_path: Path) -> None:
    place = Path(tokenizer_of(tmp_path, {"a": 3, "b": 5}, 2))
    own = HubTokenizer(str(place))
    (place / "config.json").write_text(json.dumps({"model_type": kind}))
    beside = HubTokenizer(str(place))
    assert beside.encode([b"abba"])[0].tolist() == own.encode([b"abba"])[0].tolist()
    assert (beside.end, beside.vocab_size) == (own.end, own.vocab_size)


NO_TOKENIZER = "is no tokenizer that transformers can load"
LARGE = "gives 'b' the id 4294967295, and ids of a model are 0 to 16777215; choose"


@pytest.mark.parametrize(
    ("number", "why"), [(2**32 - 1, LARGE), (2**40, NO_TOKENIZER), (-3, NO_TOKENIZER)]
)
def test_absurd_ids_are_one_line(number: int, why: str, tmp_path: Path) -> None:
    place = tokenizer_of(tmp_path, {"a": 3, "b": number}, 0)
    assert why in error_text(DataError, HubTokenizer, place)
