"""Conversations and instructions to tokens; the loss counts tokens of answers only.

The columns of a row say what it holds; rows of one data set may differ:

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
import logging
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from diloco.config import DataConfig
from diloco.data.formats import OddRows, records
from diloco.data.hub_files import HUB_REMEDY, find_files
from diloco.data.packing import is_held_out
from diloco.data.sources import as_data_error, files_of, kind_of
from diloco.data.templates import Message
from diloco.data.tokenizers import Tokenizer
from diloco.data.tokens import TokenList
from diloco.errors import DataError
from diloco.hub import dataset_file

logger = logging.getLogger(__name__)

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


def parse_row(row: Mapping[str, Any], field: str) -> Chat | tuple[str, str] | str:
    """Read a row as a chat, a prompt and its completion, or plain text.

    Raises ValueError for a row without any of it, with the columns that it has.
    """
    got = {name: value for name, value in row.items() if value not in (None, "", [])}
    tools = [*map(_decoded, _decoded(got.get("tools")) or ())] or None
    if "messages" in got:
        return Chat(_messages(got, "messages"), tools)
    if "conversations" in got:
        return Chat([*_system(got), *_messages(got, "conversations")], tools)
    if "prompt" in got and "completion" in got:
        prompt, completion = got["prompt"], got["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt, completion
        return Chat([*_messages(got, "prompt"), *_messages(got, "completion")], tools)
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
    """Return the system message of a row that has it in a column of its own."""
    return [{"role": "system", "content": str(row["system"])}] if "system" in row else []


def _messages(row: Mapping[str, Any], column: str) -> list[Message]:
    turns = _decoded(row[column])
    if not isinstance(turns, Sequence) or isinstance(turns, str):
        raise ValueError(f"{column} is no list of messages")
    chat = list[Message]()
    for number, turn in enumerate(map(_decoded, turns), 1):
        where = f"message {number} of {column}"
        turn = turn if isinstance(turn, Mapping) else {}
        role, content = ("from", "value") if "from" in turn else ("role", "content")
        if not isinstance(turn.get(role), str):
            raise ValueError(f"{where} has no {role}")
        name = turn[role].lower()
        if name not in _ROLE_OF:
            known = ", ".join(sorted(_ROLE_OF))
            raise ValueError(f"{where} has the {role} {name!r}, which is none of {known}")
        rest = {key: value for key, value in turn.items() if key not in (role, content)}
        rest = {key: value for key, value in rest.items() if value is not None}
        if calls := _decoded(rest.pop("tool_calls", None)):
            rest["tool_calls"] = [_call(_decoded(call)) for call in calls]
        chat.append({**rest, "role": _ROLE_OF[name], "content": _text(turn.get(content), where)})
    return chat


def _text(content: Any, where: str) -> str:
    """Join the content of a message, which is a text or a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise ValueError(f"{where} has content of the type {kind}, and only text is learned")
    return "".join(part.get("text") or "" for part in parts)


def _call(call: Any) -> Any:
    """Return a tool call; its arguments may be JSON text, as OpenAI writes them."""
    function = dict(call.get("function", call))
    if "arguments" in function:
        function["arguments"] = _decoded(function["arguments"])
    return {**call, "function": function} if "function" in call else function


def _decoded(value: Any) -> Any:
    """Parse the JSON text of an object or a list; return other values as they are."""
    is_json = isinstance(value, str) and value.lstrip()[:1] in ("{", "[")
    return json.loads(value) if is_json else value


def encode_row(content: Chat | tuple[str, str] | str, tokenizer: Tokenizer) -> list[Sample]:
    """Tokenise the content of a row and mark the learned tokens; a chat gives one sample for each
    part of `Tokenizer.encode_chat`.

    Raises ValueError for a chat without an answer, and for what the chat template refuses.
    """
    if isinstance(content, Chat):
        if not any(message["role"] == "assistant" for message in content.messages):
            raise ValueError("it has no message of an assistant, so nothing to learn")
        parts = tokenizer.encode_chat(content.messages, content.tools)
    else:
        texts = [content] if isinstance(content, str) else content
        ids = tokenizer.encode([text.encode("utf-8", errors="replace") for text in texts])
        end = [] if tokenizer.end is None else [tokenizer.end]
        tokens = [*tokenizer.begin, *np.concatenate(ids).tolist(), *end]
        asked = len(tokenizer.begin) + len(ids[0]) if len(ids) > 1 else 0
        parts = [(tokens, [index >= asked for index in range(len(tokens))])]
    return [Sample(np.array(ids, np.int32), np.array(marks, np.bool_)) for ids, marks in parts]


