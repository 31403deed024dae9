"""The local parameters of an island of several processes, of which each has all rows (DDP) or some of them (FSDP2).

Fragments are ranges of the flat layout of whole parameters, whoever has their rows. So payloads, blocks of the codecs
and digests do not depend on the number of processes.

    rank 0        the swarm's node asks for a range, or has a new one     `gather_`, `scatter_`
    other ranks   send the rows that they have, or take them              `follow`, until rank 0 says `release`

Rank 0 says first which range it is about. So the other ranks need not know what the node is doing, and may wait in
`follow` for as long as it takes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from diloco.errors import ConfigError
from diloco.outer.fragments import Fragment, Slice
from diloco.outer.local import Local
from diloco.train.island import Island

__all__ = ["Rows", "rows_of", "whole"]

RELEASE, GATHER, SCATTER = range(3)


class Part(NamedTuple):
    """A range of a parameter that a rank has, and where it lies in the range of the fragment that is asked for."""

    at: int
    name: str
    start: int
    stop: int


def rows_of(tensor: Tensor) -> tuple[int, int]:
    """The range of the flattened whole that this process has of a tensor.

    Raises `ConfigError` for a layout other than plain tensors, and rows along the first dimension.
    """
    if not isinstance(tensor, DTensor):
        return 0, tensor.numel()
    mesh, placements = tensor.device_mesh, tensor.placements
    sharded = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    if not sharded:
        return 0, tensor.numel()
    if len(sharded) > 1 or placements[sharded[0]] != Shard(0):
        raise ConfigError(f"it is laid out as {placements}, and outer steps know rows along the first dimension only")
    # As torch.chunk cuts: the last ranks may have fewer rows, or none.
    rows, parts, place = tensor.shape[0], mesh.size(sharded[0]), mesh.get_local_rank(sharded[0])
    each, width = -(-rows // parts), tensor.numel() // max(rows, 1)
    return min(place * each, rows) * width, min((place + 1) * each, rows) * width


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """All ranks: a tensor with the rows of all of them."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Rows(Local):
    """The parameters of all ranks, at rank 0; `tensors` are this rank's rows.

    Every rank makes one, from the same parameters. When a rank dies, the others' calls raise what torch says of that.
    """

    def __init__(self, parameters: Mapping[str, Tensor], island: Island) -> None:
        self._whole = {name: parameter.shape for name, parameter in parameters.items()}
        super().__init__({name: _local(parameter) for name, parameter in parameters.items()})
        self._island = island
        self._own = {name: rows_of(parameter) for name, parameter in parameters.items()}
        self._lock = threading.Lock()  # the exchanges of several fragments ask from threads of their own
        self._device = island.device
        # Of its own, because the ranks' other collectives run in other threads than these.
        self._words = dist.new_group(backend="gloo")
        self._values = dist.new_group(backend="nccl") if island.device.type == "cuda" else self._words
        everybody: list[dict[str, tuple[int, int]]] = [{} for _ in range(island.size)]
        dist.all_gather_object(everybody, self._own, group=self._words)
        self._rows = everybody

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return dict(self._whole)

    # -- rank 0 -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gather_(self, out: Tensor, fragment: Fragment, start: int, stop: int) -> None:
        parts = self._senders(fragment, start, stop)
        with self._lock:
            others = [rank for rank in range(1, self._island.size) if parts[rank]]
            if others:
                self._say(GATHER, fragment.index, start, stop)
            self._pack(out, parts[0])
            for rank in others:
                values = self._empty(parts[rank])
                dist.recv(values, src=rank, group=self._values)
                _place(out, parts[rank], values)

    def gathered(self, buffer: Tensor, fragment: Fragment, start: int, stop: int) -> Tensor:
        self.gather_(buffer, fragment, start, stop)
        return buffer

    @torch.no_grad()
    def scatter_(self, fragment: Fragment, start: int, stop: int, values: Tensor) -> None:
        with self._lock:
            self._say(SCATTER, fragment.index, start, stop)
            sent = values.to(self._device)
            dist.broadcast(sent, src=0, group=self._values)
            self._unpack(sent, self._parts(0, fragment, start, stop))

    def release(self) -> None:
        """The other ranks need not follow any more."""
        with self._lock:
            self._say(RELEASE, 0, 0, 0)

    def _say(self, *words: int) -> None:
        dist.broadcast(torch.tensor(words), src=0, group=self._words)

    # -- the other ranks ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def follow(self, fragments: tuple[Fragment, ...]) -> None:
        """Send and take rows, as rank 0 says, until it says `release`."""
        words = torch.zeros(4, dtype=torch.int64)
        while True:
            dist.broadcast(words, src=0, group=self._words)
            what, index, start, stop = words.tolist()
            if what == RELEASE:
                return
            if what == GATHER:
                parts = self._senders(fragments[index], start, stop)[self._island.rank]
                if parts:
                    values = self._empty(parts)
                    self._pack_in_turn(values, parts)
                    dist.send(values, dst=0, group=self._values)
            else:
                values = torch.empty(stop - start, device=self._device)
                dist.broadcast(values, src=0, group=self._values)
                self._unpack(values, self._parts(self._island.rank, fragments[index], start, stop))

    # -- who has what -------------------------------------------------------------------------------------------------

    def _parts(self, rank: int, fragment: Fragment, start: int, stop: int) -> list[Part]:
        """What a rank has of [start, stop) of a fragment."""
        pieces = fragment.locate(start, stop)
        return [part for offset, piece in pieces if (part := _common(offset, piece, self._rows[rank][piece.name]))]

    def _senders(self, fragment: Fragment, start: int, stop: int) -> list[list[Part]]:
        """Of each rank, what it sends of [start, stop): every element comes from the first rank that has it."""
        found: list[list[Part]] = [[] for _ in self._rows]
        for offset, piece in fragment.locate(start, stop):
            at = piece.start
            for rank, rows in enumerate(self._rows):
                begin, end = rows[piece.name]
                if begin <= at < min(end, piece.stop):
                    found[rank].append(Part(offset + at - piece.start, piece.name, at, min(end, piece.stop)))
                    at = min(end, piece.stop)
            assert at == piece.stop, f"no rank has {piece.name} from {at}"
        return found

    def _empty(self, parts: list[Part]) -> Tensor:
        return torch.empty(sum(part.stop - part.start for part in parts), device=self._device)

    # -- copies -------------------------------------------------------------------------------------------------------

    def _flat(self, part: Part) -> Tensor:
        begin, _ = self._own[part.name]
        return self.tensors[part.name].view(-1)[part.start - begin : part.stop - begin]

    def _pack(self, out: Tensor, parts: list[Part]) -> None:
        for part in parts:
            out[part.at : part.at + part.stop - part.start].copy_(self._flat(part))

    def _pack_in_turn(self, out: Tensor, parts: list[Part]) -> None:
        for at, part in _in_turn(parts):
            out[at : at + part.stop - part.start].copy_(self._flat(part))

    def _unpack(self, values: Tensor, parts: list[Part]) -> None:
        for part in parts:
            self._flat(part).copy_(values[part.at : part.at + part.stop - part.start])
