"""An island: the processes of one torchrun job, which are one peer of the swarm together.

Its ranks average gradients in every inner step: each has the whole model (DistributedDataParallel), or rows of every
parameter (FSDP2, `fully_shard`). Only rank 0 talks to the swarm. Its decisions, and the swarm's answers, reach the
other ranks by broadcast, so ranks cannot differ; `rows` moves parameters. Without torchrun the island is one process,
and every method here does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from diloco.errors import ConfigError, DilocoError
from diloco.train import devices

__all__ = ["Island"]

BROKEN = ("Connection closed by peer", "Connection reset by peer")  # what gloo says when another rank has ended
# Other ranks wait for a word of rank 0 while it waits for the swarm, which has deadlines of its own.
WORD_TIMEOUT = timedelta(hours=12)


class Island:
    """Rank, size and device of this process, and the collectives that keep the ranks alike.

    If a rank dies, torchrun ends the others, and the swarm sees one peer vanish.
    """

    def __init__(
        self,
        device: torch.device,
        rank: int = 0,
        size: int = 1,
        sharded: bool = False,
        backend: str = "gloo",
        store: dist.Store | None = None,
    ) -> None:
        self.device = device
        self.backend = backend  # of collectives of parameters
        self._store = store
        self.rank = rank
        self.size = size
        self.sharded = sharded
        # Words are tensors of the CPU: no inner step waits for the device to hear one.
        self._words = self.new_group("gloo") if size > 1 and dist.is_initialized() else None

    @classmethod
    def from_environment(cls, device: str, parallel: str = "ddp") -> Island:
        """The island that torchrun's environment describes; one process without it.

        `device` is the value of train.device, as `devices.claim` reads it. With `parallel` fsdp each rank has rows of
        every parameter. Raises `ConfigError` if train.device names a device that is not there.
        """
        size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        chosen = devices.claim(device)
        if size == 1:
            return cls(chosen)
        backend = devices.backend_of(chosen, devices.shares_device(device))
        store, _, _ = next(iter(dist.rendezvous("env://", rank, size)))
        # torchrun keeps one store for all its restarts, where the addresses of ranks that have ended are still found.
        store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        return cls(chosen, rank, size, parallel == "fsdp", backend, store)

    def new_group(self, backend: str) -> Any:
        """A process group of all ranks, for collectives of a thread or a kind of their own. All ranks call it."""
        return dist.new_group(backend=backend, timeout=WORD_TIMEOUT)

    @property
    def leads(self) -> bool:
        """Whether this process is rank 0."""
        return self.rank == 0

    @property
    def device_name(self) -> str:
        """The hardware that it trains on, in a few words."""
        name = devices.name_of(self.device)
        return name if self.size == 1 else f"{self.size} x {name}"

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model whose backward pass averages gradients over the ranks; FSDP2 cuts `model` itself into rows."""
        if self.size == 1:
            return model
        if not self.sharded:
            return DistributedDataParallel(model, gradient_as_bucket_view=True)
        from torch.distributed.fsdp import fully_shard  # which takes a while to load

        for layer in _layers(model):
            fully_shard(layer)
        # After a forward pass without a backward pass nothing stays whole: an exchange would find another layout.
        fully_shard(model, reshard_after_forward=True)
        return model

    def accumulating(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        """Backward passes inside add to this rank's gradients; the first one after it averages all of that."""
        if isinstance(wrapped, DistributedDataParallel):
            return wrapped.no_sync()
        return _without_reduction(wrapped) if hasattr(wrapped, "set_requires_gradient_sync") else nullcontext()

    def rows(self, batch: Tensor) -> Tensor:
        """This rank's sequences of the peer's batch (B, T)."""
        return batch[self.rank :: self.size]

    def check_batch_size(self, batch_size: int) -> None:
        """Raise `ConfigError` on rank 0 unless the ranks can share the peer's batch evenly."""
        if batch_size % self.size:
            self._refuse(
                f"inner.batch_size={batch_size} cannot be shared evenly by {self.size} processes; "
                f"use a multiple of {self.size}"
            )

    def check_same(self, settings: Mapping[str, object]) -> None:
        """Raise `ConfigError` on rank 0 unless all ranks were started with the same settings."""
        if self.size == 1:
            return
        ranks: list[dict[str, str]] = [{} for _ in range(self.size)]
        dist.all_gather_object(ranks, {key: str(value) for key, value in settings.items()}, group=self._words)
        for rank, there in enumerate(ranks):
            for key in sorted(ranks[0].keys() | there.keys()):
                here, other = ranks[0].get(key), there.get(key)
                if here != other:
                    self._refuse(f"{key}={other} on rank {rank}, and {here} on rank 0; start all ranks alike")

    def _refuse(self, why: str) -> NoReturn:
        """`ConfigError` on rank 0. The others wait for its end, because torchrun ends it as soon as one has ended."""
        if not self.leads:
            self.agree([0])
        raise ConfigError(why)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Ranks other than 0 end in silence when the connection to rank 0 breaks: it has said why it failed."""
        try:
            yield
        except RuntimeError as error:
            if self.leads or not any(broken in str(error) for broken in BROKEN):
                raise
            raise SystemExit(DilocoError.exit_code) from None

    def agree(self, values: Sequence[float]) -> list[float]:
        """Rank 0's numbers, on every rank."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.broadcast(tensor, src=0, group=self._words)
        return [float(value) for value in tensor.tolist()]

    def least(self, value: int) -> int:
        """The least of all ranks' numbers."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._words)
        return int(tensor)

    def share_(self, tensors: Iterable[Tensor]) -> None:
        """Rank 0's values of tensors of the CPU, on every rank, in place."""
        if self.size > 1:
            with torch.no_grad():
                for tensor in tensors:
                    dist.broadcast(tensor.detach(), src=0, group=self._words)

    def sum(self, *values: float) -> list[float]:
        """The sum of each number over the ranks."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self._words)
        return [float(value) for value in tensor.tolist()]

    def close(self) -> None:
        """Leave the process group."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _without_reduction(wrapped: Any) -> Iterator[None]:
    wrapped.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        wrapped.set_requires_gradient_sync(True)


def _layers(model: nn.Module) -> list[nn.Module]:
    """The layers of the deepest stack in a model, each of which FSDP2 gathers as a whole."""
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    largest = max(stacks, key=lambda stack: sum(one.numel() for one in stack.parameters()), default=nn.ModuleList())
    return list(largest)
