"""The base of all codecs: their interface, checks of values, and the working memory of a thread."""

from __future__ import annotations

import math
import mmap
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diloco.errors import DivergedError, PayloadError
from diloco.outer.fragments import BLOCK, CHUNK, chunks

assert sys.byteorder == "little", "payloads are views of tensors"

LIMIT = 2.0**64
"""The largest magnitude that is sent or accepted. Sums of such values with weights up to 2**50
tokens are finite."""

SAFE = 1e15
"""Norms above it or below its inverse are computed in float64: squares of what a peer may send
overflow fp32."""

Integers = NDArray[np.signedinteger]
Chunk = TypeVar("Chunk")
Result = TypeVar("Result")


class Codec(ABC):
    """One encoding of chunks. Stateless: `CODECS[name]` is the instance.

    Shapes: `x`, `out` of decode, `acc`, `master` and `anchor` are (n,) fp32; payloads are
    (nbytes(n),) uint8. A value to be sent that is not finite or too large raises DivergedError. An
    invalid payload raises PayloadError before anything is changed.
    """

    name: ClassVar[str]
    carries_values: ClassVar[bool] = False
    """True if an update holds the new values, which need no earlier anchor, rather than a
    displacement."""
    publishes: ClassVar[bool] = False
    """True if it may encode updates: `apply_update_` has equal bits on all machines."""

    @abstractmethod
    def widths(self, numel: int) -> list[int]:
        """Bytes of each part of the payload of one block, of 1 to BLOCK elements."""

    def _sizes(self, numel: int) -> list[int]:
        full, rest = divmod(numel, BLOCK)
        widths = self.widths(BLOCK)
        last = self.widths(rest) if rest else [0] * len(widths)
        return [full * width + end for width, end in zip(widths, last, strict=True)]

    def nbytes(self, numel: int) -> int:
        """Bytes of the payload of `numel` elements."""
        return sum(self._sizes(numel))

    def pieces(self, payload: Tensor, numel: int) -> tuple[Tensor, ...]:
        """Views of a payload's parts, each with all blocks. PayloadError if the length is wrong."""
        self._check_length(payload, numel)
        return payload.split_with_sizes(self._sizes(numel))

    @abstractmethod
    def encode(self, x: Tensor, out: Tensor) -> None:
        """Write the payload of `x` to `out`."""

    @abstractmethod
    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write the decoded values to `out`."""

    def values(self, payload: Tensor, numel: int) -> Tensor:
        """The decoded values (numel,) fp32, in the payload or in this thread's buffer "chunk"."""
        values = buffer("chunk", torch.float32, numel)
        self.decode(payload, values)
        return values

    def measured(self, payload: Tensor, numel: int) -> tuple[Tensor, float]:
        """The decoded values, as `values` returns them, and their L2 norm."""
        values = self.values(payload, numel)
        return values, norm_of(values)

    def accumulate_(self, acc: Tensor, payload: Tensor, weight: float) -> None:
        """acc += weight * decoded. With weight 1 the sum is the only rounding."""
        values = buffer("values", torch.float32, acc.numel())
        self.decode(payload, values)
        acc.add_(values, alpha=weight)

    def encode_update(self, master: Tensor, anchor: Tensor, out: Tensor) -> None:
        """Write the update that moves `anchor` to `master`, up to the codec's error."""
        if not self.carries_values:
            displacement = buffer("displacement", torch.float32, master.numel())
            master = torch.sub(master, anchor, out=displacement)
        self.encode(master, out)

    def apply_update_(self, anchor: Tensor, payload: Tensor) -> None:
        """Move the anchor by an update, with a bit-identical result on all peers."""
        if self.carries_values:
            self.decode(payload, anchor)
        else:
            self.accumulate_(anchor, payload, 1.0)

    def updated(self, anchor: Tensor, payload: Tensor) -> Tensor:
        """The anchor after `apply_update_`: (n,) fp32, in the payload or a buffer."""
        if self.carries_values:
            return self.values(payload, anchor.numel())
        after = buffer("after", torch.float32, anchor.numel()).copy_(anchor)
        self.accumulate_(after, payload, 1.0)
        return after

    def _check_length(self, payload: Tensor, numel: int) -> None:
        if payload.numel() != self.nbytes(numel):
            what = f"{self.name} payload of {numel} elements"
            raise PayloadError(f"{what} has {payload.numel()} bytes, not {self.nbytes(numel)}")


class Layout:
    """Places of the chunks of a fragment in its values (`ranges`) and in its payload (`nbytes`)."""

    def __init__(self, codec: Codec, numel: int) -> None:
        self.ranges = tuple(chunks(numel))
        self._sizes = [codec.nbytes(stop - start) for start, stop in self.ranges]
        self.nbytes = sum(self._sizes)

    def split(self, payload: Tensor) -> list[tuple[Tensor, tuple[int, int]]]:
        """Views of the chunks of a whole payload, each with its range; raises PayloadError."""
        if (nbytes := payload.numel()) != self.nbytes:
            raise PayloadError(
                f"{self.nbytes} bytes of a fragment are expected, these are {nbytes}"
            )
        return list(zip(payload.split_with_sizes(self._sizes), self.ranges, strict=True))


def empty_payload(nbytes: int) -> Tensor:
    """Memory (uint8) for a whole payload or update, which goes back to the system with the tensor.

    Shared memory, which `mmap` makes by default, would take 1.6 times as long to write to, and
    twice as long to free.
    """
    if nbytes < CHUNK:
        return torch.empty(nbytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8)


def magnitude_of(x: Tensor) -> float:
    """The largest magnitude, or NaN if any value is NaN."""
    low, high = torch.aminmax(x)
    return float(torch.maximum(high, -low))


