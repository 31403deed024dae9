"""Conversations and instructions to tokens, of which the answers are marked: only they are learned.

A row of a data set is told by its columns, each row by itself:

    messages                       [{role, content}, ...], as chat templates take them
    conversations                  ShareGPT: [{from, value}, ...]
    prompt, completion             two texts, or two lists of messages
    instruction, input, output     Alpaca; `response` for `output` and `context` for `input`, too
    `data.field`                   plain text, which is learned as a whole

A packed sequence holds several of them, each a segment: attention does not cross into another
segment, and positions begin anew in it (`diloco.model.cross_entropy.loss`).
"""

from __future__ import annotations

import json
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from diloco.config import DataConfig
from diloco.data.formats import records
from diloco.data.hub_files import HUB_REMEDY, find_files
from diloco.data.packing import is_held_out
from diloco.data.sources import as_data_error, files_of
from diloco.data.tokenizers import Message, Tokenizer
from diloco.data.tokens import TokenList
from diloco.errors import DataError
from diloco.hub import dataset_file

ROLES = {
    "assistant": "assistant bard bing chatbot chatgpt gpt model",
    "system": "developer system",
    "tool": "function observation tool",
    "user": "human prompter user",
}
_ROLE_OF = {name: role for role, names in ROLES.items() for name in names.split()}


class Sample(NamedTuple):
    """One document or conversation."""

    tokens: NDArray[np.int32]  # (n,)
    learned: NDArray[np.bool_]  # (n,): tokens that the model has to predict


class Chat(NamedTuple):
    """Messages, and what the chat template gets beside them."""

    messages: list[Message]
    tools: Any = None


def parse(row: Mapping[str, Any], field: str) -> Chat | tuple[str, str] | str:
    """What a row holds: a chat, a prompt and its completion, or plain text.

    Raises ValueError for a row without any of it, with the columns that it has.
    """
    got = {name: value for name, value in row.items() if value not in (None, "", [])}
    tools = got.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    if "messages" in got:
        return Chat(_messages(got["messages"], "messages", "role", "content"), tools)
    if "conversations" in got:
        turns = got["conversations"]
        first = turns[0] if isinstance(turns, list) and isinstance(turns[0], Mapping) else {}
        keys = ("role", "content") if "role" in first else ("from", "value")
        return Chat([*_system(got), *_messages(turns, "conversations", *keys)], tools)
    if "prompt" in got and "completion" in got:
        prompt, completion = got["prompt"], got["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt, completion
        parts = ((prompt, "prompt"), (completion, "completion"))
        return Chat([one for part in parts for one in _messages(*part, "role", "content")], tools)
    answer = next((name for name in ("output", "response") if name in got), None)
    if "instruction" in got and answer:
        asked = str(got["instruction"])
        more = got.get("input", got.get("context"))
        asked = f"{asked}\n\n{more}" if more else asked
        user = {"role": "user", "content": asked}
        return Chat([*_system(got), user, {"role": "assistant", "content": str(got[answer])}])
    if isinstance(text := got.get(field), str):
        return text
    raise ValueError(
        f"it has no messages, conversations, prompt and completion, instruction and output, or"
        f" {field}; its columns are {', '.join(sorted(row)) or 'none'}"
    )


def _system(row: Mapping[str, Any]) -> list[Message]:
    """The message of a column of its own, where there is one."""
    return [{"role": "system", "content": str(row["system"])}] if "system" in row else []


def _messages(turns: Any, column: str, role: str, content: str) -> list[Message]:
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise ValueError(f"{column} is no list of messages")
    found = list[Message]()
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, Mapping) or not isinstance(turn.get(role), str):
            raise ValueError(f"message {number} of {column} has no {role}")
        name = turn[role].lower()
        if name not in _ROLE_OF:
            known = ", ".join(sorted(_ROLE_OF))
            raise ValueError(
                f"message {number} of {column} has the {role} {name!r}, which is none of {known}"
            )
        rest = {key: value for key, value in turn.items() if key not in (role, content)}
        rest = {key: value for key, value in rest.items() if value is not None}
        found.append({**rest, "role": _ROLE_OF[name], "content": turn.get(content) or ""})
    return found


