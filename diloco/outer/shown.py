"""What a syncer shows to auditors: parts of contributions and updates, with their paths to a root that is signed.

    contribution or update, in the payloads of its chunks  --show-->  Shown  --opens-->  its part is under the root

`merkle` has one tree of leaves per contribution or update. A part (see `audit.parts`) is one leaf, or several in a row.

Memory: the syncer of a fragment keeps the contributions to its newest `VERSIONS` versions as they came: with int8 a
quarter of a fp32 copy of the fragment for each contribution. Nothing is copied.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from diloco.config import OuterConfig
from diloco.outer import fragments, merkle
from diloco.outer.fragments import Fragment
from diloco.outer.merkle import Tree
from diloco.outer.payloads import Codec
from diloco.outer.recompute import Part

__all__ = ["VERSIONS", "Kept", "Shown", "leaf_count", "opens", "part_at", "part_count", "show"]

VERSIONS = 2  # An auditor that asks when a version is adopted is answered, even if the next one is made meanwhile.


class Shown(NamedTuple):
    """A part of a contribution or update.

    Attributes:
        payload: (bytes,) uint8, what the codec makes of the part's elements alone.
        paths: of each leaf of the part in order, from it to the root (see `merkle.path`).
    """

    payload: Tensor
    paths: Sequence[Sequence[bytes]]


def leaf_count(numel: int) -> int:
    """Leaves of a payload of so many elements."""
    return _leaf_at(numel - 1) + 1


def part_count(fragment: Fragment, settings: OuterConfig) -> int:
    """In how many parts a fragment is audited: with `rda` a part has to hold whole pieces of tensors."""
    return -(-fragment.numel // fragments.CHUNK) if settings.merge == "rda" else leaf_count(fragment.numel)


def part_at(fragment: Fragment, settings: OuterConfig, number: int) -> Part | None:
    """The part of that number, which is a leaf, or a chunk with `rda`; None if there is none."""
    if not 0 <= number < part_count(fragment, settings):
        return None
    size = fragments.CHUNK if settings.merge == "rda" else merkle.LEAF
    chunk, at = divmod(number, -(-fragments.CHUNK // size))
    stop = min((chunk + 1) * fragments.CHUNK, fragment.numel)
    start = chunk * fragments.CHUNK + at * size
    return Part(fragment, start, min(start + size, stop))


def show(codec: Codec, payloads: Sequence[Tensor], tree: Tree, part: Part) -> Shown:
    """A part of the payloads (uint8) of all chunks, whose leaves the tree has."""
    chunk, at = divmod(part.start, fragments.CHUNK)
    numel = min((chunk + 1) * fragments.CHUNK, part.fragment.numel) - chunk * fragments.CHUNK
    payload = codec.cut(payloads[chunk], numel, at, at + part.numel)
    return Shown(payload, [tree.path(index) for index in _leaves(part)])


def opens(codec: Codec, root: bytes, part: Part, shown: Shown) -> bool:
    """Whether the payload that the root names has this part. `PayloadError` when it is none of the part's length."""
    hashes, indices = merkle.leaves(codec, shown.payload, part.numel), _leaves(part)
    if len(shown.paths) != len(indices):
        return False
    count = leaf_count(part.fragment.numel)
    rows = zip(hashes, indices, shown.paths, strict=True)
    return all(merkle.verify(root, one, index, count, path) for one, index, path in rows)


class Kept:
    """The contributions to one version, by peer the payloads (uint8) of all chunks.

    `hashes` has those of the leaves of some payloads; the others are hashed once they are asked for.
    """

    def __init__(
        self, codec: Codec, numel: int, version: int, payloads: Mapping[str, Sequence[Tensor]],
        hashes: Mapping[str, Sequence[bytes]] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.version, self._codec, self._payloads = version, codec, payloads
        self._numels = [stop - start for start, stop in fragments.chunks(numel)]
        self._hashes, self._trees = dict(hashes), dict[str, Tree]()
        self.peers = sorted(payloads)
        self.asked: Counter[str] = Counter()  # parts, by auditor

    def show(self, part: Part) -> list[Shown]:
        """A part of what each of `peers` contributed."""
        return [show(self._codec, self._payloads[peer], self._tree(peer), part) for peer in self.peers]

    def _tree(self, peer: str) -> Tree:
        if peer not in self._trees:
            hashes = self._hashes.pop(peer, None)
            if hashes is None:
                rows = zip(self._payloads[peer], self._numels, strict=True)
                hashes = [one for payload, numel in rows for one in merkle.leaves(self._codec, payload, numel)]
            self._trees[peer] = Tree(hashes)
        return self._trees[peer]


def _leaf_at(element: int) -> int:
    """The leaf with this element of a fragment. A chunk ends where a leaf ends."""
    chunk, at = divmod(element, fragments.CHUNK)
    return chunk * -(-fragments.CHUNK // merkle.LEAF) + at // merkle.LEAF


def _leaves(part: Part) -> range:
    return range(_leaf_at(part.start), _leaf_at(part.stop - 1) + 1)
