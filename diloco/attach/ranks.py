"""The processes of one torchrun job, which are one peer of the swarm together.

They average gradients in every inner step: each has the whole model (DistributedDataParallel), or
rows of every parameter (FSDP2, `fully_shard`). Only rank 0 talks to the swarm. Its decisions, and
the swarm's answers, reach the others by broadcast, so ranks cannot differ.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from diloco.attach import devices
from diloco.attach.parameters import local_tensor, row_range
from diloco.errors import CheckpointError, ConfigError, DilocoError, UnsavedError
from diloco.model.forward import layers_of
from diloco.outer.fragments import Fragment, Slice, read_, write_
from diloco.outer.local import Local
from diloco.swarm.node.position import nothing

# what gloo and NCCL say when another rank has ended
BROKEN = "Connection (closed|reset) by peer|Broken pipe|remote process exited"
# Other ranks wait for rank 0 while it waits for the swarm, which has deadlines of its own.
WORD_TIMEOUT = timedelta(hours=12)

T = TypeVar("T")


class RankGroup:
    """Rank and device of this process, and the collectives that keep ranks alike.

    `broken` is True once another rank is lost.
    """

    def __init__(
        self,
        device: torch.device,
        rank: int = 0,
        size: int = 1,
        sharded: bool = False,
        backend: str = "gloo",
        store: Any = None,
    ) -> None:
        self.device, self.rank, self.size = device, rank, size
        self.sharded, self.backend, self._store = sharded, backend, store
        self.broken = False
        # Words are CPU tensors: reading a broadcast then needs no wait for the device.
        self._words = self.new_group("gloo") if size > 1 and dist.is_initialized() else None

    @classmethod
    def from_process_group(cls, device: torch.device) -> RankGroup:
        """Return the ranks of the initialised process group, or this process alone."""
        rank, size = cls.rank_and_size()
        return cls(device) if size == 1 else cls(device, rank, size, backend=dist.get_backend())

    @staticmethod
    def rank_and_size() -> tuple[int, int]:
        """Rank and size of the initialised process group; (0, 1) without one."""
        return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    @classmethod
    def from_environment(cls, device: str = "auto", parallel: str = "ddp") -> RankGroup:
        """Return the ranks that torchrun's environment describes; `parallel` is ddp or fsdp.

        Raises `ConfigError` if `device` (train.device) is not there.
        """
        chosen = devices.pick_device(device)
        if dist.is_initialized():
            return cls.from_process_group(chosen)
        size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        if size == 1:
            return cls(chosen)
        backend = devices.backend_of(chosen, device)
        store = _store(rank, size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        return cls(chosen, rank, size, parallel == "fsdp", backend, store)

    def new_group(self, backend: str) -> Any:
        """All ranks: make a process group for the collectives of another thread or backend."""
        return dist.new_group(backend=backend, timeout=WORD_TIMEOUT)

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0

    @property
    def device_name(self) -> str:
        """Name the hardware that this rank trains on."""
        name = devices.name_of(self.device)
        return name if self.size == 1 else f"{self.size} x {name}"

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap a model so that backward passes average gradients; FSDP2 shards it in place."""
        if self.size == 1:
            return model
        if not self.sharded:
            return DistributedDataParallel(model, gradient_as_bucket_view=True)
        from torch.distributed.fsdp import fully_shard  # which takes a while to load

        for layer in layers_of(model):
            fully_shard(layer)
        # reshard after a forward pass without backward, too, as exchanges need sharded parameters
        fully_shard(model, reshard_after_forward=True)
        return model

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        """Context of backward passes that add to local gradients; the next one averages the sum."""
        if isinstance(wrapped, DistributedDataParallel):
            return wrapped.no_sync()
        is_sharded = hasattr(wrapped, "set_requires_gradient_sync")
        return _without_reduction(wrapped) if is_sharded else nullcontext()

    # -- checks ------------------------------------------------------------------------------------

    def check_newest(self, step: int, source: str) -> None:
        """All ranks: raise `CheckpointError` if a rank's newest checkpoint is not rank 0's."""
        (newest,) = self.broadcast_floats([step])
        if newest != step:
            raise CheckpointError(
                f"{source} holds outer step {newest:.0f} for rank 0 and {step} for rank"
                f" {self.rank}; put it where all ranks see the same files"
            )

    def raise_first_error(self, error: str) -> None:
        """Raise `ConfigError` on rank 0 with the first rank's error, if there is any."""
        if first := next(filter(None, self._gather(error)), None):
            self.refuse(first)

    def check_same(self, settings: Mapping[str, object]) -> None:
        """Raise `ConfigError` on rank 0 unless all ranks were started with the same settings."""
        first, *others = self._gather({key: str(value) for key, value in settings.items()})
        for rank, there in enumerate(others, 1):
            for key in sorted(first.keys() | there.keys()):
                value, here = there.get(key), first.get(key)
                if value != here:
                    self.refuse(
                        f"{key}={value} on rank {rank}, and {here} on rank 0; start all ranks alike"
                    )

    def _gather(self, value: T) -> list[T]:
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self._words)
        return values

    def refuse(self, why: str) -> NoReturn:
        """Raise `ConfigError` on rank 0; the others wait until torchrun ends them for that."""
        if not self.is_rank0:
            self.broadcast_floats([0])  # never sent, so this waits
        raise ConfigError(why)

    @contextmanager
    def report_lost_rank(self) -> Iterator[None]:
        """Raise `UnsavedError` on rank 0 if another rank ends; the others exit silently."""
        try:
            yield
        except RuntimeError as error:
            # the owner of a foreign group reports it; after the first error nothing is added
            if self._store is None or self.broken or not re.search(BROKEN, str(error)):
                raise
            self.broken = True
            if not self.is_rank0:
                raise SystemExit(DilocoError.exit_code) from None
            raise UnsavedError(
                f"one of {self.size} ranks ended (torchrun says which); the last checkpoint is"
                " good, and torchrun --max-restarts=9 goes on from it by itself"
            ) from None

    # -- collectives -------------------------------------------------------------------------------

    def broadcast_floats(self, values: Sequence[float]) -> list[float]:
        """Return rank 0's numbers on every rank."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        self.broadcast_(tensor)
        return [float(value) for value in tensor.tolist()]

    def broadcast(self, value: T) -> T:
        """Return rank 0's value on every rank; torch.distributed pickles it between the ranks."""
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, group=self._words)
        return box[0]

    def broadcast_(self, values: Tensor) -> None:
        """Overwrite a CPU tensor with rank 0's values on every rank."""
        if self.size > 1:
            dist.broadcast(values, src=0, group=self._words)

    def all_reduce_min(self, value: int) -> int:
        """Return the minimum over the ranks."""
        tensor = torch.tensor(value)
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._words)
        return int(tensor)

    def sum(self, *values: float) -> list[float]:
        """Sum each number over the ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        if self.size > 1:
            dist.all_reduce(tensor, group=self._words)
        return [float(value) for value in tensor.tolist()]

    def close(self) -> None:
        """Leave the process group, if this object made it."""
        if self._store is not None and dist.is_initialized() and not self.broken:
            dist.destroy_process_group()


def said_by_rank_0(text: str | None) -> str:
    """Return rank 0's text on every rank of a torchrun job, before there is a process group."""
    store = _store()
    if text is not None:
        store.set("said", text)
    return str(store.get("said"), "utf-8")