def conversations_of(settings: DataConfig, tokenizer: Tokenizer) -> TokenList:
    """Pack the rows of `data.path`, or of a dataset of the hub: (N, 2, T).

    Rows that cannot be read or encoded are left out, as are those of which nothing is learned; a
    line of the log counts them. Raises DataError, which names a file and a row, if they are half of
    all rows or more.
    """
    kind, key, files = settings.source, "data.path", list[Path]()
    if kind == "hub":
        kind, files = _of_hub(settings)
        key = "data.name"
    sides: tuple[list[Sample], list[Sample]] = [], []
    documents = num_bytes = 0
    remedy = "mend that row, or leave it out"
    odd = OddRows(remedy)
    for file in files or files_of(settings):
        with as_data_error(f"{key}: {file}", remedy), file.open("rb") as handle:
            for number, row in enumerate(records(handle, str(file), kind_of(file, kind)), 1):
                odd.rows += 1
                try:
                    if isinstance(row, ValueError):
                        raise row
                    content = parse_row(row, settings.field)
                    samples = encode_row(content, tokenizer)
                except ValueError as error:
                    fault = str(error) if error is row else f"row {number}: {error}"
                    odd.add(ValueError(fault), f"{key}: {file}")
                    continue
                text = content if isinstance(content, str) else json.dumps(content, default=str)
                encoded = text.encode("utf-8", errors="replace")
                sides[is_held_out(encoded, settings.holdout, settings.source)].extend(samples)
                documents, num_bytes = documents + 1, num_bytes + len(encoded)
    odd.close()
    length = settings.sequence_length
    learned = [_is_learned(sample, length) for sample in chain(*sides)]
    if not all(learned):
        line = (
            f"of {learned.count(False)} of {len(learned)} conversations nothing is learned, which"
            f" are left out: the answer is behind the first data.sequence_length={length} tokens,"
            " or the template marks none"
        )
        if not any(learned):
            raise DataError(f"data.format: {line}; raise the one, or mend the other")
        logger.warning(line)
    training, held_out = (pack_samples(side, length) for side in sides)
    digest = blake3(training.tobytes()).hexdigest()
    return TokenList(training, held_out, documents, num_bytes, digest)


def _is_learned(sample: Sample, length: int) -> bool:
    return bool(sample.learned[1:length].any())


def _of_hub(settings: DataConfig) -> tuple[str, list[Path]]:
    """Return the format of a dataset, and its files, which are fetched once."""
    with as_data_error(f"data.name: {settings.name}", HUB_REMEDY):
        kind, names, opened = find_files(settings)
        if kind == "text":
            raise DataError(
                f"data.name: {settings.name} is of the format text, and data.format=auto reads rows"
                " with fields; choose another dataset"
            )
        return kind, [Path(name) if opened is open else dataset_file(name) for name in names]


def pack_samples(samples: Iterable[Sample], length: int) -> NDArray[np.int32]:
    """Pack samples into (N, 2, T), T = `length`: tokens, and 2 x segment + (1 if it is learned).

    Best fit, the longest first (Ding et al. 2024, arXiv 2404.10830). A sample is cut only if it is
    longer than a sequence, and left out if no learned token is left of it. Segments count from 1;
    padding is segment 0. The first token of a segment is never learned, as none is before it.
    """
    kept = [sample for sample in samples if _is_learned(sample, length)]
    inside = list[list[Sample]]()  # samples by sequence
    free = list[tuple[int, int]]()  # (tokens, sequence), sorted
    for sample in sorted(kept, key=lambda sample: -len(sample.tokens)):
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
