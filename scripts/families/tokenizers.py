"""The ids that are trained on are those of the `tokenizers` library itself, before and after the
model's directory is written and read again, beside the config of each model type.

A text begins with what the tokenizer's own post-processor puts in front of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    AutoTokenizer,
    CohereTokenizer,
    GemmaTokenizer,
    GPT2Tokenizer,
    GPTNeoXTokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
    T5Tokenizer,
)

from diloco.data.packing import Packer
from diloco.data.tokenizers import ByteTokenizer, load_tokenizer
from scripts.families import WORKS, Member

SOURCES = ("tokenizers", "transformers")

# which transformers takes beside a config of their model, and each process would import
OTHERS = (AutoTokenizer, CohereTokenizer, GemmaTokenizer, GPT2Tokenizer, GPTNeoXTokenizer)
OTHERS += (LlamaTokenizer, Qwen2Tokenizer, T5Tokenizer)

LINES = [f"word{n % 50} and {n % 7} more, caf\u00e9 \u4e2d {'x' * (n % 5)}" for n in range(400)]
TEXTS = [*LINES[:20], "", " a  b\n\tc", "</s> is text, too", "\U0001f600 e\u0301"]
SPECIAL = ["<unk>", "</s>", "<s>"]
CONFIGS = (
    "none cohere falcon gemma gpt2 gpt_neox gpt_oss llama mistral phi3 qwen2 qwen3_5 t5"
).split()
QUICK = {"metaspace BPE beside qwen2", "BPE with <bos> beside gemma"}


def trained(model: Any, trainer: Any) -> Tokenizer:
    made = Tokenizer(model)
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.train_from_iterator(LINES, trainer)
    return made


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = {"show_progress": False, "special_tokens": SPECIAL}
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=letters, **options)
    made.train_from_iterator(LINES, trainer)
    return made


def with_bos() -> Tokenizer:
    made = byte_level()
    bos = made.token_to_id("<s>")
    made.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", bos)])
    return made


def with_both() -> Tokenizer:
    made = byte_level()
    ids = [(token, made.token_to_id(token)) for token in ("<s>", "</s>")]
    made.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=ids)
    return made


def metaspace() -> Tokenizer:
    trainer = trainers.BpeTrainer(vocab_size=256, special_tokens=SPECIAL, show_progress=False)
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    digits = pre_tokenizers.Digits(individual_digits=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.Metaspace()])
    made.decoder = decoders.Metaspace()
    made.train_from_iterator(LINES, trainer)
    return made


def unigram() -> Tokenizer:
    options: dict[str, Any] = {"unk_token": "<unk>", "show_progress": False}
    return trained(
        models.Unigram(), trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, **options)
    )


def word_level() -> Tokenizer:
    made = Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.normalizer = normalizers.NFKC()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.train_from_iterator(LINES, trainers.WordLevelTrainer(special_tokens=SPECIAL))
    return made


def with_gaps() -> Tokenizer:
    content = json.loads(word_level().to_str())
    words = content["model"]["vocab"]
    content["model"]["vocab"] = {word: 3 * number for word, number in words.items()}
    for token in content["added_tokens"]:
        token["id"] *= 3
    return Tokenizer.from_str(json.dumps(content))


def with_added() -> Tokenizer:
    made = byte_level()
    made.add_tokens(["caf\u00e9", "word1"])
    made.add_special_tokens(["<|tool|>"])
    return made


KINDS = {
    "byte-level BPE": byte_level,
    "BPE with <bos>": with_bos,
    "BPE with <bos> and <eos>": with_both,
    "metaspace BPE": metaspace,
    "Unigram": unigram,
    "WordLevel": word_level,
    "WordLevel with gaps": with_gaps,
    "BPE with added tokens": with_added,
}


def members() -> Iterator[Member]:
    for kind in (*KINDS, "bytes"):
        for config in CONFIGS:
            name = f"{kind} beside {config}"
            yield Member(name, kind, name in QUICK)


def play(name: str) -> str:
    kind, _, config = name.partition(" beside ")
    place, saved = Path("tokenizer"), Path("model")
    if kind == "bytes":
        ByteTokenizer().save(place)
        expected = [[*text.encode(), 0] for text in TEXTS]
    else:
        made = KINDS[kind]()
        named: dict[str, Any] = {"unk_token": "<unk>", "eos_token": "</s>"}
        wrapped = PreTrainedTokenizerFast(tokenizer_object=made, **named)
        wrapped.save_pretrained(place)
        end = made.token_to_id("</s>")
        ids = [made.encode(text).ids for text in TEXTS]
        expected = ids if kind.endswith("<eos>") else [[*row, end] for row in ids]
    for folder in (place, saved):
        folder.mkdir(exist_ok=True)
        if config != "none":
            (folder / "config.json").write_text(json.dumps({"model_type": config}))
    before = load_tokenizer(str(place))
    before.save(saved)
    after = load_tokenizer(str(saved))
    for tokenizer in (before, after):
        found = []
        for row in tokenizer.encode([text.encode() for text in TEXTS]):
            packer = Packer(1, tokenizer)
            packer.add(row)
            found.append(packer.take(len(packer)).flatten().tolist())
        wrong = [pair for pair in zip(found, expected, TEXTS, strict=True) if pair[0] != pair[1]]
        assert not wrong, wrong[0]
    return WORKS