def encode(found: Chat | tuple[str, str] | str, tokenizer: Tokenizer) -> Sample:
    """The tokens of what a row holds, and which of them are learned.

    Raises ValueError for what has no answer, or that the chat template refuses.
    """
    if isinstance(found, Chat):
        if not any(one["role"] == "assistant" for one in found.messages):
            raise ValueError("it has no message of an assistant, so nothing to learn")
        tokens, learned = tokenizer.encode_chat(found.messages, found.tools)
    else:
        texts = [found] if isinstance(found, str) else list(found)
        parts = tokenizer.encode([text.encode("utf-8", errors="replace") for text in texts])
        end = [] if tokenizer.end is None else [tokenizer.end]
        tokens = [*(int(token) for part in parts for token in part), *end]
        learned = [False] * (len(parts[0]) if len(parts) > 1 else 0)
        learned += [True] * (len(tokens) - len(learned))
    return Sample(np.array(tokens, np.int32), np.array(learned, np.bool_))


def conversations_of(settings: DataConfig, tokenizer: Tokenizer) -> TokenList:
    """The packed sequences, (N, 2, T), of the rows of `data.path`, or of a dataset of the hub.

    Raises DataError, which names file and row: one cannot be read, or is refused by `encode`.
    """
    kind, key, files = settings.source, "data.path", list[Path]()
    if kind == "hub":
        kind, files = _of_hub(settings)
        key = "data.name"
    sides: tuple[list[Sample], list[Sample]] = [], []
    num_bytes = 0
    remedy = "mend that row, or leave it out"
    for file in files or files_of(settings):
        with as_data_error(f"{key}: {file}", remedy), file.open("rb") as handle:
            for number, row in enumerate(records(handle, str(file), kind), 1):
                try:
                    found = parse(row, settings.field)
                    sample = encode(found, tokenizer)
                except ValueError as error:
                    raise ValueError(f"row {number}: {error}") from error
                content = found if isinstance(found, str) else json.dumps(found, default=str)
                text = content.encode("utf-8", errors="replace")
                sides[is_held_out(text, settings.holdout, settings.source)].append(sample)
                num_bytes += len(text)
    training, held_out = (pack(side, settings.sequence_length) for side in sides)
    digest = blake3(training.tobytes()).hexdigest()
    return TokenList(training, held_out, sum(map(len, sides)), num_bytes, digest)


def _of_hub(settings: DataConfig) -> tuple[str, list[Path]]:
    """The format of a dataset, and its files, which are fetched once."""
    with as_data_error(f"data.name: {settings.name}", HUB_REMEDY):
        kind, names, opened = find_files(settings)
        if kind not in ("json", "parquet"):
            raise DataError(
                f"data.name: {settings.name} is of the format {kind}, and data.format=auto reads"
                " json and parquet; choose another dataset"
            )
        return kind, [Path(one) if opened is open else dataset_file(one) for one in names]


def pack(samples: Iterable[Sample], length: int) -> NDArray[np.int32]:
    """Sequences of T = `length` tokens, (N, 2, T): tokens, and 2 x segment + (1 if it is learned).

    Best fit, the longest first (Ding et al. 2024, arXiv 2404.10830): a sample is whole, cut off
    only if it is longer than a sequence, and left out if nothing of it is learned then. Segments
    count from 1; what is left of a sequence is segment 0. The first token of a segment is never
    learned: nothing is before it.
    """
    kept = [sample for sample in samples if sample.learned[1:length].any()]
    inside = list[list[Sample]]()  # of each sequence
    free = list[tuple[int, int]]()  # (tokens, sequence), sorted
    for sample in sorted(kept, key=lambda one: -len(one.tokens)):
        size = min(len(sample.tokens), length)
        at = bisect_left(free, (size, 0))
        if at == len(free):
            free.append((length, len(inside)))
            inside.append([])
        left, number = free.pop(at)
        inside[number].append(sample)
        if left > size:
            insort(free, (left - size, number))
    packed = np.zeros((len(inside), 2, length), np.int32)
    for (tokens, marks), those in zip(packed, inside, strict=True):
        start = 0
        for segment, sample in enumerate(those, 1):
            part = slice(start, min(start + len(sample.tokens), length))
            size = part.stop - start
            tokens[part] = sample.tokens[:size]
            marks[part] = 2 * segment + sample.learned[:size]
            marks[start] = 2 * segment
            start = part.stop
    return packed
