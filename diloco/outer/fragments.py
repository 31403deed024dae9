"""Cuts a model into fragments, and copies chunks of a fragment out of the parameters and back.

A fragment is a list of slices of flattened parameters, and is addressed as one flat fp32 vector:

    parameters   [ embed ........ ][ layer.0 .. ][ layer.1 .. ][ head ........ ]
    fragments    [ 0 .................. ][ 1 .................. ][ 2 .......... ]     partition()
    or, strided  [ 1 ......... ][ 0 ...... ][ 1 ...... ][ 0 .................. ]
    chunks       [ CHUNK ][ CHUNK ][ .. ]                                            chunks()

A chunk fits into a CPU cache and into a network block. Callers work chunk by chunk, so none needs a
second copy of a fragment.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from diloco.errors import ConfigError

BLOCK = 4096  # elements that share one scale in the block codecs
CHUNK = 64 * BLOCK  # elements handled at a time: 1 MiB of fp32

# copies from the second tensor to the first, at once or in a stream of a device
Copy = Callable[[Tensor, Tensor], object]


@dataclass(frozen=True)
class Slice:
    """The half-open range [start, stop) of the parameter `name`, flattened in row-major order."""

    name: str
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Fragment:
    """Slices of parameters that are synchronised together; `numel` elements in all."""

    index: int
    slices: tuple[Slice, ...]
    numel: int

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return tuple(accumulate(piece.numel for piece in self.slices))

    def locate(self, start: int, stop: int) -> Iterator[tuple[int, Slice]]:
        """Yield `(offset from start, slice)` for what makes up [start, stop) of the fragment."""
        assert 0 <= start <= stop <= self.numel, f"[{start}, {stop}) of {self.numel} elements"
        position = start
        first = bisect_right(self._ends, start)
        for piece, end in zip(self.slices[first:], self._ends[first:], strict=True):
            if position >= stop:
                return
            begin = piece.stop - (end - position)
            length = min(end, stop) - position
            yield position - start, Slice(piece.name, begin, begin + length)
            position += length


def partition(
    numels: Mapping[str, int], fragments: int, pattern: str = "contiguous"
) -> tuple[Fragment, ...]:
    """Cut a model into fragments; every element belongs to exactly one.

    "contiguous": nearly equal ranges of the concatenation of all parameters in the given order.
    Cuts are multiples of BLOCK, so that only the last fragment has a block that is not full. A
    model of fewer than `fragments` blocks is cut between elements instead.

    "strided" (Streaming DiLoCo, arXiv 2501.18512): whole layers, layer i in fragment i mod
    `fragments`. A layer is all parameters with the same first number in their name, and the same
    components before it (`model.layers.3.mlp.up.weight`, `transformer.h.3.ln_1.bias`). Each
    parameter outside all layers goes to the fragment that has the fewest elements so far. Within a
    fragment, parameters keep the given order.

    `numels` are the elements of each parameter; all peers must give the same names in the same
    order. Raises ConfigError where there are fewer elements than fragments (with "strided", fewer
    layers).
    """
    total = sum(numels.values())
    if total == 0:
        nothing = "the model has no parameters to synchronise"
        raise ConfigError(f"{nothing}; give it at least one that requires a gradient")
    if not 1 <= fragments <= total:
        choose = f"choose 1 to {total}, the model's elements"
        raise ConfigError(f"outer.fragments={fragments} is not possible; {choose}")
    return _strided(numels, fragments) if pattern == "strided" else _contiguous(numels, fragments)


def _contiguous(numels: Mapping[str, int], fragments: int) -> tuple[Fragment, ...]:
    total = sum(numels.values())
    unit = BLOCK if total >= fragments * BLOCK else 1
    units = -(-total // unit)
    cuts = [min(i * units // fragments * unit, total) for i in range(fragments + 1)]
    slices = tuple(Slice(name, 0, numel) for name, numel in numels.items() if numel)
    whole = Fragment(0, slices, total)
    return tuple(
        Fragment(index, tuple(piece for _, piece in whole.locate(start, stop)), stop - start)
        for index, (start, stop) in enumerate(pairwise(cuts))
    )


def _strided(numels: Mapping[str, int], fragments: int) -> tuple[Fragment, ...]:
    layers = Counter[tuple[str, int]]()  # elements by stack (encoder, decoder) and number
    for name, numel in numels.items():
        if numel and (layer := _layer(name)):
            layers[layer] += numel
    stacks = [stack for stack, _ in layers]
    order = sorted(layers, key=lambda layer: (stacks.index(layer[0]), layer[1]))
    if len(order) < fragments:
        why = f"with outer.pattern=strided, as the model has {len(order)} layers"
        remedy = f"choose at most {len(order)} fragments, or" if order else "choose"
        raise ConfigError(
            f"outer.fragments={fragments} is not possible {why}; {remedy} outer.pattern=contiguous"
        )
    owners = {layer: index % fragments for index, layer in enumerate(order)}
    sizes = [0] * fragments
    for layer, index in owners.items():
        sizes[index] += layers[layer]
    slices: list[list[Slice]] = [[] for _ in range(fragments)]
    for name, numel in numels.items():
        if not numel:
            continue
        owner = owners.get(_layer(name) or ("", -1))
        if owner is None:
            owner = sizes.index(min(sizes))
            sizes[owner] += numel
        slices[owner].append(Slice(name, 0, numel))
    return tuple(Fragment(index, tuple(slices[index]), size) for index, size in enumerate(sizes))


def _layer(name: str) -> tuple[str, int] | None:
    """`model.layers.3.mlp.weight` -> ("model.layers", 3); None if no component is a number."""
    components = name.split(".")
    for index, component in enumerate(components):
        if component.isdecimal():
            return ".".join(components[:index]), int(component)
    return None


def chunks(numel: int) -> Iterator[tuple[int, int]]:
    """Yield the half-open ranges of CHUNK elements that cover [0, numel); the last is shorter."""
    for start in range(0, numel, CHUNK):
        yield start, min(start + CHUNK, numel)


@torch.no_grad()
def gather_(
    out: Tensor,
    fragment: Fragment,
    start: int,
    parameters: Mapping[str, Tensor],
    copy_: Copy = Tensor.copy_,
) -> None:
    """Copy the fragment from `start` on out of the parameters into `out`, (n,) fp32 and contiguous.

    The parameters, by name, are of any dtype, device and memory layout.
    """
    for offset, piece in fragment.locate(start, start + out.numel()):
        read_(out[offset : offset + piece.numel], parameters[piece.name], piece.start, copy_)


@torch.no_grad()
def gathered(
    buffer: Tensor, fragment: Fragment, start: int, parameters: Mapping[str, Tensor]
) -> Tensor:
    """The fragment from `start` on as (n,) fp32, to be read before the parameters change.

    It is a view if one fp32 CPU parameter holds it in one piece; else `gather_` copies it to the
    buffer, (n,) fp32.
    """
    [(_, first), *others] = fragment.locate(start, start + buffer.numel())
    parameter = parameters[first.name]
    is_plain = parameter.dtype == torch.float32 and parameter.device.type == "cpu"
    if not others and is_plain and parameter.is_contiguous():
        return parameter.view(-1)[first.start : first.stop]
    gather_(buffer, fragment, start, parameters)
    return buffer


@torch.no_grad()
def scatter_(
    parameters: Mapping[str, Tensor],
    fragment: Fragment,
    start: int,
    values: Tensor,
    copy_: Copy = Tensor.copy_,
) -> None:
    """Write `values`, (n,) fp32 and contiguous, into the parameters, from `start` of the fragment
    on. Parameters may require gradients."""
    for offset, piece in fragment.locate(start, start + values.numel()):
        write_(parameters[piece.name], piece.start, values[offset : offset + piece.numel], copy_)


@torch.no_grad()
def as_loaded(
    buffer: Tensor, values: Tensor, fragment: Fragment, start: int, parameters: Mapping[str, Tensor]
) -> Tensor:
    """Values of parameters after `scatter_` wrote these values, (n,) fp32, to them: the values,
    rounded to the parameters' dtypes.

    The result is the values where no parameter is narrower than fp32, else in the buffer.
    """
    rounded = values
    for offset, piece in fragment.locate(start, start + values.numel()):
        dtype = parameters[piece.name].dtype
        if dtype in (torch.float32, torch.float64):
            continue
        if rounded is values:
            rounded = buffer.copy_(values)
        part = rounded[offset : offset + piece.numel]
        part.copy_(part.to(dtype))
    return rounded


def read_(out: Tensor, tensor: Tensor, start: int, copy_: Copy = Tensor.copy_) -> None:
    """Copy (n,) values of a tensor from the row-major flat index `start` on."""
    for at, part in _rectangles(tensor, start, start + out.numel()):
        copy_(out[at - start : at - start + part.numel()].view(part.shape), part)


def write_(tensor: Tensor, start: int, values: Tensor, copy_: Copy = Tensor.copy_) -> None:
    """Write (n,) values into a tensor from the row-major flat index `start` on."""
    for at, part in _rectangles(tensor, start, start + values.numel()):
        copy_(part, values[at - start : at - start + part.numel()].view(part.shape))


def _rectangles(tensor: Tensor, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
    """Yield `(first flat index, view)` for views that together are [start, stop) of the tensor in
    row-major order.

    A contiguous tensor gives one view. Any other (a transposed weight, channels_last) cannot be
    flattened without copying it whole. So the range is split along the first dimension into an
    incomplete first row, full rows and an incomplete last row, and incomplete rows are split
    likewise along the next: at most 2 * ndim - 1 views.
    """
    if start == stop:
        return
    if tensor.is_contiguous():
        yield start, tensor.view(-1)[start:stop]
        return
    width = tensor.numel() // tensor.shape[0]
    first, last = -(-start // width), stop // width
    if first > last:  # inside one row
        for at, part in _rectangles(tensor[last], start - last * width, stop - last * width):
            yield last * width + at, part
        return
    if start < first * width:
        for at, part in _rectangles(tensor[first - 1], start - (first - 1) * width, width):
            yield (first - 1) * width + at, part
    if first < last:
        yield first * width, tensor[first:last]
    if last * width < stop:
        for at, part in _rectangles(tensor[last], 0, stop - last * width):
            yield last * width + at, part
