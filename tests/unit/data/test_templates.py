"""What is learned of a conversation, whatever its chat template does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from diloco.data.conversations import encode_row, parse_row
from diloco.data.formats import records
from diloco.data.tokenizers import ByteTokenizer, HubTokenizer, Tokenizer

ASKED = {"role": "user", "content": "Q?"}
ANSWER = {"role": "assistant", "content": "A."}
TWO = [ASKED, ANSWER, ASKED, ANSWER]
HEAD = "{% for m in messages %}[{{ m.role }}]"
TAIL = "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
PLAIN = HEAD + "{{ m.content }}<end>" + TAIL
THINKS = (
    HEAD + "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}<end>" + TAIL
)
FORGETS = (
    HEAD + "{% if loop.last %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1] }}"
    "{% endif %}<end>" + TAIL
)
PROMPTS = (
    HEAD + "{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}<end>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]<think>\n{% endif %}"
)
LAST = HEAD + "{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}[assistant]"
LAST += "{% else %}{{ eos_token }}{% endif %}"
TURN = "[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<end>"
TURN += "{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
MARKED = "{% for m in messages %}" + TURN + TAIL
MACRO = "{% macro turn(m) %}" + TURN + "{% endmacro %}{% for m in messages %}{{ turn(m) }}" + TAIL
SET = "{% for m in messages %}{% set text %}" + TURN + "{% endset %}{{ text }}" + TAIL
FILTER = "{% for m in messages %}{% filter replace('x', 'y') %}" + TURN + "{% endfilter %}" + TAIL
CALLS = HEAD + (
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<end>"
)
CALLS += TAIL


def tokenizer_of(template: str, place: Path) -> HubTokenizer:
    ByteTokenizer().save(place)
    (place / "diloco.json").unlink()
    (place / "chat_template.jinja").write_text(template)
    return HubTokenizer(str(place))


def learned(messages: Any, tokenizer: Tokenizer, **row: Any) -> str:
    samples = encode_row(parse_row({"messages": messages, **row}, "text"), tokenizer)
    return b"".join(bytes(part.tokens[part.learned].tolist()) for part in samples).decode()


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (PLAIN, "A.<end>" * 2),
        (THINKS, "<think></think>A.<end>" * 2),
        (PROMPTS, "</think>A.<end>" * 2),
        (LAST, "A.<end>A.<end>\0"),
        (HEAD + "{{ m.content }}" + TAIL, "A.[user]" * 2),
        (MARKED, "A.<end>" * 2),
        (MACRO, "A.<end>" * 2),
        (SET, "A.<end>" * 2),
        (FILTER, "A.<end>" * 2),
    ],
)
def test_each_answer_is_learned_with_what_ends_it(template: str, text: str, tmp_path: Path) -> None:
    assert learned(TWO, tokenizer_of(template, tmp_path)) == text


def test_what_was_thought_before_is_learned_where_later_turns_forget_it(tmp_path: Path) -> None:
    thought = {"role": "assistant", "content": "<think>T</think>A."}
    parts = encode_row(
        parse_row({"messages": [ASKED, thought] * 2}, "text"), tokenizer_of(FORGETS, tmp_path)
    )
    first, second = (bytes(part.tokens.tolist()).decode() for part in parts)
    assert first == "[user]Q?<end>[assistant]<think>T</think>A.<end>"
    assert second.startswith("[user]Q?<end>[assistant]A.<end>[user]"), "as the model will see it"
    assert [int(part.learned.sum()) for part in parts] == [len(first) - 24] * 2


@pytest.mark.parametrize(
    ("template", "message", "said"),
    [
        (
            HEAD + "{{ m.content.split('</think>')[-1] }}<end>" + TAIL,
            {},
            "leaves '<think>T</th.*out",
        ),
        (PLAIN, {"tool_calls": [{"function": {"name": "f"}}]}, "leaves 'f' out of an answer"),
        (PLAIN, {"content": [{"type": "image"}]}, "message 2 of messages has content of the type"),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            {},
            "writes nothing that ends an answer",
        ),
        ("{{ messages | length }}" + PLAIN, {}, "writes messages anew once there is an answer"),
        (MARKED.replace("[", "{{ raise_exception('no') }}["), {}, "template refuses it: no"),
        (SET.replace("{{ text }}", "{{ text | upper | length }}"), {}, "leaves|changes"),
    ],
)
def test_what_would_be_learned_wrong_is_refused(
    template: str, message: dict[str, Any], said: str, tmp_path: Path
) -> None:
    answer = {"role": "assistant", "content": "<think>T</think>A.", **message}
    with pytest.raises(ValueError, match=said):
        learned([ASKED, answer], tokenizer_of(template, tmp_path))


TEXT_ONLY = HEAD + "{% if m.content is string %}{{ m.content }}{% endif %}<end>" + TAIL
PARTS_ONLY = HEAD + "{% for p in m.content %}{{ p.text }}{% endfor %}<end>" + TAIL


@pytest.mark.parametrize("template", [TEXT_ONLY, PARTS_ONLY, PLAIN])
@pytest.mark.parametrize("as_parts", [False, True])
def test_content_is_a_text_or_parts_of_one(template: str, as_parts: bool, tmp_path: Path) -> None:
    both = [
        {**one, "content": [{"type": "text", "text": one["content"], "image": None}]}
        for one in (ASKED, ANSWER)
    ]
    tokenizer = tokenizer_of(template, tmp_path)
    assert learned(both if as_parts else [ASKED, ANSWER], tokenizer) == "A.<end>"
    assert tokenizer.question("Q?") == "[user]Q?<end>[assistant]"


def calls(*arguments: Any) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {**ASKED, "tool_calls": None},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"function": {"name": "f", "arguments": one}}],
                },
            ]
        }
        for one in arguments
    ]


@pytest.mark.parametrize("kind", ["json", "texts", "lines", "parquet", "arrow"])
def test_calls_of_tools_have_the_arguments_that_were_given(kind: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(CALLS, tmp_path / "tokenizer")
    given = [{"city": "Oslo"}, {"a": 2}]
    rows = calls(*given)
    if kind == "texts":  # as OpenAI writes arguments
        rows = calls(*map(json.dumps, given))
    if kind == "lines":  # as datasets writes messages that differ
        rows = [{"messages": [json.dumps(one) for one in row["messages"]]} for row in rows]
    file = tmp_path / "calls"
    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), file)
    elif kind == "arrow":
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(str(file), table.schema) as stream:
            stream.write_table(table)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    format = kind if kind in ("parquet", "arrow") else "json"
    with file.open("rb") as handle:
        found = [learned(row["messages"], tokenizer) for row in records(handle, "calls", format)]  # type: ignore[index]
    expected = [{"arguments": one, "name": "f"} for one in given]
    assert [json.loads(text.removesuffix("<end>")) for text in found] == expected


def test_nulls_are_arguments_in_json_and_no_value_in_arrow(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(CALLS, tmp_path / "tokenizer")
    given = {"city": None, "near": [{"zip": None}]}
    rows = [*calls(given), *calls(json.dumps(given))]
    lines = tmp_path / "calls.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = tmp_path / "calls.parquet"
    parquet.write_table(pa.Table.from_pylist(calls(given, {"city": "Oslo"})), table)
    for file, kind, expected in [
        (lines, "json", [given, given]),
        (table, "parquet", [{"near": [{}]}, {"city": "Oslo"}]),
    ]:
        with file.open("rb") as handle:
            found = [learned(row["messages"], tokenizer) for row in records(handle, "", kind)]  # type: ignore[index]
        texts = [json.loads(text.removesuffix("<end>"))["arguments"] for text in found]
        assert texts == expected, kind


def test_a_template_may_take_arguments_as_texts_only(tmp_path: Path) -> None:
    template = CALLS.replace("c.function | tojson", "c.function.name + c.function.arguments")
    [row] = calls({"city": "Oslo"})
    text = learned(row["messages"], tokenizer_of(template, tmp_path))
    assert text == 'f{"city": "Oslo"}<end>'
    with pytest.raises(ValueError, match="calls of tools need a tokenizer with a chat template"):
        learned(row["messages"], ByteTokenizer())


def test_tokens_at_the_edge_of_an_answer_count(tmp_path: Path) -> None:
    [sample] = encode_row(
        parse_row({"messages": [ASKED, ANSWER]}, "text"), tokenizer_of(MARKED, tmp_path)
    )
    assert np.flatnonzero(sample.learned).tolist() == [*range(19, 26)]