def _store(*rank_and_size: int) -> Any:
    """Store that torchrun's processes share, with a prefix of its own for each restart."""
    names: Any = dist  # torch has no types for its stores
    store = next(iter(names.rendezvous("env://", *rank_and_size)))[0]
    return names.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


@contextmanager
def _without_reduction(wrapped: Any) -> Iterator[None]:
    wrapped.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        wrapped.set_requires_gradient_sync(True)


# -- parameters whose rows are in several processes -----------------------------------------------

RELEASE, GATHER, SCATTER = range(3)
MOST_WORDS = 12  # numbers in a message to the other ranks, exact up to 2**53
WORD: Any = {"dtype": torch.float64, "device": "cpu"}


class ShardedParams(Local):
    """All ranks' parameters as rank 0's node reads and writes them. Every rank makes one.

    All ranks call `of_rank0` together. When the node asks for a range (`gather_`) or has a new one
    (`scatter_`), rank 0 exchanges rows with the others, until it sends its result; if it raises,
    they wait, and torchrun ends them. Fragments are ranges of whole parameters, so payloads, blocks
    of the codecs and digests do not depend on the number of ranks.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], fragments: Sequence[Fragment], ranks: RankGroup
    ) -> None:
        super().__init__(parameters)
        self._fragments, self._ranks = tuple(fragments), ranks
        self._own = {name: row_range(parameter) for name, parameter in parameters.items()}
        # several fragments may be exchanged at once, each in a thread of its own
        self._lock = threading.Lock()
        # Own groups, because the ranks' other collectives run in another thread.
        self._words = ranks.new_group("gloo")
        self._values = self._words if ranks.backend == "gloo" else ranks.new_group(ranks.backend)
        self._rows: list[dict[str, tuple[int, int]]] = [{} for _ in range(ranks.size)]
        dist.all_gather_object(self._rows, self._own, group=self._words)
        self.is_whole = self._own == {name: (0, p.numel()) for name, p in parameters.items()}

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

    def of_rank0(
        self, call: Callable[[], Sequence[float]], prepare: Callable[[], None]
    ) -> Sequence[float]:
        """All ranks: return rank 0's result of `call`; the others send and receive rows meanwhile.

        Before the first row the others run `prepare`, as rank 0 does in its call.
        """
        if not self._ranks.is_rank0:
            return self._follow(prepare)
        result = call()
        with self._lock:
            self._say(RELEASE, *result)
        return result

    def _say(self, *words: float) -> None:
        message = torch.zeros(MOST_WORDS, **WORD)
        message[: len(words)] = torch.tensor(words, **WORD)
        dist.broadcast(message, src=0, group=self._words)

    # -- the other ranks ---------------------------------------------------------------------------

    @torch.no_grad()
    def _follow(self, prepare: Callable[[], None]) -> Sequence[float]:
        """Send and receive rows as rank 0 orders, until it sends its result."""
        words = torch.zeros(MOST_WORDS, **WORD)
        while True:
            dist.broadcast(words, src=0, group=self._words)
            if words[0] == RELEASE:
                return [float(word) for word in words[1:].tolist()]
            prepare()
            prepare = nothing
            what, index, start, stop = map(int, words[:4].tolist())
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
        """By rank, its slices of [start, stop), as `Fragment.locate`; the first rank sends each."""
        senders: list[list[tuple[int, Slice]]] = [[] for _ in self._rows]
        for offset, piece in fragment.locate(start, stop):
            at = piece.start
            for rank, rows in enumerate(self._rows):
                begin, end = rows[piece.name]
                if begin <= at < min(end, piece.stop):
                    part = Slice(piece.name, at, min(end, piece.stop))
                    senders[rank].append((offset + at - piece.start, part))
                    at = part.stop
            assert at == piece.stop, f"no rank has {piece.name} from element {at} on"
        return senders

    def _empty(self, parts: Sequence[tuple[int, Slice]]) -> tuple[Tensor, Sequence[Tensor]]:
        """Allocate one tensor for these parts; return it, and a view for each part."""
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
