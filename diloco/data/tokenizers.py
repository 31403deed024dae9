"""Text to tokens and back: raw bytes, or any tokenizer that `transformers` loads."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from diloco.data.templates import ChatTemplate, Message
from diloco.errors import DataError, DilocoError
from diloco.hub import TOKENIZER_FILES, check_reachable, files_at
from diloco.text import one_line

Tokens = NDArray[Any]  # (N,) uint8, uint16 or int32, the smallest that holds the vocabulary

ChatPart = tuple[list[int], list[bool]]
"""The tokens of messages, and which of them are learned."""

MAX_IDS = 2**24  # of a vocabulary; no model has more
MAX_TOKENIZER_BYTES = 2**28  # the largest public vocabularies have some 40 MB
# This file marks a model directory whose tokenizer is `ByteTokenizer`.
_MARKER = "diloco.json"


class Tokenizer(Protocol):
    """Text to tokens and back.

    Attributes:
        vocab_size: one more than the largest id; below that there may be ids without a token.
        largest: the token with the largest id, and of how many it is one: for an error.
        begin: the tokens before every document, such as <bos>; of most tokenizers none.
        end: the token after every document; None if the vocabulary has none.
        digest: equal for tokenizers that make the same tokens of the same text.
    """

    vocab_size: int
    largest: str
    begin: list[int]
    end: int | None

    @property
    def digest(self) -> str: ...

    def encode(self, documents: Sequence[bytes]) -> list[Tokens]:
        """Tokenise UTF-8 texts, without special tokens. Invalid UTF-8 stays, or becomes U+FFFD."""

    def encode_chat(self, messages: Sequence[Message], tools: Any = None) -> list[ChatPart]:
        """Tokenise a conversation, and mark the tokens that the assistant writes: its messages with
        what ends each. Returns several parts, each from the first message on, if the chat template
        writes earlier answers otherwise than the last one. Raises ValueError if the template
        refuses the messages or leaves out words of an answer."""

    def question(self, text: str) -> str:
        """Render a conversation that a user begins with `text`, up to the answer. Raises DataError
        if the chat template refuses it."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens without special ones; invalid UTF-8 becomes U+FFFD."""

    def num_bytes(self, tokens: Sequence[int]) -> int:
        """Return the length in bytes of the text of `tokens`."""

    def save(self, directory: Path) -> None:
        """Write the files that `transformers.AutoTokenizer` and `load_tokenizer` read."""


def token_dtype(vocab_size: int) -> type[np.integer[Any]]:
    """Return the smallest of uint8, uint16 and int32 that holds every token of the vocabulary."""
    return np.uint8 if vocab_size <= 1 << 8 else np.uint16 if vocab_size <= 1 << 16 else np.int32


def load_tokenizer(name: str, revision: str | None = None) -> Tokenizer:
    """Load the tokenizer 'bytes', that of a directory (a saved model too), or one from the hub.

    With a `revision` it is the one on the hub at that commit, never a directory. Runs no code of a
    repository. Raises DataError.
    """
    if name == "bytes":
        return ByteTokenizer()
    if revision is not None:
        name = str(files_at("data.tokenizer", name, revision, TOKENIZER_FILES, MAX_TOKENIZER_BYTES))
    return ByteTokenizer() if is_bytes(Path(name)) else HubTokenizer(name)


