"""Finds the assistant's answers in a conversation, by the chat template of its tokenizer.

1. A template with `{% generation %}` marks says itself what is learned.
2. Else an answer is what the template adds to the messages before it, whose generation prompt is
   not learned, with what ends it: in some templates the beginning of the next message.
3. A template may write earlier answers otherwise than the last one, without what was thought, say.
   Then each is learned as the model writes it, in a text that ends with it.
4. What an answer says and its template leaves out would be missed in silence: it is refused.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile
from typing import Any

from diloco.text import one_line

Message = dict[str, Any]
"""`role` (system, user, assistant, tool), `content`, and what a chat template knows besides."""
Answers = tuple[str, list[tuple[int, int]]]
"""A text, and where the answers are in it, in characters."""

_BEGIN, _END = "\ufdd0\ufdd1"  # noncharacters of Unicode, which no text has
_MARK = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_OPEN_TAG = re.compile(r"(?:[<\[][^<>\[\]\s]*)?$")
_PROBE = "QUESTIONMARK"  # a text that no template writes by itself


class ChatTemplate:
    """The chat template of a tokenizer of `transformers`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._eos = tokenizer.eos_token or "\0"  # only the last answer may end with it

    def question(self, text: str) -> str:
        """Render a user's message and the prompt for an answer; raises what the template raises."""
        return self._render([{"role": "user", "content": text}], add_generation_prompt=True)

    def answers(self, messages: Sequence[Message], tools: Any = None) -> list[Answers]:
        """Render texts, with the spans of the answers: each answer is in one text. Raises
        ValueError if the template refuses the messages, leaves out words of an answer, or hides
        where it ends."""
        try:
            try:
                return self._answers(messages, tools)
            except TypeError:  # a template may add arguments to its text as they are
                return self._answers([_with_texts(message) for message in messages], tools)
        except ValueError:
            raise
        except Exception as error:  # of jinja, and whatever a template calls
            raise ValueError(f"the chat template refuses it: {one_line(error)}") from error

    def _answers(self, messages: Sequence[Message], tools: Any) -> list[Answers]:
        template = self._tokenizer.get_chat_template(tools=tools)
        render = functools.partial(self._render, tools=tools)
        whole = render(messages)
        is_whole = all(word in whole for message in messages for word in _words(message))
        if not _MARK.search(template) or not is_whole:
            return self._told_apart(messages, render)
        marked = render(messages, chat_template=_MARK.sub(_sentinel, template))
        pieces = re.split(f"[{_BEGIN}{_END}]", marked)
        if "".join(pieces) != whole or len(pieces) % 2 == 0:
            raise ValueError("the chat template changes what its {% generation %} marks are around")
        ends = [*accumulate(map(len, pieces))]
        return [(whole, list(zip(ends[:-1:2], ends[1::2], strict=True)))]

    def _told_apart(self, messages: Sequence[Message], render: Callable[..., str]) -> list[Answers]:
        """Find each answer by what the template adds to the messages before it."""
        answers = list[Answers]()
        for number, answer in reversed(list(enumerate(messages))):
            if answer["role"] != "assistant":
                continue
            after, (earlier, before) = render(messages[: number + 1]), ("", "")
            if number:
                earlier = render(messages[:number])
                before = render(messages[:number], add_generation_prompt=True)
            begin = _num_shared(before, after)
            if begin < len(before):  # an answer may go on otherwise than the prompt for one, ...
                if begin < len(earlier):
                    raise ValueError(
                        "the chat template writes messages anew once there is an answer"
                    )
                begin = _OPEN_TAG.search(after[:begin]).start()  # type: ignore[union-attr]
            elif after.startswith(self._head, begin):  # ... and after a tool there may be no prompt
                begin += len(self._head)
            written = after[_num_shared(earlier, after) :]
            if lost := [word for word in _words(answer) if word not in written]:
                raise ValueError(f"the chat template leaves {lost[0]!r} out of an answer")
            if self._ends_none:
                after += self._next_begins(answer, messages[number + 1 : number + 2], render)
            text, short = answers[-1][0] if answers else "", after.removesuffix(self._eos)
            if text.startswith(short) and not short.endswith(answer["content"]):
                after = (
                    after if text.startswith(after) else short
                )  # only the last answer has the end token
            if not text.startswith(after):
                answers.append((after, []))
            answers[-1][1].append((begin, len(after)))
        return answers[::-1]

    def _next_begins(
        self, answer: Message, following: Sequence[Message], render: Callable[..., str]
    ) -> str:
        """Return the first word of the next message, for templates where it ends an answer."""
        calls = {"tool_calls": answer["tool_calls"]} if "tool_calls" in answer else {}
        role = following[0]["role"] if following else "tool" if calls else "user"
        two = [_said("user"), _said("assistant") | calls]
        rest = render([*two, _said(role)]).removeprefix(render(two))
        if not (words := rest.partition(_PROBE)[0].split()):
            raise ValueError("the chat template writes nothing that ends an answer")
        return words[0]

    @functools.cached_property
    def _head(self) -> str:
        """The text that the template writes between a user's message and the answer."""
        whole = self.question(_PROBE)
        return whole.removeprefix(self._render([_said("user")])) if _PROBE in whole else ""

    @functools.cached_property
    def _ends_none(self) -> bool:
        return self._render([_said("user"), _said("assistant")]).endswith(_PROBE)

    def _render(self, messages: Sequence[Message], **options: Any) -> str:
        if self._takes_parts:
            messages = [_with_parts(message) for message in messages]
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **options))

    @functools.cached_property
    def _takes_parts(self) -> bool:
        """True if the template reads content only as a list of parts, not as a text."""
        asked = _said("user")
        for message in (asked, _with_parts(asked)):
            with contextlib.suppress(Exception):  # of jinja, and whatever a template calls
                if _PROBE in self._tokenizer.apply_chat_template([message], tokenize=False):
                    return message is not asked
        return False


def _said(role: str) -> Message:
    return {"role": role, "content": _PROBE}


def _num_shared(*texts: str) -> int:
    """Return the length of the common prefix of two texts."""
    pairs = zip(*texts, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _words(answer: Message) -> list[str]:
    """List the words that the rendered text of an answer must contain."""
    if answer["role"] != "assistant":
        return []
    calls = (call.get("function", call) for call in answer.get("tool_calls") or ())
    return [*answer["content"].split(), *(str(call["name"]) for call in calls)]


def _with_parts(message: Message) -> Message:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _with_texts(message: Message) -> Message:
    """Replace the arguments of calls by JSON text."""
    calls = []
    for call in message.get("tool_calls", ()):
        text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append(call | {"function": call["function"] | {"arguments": text}})
    return message | {"tool_calls": calls} if calls else message


def _sentinel(mark: re.Match[str]) -> str:
    """Replace a generation mark by a character of the text, keeping white space control: the marks
    of transformers are misplaced in a macro, `set`, `filter` or `call` block."""
    left, end, right = mark.groups()
    return f"{{%{left} if true %}}{{{{ '{_END if end else _BEGIN}' }}}}{{% endif {right}%}}"
