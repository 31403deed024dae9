"""Codecs for contributions that lose so much that the peer keeps what they lost
(`Replica.capture`).

    name    bytes of a block of 4096   parts of a payload (little-endian), each with all blocks
    stat2   8 + 1024                   four bfloat16 levels; a 2-bit code per element
    topk    4 + 96 + 16                two bfloat16 levels; k 12-bit indices; k 2-bit codes

stat2 (MuLoCo, arXiv 2505.23725): the elements of a block fall into four bins of 1.5 sigma around
the mean, the outer two open; a level is the mean of its bin. topk (SparseLoCo, arXiv 2508.15706):
the k = ceil(n / 64) largest magnitudes of a block of n elements, 1.56 %, by ascending index; bit 0
of a code chooses the level, which is the mean of the magnitudes above or below their mean, and bit
1 is the sign. Levels are bfloat16, where the papers take half: it has as many bytes, and no
pseudo-gradient is too small for it. A byte holds four 2-bit codes, one from each quarter of the
block. Two 12-bit indices take three bytes.

These codecs cannot publish updates: the anchors would lack what an update lost until later rounds.
All else is as in `codecs`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from diloco.errors import PayloadError
from diloco.outer.fragments import BLOCK
from diloco.outer.payloads import (
    LIMIT,
    Codec,
    assert_chunk,
    blockwise,
    buffer,
    exponents_of,
    power_of_two,
    refuse_diverged,
)

__all__ = ["Stat2", "TopK"]

_ELEMENTS_PER_KEPT = 64


class _LossyCodec(Codec):
    num_levels: ClassVar[int]  # of a block
    lowest_level: ClassVar[float]

    @abstractmethod
    def _widths(self, numel: int) -> list[int]:
        """`widths` without the levels, which come first."""

    @abstractmethod
    def _encode_rows(self, rows: Tensor, levels: Tensor, *packed: Tensor) -> None:
        """Write levels (r, num_levels) fp32 and packed parts (r, .) uint8 of rows (r, n) fp32."""

    def widths(self, numel: int) -> list[int]:
        return [2 * self.num_levels, *self._widths(numel)]

    def encode(self, x: Tensor, out: Tensor) -> None:
        assert_chunk(x, out, self.nbytes(x.numel()))
        head, *packed = self.pieces(out, x.numel())
        levels = torch.empty(len(head) // 2, dtype=torch.float32)
        for parts in self._blocks(x, levels, packed):
            self._encode_rows(*parts)
        head.copy_(levels.bfloat16().view(torch.uint8))

    def _blocks(
        self, x: Tensor, levels: Tensor, packed: Sequence[Tensor]
    ) -> Iterator[tuple[Tensor, ...]]:
        """Elements (r, n), levels (r, num_levels) and packed parts (r, .); full blocks first."""
        return blockwise(x, [levels, *packed], [self.num_levels, *self._widths(BLOCK)])

    def _read(self, payload: Tensor, x: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """`_blocks` of a payload, of which `x` has the shape; raises PayloadError."""
        head, *packed = self.pieces(payload, x.numel())
        # a copy, because bfloat16 needs an even address
        levels = head.clone().view(torch.bfloat16).float()
        low, high = torch.aminmax(levels)
        if not (low >= self.lowest_level and high <= LIMIT):  # NaN fails both
            outside = f"a level outside {self.lowest_level:g}..{LIMIT:g}"
            raise PayloadError(f"{self.name} payload holds {outside}")
        return self._blocks(x, levels, packed)


class Stat2(_LossyCodec):
    name = "stat2"
    num_levels = 4
    lowest_level = -LIMIT

    def _widths(self, numel: int) -> list[int]:
        return [_packed(2, numel)]

    def _encode_rows(self, rows: Tensor, levels: Tensor, *packed: Tensor) -> None:
        # A power of two as scale rounds nothing, and squares then neither overflow nor vanish.
        exponents = np.maximum(exponents_of(rows, self.name, round_up_from=2.0), -126)
        down, up = power_of_two(-exponents, 0), power_of_two(exponents, 0)
        scaled = torch.mul(rows, down, out=buffer("values", torch.float32, *rows.shape))
        means, codes = _statistical(scaled)
        torch.mul(means, up, out=levels)
        _pack(codes, *packed)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        for rows, levels, packed in self._read(payload, out):
            torch.gather(levels, 1, _unpack(packed, rows.shape[1]).long(), out=rows)


class TopK(_LossyCodec):
    name = "topk"
    num_levels = 2
    lowest_level = 0.0

    def _widths(self, numel: int) -> list[int]:
        return [_packed(12, _kept(numel)), _packed(2, _kept(numel))]

    def _encode_rows(self, rows: Tensor, levels: Tensor, *packed: Tensor) -> None:
        refuse_diverged(rows, self.name, LIMIT)
        magnitudes = torch.abs(rows, out=buffer("values", torch.float32, *rows.shape))
        largest = magnitudes.topk(_kept(rows.shape[1]), dim=1, sorted=False).indices
        indices = largest.sort(dim=1).values
        pair, codes = _two_levels(rows.gather(1, indices))
        levels.copy_(pair)
        _pack_indices(indices, packed[0])
        _pack(codes, packed[1])

    def decode(self, payload: Tensor, out: Tensor) -> None:
        parts = self._parts(payload, out)
        out.zero_()
        for rows, indices, values in parts:
            rows.scatter_(1, indices, values)

    def accumulate_(self, acc: Tensor, payload: Tensor, weight: float) -> None:
        for rows, indices, values in self._parts(payload, acc):
            rows.scatter_add_(1, indices, values * weight)

    def _parts(self, payload: Tensor, x: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Validated rows (r, n), indices (r, k) int64 and values (r, k) fp32; full blocks first."""
        parts = []
        for rows, levels, packed_indices, packed_codes in self._read(payload, x):
            numel, kept = rows.shape[1], _kept(rows.shape[1])
            indices = _unpack_indices(packed_indices, kept)
            if bool((indices[:, -1] >= numel).any()) or bool((indices.diff(dim=1) <= 0).any()):
                wrong = f"indices that do not ascend from 0 to {numel - 1}"
                raise PayloadError(f"topk payload holds {wrong}")
            codes = _unpack(packed_codes, kept)
            values = levels.gather(1, (codes & 1).long())
            parts.append((rows, indices, torch.where(codes >= 2, -values, values)))
        return parts