def is_bytes(directory: Path) -> bool:
    """Return True if the tokenizer in a saved model's directory is 'bytes'."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        marker = json.loads((directory / _MARKER).read_text(encoding="utf-8"))
        return bool(marker["tokenizer"] == "bytes")
    return False


def _encode_plainly(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[ChatPart]:
    """Encode a chat without a template: a line with the role, then the text; the end token ends an
    answer."""
    tokens, answers = list[int](), list[bool]()
    for message in messages:
        content, is_answer = message["content"], message["role"] == "assistant"
        if message.get("tool_calls"):
            raise ValueError("calls of tools need a tokenizer with a chat template")
        head, text = (
            part.tolist()
            for part in tokenizer.encode(
                [f"<{message['role']}>\n".encode(), f"{content}\n".encode(errors="replace")]
            )
        )
        text += [tokenizer.end] if is_answer and tokenizer.end is not None else []
        tokens += head + text
        answers += [False] * len(head) + [is_answer] * len(text)
    return [(tokens, answers)]


def _ask_plainly(text: str) -> str:
    return f"<user>\n{text}\n<assistant>\n"


class ByteTokenizer:
    """Tokens are the bytes of UTF-8 text; token 0, which no text has, ends a document."""

    vocab_size = 256
    largest = "the last of 256 bytes"
    begin: list[int] = []  # noqa: RUF012
    end: int | None = 0
    digest = "bytes"

    def encode(self, documents: Sequence[bytes]) -> list[Tokens]:
        return [np.frombuffer(document, dtype=np.uint8) for document in documents]

    def encode_chat(self, messages: Sequence[Message], tools: Any = None) -> list[ChatPart]:
        return _encode_plainly(self, messages)

    def question(self, text: str) -> str:
        return _ask_plainly(text)

    def decode(self, tokens: Sequence[int]) -> str:
        # A model with a padded vocabulary has tokens above 255; they stand for no text.
        return bytes(token for token in tokens if 0 < token < 256).decode("utf-8", errors="replace")

    def num_bytes(self, tokens: Sequence[int]) -> int:
        return len(tokens)

    def save(self, directory: Path) -> None:
        """Write an equivalent for plain `transformers`: byte-level BPE without merges."""
        import transformers
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        library: Any = transformers  # its functions have no annotations
        characters: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
        # The end token is matched in the raw text, before bytes become characters, so its entry is
        # NUL itself.
        vocabulary = {character if byte else "\x00": byte for byte, character in characters.items()}
        levels = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
        levels["trim_offsets"] = True
        pipeline = {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": levels,
            "decoder": {**levels, "add_prefix_space": True, "use_regex": True},
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        }
        directory.mkdir(parents=True, exist_ok=True)
        (file := directory / "tokenizer.json").write_text(json.dumps(pipeline), encoding="utf-8")
        options = {"eos_token": "\x00", "clean_up_tokenization_spaces": False}
        fast = library.PreTrainedTokenizerFast(tokenizer_file=str(file), **options)
        fast.save_pretrained(directory)
        marker = json.dumps({"tokenizer": "bytes"}) + "\n"
        (directory / _MARKER).write_text(marker, encoding="utf-8")


class HubTokenizer:
    """A `transformers` tokenizer. Making one imports `transformers`, which takes seconds."""

    def __init__(self, name: str) -> None:
        import transformers

        library: Any = transformers  # its functions have no annotations
        library.logging.set_verbosity_error()
        local = Path(name).expanduser()
        source = str(local) if local.is_dir() else name
        load = functools.partial(library.AutoTokenizer.from_pretrained, trust_remote_code=False)
        try:
            try:
                loaded = load(source, local_files_only=True)
            except Exception:
                if local.exists() or local.is_absolute():
                    raise
                # It is not in the cache of earlier downloads.
                check_reachable("data.tokenizer", "model", name)
                loaded = load(name)
            loaded = _as_written(loaded, local)
            end = loaded.eos_token_id if loaded.eos_token_id is not None else loaded.sep_token_id
            # with added tokens; there may be ids without a token
            ids: dict[str, int] = loaded.get_vocab()
            if end is not None:
                ids = {**ids, loaded.eos_token or loaded.sep_token: end}
            largest, last = max((number, token) for token, number in ids.items())
        except DilocoError:
            raise
        # the library raises OSError, ValueError, KeyError and its own types
        except Exception as error:
            raise DataError(
                f"data.tokenizer: {name!r} is no tokenizer that transformers can load; give"
                " 'bytes', a directory with tokenizer.json, or a name on the reachable Hugging"
                " Face hub"
            ) from error
        if largest >= MAX_IDS:
            raise DataError(
                f"data.tokenizer: {name} gives {last[:40]!r} the id {largest}, and ids of a model"
                f" are 0 to {MAX_IDS - 1}; choose another"
            )
        self._name, self._tokenizer = name, loaded
        self.vocab_size, self.largest = largest + 1, f"{last[:40]!r}, one of {len(ids)} tokens"
        self.end: int | None = end
        self._dtype = np.dtype(token_dtype(self.vocab_size))
        self.begin = _begin_of(loaded)
        self._template = ChatTemplate(loaded) if loaded.chat_template else None

    @functools.cached_property
    def digest(self) -> str:
        # What `save` writes is everything that the tokenizer is made of.
        with TemporaryDirectory(prefix="diloco-") as directory:
            self.save(Path(directory))
            paths = (path for path in sorted(Path(directory).iterdir()) if path.is_file())
            files = [(path.name, path.read_bytes()) for path in paths]
        content = blake3(f"{self.end}".encode())
        for name, text in files:
            content.update(f" {name} {len(text)} ".encode() + text)
        return content.hexdigest()

    def encode(self, documents: Sequence[bytes]) -> list[Tokens]:
        texts = [document.decode("utf-8", errors="replace") for document in documents]
        if not texts:
            return []
        try:
            ids = self._tokenizer(
                texts, add_special_tokens=False, return_attention_mask=False, verbose=False
            )
            rows = [np.asarray(row, dtype=np.int64) for row in ids["input_ids"]]
            low = min(row.min(initial=0) for row in rows)
            high = max(row.max(initial=0) for row in rows)
            if not 0 <= low <= high < self.vocab_size:
                raise ValueError(
                    f"it makes ids that are not below {self.vocab_size}, or negative ones"
                )
        # no token for a character, and none for unknown ones; or None in place of an id
        except Exception as error:
            raise DataError(
                f"data.tokenizer: {self._name} cannot encode this text: {one_line(error)}; choose"
                " another"
            ) from error
        return [row.astype(self._dtype) for row in rows]

    def encode_chat(self, messages: Sequence[Message], tools: Any = None) -> list[ChatPart]:
        if self._template is None:
            return _encode_plainly(self, messages)
        parts = []
        for text, spans in self._template.answers(messages, tools):
            encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            offsets = encoded["offset_mapping"]
            marks = [any(start < e and b < end for b, e in spans) for start, end in offsets]
            parts.append((list(encoded["input_ids"]), marks))
        return parts

    def question(self, text: str) -> str:
        if self._template is None:
            return _ask_plainly(text)
        try:
            return self._template.question(text)
        except Exception as error:  # of jinja, and whatever a template calls
            refusal = f"data.tokenizer: the chat template of {self._name} refuses a user's question"
            raise DataError(f"{refusal}: {one_line(error)}; give one that takes it") from error

    def decode(self, tokens: Sequence[int]) -> str:
        # a padded vocabulary has ids without a token
        known = [token for token in tokens if token < self.vocab_size]
        text: str = self._tokenizer.decode(known, skip_special_tokens=True)
        return text

    def num_bytes(self, tokens: Sequence[int]) -> int:
        return len(self.decode(tokens).encode("utf-8"))

    def save(self, directory: Path) -> None:
        self._tokenizer.save_pretrained(directory)


def _as_written(loaded: Any, directory: Path) -> Any:
    """Load tokenizer.json itself: for the configs of some models, such as qwen2, transformers makes
    another tokenizer out of its vocabulary."""
    if not (file := directory / "tokenizer.json").is_file():
        return loaded
    import transformers

    pipeline = loaded.backend_tokenizer  # of `tokenizers`
    written = type(pipeline).from_file(str(file))
    texts, made = (json.loads(each.to_str()) for each in (written, pipeline))
    if all(texts[part] == made[part] for part in ("normalizer", "pre_tokenizer", "model")):
        return loaded
    known, names = written.get_vocab(), loaded.special_tokens_map
    special = {name: token for name, token in names.items() if token in known}
    library: Any = transformers  # its functions have no annotations
    return library.PreTrainedTokenizerFast.from_pretrained(str(directory), **special)


def _begin_of(loaded: Any) -> list[int]:
    """Return the ids that the tokenizer itself puts in front of a text."""
    for text in ("a", ""):  # the vocabulary may have no token for the one
        with contextlib.suppress(Exception):
            plain, whole = (loaded(text, add_special_tokens=a)["input_ids"] for a in (False, True))
            starts = range(len(whole)) if plain else [len(whole)]
            start = next(n for n in starts if whole[n : n + len(plain)] == plain)
            return [int(token) for token in whole[:start]]
    return []
