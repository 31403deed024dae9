"""A seeded permutation of any size that needs no memory and starts anywhere.

A Feistel network permutes the numbers below the next power of four. A result outside of the range goes through the
network again until it is inside (cycle walking: fewer than 4 passes on average). Integer
arithmetic alone makes the permutation equal on every machine and with every numpy version; `numpy.random` does not
promise that (NEP 19).
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np
from numpy.typing import NDArray

__all__ = ["permuted"]

_ROUNDS = 6


def permuted(positions: NDArray[np.int64], size: int, key: str) -> NDArray[np.int64]:
    """Applies the permutation of range(size) that `key` names to `positions`, each in [0, size): same shape, int64."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    round_keys = _round_keys(key)
    values = _network(positions.astype(np.uint64), half_bits, round_keys)
    while (outside := values >= size).any():
        values[outside] = _network(values[outside], half_bits, round_keys)
    return values.astype(np.int64)


@functools.lru_cache(maxsize=64)
def _round_keys(key: str) -> tuple[np.uint64, ...]:
    digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
    return tuple(np.frombuffer(digest, "<u8").astype(np.uint64))


def _network(values: NDArray[np.uint64], half_bits: int, round_keys: tuple[np.uint64, ...]) -> NDArray[np.uint64]:
    mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    left, right = values >> shift, values & mask
    for key in round_keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    joined: NDArray[np.uint64] = (left << shift) | right
    return joined


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele et al. 2014): every output bit depends on every input bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