def _statistical(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """Levels (r, 4) fp32 and codes (r, n) uint8 of rows (r, n) fp32 with magnitudes below 2.

    A code counts how many of the bounds mean - 1.5 sigma, mean, mean + 1.5 sigma the element
    reaches. An empty bin has level 0.
    """
    count, total = scaled.shape[1], scaled.sum(1)
    mean, squares = total / count, torch.linalg.vector_norm(scaled, dim=1).square_()
    sigma = (squares / count - mean.square()).clamp_(min=0).sqrt_()
    codes = torch.zeros(scaled.shape, dtype=torch.uint8)
    sums, counts = [total], [torch.full_like(total, count)]
    for bound in (mean - 1.5 * sigma, mean, mean + 1.5 * sigma):
        reached = scaled >= bound.unsqueeze(1)
        codes += reached
        # products and sums of booleans take five times as long as those of floats
        members = reached.float()
        sums.append(torch.linalg.vecdot(scaled, members))
        counts.append(members.sum(1))
    nothing = torch.zeros(len(scaled), 1, dtype=torch.float32)
    in_bin = -torch.stack(counts, dim=1).diff(dim=1, append=nothing)
    means = -torch.stack(sums, dim=1).diff(dim=1, append=nothing) / in_bin.clamp(min=1)
    return means.where(in_bin > 0, 0.0), codes


def _two_levels(kept: Tensor) -> tuple[Tensor, Tensor]:
    """Levels (r, 2) fp32, lower first, and codes (r, k) uint8 of the kept values (r, k) fp32."""
    magnitudes = kept.abs()
    upper = magnitudes > magnitudes.mean(1, keepdim=True)
    sums = [(magnitudes * members).sum(1) for members in (~upper, upper)]
    counts = [members.sum(1).clamp(min=1) for members in (~upper, upper)]
    codes = upper.to(torch.uint8) + 2 * (kept < 0).to(torch.uint8)
    return torch.stack(sums, dim=1) / torch.stack(counts, dim=1), codes


def _kept(numel: int) -> int:
    """Number of elements of a block that topk sends."""
    return -(-numel // _ELEMENTS_PER_KEPT)


def _packed(bits: int, count: int) -> int:
    """Bytes of `count` codes of `bits` bits each."""
    return -(-bits * count // 8)


def _pack(codes: Tensor, packed: Tensor) -> None:
    """Pack 2-bit codes (r, n) uint8 into (r, ceil(n/4)) uint8: one from each quarter in a byte."""
    width = packed.shape[1]
    packed.zero_()
    for quarter in range(4):
        part = codes[:, quarter * width : (quarter + 1) * width]
        packed[:, : part.shape[1]].bitwise_or_(part.bitwise_left_shift(2 * quarter))


def _unpack(packed: Tensor, numel: int) -> Tensor:
    """The inverse of `_pack`: (r, numel) uint8."""
    shifted = [packed.bitwise_right_shift(2 * quarter) for quarter in range(4)]
    return torch.cat(shifted, dim=1)[:, :numel].bitwise_and_(3)


def _pack_indices(indices: Tensor, packed: Tensor) -> None:
    """Pack 12-bit indices (r, k) into (r, ceil(3k/2)) uint8, little-endian, two in three bytes."""
    pairs = torch.nn.functional.pad(indices, (0, indices.shape[1] % 2)).view(len(indices), -1, 2)
    first, second = pairs.unbind(2)
    triples = torch.stack([first & 255, (first >> 8) | ((second & 15) << 4), second >> 4], dim=2)
    packed.copy_(triples.view(len(indices), -1)[:, : packed.shape[1]])


def _unpack_indices(packed: Tensor, kept: int) -> Tensor:
    """The inverse of `_pack_indices`: (r, kept) int64."""
    rows, width = packed.shape
    triples = torch.nn.functional.pad(packed.long(), (0, -width % 3)).view(rows, -1, 3)
    low, middle, high = triples.unbind(2)
    pairs = torch.stack([low | ((middle & 15) << 8), (middle >> 4) | (high << 4)], dim=2)
    return pairs.view(rows, -1)[:, :kept]
