"""Splits documents into training and held-out text, packs tokens into sequences, and puts these in
a seeded order."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco.data.tokenizers import Tokenizer, Tokens, token_dtype

_FEISTEL_ROUNDS = 6


def is_held_out(document: bytes, fraction: float, source: str = "") -> bool:
    """Whether a document is kept for evaluation: its `number_of`, read as one in [0, 1), is below
    `fraction`."""
    return number_of(document, source) < fraction * 2.0**64


def number_of(document: bytes, source: str = "") -> int:
    """The hash of a document, below 2**64, whatever its line ends are, and the white space behind
    it.

    Equal documents are on the same side in all runs: no peer trains on a copy of a held-out
    document. Of a text file it counts as whole lines even if the last one has no end.
    """
    content = with_plain_line_ends(document).rstrip() + (
        b"\n" if source in ("stdlib", "text") else b""
    )
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def with_plain_line_ends(text: bytes) -> bytes:
    """The text with `\\n` for each `\\r\\n` and `\\r`."""
    return text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


class Packer:
    """Concatenates the tokens of documents, each followed by the end token, and cuts them into rows
    of T tokens.

    Tokens that do not fill a row wait for the next document.
    """

    def __init__(self, sequence_length: int, tokenizer: Tokenizer) -> None:
        self.sequence_length = sequence_length
        self._dtype = np.dtype(token_dtype(tokenizer.vocab_size))
        self._end = (
            b"" if tokenizer.end is None else np.array([tokenizer.end], self._dtype).tobytes()
        )
        self._waiting = bytearray()

    def __len__(self) -> int:
        """The number of complete rows."""
        return len(self._waiting) // (self.sequence_length * self._dtype.itemsize)

    def add(self, tokens: Tokens) -> None:
        self._waiting += tokens.astype(self._dtype, copy=False).data
        self._waiting += self._end

    def take(self, rows: int) -> NDArray[Any]:
        """Removes and returns the oldest `rows` rows, (rows, T)."""
        assert rows <= len(self), (rows, len(self))
        cut = rows * self.sequence_length * self._dtype.itemsize
        # The buffer itself becomes the array: an in-memory dataset is taken at once and must not
        # exist twice.
        taken, self._waiting = self._waiting, self._waiting[cut:]
        del taken[cut:]
        return np.frombuffer(taken, self._dtype).reshape(rows, self.sequence_length)

    def waiting(self) -> NDArray[Any]:
        """A copy of the tokens that were added and not yet taken."""
        return np.frombuffer(bytes(self._waiting), self._dtype)

    def restore(self, waiting: list[int]) -> None:
        self._waiting = bytearray(np.array(waiting, self._dtype).tobytes())


def permuted(positions: NDArray[np.int64], size: int, key: str) -> NDArray[np.int64]:
    """Applies the permutation of range(size) that `key` names to `positions`, each in [0, size):
    same shape, int64.

    A Feistel network permutes the numbers below the next power of four. A result outside of the
    range goes through the network again until it is inside (fewer than 4 passes on average). It
    needs no memory, and is equal with every numpy version, which `numpy.random` does not promise
    (NEP 19).
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    round_keys = _round_keys(key)
    values = _network(positions.astype(np.uint64), half_bits, round_keys)
    while (outside := values >= size).any():
        values[outside] = _network(values[outside], half_bits, round_keys)
    return values.astype(np.int64)


@functools.lru_cache(maxsize=64)
def _round_keys(key: str) -> tuple[np.uint64, ...]:
    digest = hashlib.blake2b(key.encode(), digest_size=8 * _FEISTEL_ROUNDS).digest()
    return tuple(np.frombuffer(digest, "<u8").astype(np.uint64))


def _network(
    values: NDArray[np.uint64], half_bits: int, round_keys: tuple[np.uint64, ...]
) -> NDArray[np.uint64]:
    mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    left, right = values >> shift, values & mask
    for key in round_keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    joined: NDArray[np.uint64] = (left << shift) | right
    return joined


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele et al. 2014): every output bit depends on every input
    bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
