"""Merkle roots: one digest names many blocks of bytes, and a few hashes prove that a block is one of them.

    leaf    blake3 with the key of leaves (block)
    node    blake3 with the key of nodes (left, right)      a last node without a neighbour moves up as it is
    root    blake3 with the key of roots (number of leaves, top)

The keys, which everybody knows, keep a node from passing for a block. The root contains the number of leaves, so a path
has one length that is valid, and a proof says at which index a block stands (the tree is that of RFC 6962, with another
label for the root).

A peer that signs the root over its payload cannot show another payload later. A leaf of a payload is what its codec
makes of LEAF elements alone (`Codec.cut`), and a chunk ends where a leaf ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

from blake3 import blake3
from torch import Tensor

from diloco.outer.fragments import BLOCK, chunks
from diloco.outer.payloads import Codec

__all__ = ["LEAF", "Tree", "leaf", "leaves", "payload_root", "root", "verify"]

LEAF = 4 * BLOCK  # elements of a payload under one leaf

_LEAF, _NODE, _ROOT = (f"diloco merkle {kind}".encode().ljust(32, b"\0") for kind in ("leaf", "node", "root"))


def leaf(block: bytes | memoryview, *more: bytes | memoryview) -> bytes:
    """The hash of one block (32 bytes), given in pieces. It takes a third of the time if the first is the longest."""
    hashed = blake3(block, key=_LEAF)
    for piece in more:
        hashed.update(piece)
    return hashed.digest()


def leaves(codec: Codec, payload: Tensor, numel: int) -> list[bytes]:
    """The hashes of all leaves of the payload (uint8) of one chunk of `numel` elements; of each, its last piece first.

    A syncer calls it chunk by chunk, as they arrive.
    """
    pieces = [piece.numpy().data for piece in reversed(codec.pieces(payload, numel))]
    return [
        leaf(*[piece[start:stop] for piece, start, stop in zip(pieces, starts, stops, strict=True)])
        for starts, stops in pairwise(_ends(codec, numel))
    ]


@lru_cache(64)
def _ends(codec: Codec, numel: int) -> tuple[list[int], ...]:
    """Where leaves begin and end in the pieces of a payload of `numel` elements, the last piece first."""
    return tuple(codec.sizes(end)[::-1] for end in (*range(0, numel, LEAF), numel))


class Tree:
    """All nodes over the hashes of at least one leaf."""

    def __init__(self, hashes: Sequence[bytes]) -> None:
        self._levels = [hashes]
        while len(self._levels[-1]) > 1:
            level = self._levels[-1]
            above = [_node(left, right) for left, right in zip(level[::2], level[1::2], strict=False)]
            self._levels.append([*above, level[-1]] if len(level) % 2 else above)

    @property
    def root(self) -> bytes:
        """32 bytes that name all leaves."""
        return _labelled(len(self._levels[0]), self._levels[-1][0])

    def path(self, index: int) -> list[bytes]:
        """What proves the leaf at that index: the neighbours on its way up, at most log2 of the number of leaves."""
        assert 0 <= index < len(self._levels[0]), f"{index} is none of {len(self._levels[0])} leaves"
        found = []
        for level in self._levels[:-1]:
            if index ^ 1 < len(level):
                found.append(level[index ^ 1])
            index //= 2
        return found


def root(hashes: Sequence[bytes]) -> bytes:
    """The root (32 bytes) over the hashes of at least one leaf."""
    return Tree(hashes).root


def verify(top: bytes, hashed: bytes, index: int, count: int, neighbours: Sequence[bytes]) -> bool:
    """Whether the leaf of that hash stands at `index` among the `count` leaves that the root `top` names."""
    if not 0 <= index < count:
        return False
    left, width = iter(neighbours), count
    for _ in range((count - 1).bit_length()):
        if index ^ 1 < width:
            neighbour = next(left, None)
            if neighbour is None:
                return False
            hashed = _node(neighbour, hashed) if index % 2 else _node(hashed, neighbour)
        index, width = index // 2, -(-width // 2)
    return next(left, None) is None and _labelled(count, hashed) == top


def payload_root(payloads: Iterable[Tensor], codec: Codec, numel: int) -> bytes:
    """The root (32 bytes) of a whole contribution or update, given as the payloads (uint8) of its chunks in order."""
    hashes: list[bytes] = []
    for payload, (start, stop) in zip(payloads, chunks(numel), strict=True):
        hashes += leaves(codec, payload, stop - start)
    return root(hashes)


def _node(left: bytes, right: bytes) -> bytes:
    return blake3(left + right, key=_NODE).digest()


def _labelled(count: int, top: bytes) -> bytes:
    return blake3(count.to_bytes(8, "big") + top, key=_ROOT).digest()
