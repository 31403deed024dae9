"""Codecs: how a chunk of fp32 values becomes bytes on the wire, and back.

    name   bytes for n elements        layout of a payload (little-endian)
    fp32   4 n                         values
    fp16   2 n                         values, IEEE half
    int8   ceil(n/BLOCK) + n           int8 exponent e per block, then int8 code c:
                                       value = c * 2**e
    e3m0   ceil(n/BLOCK) + ceil(n/2)   int8 exponent e per block, then two codes a byte:
                                       value = s * 2**(e + k - 7)

An e3m0 code is a sign bit and three bits k, where k = 0 is the value zero (E3M0 of Streaming
DiLoCo, arXiv 2501.18512). The first half of a block lies in the low nibbles, the second half in the
high ones, so that packing is two long vector operations.

*Contributions* go through `encode` and `accumulate_`, *update records* through `encode_update` and
`apply_update_`: the block codecs send the displacement master - anchor, the float codecs the new
values themselves. Scales are powers of two, so every dequantised value is exact in fp32 and never
subnormal, and `anchor += displacement` is one IEEE rounding per element. That is bit-identical on
any hardware, with or without fused multiply-add, and with flush-to-zero too unless a parameter
itself is subnormal. What an encoding loses stays in master - anchor, and goes into the next
displacement.

Every codec refuses NaN, infinity and magnitudes that only a diverged model has (above LIMIT, or
above the range of half): with DivergedError when encoding, and PayloadError when decoding, before
anything is changed. A block of zeros is exact. The block codecs round magnitudes below about 1e-38
to zero. The codecs in `lossy` are for contributions only.

All functions take contiguous 1-D tensors of at most CHUNK elements in main memory and may be used
from several threads at once: the working buffers, at most 6 MiB, belong to the thread.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from diloco.config import registry
from diloco.errors import PayloadError
from diloco.outer.fragments import BLOCK
from diloco.outer.lossy import Stat2, TopK
from diloco.outer.payloads import (
    LIMIT,
    Codec,
    Integers,
    assert_chunk,
    blockwise,
    buffer,
    exponents_of,
    is_aligned,
    is_within,
    magnitude_of,
    norm_of,
    power_of_two,
    refuse_diverged,
)

__all__ = ["CODECS", "LIMIT", "Codec"]

_MIN_EXPONENT = -126  # of the smallest normal fp32
_HALF_SIGN_AND_LEVEL = 0b1_00111_0000000000 - 0x10000  # as int16


class _FloatCodec(Codec):
    """Values in a floating-point dtype; updates carry the new values themselves."""

    carries_values = publishes = True
    dtype: ClassVar[torch.dtype]
    largest: ClassVar[float]

    def widths(self, numel: int) -> list[int]:
        return [numel * self.dtype.itemsize]

    def encode(self, x: Tensor, out: Tensor) -> None:
        assert_chunk(x, out, self.nbytes(x.numel()))
        refuse_diverged(x, self.name, self.largest)
        if is_aligned(out, self.dtype):
            out.view(self.dtype).copy_(x)
        else:
            out.copy_(buffer("values", self.dtype, x.numel()).copy_(x).view(torch.uint8))

    def decode(self, payload: Tensor, out: Tensor) -> None:
        out.copy_(self.values(payload, out.numel()))

    def accumulate_(self, acc: Tensor, payload: Tensor, weight: float) -> None:
        acc.add_(self.values(payload, acc.numel()), alpha=weight)

    def values(self, payload: Tensor, numel: int) -> Tensor:
        return self.measured(payload, numel)[0]

    def measured(self, payload: Tensor, numel: int) -> tuple[Tensor, float]:
        self._check_length(payload, numel)
        if is_aligned(payload, self.dtype):
            values = payload.view(self.dtype)
        else:
            values = buffer("values", self.dtype, numel)
            values.view(torch.uint8).copy_(payload)
        if self.dtype != torch.float32:
            values = buffer("values", torch.float32, numel).copy_(values)
        norm = norm_of(values)
        if not is_within(values, self.largest, norm):
            excess = f"{self.name} payload holds {magnitude_of(values):g}"
            raise PayloadError(f"{excess}; values must be at most {self.largest:g}")
        return values, norm


class _Fp32(_FloatCodec):
    name = "fp32"
    dtype = torch.float32
    largest = LIMIT


class _Fp16(_FloatCodec):
    name = "fp16"
    dtype = torch.float16
    largest = torch.finfo(torch.float16).max


class _BlockCodec(Codec):
    """Codes with one power-of-two scale per block; updates carry a displacement."""

    publishes = True
    codes_per_byte: ClassVar[int]
    min_exponent: ClassVar[int]
    max_exponent: ClassVar[int]
    unit_exponent: ClassVar[int]  # what decoding adds to the exponent of a block

    @abstractmethod
    def _quantise(self, rows: Tensor, codes: Tensor) -> Integers:
        """Write the codes (r, nbytes) int8 of `rows` (r, n) fp32, and return the exponents (r,)."""

    @abstractmethod
    def _dequantise(self, codes: Tensor, numel: int) -> Tensor:
        """Their values (r, numel) fp32, for exponents of -unit_exponent, in the thread's buffer."""

    def widths(self, numel: int) -> list[int]:
        return [1, -(-numel // self.codes_per_byte)]

    def encode(self, x: Tensor, out: Tensor) -> None:
        assert_chunk(x, out, self.nbytes(x.numel()))
        for rows, exponents, codes in self._blocks(x, out):
            exponents[:] = self._quantise(rows, codes)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        self._check(payload, out.numel())
        for rows, exponents, codes in self._blocks(out, payload):
            scales = power_of_two(exponents, self.unit_exponent)
            torch.mul(self._dequantise(codes, rows.shape[1]), scales, out=rows)

    def accumulate_(self, acc: Tensor, payload: Tensor, weight: float) -> None:
        self._check(payload, acc.numel())
        # With weight 1 products are exact, so sums round alike with or without fused multiply-add.
        for rows, exponents, codes in self._blocks(acc, payload):
            scales = power_of_two(exponents, self.unit_exponent) * weight
            rows.addcmul_(self._dequantise(codes, rows.shape[1]), scales)

    def _check(self, payload: Tensor, numel: int) -> None:
        self._check_length(payload, numel)
        exponents = payload.numpy()[: -(-numel // BLOCK)].view(np.int8)
        lowest, highest = self.min_exponent, self.max_exponent
        if exponents.min() < lowest or exponents.max() > highest:
            outside = f"a block exponent outside {lowest}..{highest}"
            raise PayloadError(f"{self.name} payload holds {outside}")

    def _blocks(self, x: Tensor, payload: Tensor) -> Iterator[tuple[Tensor, Integers, Tensor]]:
        """Values (r, n) fp32, exponents (r,) int8 and codes (r, bytes) int8; full blocks first."""
        blocks = -(-x.numel() // BLOCK)
        parts = [payload[:blocks].view(torch.int8), payload[blocks:].view(torch.int8)]
        for rows, exponents, codes in blockwise(x, parts, [1, BLOCK // self.codes_per_byte]):
            yield rows, exponents.numpy()[:, 0], codes


class _Int8(_BlockCodec):
    """Integers -127..127 times the smallest power of two that fits the largest magnitude."""

    name = "int8"
    codes_per_byte = 1
    min_exponent = _MIN_EXPONENT
    max_exponent = 58  # LIMIT is 64 * 2**58
    unit_exponent = 0

    def _quantise(self, rows: Tensor, codes: Tensor) -> Integers:
        # 127.5 would round to 128: mantissas from 127.5/64 on take the next exponent.
        largest = exponents_of(rows, self.name, round_up_from=127.5 / 64)
        exponents = np.maximum(largest - 6, self.min_exponent)
        # fp32 numbers at 1.5 * 2**(23 + e) are 2**e apart, so one addition scales, rounds (to even)
        # and leaves the code in the low byte: three operations in one pass.
        magic = power_of_two(exponents, 0) * (1.5 * 2**23)
        shifted = torch.add(rows, magic, out=buffer("values", torch.float32, *rows.shape))
        codes.copy_(shifted.view(torch.int32))
        return exponents

    def _dequantise(self, codes: Tensor, numel: int) -> Tensor:
        return buffer("values", torch.float32, *codes.shape).copy_(codes)


class _E3m0(_BlockCodec):
    """A sign and one of seven powers of two, or zero; each value goes to the nearest.

    IEEE half has this format inside it: scaled so that the block's top level is 2**-8, the levels
    are the exponent fields 1 to 7, and the subnormals are what becomes 0 or 1. So the conversion to
    half does the work, and adding half a unit of the exponent rounds to the nearest level.
    """

    name = "e3m0"
    codes_per_byte = 2
    min_exponent = _MIN_EXPONENT + 6  # so that the lowest of the seven levels is a normal number
    max_exponent = 64  # LIMIT is 2**64
    unit_exponent = 8

    def _quantise(self, rows: Tensor, codes: Tensor) -> Integers:
        # 1.5 is the middle of two levels. Half rounds magnitudes within 2**-11 of it up to 1.5, and
        # so must the scale.
        largest = exponents_of(rows, self.name, round_up_from=1.5 - 2**-11)
        exponents = np.maximum(largest, self.min_exponent)
        scales = power_of_two(-exponents, -self.unit_exponent)
        scaled = torch.mul(rows, scales, out=buffer("values", torch.float32, *rows.shape))
        half = buffer("half", torch.float16, *rows.shape).copy_(scaled)
        bits = half.view(torch.int16).add_(0x200)  # s eeeee mmmmmmmmmm
        # numpy shifts to the right in half the time that torch takes.
        np.right_shift(bits.numpy(), 10, out=bits.numpy())
        code = buffer("code", torch.int8, *rows.shape).copy_(bits)  # s s s 0 0 k k k
        sign = buffer("sign", torch.int8, *rows.shape)
        np.right_shift(code.numpy(), 2, out=sign.numpy())
        code.bitwise_and_(7).bitwise_or_(sign.bitwise_and_(8))
        split = codes.shape[1]
        codes.copy_(code[:, :split])
        codes[:, : rows.shape[1] - split].bitwise_or_(code[:, split:].bitwise_left_shift_(4))
        return exponents

    def _dequantise(self, codes: Tensor, numel: int) -> Tensor:
        blocks, split = codes.shape
        half = buffer("half", torch.float16, blocks, numel)
        bits = half.view(torch.int16)
        bits[:, :split].copy_(torch.mul(codes, 16, out=buffer("code", torch.int8, blocks, split)))
        bits[:, split:].copy_(codes[:, : numel - split])
        # Widening copied the sign (bit 7) to bits 8 to 15; a shift by 6 brings it to bit 15, k to
        # bits 10 to 12.
        bits.mul_(1 << 6).bitwise_and_(_HALF_SIGN_AND_LEVEL)
        return buffer("values", torch.float32, blocks, numel).copy_(half)


CODECS: registry.Registry[Codec] = registry.CODECS
for _codec in (_Fp32(), _Fp16(), _Int8(), _E3m0(), Stat2(), TopK()):
    CODECS.add(_codec.name, _codec, _codec.publishes)
