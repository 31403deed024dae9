"""The local parameters of a peer of several processes: each has all rows (DDP) or some (FSDP2).

    rank 0        `gather_`: the node asks for a range; `scatter_`: it has a new one
    other ranks   `follow`: send the rows that they have, or take them, until rank 0's `release`

Fragments are ranges of the flat layout of whole parameters, so payloads, blocks of the codecs and
digests do not depend on the number of processes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.attach.ranks import RankGroup
from diloco.outer.fragments import Fragment, Slice, read_, write_
from diloco.outer.local import Local

RELEASE, GATHER, SCATTER = range(3)


def has_row_layout(tensor: Tensor) -> bool:
    """Whether a process has the tensor whole, or a range of its rows: what outer steps know."""
    sharded = [one for one in getattr(tensor, "placements", ()) if not one.is_replicate()]
    return [(type(one).__name__, getattr(one, "dim", 0)) for one in sharded] in ([], [("Shard", 0)])


def row_range(tensor: Tensor) -> tuple[int, int]:
    """The range that this process has of the flattened whole, where `has_row_layout` holds."""
    for dim, placement in enumerate(getattr(tensor, "placements", ())):
        # as torch.chunk cuts: the last processes may have fewer rows, or none
        if placement.is_shard():
            mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
            rows, size, place = tensor.shape[0], mesh.size(dim), mesh.get_local_rank(dim)
            each, width = -(-rows // size), tensor.numel() // max(rows, 1)
            return min(place * each, rows) * width, min((place + 1) * each, rows) * width
    return 0, tensor.numel()


def local_tensor(tensor: Tensor) -> Tensor:
    """What this process has of a tensor; writing to it changes the tensor."""
    sharded: Any = tensor
    local: Tensor = sharded.to_local() if is_sharded(tensor) else tensor
    return local


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor. (To import that class takes a second.)"""
    return hasattr(tensor, "placements")


@torch.no_grad()
def full_tensor(tensor: Tensor) -> Tensor:
    """All ranks: a sharded tensor as a whole one on rank 0's CPU, empty on other ranks.

    Any other tensor stays.
    """
    sharded: Any = tensor
    if not is_sharded(tensor):
        return tensor
    full: Tensor = sharded.full_tensor()
    return full.cpu() if dist.get_rank() == 0 else full.new_empty(0)


@torch.no_grad()
def sharded_like(values: Tensor, tensor: Tensor) -> Tensor:
    """A tensor laid out like `tensor`, with this process's rows of `values`, which are whole."""
    if not is_sharded(tensor) or values.shape != tensor.shape:
        return values
    from torch.distributed.tensor import DTensor

    begin, end = row_range(tensor)
    own = local_tensor(tensor)
    rows = values.reshape(-1)[begin:end].view(own.shape).to(own.device, copy=True)
    like: Any = tensor
    layout = {"device_mesh": like.device_mesh, "placements": like.placements, "run_check": False}
    return DTensor.from_local(rows, **layout, shape=tensor.shape, stride=tensor.stride())


@torch.no_grad()
def load_rows_(tensor: Tensor, values: Tensor) -> None:
    """A tensor, which may be sharded, takes this process's rows of `values`, which are whole."""
    begin, end = row_range(tensor)
    own = local_tensor(tensor)
    own.copy_(values.reshape(-1)[begin:end].view(own.shape))


