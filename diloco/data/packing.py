"""From a row of a file to rows of tokens: documents, hold-out, tokens, and their packing.

`encode_rows` tokenises the documents of rows and says which are held out; a `Packer` concatenates
documents and cuts them into sequences.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diloco.config import DataConfig
from diloco.data.tokenizers import Tokenizer, Tokens, token_dtype

# Holding out whole documents needs more than one: text files, and rows longer than LONG_ROW_BYTES,
# are cut at line ends about this far apart.
_PIECE_BYTES = 4096
LONG_ROW_BYTES = 32 << 10
DOCUMENTS_AT_ONCE = 256  # in a call of the tokenizer, which keeps its threads busy


# -- documents -------------------------------------------------------------------------------------


def documents_of(row: bytes, source: str = "") -> Iterator[bytes]:
    """Yield the documents of a row: the row, pieces of it if it is long, or none if it is empty."""
    # Line ends only make a text longer, so a short row is not normalised here.
    is_long = len(row) > LONG_ROW_BYTES and source != "stdlib"
    if is_long and len(with_plain_line_ends(row).rstrip()) > LONG_ROW_BYTES:
        yield from pieces(io.BytesIO(row))
    elif row:
        yield row


def pieces(handle: BinaryIO) -> Iterator[bytes]:
    """Yield a file in pieces of about `_PIECE_BYTES`, cut after a line, a word or a character.

    A line end counts as one byte, so that a copy of the text with other line ends is cut alike.
    """
    rest, ahead, end = b"", b"", _PIECE_BYTES
    while True:
        # one more: it may be the second byte of a line end
        ahead += handle.read(end + 1 - len(ahead))
        wanted = _PIECE_BYTES + ahead.count(b"\r\n", 0, end + 1)
        if wanted > end:
            end = wanted
            continue
        if len(ahead) < end:
            break
        block = rest + ahead[:end]
        line = max(block.rfind(b"\n"), block.rfind(b"\r"))
        cut = (line + 1) or (block.rfind(b" ") + 1) or _last_character(block)
        yield block[:cut]
        rest, ahead, end = block[cut:], ahead[end:], _PIECE_BYTES
    if rest or ahead:
        yield rest + ahead


def _last_character(block: bytes) -> int:
    """Return the index of the last UTF-8 character, which may be incomplete; the length of the
    block if it is not UTF-8."""
    for start in range(len(block) - 1, len(block) - 5, -1):
        if block[start] & 0xC0 != 0x80:
            return start
    return len(block)


# -- hold-out --------------------------------------------------------------------------------------


def is_held_out(document: bytes, fraction: float, source: str = "") -> bool:
    """Return True for a document whose `document_hash`, scaled to [0, 1), is below `fraction`."""
    return document_hash(document, source) < fraction * 2.0**64


def document_hash(document: bytes, source: str = "") -> int:
    """Hash a document to 64 bits, ignoring its kind of line ends and trailing white space.

    Equal documents are on the same side in all runs: no peer trains on a copy of a held-out
    document. In a text file the last line counts as whole even without a line end.
    """
    end = b"\n" if source in ("stdlib", "text") else b""
    content = with_plain_line_ends(document).rstrip() + end
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def with_plain_line_ends(text: bytes) -> bytes:
    """Replace each `\\r\\n` and `\\r` by `\\n`."""
    return text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


# -- tokens ----------------------------------------------------------------------------------------


class Document(NamedTuple):
    """Tokens of one document, without the end token, and whether it is held out."""

    tokens: Tokens
    held_out: bool


def encode_rows(
    rows: Sequence[bytes], settings: DataConfig, tokenizer: Tokenizer, held_out: bool | None = None
) -> list[list[Document]]:
    """Tokenise the documents of each row; `held_out` selects one side, None both.

    Raises `DataError` as `Tokenizer.encode`.
    """
    kept: list[list[tuple[bytes, bool]]] = []
    for row in rows:
        texts = documents_of(row, settings.source)
        sides = ((text, is_held_out(text, settings.holdout, settings.source)) for text in texts)
        kept.append([(text, side) for text, side in sides if held_out in (None, side)])
    texts = (text for row in kept for text, _ in row)
    tokens: list[Tokens] = []
    while group := list(islice(texts, DOCUMENTS_AT_ONCE)):
        tokens += tokenizer.encode(group)
    each = iter(tokens)
    return [[Document(next(each), side) for _, side in row] for row in kept]


class Packer:
    """Concatenates documents, each as begin tokens, its tokens and the end token, and cuts them
    into rows of T tokens.

    Tokens that do not fill a row wait for the next document.
    """

    def __init__(self, sequence_length: int, tokenizer: Tokenizer) -> None:
        self.sequence_length = sequence_length
        self._dtype, end = np.dtype(token_dtype(tokenizer.vocab_size)), tokenizer.end
        self._begin = np.array(tokenizer.begin, self._dtype).tobytes()
        self._end = b"" if end is None else np.array([end], self._dtype).tobytes()
        self._waiting = bytearray()

    def __len__(self) -> int:
        """Return the number of complete rows."""
        return len(self._waiting) // (self.sequence_length * self._dtype.itemsize)

    def add(self, tokens: Tokens) -> None:
        self._waiting += self._begin
        self._waiting += tokens.astype(self._dtype, copy=False).data
        self._waiting += self._end

    def take(self, rows: int) -> NDArray[Any]:
        """Remove and return the oldest `rows` rows, (rows, T)."""
        assert rows <= len(self), (rows, len(self))
        cut = rows * self.sequence_length * self._dtype.itemsize
        # The buffer itself becomes the array: an in-memory dataset must not exist twice.
        taken, self._waiting = self._waiting, self._waiting[cut:]
        del taken[cut:]
        return np.frombuffer(taken, self._dtype).reshape(rows, self.sequence_length)

    def waiting(self) -> NDArray[Any]:
        """Return a copy of the tokens that were added and not yet taken."""
        return np.frombuffer(bytes(self._waiting), self._dtype)

    def restore(self, waiting: list[int]) -> None:
        self._waiting = bytearray(np.array(waiting, self._dtype).tobytes())
