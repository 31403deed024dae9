"""Each answer's learned text, token by token, is what TRL's training template of the same model
marks as learned, but for what the generation prompt has already and white space behind an answer.

A training template counts as TRL's own marks say. Where TRL itself learns less of an earlier answer
than the row says, the whole answer is expected: `BEYOND` says why.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import trl
from datasets import Dataset, load_dataset
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import apply_chat_template
from trl.chat_template_utils import get_training_chat_template, has_generation_markers

from diloco.data.conversations import encode_row, parse_row
from diloco.data.formats import records
from diloco.data.tokenizers import HubTokenizer
from scripts.families import WORKS, Member, refused, works_with

SOURCES = ("trl", "transformers", "datasets", "jinja2")

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
SPECIAL = re.compile(
    r"<[|\uff5c][^<>|\uff5c ]+[|\uff5c]>|</?s>|<(?:start|end)_of_\w+>|<turn\|>|<\|turn>"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASKED = {"role": "user", "content": "Q1?"}
AGAIN = {"role": "user", "content": "Q2?"}
TOLD = {"role": "tool", "name": "weather", "content": "Rain."}


def answer(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    return answer("", tool_calls=[{"type": "function", "function": function}])


def thought(number: int) -> dict[str, Any]:
    return answer(f"<think>\nT{number}\n</think>\n\nA{number}.")


CASES: dict[str, list[dict[str, Any]]] = {
    "one turn": [ASKED, answer("A1.")],
    "two turns": [ASKED, answer("A1."), AGAIN, answer("A2.")],
    "system": [{"role": "system", "content": "S."}, ASKED, answer("A1.")],
    "thinking": [ASKED, thought(1), AGAIN, thought(2)],
    "reasoning": [ASKED, answer("A1.", reasoning_content="R1")],
    "tools": [ASKED, call({"city": "Oslo"}), TOLD, answer("A2.")],
    "parts": [ASKED, answer("A1."), AGAIN, answer("A2.")],
}
# How rows may come: the same answers are learned
CARRIERS = ("lists", "JSON lines", "Parquet", "Json type", "Arrow")
CARRIED = ("qwen3", "llama3_1", "glm4moe", "gptoss")
QUICK = {
    "qwen3: two turns",
    "glm4moe: two turns",
    "deepseekv3: one turn",
    "phi3: two turns",
    "llama3: parts",
    "qwen3: parts",
    "qwen2_5: tools in Parquet",
    "qwen2_5: tools in Json type",
}
# TRL learns less than these, and the product all that the row says
FORGETS = "TRL leaves out what was thought in an earlier answer"
ENDS = "TRL ends an earlier answer as history has it, and the product as the model ends one"
BEYOND = {
    ("glm4moe", "thinking"): FORGETS,
    ("lfm2", "thinking"): FORGETS,
    ("nemotron", "thinking"): FORGETS,
    ("gptoss", "two turns"): ENDS,
    ("gptoss", "parts"): ENDS,
    ("gptoss", "thinking"): ENDS,
    ("diffusion", "tools"): "TRL learns nothing that ends a call",
}


def names() -> list[str]:
    return sorted(file.stem for file in TEMPLATES.glob("*.jinja"))


def members() -> Iterator[Member]:
    for template in names():
        for case in CASES:
            name = f"{template}: {case}"
            yield Member(name, template.removesuffix("_training"), name in QUICK)
    for template in (*CARRIED, "qwen2_5"):
        for carrier in CARRIERS:
            name = f"{template}: tools in {carrier}"
            yield Member(name, "rows", name in QUICK)


def play(name: str) -> str:
    warnings.simplefilter("ignore")
    template, _, case = name.partition(": ")
    case, _, carrier = case.partition(" in ")
    text = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    fast = tokenizer_of(text, sorted(set(SPECIAL.findall(text))))
    fast.save_pretrained("tokenizer")
    product = HubTokenizer("tokenizer")
    messages = CASES[case]
    row = {"messages": messages, **({"tools": [TOOL]} if case == "tools" else {})}
    if case == "parts":
        parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
        row["messages"] = parts
    try:
        found = learned(carried(row, carrier), product, fast)
    except ValueError as error:
        return refused(error)
    expected = marked(fast, messages, row.get("tools"))
    if found == expected:
        return WORKS
    reasons = (BEYOND.get((start, case)) for start in (template, template.split("_")[0]))
    why = next(filter(None, reasons), None)
    assert why, f"{found} is not {expected}"
    for words, text in zip(said(messages), found, strict=True):
        assert all(word in text for word in words), f"{text!r} has not all of {words}"
    return works_with(f"more than TRL learns: {why}")


def tokenizer_of(template: str, special: list[str]) -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*letters, "<eos>", "<bos>"])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    ends: dict[str, Any] = {"eos_token": "<eos>", "bos_token": "<bos>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=made, additional_special_tokens=special, **ends)
    fast.chat_template = template
    return fast


def carried(row: dict[str, Any], carrier: str) -> dict[str, Any]:
    """The row as it comes back from a file beside a row with other arguments."""
    if carrier in ("", "lists"):
        return row
    other = copy.deepcopy(row)
    other["messages"][1]["tool_calls"][0]["function"]["arguments"] = {"day": 7}
    both = [row, other]
    texts = "".join(json.dumps(one) + "\n" for one in both)
    file, kind = Path("rows.jsonl"), "json"
    file.write_text(texts)
    if carrier == "Parquet":
        kind = "parquet"
        parquet.write_table(pa.Table.from_pylist(both), file)
    elif carrier == "Json type":
        kind = "parquet"
        loaded = load_dataset("json", data_files=str(file), split="train", cache_dir="cache")
        loaded.to_parquet(str(file := Path("rows.parquet")))
    elif carrier == "Arrow":
        kind = "arrow"
        Dataset.from_list(both).save_to_disk("saved")
        [file] = Path("saved").glob("*.arrow")
    with file.open("rb") as handle:
        first = next(records(handle, str(file), kind))
    assert isinstance(first, dict), first
    return first


def runs(tokens: list[int], marks: list[Any], fast: Any) -> list[str]:
    """The texts that are marked."""
    found = list[list[int]]()
    last = False
    for token, mark in zip(tokens, marks, strict=True):
        if mark:
            found = found if last else [*found, []]
            found[-1].append(token)
        last = bool(mark)
    return [fast.decode(run).strip() for run in found]


def learned(row: dict[str, Any], product: HubTokenizer, fast: Any) -> list[str]:
    samples = encode_row(parse_row(row, "text"), product)
    parts = ((part.tokens.tolist(), part.learned.tolist()) for part in samples)
    return [text for part in parts for text in runs(*part, fast)]


def marked(fast: Any, messages: list[dict[str, Any]], tools: Any) -> list[str]:
    """What TRL learns of the messages."""
    own = fast.chat_template
    if not reads_text(fast):
        messages = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    answers = [number for number, one in enumerate(messages) if one["role"] == "assistant"]
    template = own
    with contextlib.suppress(ValueError):  # it has none of some models
        template = get_training_chat_template(processing_class=fast) or own
    if not has_generation_markers(template):  # a prompt and its completion, then
        rows = [{"prompt": messages[:n], "completion": [messages[n]]} for n in answers]
        return [apply_chat_template(row, fast, tools)["completion"].strip() for row in rows]
    options: dict[str, Any] = {"tokenize": True, "return_dict": True, "tools": tools}
    options |= {"chat_template": template, "return_assistant_tokens_mask": True}
    out = fast.apply_chat_template(messages, **options)
    texts = runs(out["input_ids"], out["assistant_masks"], fast)
    if template == own:
        return texts
    found = []
    for number, text in zip(answers, texts, strict=True):
        options = {"tools": tools, "tokenize": False, "add_generation_prompt": True}
        prompt = fast.apply_chat_template(messages[:number], chat_template=template, **options)
        content = messages[number - 1]["content"]
        before = content if isinstance(content, str) else content[0]["text"]
        found.append(without(prompt.rpartition(before)[2], text).strip())
    return found


def reads_text(fast: Any) -> bool:
    """Whether the template reads content that is a text."""
    with contextlib.suppress(Exception):  # of jinja
        return ASKED["content"] in fast.apply_chat_template([ASKED], tokenize=False)
    return False


def without(prompt: str, text: str) -> str:
    """The text without what the generation prompt has of its beginning."""
    starts = (os.path.commonprefix([prompt[start:], text]) for start in range(len(prompt)))  # noqa: RUF071
    shared = max(starts, key=len)
    if not shared.startswith("<"):
        return text
    whole = shared[: shared.rfind(">") + 1] if "<" in shared[shared.rfind(">") + 1 :] else shared
    return text.removeprefix(whole)


def said(messages: list[dict[str, Any]]) -> list[list[str]]:
    """The words that an answer has; the tag that begins a thought may be in the prompt for it."""
    answers = (one for one in messages if one["role"] == "assistant")
    return [one["content"].removeprefix("<think>").split() or ["weather"] for one in answers]