def is_within(x: Tensor, largest: float, norm: float) -> bool:
    """True if no magnitude of fp32 values, which have this L2 norm, is above `largest` or NaN.

    The norm takes half the time of the extremes, and bounds them; the factor 2 is far above its
    rounding.
    """
    return norm <= largest / 2 or magnitude_of(x) <= largest


def norm_of(x: Tensor) -> float:
    """L2 norm of (n,) fp32 values; finite for all values that a codec carries."""
    norm = float(torch.linalg.vector_norm(x))
    if 1 / SAFE < norm < SAFE:
        return norm
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def refuse_diverged(x: Tensor, name: str, largest: float) -> None:
    """Raises DivergedError if a magnitude of fp32 values is above `largest` or NaN."""
    if not is_within(x, largest, norm_of(x)):
        raise DivergedError(
            f"training diverged: a value of {magnitude_of(x):g} cannot be sent ({name} carries at"
            f" most {largest:g}); resume from an earlier checkpoint with a lower inner.lr or"
            " outer.lr"
        )


def exponents_of(rows: Tensor, name: str, round_up_from: float) -> Integers:
    """Exponents (r,) of the largest magnitudes of rows (r, n): 2**exponent <= magnitude <
    2**(exponent + 1).

    From a mantissa of `round_up_from` on, a multiple of 2**-23 in (1, 2], it is one more. A row of
    zeros or subnormals gives -127. Raises DivergedError if a value is not finite or too large.
    """
    # faster than `abs` and one maximum
    magnitudes = np.maximum(rows.amax(1).numpy(), -rows.amin(1).numpy())
    refuse_diverged(torch.from_numpy(magnitudes), name, LIMIT)
    bits: Integers = magnitudes.view(np.int32) + int((2 - round_up_from) * 2**23)
    return (bits >> 23) - 127


def blockwise(
    x: Tensor, parts: Sequence[Tensor], widths: Sequence[int]
) -> Iterator[tuple[Tensor, ...]]:
    """Yield `x` and its parts as rows, one per block: all full blocks, then the rest.

    `widths` are the elements of each part that belong to a full block.
    """
    full, rest = divmod(x.numel(), BLOCK)
    columns = list(zip([x, *parts], [BLOCK, *widths], strict=True))
    if full:
        yield tuple(part[: full * width].view(full, width) for part, width in columns)
    if rest:
        yield tuple(part[full * width :].view(1, -1) for part, width in columns)


def power_of_two(exponents: Integers, shift: int) -> Tensor:
    """2**(exponent + shift), exactly, for sums in -126..127: (r,) -> (r, 1) fp32."""
    bits = (exponents.astype(np.int32) + (127 + shift)) << 23
    return torch.from_numpy(bits.view(np.float32)).unsqueeze(1)


def is_aligned(payload: Tensor, dtype: torch.dtype) -> bool:
    """True if torch can view the bytes as `dtype`. A slice of a larger message may lie at any
    offset."""
    return not (payload.storage_offset() % dtype.itemsize or payload.data_ptr() % dtype.itemsize)


def assert_chunk(x: Tensor, out: Tensor, nbytes: int) -> None:
    """Assert that `x` is one chunk, and that `out` has the size of its payload."""
    one_chunk = x.dtype == torch.float32 and x.dim() == 1 and 0 < x.numel() <= CHUNK
    assert one_chunk, "values must be one fp32 chunk"
    assert out.dtype == torch.uint8 and out.numel() == nbytes, f"out must be {nbytes} bytes"


def over_chunks(work: Callable[[Chunk], Result], chunks: Sequence[Chunk]) -> list[Result]:
    """Results of `work` for each chunk, in order; raises what it raises, once all have ended.

    Where torch has several threads (`train.threads`), as many share out the chunks, and each
    computes alone. In one operation on one chunk they would start and wait longer than they work.
    """
    threads = torch.get_num_threads()
    if min(threads, len(chunks)) <= 1:
        return [work(chunk) for chunk in chunks]
    pool, work = _pool(threads), torch.no_grad()(work)
    works = [pool.submit(work, chunk) for chunk in chunks]
    wait(works)
    return [done.result() for done in works]


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    pool, begun = ThreadPoolExecutor(threads, "chunks"), threading.Barrier(threads)

    def begin() -> None:
        torch.get_num_threads()  # a new thread copies the process's number at its first call
        torch.set_num_threads(1)  # also sets the process's number, which is restored below
        begun.wait()

    wait([pool.submit(begin) for _ in range(threads)])
    torch.set_num_threads(threads)
    return pool


class _Buffers(threading.local):
    """Working memory of one thread, and views of it: making a view takes as long as an operation on
    10,000 elements."""

    def __init__(self) -> None:
        self.memory: dict[tuple[str, torch.dtype], Tensor] = {}
        self.views: dict[tuple[object, ...], Tensor] = {}


_buffers = _Buffers()


def buffer(name: str, dtype: torch.dtype, *shape: int) -> Tensor:
    """This thread's buffer of that name and dtype in that shape, as it was last written; at most
    CHUNK elements.

    Allocating a chunk would take ten times as long as a pass over it, as the system maps new pages.
    """
    view = _buffers.views.get((name, dtype, shape))
    if view is None:
        # memory allocated in inference mode can never be written outside of it
        with torch.inference_mode(False):
            if (name, dtype) not in _buffers.memory:
                _buffers.memory[name, dtype] = torch.empty(CHUNK, dtype=dtype, device="cpu")
            view = _buffers.memory[name, dtype][: math.prod(shape)].view(shape)
        if len(_buffers.views) > 100:  # each fragment may end in a chunk of another length
            _buffers.views.clear()
        _buffers.views[name, dtype, shape] = view
    return view
