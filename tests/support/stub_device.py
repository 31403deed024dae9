"""A device whose streams do nothing until somebody waits for them, made of tensors in main
memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.outer.fragments import CHUNK
from diloco.outer.local import AtOnce, Local, Staging

__all__ = ["LazyDevice", "LazyStream", "at_once"]


def at_once() -> Staging:
    """The staging of a device in main memory that has done each copy when it returns."""
    stream = AtOnce()
    return Staging(
        stream,
        stream,
        lambda numel, dtype: torch.empty(numel, dtype=dtype),
        lambda: torch.empty(CHUNK),
    )


class LazyStream:
    """Work that is done in order, as late as possible: when somebody waits for a place behind it.

    Copies find what their source holds then. `log` is of the device: what was put where, and what
    was waited for.
    """

    def __init__(self, name: str, device: LazyDevice) -> None:
        self.name, self._device = name, device
        self._work: list[Callable[[], object]] = []
        self._done = 0

    def put(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    def copy_(self, to: Tensor, source: Tensor) -> None:
        self._device.log.append(f"{self.name} copies {to.numel()}")
        self.put(lambda: to.copy_(source))

    def record(self) -> LazyPlace:
        return LazyPlace(self, len(self._work))

    def wait(self, event: LazyPlace) -> None:
        self.put(lambda: event.stream.run(event.at))

    def run(self, until: int | None = None) -> None:
        with torch.no_grad():
            while self._done < (len(self._work) if until is None else until):
                self._done += 1
                self._work[self._done - 1]()


@dataclass
class LazyPlace:
    stream: LazyStream
    at: int

    def synchronize(self) -> None:
        device = self.stream._device
        device.log.append(f"waits for {self.stream.name}")
        device.on_wait(self.stream.name)
        self.stream.run(self.at)


class LazyDevice:
    """The staging of a device that keeps up with nothing.

    Attributes:
        training: the stream in which a test puts the inner steps.
        on_wait: called with the stream's name when this process is about to wait for it.
        vectors: elements that copies on the device had, one after another.
    """

    def __init__(self) -> None:
        self.log = list[str]()
        self.training, self.side = LazyStream("training", self), LazyStream("side", self)
        self.on_wait: Callable[[str], object] = lambda name: None
        self.vectors: list[int] = []
        self.staging = Staging(
            self.training, self.side, self._empty, lambda: torch.full((CHUNK,), torch.nan)
        )

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        self.vectors.append(numel)
        return torch.full((numel,), -1.0, dtype=dtype)

    def local(self, parameters: dict[str, Tensor]) -> Local:
        """Parameters as if they were on the device."""
        return Local(parameters, lambda _: self.staging)

    def finish(self) -> None:
        """Do all that was put into the streams."""
        self.side.run()
        self.training.run()
