"""An island: the processes of one torchrun job, which are one peer of the swarm together.

Its ranks average gradients in every inner step (DistributedDataParallel). Only rank 0 talks to the swarm. Its
decisions, and the swarm's answers, reach the other ranks by broadcast, so ranks cannot differ. Without torchrun the
island is one process, and every method here does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from diloco.errors import ConfigError, DilocoError

__all__ = ["Island"]

BROKEN = ("Connection closed by peer", "Connection reset by peer")  # what gloo says when another rank has ended
# Other ranks wait in a collective while rank 0 waits for the swarm, which has deadlines of its own.
COLLECTIVE_TIMEOUT = timedelta(hours=12)


class Island:
    """Rank, size and device of this process, and the collectives that keep the ranks alike.

    If a rank dies, torchrun ends the others, and the swarm sees one peer vanish.
    """

    def __init__(self, device: torch.device, rank: int = 0, size: int = 1) -> None:
        self.device = device
        self.rank = rank
        self.size = size

    @classmethod
    def from_environment(cls, device: str) -> Island:
        """The island that torchrun's environment describes; one process without it.

        `device` is `auto`, `cpu`, `cuda` or `cuda:N`; with several ranks each takes its own GPU. Raises `ConfigError`
        if train.device names a device that is not there.
        """
        size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda":
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0') if size > 1 else 0}"
        count = torch.cuda.device_count()
        if device.startswith("cuda") and int(device.removeprefix("cuda:")) >= count:
            raise ConfigError(
                f"train.device={device} is not there: this machine has {count} CUDA devices; use auto or cpu"
            )
        chosen = torch.device(device)
        if size > 1:
            if chosen.type == "cuda":
                torch.cuda.set_device(chosen)
            dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=COLLECTIVE_TIMEOUT)
        return cls(chosen, rank, size)

    @property
    def leads(self) -> bool:
        """Whether this process is rank 0."""
        return self.rank == 0

    @property
    def device_name(self) -> str:
        """The hardware that it trains on, in a few words."""
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        return name if self.size == 1 else f"{self.size} x {name}"

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model whose backward pass averages gradients over the ranks."""
        return DistributedDataParallel(model) if self.size > 1 else model

    def rows(self, batch: Tensor) -> Tensor:
        """This rank's sequences of the peer's batch (B, T)."""
        return batch[self.rank :: self.size]

    def check_batch_size(self, batch_size: int) -> None:
        """Raise `ConfigError` on rank 0 unless the ranks can share the peer's batch evenly.

        The other ranks wait for its end, because torchrun ends rank 0 as soon as another one has ended.
        """
        if batch_size % self.size:
            if not self.leads:
                self.agree([0])
            raise ConfigError(
                f"inner.batch_size={batch_size} cannot be shared evenly by {self.size} processes; "
                f"use a multiple of {self.size}"
            )

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
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.broadcast(tensor, src=0)
        return [float(value) for value in tensor.tolist()]

    def share_(self, parameters: Iterable[Tensor]) -> None:
        """Rank 0's parameters, on every rank, in place."""
        if self.size > 1:
            with torch.no_grad():
                for parameter in parameters:
                    dist.broadcast(parameter.detach(), src=0)

    def mean(self, value: float) -> float:
        """Mean of a number over the ranks."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return float(tensor) / self.size

    def close(self) -> None:
        """Leave the process group."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
