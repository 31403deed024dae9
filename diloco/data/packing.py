"""Splitting documents into training and held-out text, and packing tokens into sequences."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco.data.tokenizers import Tokenizer, Tokens

__all__ = ["Packer", "is_held_out", "token_dtype"]


def is_held_out(document: bytes, fraction: float) -> bool:
    """Whether a document is kept for evaluation: its hash, read as a number in [0, 1), is below `fraction`.

    The seed has no influence, so that runs with different seeds are evaluated on the same text. Equal documents are on
    the same side: no exact copy of a held-out document is trained on, but a near copy may be.
    """
    number = int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "big")
    return number < fraction * 2.0**64


def token_dtype(vocab_size: int) -> type[np.integer[Any]]:
    """The smallest of uint8, uint16 and int32 that holds every token of the vocabulary."""
    return np.uint8 if vocab_size <= 1 << 8 else np.uint16 if vocab_size <= 1 << 16 else np.int32


class Packer:
    """Concatenates the tokens of documents, each followed by the end token, and cuts them into rows of T tokens.

    No token is lost or repeated: tokens that do not fill a row wait for the next document. Memory: the waiting tokens,
    in the smallest integer type.
    """

    def __init__(self, sequence_length: int, tokenizer: Tokenizer) -> None:
        self.sequence_length = sequence_length
        self._dtype = np.dtype(token_dtype(tokenizer.vocab_size))
        self._end = b"" if tokenizer.end is None else np.array([tokenizer.end], self._dtype).tobytes()
        self._waiting = bytearray()

    def __len__(self) -> int:
        """The number of complete rows."""
        return len(self._waiting) // (self.sequence_length * self._dtype.itemsize)

    def add(self, tokens: Tokens) -> None:
        """Appends one document."""
        self._waiting += tokens.astype(self._dtype, copy=False).data
        self._waiting += self._end

    def take(self, rows: int) -> NDArray[Any]:
        """Removes and returns the oldest `rows` rows, (rows, T)."""
        assert rows <= len(self), (rows, len(self))
        cut = rows * self.sequence_length * self._dtype.itemsize
        # The buffer itself becomes the array: an in-memory dataset is taken at once and must not exist twice.
        taken, self._waiting = self._waiting, self._waiting[cut:]
        del taken[cut:]
        return np.frombuffer(taken, self._dtype).reshape(rows, self.sequence_length)

    def waiting(self) -> list[int]:
        """The tokens that were added and not yet taken."""
        tokens: list[int] = np.frombuffer(bytes(self._waiting), self._dtype).tolist()
        return tokens

    def restore(self, waiting: list[int]) -> None:
        """Puts back what `waiting` returned."""
        self._waiting = bytearray(np.array(waiting, self._dtype).tobytes())