@contextmanager
def restored_after(parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Whatever becomes of the parameters inside, they are as before afterwards."""
    before = {name: local_tensor(one.detach()).clone() for name, one in parameters.items()}
    try:
        yield
    finally:
        for name, values in before.items():
            local_tensor(parameters[name].detach()).copy_(values)


class ShardedParams(Local):
    """The parameters of all ranks, at rank 0. Every rank makes one, of the same parameters."""

    def __init__(
        self, parameters: Mapping[str, Tensor], fragments: Sequence[Fragment], ranks: RankGroup
    ) -> None:
        super().__init__(parameters)
        self._fragments, self._ranks = tuple(fragments), ranks
        self._own = {name: row_range(parameter) for name, parameter in parameters.items()}
        # the exchanges of several fragments ask from threads of their own
        self._lock = threading.Lock()
        # Of their own, because the ranks' other collectives run in another thread.
        self._words = ranks.new_group("gloo")
        self._values = self._words if ranks.backend == "gloo" else ranks.new_group(ranks.backend)
        self._rows: list[dict[str, tuple[int, int]]] = [{} for _ in range(ranks.size)]
        dist.all_gather_object(self._rows, self._own, group=self._words)
        self.is_whole = self._own == {key: (0, one.numel()) for key, one in parameters.items()}

    def of_process(self, name: str) -> Tensor:
        return local_tensor(self.tensors[name].detach())

    # -- rank 0 ------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather_(self, out: Tensor, fragment: Fragment, start: int) -> None:
        stop = start + out.numel()
        parts = self._senders(fragment, start, stop)
        with self._lock:
            if any(parts[1:]):
                self._say(GATHER, fragment.index, start, stop)
            for at, own in parts[0]:
                self._read(own, out[at : at + own.numel])
            for rank, theirs in enumerate(parts[1:], 1):
                if theirs:
                    values, pieces = self._empty(theirs)
                    dist.recv(values, src=rank, group=self._values)
                    for (at, part), piece in zip(theirs, pieces, strict=True):
                        out[at : at + part.numel].copy_(piece)

    def gathered(self, buffer: Tensor, fragment: Fragment, start: int) -> Tensor:
        self.gather_(buffer, fragment, start)
        return buffer

    @torch.no_grad()
    def scatter_(self, fragment: Fragment, start: int, values: Tensor) -> None:
        stop = start + values.numel()
        with self._lock:
            self._say(SCATTER, fragment.index, start, stop)
            staging = self._staging(fragment, start, stop)
            sent = values.to(self._ranks.device) if staging is None else staging.sent(values)
            dist.broadcast(sent, src=0, group=self._values)
            self._write(sent, fragment, start, stop)

    def release(self) -> None:
        """The other ranks need not follow any more, for now."""
        with self._lock:
            self._say(RELEASE, 0, 0, 0)

    def _say(self, *words: int) -> None:
        dist.broadcast(torch.tensor(words, device="cpu"), src=0, group=self._words)

    # -- the other ranks ---------------------------------------------------------------------------

    @torch.no_grad()
    def follow(self) -> None:
        """Send and take rows as rank 0 says, until it says `release`."""
        words = torch.zeros(4, dtype=torch.int64)
        while True:
            dist.broadcast(words, src=0, group=self._words)
            what, index, start, stop = words.tolist()
            if what == RELEASE:
                return
            if what == SCATTER:
                values = torch.empty(stop - start, dtype=torch.float32, device=self._ranks.device)
                dist.broadcast(values, src=0, group=self._values)
                self._write(values, self._fragments[index], start, stop)
                continue
            mine = self._senders(self._fragments[index], start, stop)[self._ranks.rank]
            if mine:
                values, pieces = self._empty(mine)
                for (_, part), piece in zip(mine, pieces, strict=True):
                    self._read(part, piece)
                dist.send(values, dst=0, group=self._values)

    # -- who has what ------------------------------------------------------------------------------

    def _senders(self, fragment: Fragment, start: int, stop: int) -> list[list[tuple[int, Slice]]]:
        """What each rank gives of [start, stop), as `Fragment.locate`: the first that has it."""
        found: list[list[tuple[int, Slice]]] = [[] for _ in self._rows]
        for offset, piece in fragment.locate(start, stop):
            at = piece.start
            for rank, rows in enumerate(self._rows):
                begin, end = rows[piece.name]
                if begin <= at < min(end, piece.stop):
                    part = Slice(piece.name, at, min(end, piece.stop))
                    found[rank].append((offset + at - piece.start, part))
                    at = part.stop
            assert at == piece.stop, f"no rank has {piece.name} from element {at} on"
        return found

    def _empty(self, parts: Sequence[tuple[int, Slice]]) -> tuple[Tensor, Sequence[Tensor]]:
        """Memory for these parts, one behind the other, and its pieces."""
        numels = [part.numel for _, part in parts]
        values = torch.empty(sum(numels), dtype=torch.float32, device=self._ranks.device)
        return values, torch.split(values, numels)

    # -- this rank's rows --------------------------------------------------------------------------

    def _read(self, part: Slice, into: Tensor) -> None:
        begin, _ = self._own[part.name]
        read_(into, self.of_process(part.name), part.start - begin)

    def _write(self, values: Tensor, fragment: Fragment, start: int, stop: int) -> None:
        for offset, piece in fragment.locate(start, stop):
            begin, end = self._own[piece.name]
            first, last = max(begin, piece.start), min(end, piece.stop)
            if first < last:
                at = offset + first - piece.start
                write_(self.of_process(piece.name), first - begin, values[at : at + last - first])
